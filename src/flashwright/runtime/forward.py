"""Running one config's kernel, on a GPU or on the simulated one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import as_config
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.problem.options import AttentionOptions
from flashwright.problem.sequences import check_starts, sequence_rows
from flashwright.problem.window import FULL, Window
from flashwright.runtime.devices import GPUError, require_torch
from flashwright.runtime.plans import CallKind, Packed
from flashwright.runtime.simulated import simulate_forward

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
    device: str | None = None,
) -> Any:
    """softmax(q·kᵀ·scale)·v by the kernel of one config, of any family, which may be given by its short form.

    Tensors are (batch, heads, rows, head_dim); q may have a multiple of k's and v's heads. Each row attends to the keys
    in `window`; with a `softcap` c, scores s become c·tanh(s/c). With `return_lse`, also the log-sum-exp of each row's
    scores, (batch, heads, rows) in fp32. Rows with no key to attend to are 0, and their log-sum-exp is -inf.

    Sequences of different lengths are packed along the rows of tensors of batch 1: sequence b is rows
    cu_seqlens[b] … cu_seqlens[b + 1] - 1 (int32, on the tensors' device). Rows of no sequence are 0.

    PyTorch tensors run on their GPU and its current stream; with `device="simulator"`, NumPy arrays and CPU tensors
    run on the simulated GPU, hazards checked.
    """
    known = as_config(config)
    options = AttentionOptions(window, scale, softcap)
    starts, packed = None, None
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_starts(cu_seqlens_q, cu_seqlens_k)
        starts = (cu_seqlens_q, cu_seqlens_k)
        packed = (len(cu_seqlens_q) - 1, _longest(cu_seqlens_q, max_seqlen_q), _longest(cu_seqlens_k, max_seqlen_k))
    if device == "simulator":
        output, lse = _run_on_simulator(known, q, k, v, options, out, return_lse, starts, packed)
    elif device in (None, "gpu"):
        output, lse = _run_on_gpu(known, q, k, v, options, out, return_lse, starts, packed)
    else:
        raise ValueError(f"device: {device!r} is not known; allowed: 'gpu', 'simulator'")
    return (output, lse) if return_lse else output


def _longest(starts: Any, given: int | None) -> int:
    return int((starts[1:] - starts[:-1]).max()) if given is None else given


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
) -> tuple[Any, Any]:
    _check_tensors(config, q, k, v, out, starts)
    if starts is not None:
        starts = (starts[0].contiguous(), starts[1].contiguous())
    return _call_kind(config, options, q.device.index, return_lse).run(q, k, v, out, starts, packed)


@lru_cache(maxsize=4096)
def _call_kind(config: KernelConfig, options: AttentionOptions, device_index: int, returns_lse: bool) -> CallKind:
    options.check()
    return CallKind(options, lambda *sizes: config, returns_lse=returns_lse, device_index=device_index)


def _check_tensors(config: KernelConfig, q: Any, k: Any, v: Any, out: Any, starts: tuple[Any, Any] | None) -> None:
    torch = require_torch("running on a GPU")
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)} has {tensor.dim()} dimensions; expected 4: (batch, heads, rows, "
                "head_dim)"
            )
        if 0 in tensor.shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)} has no elements, which leaves nothing to compute")
        if DType.parse(str(tensor.dtype)) != config.dtype:
            raise ValueError(f"{name}: dtype is {tensor.dtype}, but the config computes {config.dtype.name}")
    if q.shape[3] > config.d_head:
        raise ValueError(f"q: head_dim is {q.shape[3]}, but the config computes up to d_head = {config.d_head}")
    if out is not None:
        tensors["out"] = out
    if starts is not None:
        tensors |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    if q.device.type != "cuda":
        missing = "" if torch.cuda.is_available() else ", and PyTorch sees no CUDA GPU on this machine"
        raise GPUError(f"q is on {q.device}, not on a GPU{missing}")
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}; all tensors must be on one GPU")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        raise ValueError(f"out: {tuple(out.shape)} of {out.dtype} does not match q: {tuple(q.shape)} of {q.dtype}")


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
) -> tuple[Any, Any]:
    arrays = [_as_numpy(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v))]
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
    )  # fmt: skip
    output, lse = simulated.output, simulated.lse
    if not isinstance(q, np.ndarray):
        output, lse = _as_torch(output, q.dtype), None if lse is None else _as_torch(lse)
    if out is not None:
        out[...] = output
        output = out
    return output, lse


def _as_numpy(name: str, tensor: Any) -> np.ndarray:
    """A view of a CPU tensor, or the array itself. NumPy has no bfloat16 of its own, so bits are passed on."""
    if isinstance(tensor, np.ndarray):
        return tensor
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a NumPy array or a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; the simulator takes NumPy arrays and CPU tensors")
    dtype = DType.parse(str(tensor.dtype))
    return tensor.detach().view(torch.int16).numpy().view(NUMPY_DTYPES[dtype])


def _as_torch(array: np.ndarray, dtype: Any = None) -> Any:
    import torch

    return torch.from_numpy(array) if dtype is None else torch.from_numpy(array.view(np.int16)).view(dtype)
