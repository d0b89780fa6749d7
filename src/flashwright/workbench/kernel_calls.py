"""Calls of single configs on a GPU's tensors, to be timed beside each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flashwright.kernels.family import KernelConfig
from flashwright.problem.flops import BACKWARD, FORWARD
from flashwright.problem.window import FULL, Window

ConfigCall = Callable[[KernelConfig], Callable[[], Any]]


def kernel_calls(operation: str, q: Any, k: Any, v: Any, do: Any = None, *, window: Window = FULL) -> ConfigCall:
    """For configs of an operation, a call each on the same tensors. Windows are aligned to the bottom right. All
    backwards follow one forward."""
    if operation == FORWARD:
        return _forwards(q, k, v, window)
    if operation == BACKWARD:
        return _backwards(q, k, v, do, window)
    raise ValueError(f"operation: {operation!r} has no kernels of its own; allowed: {FORWARD}, {BACKWARD}")


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
