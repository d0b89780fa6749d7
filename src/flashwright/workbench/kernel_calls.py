"""Calls of single configs on a GPU's tensors, to be timed beside each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flashwright.kernels.cache_use import CacheUse, each_head_by_itself, in_pages
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of
from flashwright.problem.flops import BACKWARD, DECODE, FORWARD
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import FULL, Window
from flashwright.runtime.decode_plans import CacheTensors, DecodeKind

ConfigCall = Callable[[KernelConfig], Callable[[], Any]]


def kernel_calls(
    operation: str, q: Any, k: Any, v: Any, do: Any = None, *, window: Window = FULL, use: CacheUse | None = None
) -> ConfigCall:
    """For configs of an operation, a call each on the same tensors. Windows are aligned to the bottom right. All
    backwards follow one forward; decodes meet the cache as `use` says."""
    if operation == FORWARD:
        return _forwards(q, k, v, window)
    if operation == BACKWARD:
        return _backwards(q, k, v, do, window)
    if operation == DECODE:
        return _decodes(q, k, v, window, use or CacheUse())
    raise ValueError(f"operation: {operation!r} has no kernels of its own; allowed: {FORWARD}, {BACKWARD}, {DECODE}")


def _forwards(q: Any, k: Any, v: Any, window: Window) -> ConfigCall:
    import torch

    from flashwright.runtime.forward import run_forward

    out = torch.empty_like(q)
    return lambda config: partial(run_forward, config, q, k, v, window=window, out=out)


def _backwards(q: Any, k: Any, v: Any, do: Any, window: Window) -> ConfigCall:
    from flashwright.attention import attention
    from flashwright.runtime.backward import run_backward

    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = attention(q, k, v, window=window[:2], return_lse=True)
    return lambda config: partial(run_backward, config, do, q, k, v, out, lse, window=window)


def _decodes(q: Any, k: Any, v: Any, window: Window, use: CacheUse) -> ConfigCall:
    import torch

    cache = CacheTensors()
    shape = q.shape
    if not use.packs_heads:
        q, k, v = each_head_by_itself(q, k, v)
    elif use.page_rows:
        order = torch.randperm(k.shape[0] * k.shape[2] // use.page_rows, device=k.device)
        k, v = (in_pages(x, use.page_rows, order) for x in (k, v))
        cache = CacheTensors(page_table=order.view(shape[0], -1).int())
    return cached_decodes(q, k, v, cache, window=window, split_units=use.split_units, shape=shape)


def cached_decodes(
    q: Any,
    k: Any,
    v: Any,
    cache: CacheTensors,
    *,
    window: Window = FULL,
    split_units: int = 0,
    shape: tuple[int, ...] | None = None,
    out: Any = None,
) -> ConfigCall:
    """For decode configs, a call each that returns the output, in q's shape or another, with as many columns as there
    are values. Values that are columns of the keys are taken from there."""
    import torch

    out = torch.empty_like(q) if out is None else out
    shape = q.shape if shape is None else shape

    def call_of(config: KernelConfig) -> Callable[[], Any]:
        most = family_of(config).launch_rules.values_in_keys
        values = k[..., :most] if most else v
        target, found = out[..., : values.shape[-1]], (*shape[:-1], values.shape[-1])
        kind = DecodeKind(
            AttentionOptions(window), lambda *sizes: config, returns_lse=False, device_index=q.device.index,
            split_units=split_units,
        )  # fmt: skip
        return lambda: kind.run(q, k, values, target, cache)[0].view(found)

    return call_of
