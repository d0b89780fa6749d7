"""Running one config's kernel, on a GPU or on the simulated one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import as_config
from flashwright.problem.options import AttentionOptions
from flashwright.problem.sequences import check_starts, sequence_rows
from flashwright.problem.window import FULL, Window
from flashwright.runtime.call_kinds import CallKind
from flashwright.runtime.devices import GPUError
from flashwright.runtime.simulated import simulate_forward
from flashwright.runtime.tensors import Packed, as_numpy, as_torch, check_tensors_for, longest_of

__all__ = ["GPUError", "run_forward"]


def run_forward(
    config: KernelConfig | str,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    window: Window = FULL,
    softcap: float = 0.0,
    return_lse: bool = False,
    out: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sums: tuple[Any, Any] | None = None,
    device: str | None = None,
) -> Any:
    """softmax(q·kᵀ·scale)·v by the kernel of one config, of any family, which may be given by its short form.

    Tensors are (batch, heads, rows, head_dim); q may have a multiple of k's and v's heads. Each row attends to the keys
    in `window`; with a `softcap` c, scores s become c·tanh(s/c). With `return_lse`, also the log-sum-exp of each row's
    scores, (batch, heads, rows) in fp32. Rows with no key to attend to are 0, and their log-sum-exp is -inf.

    Sequences of different lengths are packed along the rows of tensors of batch 1: sequence b is rows
    cu_seqlens[b] … cu_seqlens[b + 1] - 1 (int32, on the tensors' device). Rows of no sequence are 0.

    With `sums`, output and log-sum-exp of other keys in fp32 (-inf where no key has come yet), results are mixed into
    them, in place.

    PyTorch tensors run on their GPU and its current stream; with `device="simulator"`, NumPy arrays and CPU tensors
    run on the simulated GPU, hazards checked.
    """
    known = as_config(config)
    options = AttentionOptions(window, scale, softcap)
    starts, packed = None, None
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_starts(cu_seqlens_q, cu_seqlens_k)
        starts = (cu_seqlens_q, cu_seqlens_k)
        packed = (len(cu_seqlens_q) - 1, longest_of(cu_seqlens_q, max_seqlen_q), longest_of(cu_seqlens_k, max_seqlen_k))
    if device == "simulator":
        output, lse = _run_on_simulator(known, q, k, v, options, out, return_lse, starts, packed, sums)
    elif device in (None, "gpu"):
        output, lse = _run_on_gpu(known, q, k, v, options, out, return_lse, starts, packed, sums)
    else:
        raise ValueError(f"device: {device!r} is not known; allowed: 'gpu', 'simulator'")
    return (output, lse) if return_lse else output


# --- A GPU ---------------------------------------------------------------------------------------------------------


def _run_on_gpu(
    config: KernelConfig,
    q: Any,
    k: Any,
    v: Any,
    options: AttentionOptions,
    out: Any,
    return_lse: bool,
    starts: tuple[Any, Any] | None,
    packed: Packed | None,
    sums: tuple[Any, Any] | None,
) -> tuple[Any, Any]:
    outputs = {} if out is None else {"out": out}
    check_tensors_for(config, {"q": q, "k": k, "v": v}, outputs, starts)
    if starts is not None:
        starts = (starts[0].contiguous(), starts[1].contiguous())
    if sums is None:
        return _call_kind(config, options, q.device.index, return_lse).run(q, k, v, out, starts, packed)
    _call_kind(config, options, q.device.index, True).run(q, k, v, sums[0].view(q.dtype), starts, packed, sums[1])
    return sums


@lru_cache(maxsize=4096)
def _call_kind(config: KernelConfig, options: AttentionOptions, device_index: int, returns_lse: bool) -> CallKind:
    options.check()
    return CallKind(options, lambda *sizes: config, returns_lse=returns_lse, device_index=device_index)


# --- The simulated GPU -------------------------------------------------------------------------------------------


def _run_on_simulator(
    config: KernelConfig,
    q: Any,
    k: Any,
    v: Any,
    options: AttentionOptions,
    out: Any,
    return_lse: bool,
    starts: tuple[Any, Any] | None,
    packed: Packed | None,
    sums: tuple[Any, Any] | None,
) -> tuple[Any, Any]:
    arrays = [as_numpy(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v))]
    array_starts = None
    if starts is not None and packed is not None:
        array_starts = (np.ascontiguousarray(starts[0]), np.ascontiguousarray(starts[1]))
        for name, each, x, longest in zip(
            ("cu_seqlens_q", "cu_seqlens_k"), array_starts, arrays, packed[1:], strict=False
        ):
            sequence_rows(name, each, x.shape[2], longest)
    simulated = simulate_forward(
        config, *arrays, options=options, return_lse=return_lse, starts=array_starts,
        max_lengths=(0, 0) if packed is None else packed[1:],
        sums=None if sums is None else (np.asarray(sums[0]), np.asarray(sums[1])),
    )  # fmt: skip
    if sums is not None:
        return sums
    output, lse = simulated.output, simulated.lse
    if not isinstance(q, np.ndarray):
        output, lse = as_torch(output, q.dtype), None if lse is None else as_torch(lse)
    if out is not None:
        out[...] = output
        output = out
    return output, lse
