"""The forward pass on PyTorch's tensors and NumPy's arrays: a config chosen, a plan kept, a launch queued."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flashwright.choice.choose import chosen_config
from flashwright.choice.few_rows import MOST_PACKED_ROWS, decodes
from flashwright.hardware.units import VECTOR_BYTES
from flashwright.kernels.family import KernelConfig
from flashwright.operators.backward import forget_backward_plans
from flashwright.operators.decode import decode_kind
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.problem.shapes import is_empty
from flashwright.problem.window import Window
from flashwright.runtime.call_kinds import CallKind
from flashwright.runtime.devices import gpu_model
from flashwright.runtime.few_rows import FewRows
from flashwright.runtime.forward import run_forward
from flashwright.runtime.tensors import Packed, empty_output, with_vector_rows

if TYPE_CHECKING:
    import torch


INVARIANT_LENGTH, INVARIANT_LENGTH_OF_NARROW_CAUSAL = 8192, 512
"""Rows and keys: whatever a problem's own, a row-invariant call uses the config for these. In bf16, 64 columns and a
causal mask, on an H200, the Hopper family's config for 8,192 rows has 0.86 × the speed of the one for 512 at 512 rows.
The one for 512 has at least 0.96 × that of the others at their lengths on normal scores, and 0.92 × on other kinds."""
NARROW = 64


def lengths_to_choose_for(
    dtype: DType,
    head_dim: int,
    window: Window,
    q_length: int,
    kv_length: int,
    *,
    family: str | None,
    row_invariant: bool,
) -> tuple[int, int]:
    if not row_invariant:
        return q_length, kv_length
    is_measured = dtype == DType.BF16 and family in (None, "hopper")
    is_narrow_causal = is_measured and head_dim <= NARROW and window.right is not None
    length = INVARIANT_LENGTH_OF_NARROW_CAUSAL if is_narrow_causal else INVARIANT_LENGTH
    return length, length


@lru_cache(maxsize=1024)
def call_kind(
    options: AttentionOptions,
    dtype: DType,
    device_index: int,
    returns_lse: bool,
    config: KernelConfig | str | None = None,
    family: str | None = None,
    row_invariant: bool = False,
    decodes_few_rows: bool = True,
) -> CallKind:
    """Calls on one GPU with the same options; kernels are chosen by head dimension and lengths when they come. Where
    the caller names no kernel, and a row's bits may depend on the chunk it is in, few rows on many keys are decoded."""

    def choose(head_dim: int, q_length: int, kv_length: int) -> KernelConfig:
        lengths = lengths_to_choose_for(
            dtype, head_dim, options.window, q_length, kv_length, family=family, row_invariant=row_invariant
        )
        return chosen_config(
            dtype, head_dim, options.window, *lengths, gpu=gpu_model(device_index), config=config, family=family
        )

    few_rows = None
    if decodes_few_rows and config is None and family is None and not row_invariant:
        kind = decode_kind(options, dtype, device_index, returns_lse, split_units=0)
        few_rows = FewRows(kind, partial(decodes, options.window), MOST_PACKED_ROWS)
    return CallKind(options, choose, returns_lse=returns_lse, device_index=device_index, few_rows=few_rows)


def config_chosen_for(
    q: Any, k: Any, options: AttentionOptions, family: str | None, *, row_invariant: bool = False
) -> KernelConfig:
    """The config that a call on these tensors uses."""
    gpu = gpu_model(q.device.index) if not isinstance(q, np.ndarray) and q.is_cuda else None
    dtype, head_dim, window = DType.parse(str(q.dtype)), q.shape[3], options.window
    lengths = lengths_to_choose_for(
        dtype, head_dim, window, q.shape[2], k.shape[2], family=family, row_invariant=row_invariant
    )
    return chosen_config(dtype, head_dim, window, *lengths, gpu=gpu, family=family)


def run_on_gpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    *,
    with_lse: bool,
    config: KernelConfig | str | None = None,
    family: str | None = None,
    starts: tuple[torch.Tensor, torch.Tensor] | None = None,
    packed: Packed | None = None,
    decodes_few_rows: bool = True,
    sums: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The kernel on checked tensors of any layout: output, and the log-sum-exp or None. Both are mixed into `sums`, if
    given: output and log-sum-exp of other keys, in fp32, which are minus infinity where no key has come yet."""
    if is_empty(q.shape, k.shape):
        return sums or nothing_attended(q, with_lse)
    kind = call_kind(
        options, DType.parse(str(q.dtype)), q.device.index, with_lse, config, family, decodes_few_rows=decodes_few_rows
    )
    if sums is None:
        return kind.run(q, k, v, None, starts, packed)
    out, lse = sums
    kind.run(q, k, v, out.view(q.dtype), starts, packed, lse)
    return sums


def run_on_simulator(
    q: Any,
    k: Any,
    v: Any,
    options: AttentionOptions,
    *,
    with_lse: bool,
    config: KernelConfig | str | None,
    family: str | None,
    row_invariant: bool = False,
    sums: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """The kernel on the simulated GPU, of checked CPU tensors or arrays of any layout; `sums` as on a real one."""
    if is_empty(q.shape, k.shape):
        return sums or nothing_attended(q, with_lse)
    dtype, head_dim, window = DType.parse(str(q.dtype)), q.shape[3], options.window
    lengths = lengths_to_choose_for(
        dtype, head_dim, window, q.shape[2], k.shape[2], family=family, row_invariant=row_invariant
    )
    chosen = chosen_config(dtype, head_dim, window, *lengths, gpu=None, config=config, family=family)
    arrays = (_with_vector_rows(x) for x in (q, k, v))
    result = run_forward(
        chosen, *arrays, scale=options.scale, window=options.window, softcap=options.softcap, return_lse=with_lse,
        sums=sums, device="simulator",
    )  # fmt: skip
    return result if with_lse else (result, None)


def nothing_attended(q: Any, with_lse: bool) -> tuple[Any, Any]:
    """Zeros, and log-sum-exps of -inf: no row has a key."""
    if isinstance(q, np.ndarray):
        return np.zeros_like(q), np.full(q.shape[:3], -np.inf, np.float32) if with_lse else None
    import torch

    out = empty_output(q).zero_()
    if not with_lse:
        return out, None
    return out, torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)


def _with_vector_rows(x: Any) -> Any:
    """The array or CPU tensor itself if a kernel can read its rows in 16-byte vectors, otherwise a copy."""
    if not isinstance(x, np.ndarray):
        return with_vector_rows(x)
    strides = [stride for stride, n in zip(x.strides[:-1], x.shape, strict=False) if n > 1]
    fits = x.strides[-1] == x.itemsize and not any(s % VECTOR_BYTES or s < 0 for s in strides)
    return x if fits else np.ascontiguousarray(x)


def forget_plans() -> None:
    """Calls choose their kernels anew."""
    call_kind.cache_clear()
    decode_kind.cache_clear()
    forget_backward_plans()
