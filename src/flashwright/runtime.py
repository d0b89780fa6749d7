"""Running one config's kernel, on a GPU or on the simulated one."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashwright.families import ForwardKernelConfig
from flashwright.gpu import GPUError, run_on_gpu
from flashwright.kernel_configs import DType
from flashwright.numpy_dtypes import NUMPY_DTYPES
from flashwright.simulation import simulate_forward
from flashwright.variant import FULL, Window

__all__ = ["GPUError", "run_forward"]


def run_forward(
    config: ForwardKernelConfig,
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
    """softmax(q·kᵀ·scale)·v by the kernel of one config.

    Tensors are (batch, heads, rows, head_dim) with any strides over contiguous, 16-byte aligned rows; q may have a
    multiple of k's and v's heads. Each row looks at the keys in `window`; with a `softcap` c, scores s become
    c·tanh(s/c). With `return_lse`, also the log-sum-exp of each row's scores, (batch, heads, rows) in fp32. Rows
    with nothing to look at are 0, and their log-sum-exp is -inf.

    Sequences of different lengths are packed along the rows of tensors of batch 1: sequence b is rows
    cu_seqlens[b] … cu_seqlens[b + 1] - 1 (int32, on the tensors' device).

    PyTorch tensors run on their GPU and its current stream; with `device="simulator"`, NumPy arrays and CPU tensors
    run on the simulated GPU, hazards checked.
    """
    starts, max_lengths = None, (0, 0)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        starts, max_lengths = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if device == "simulator":
        return _run_on_simulator(
            config, q, k, v, out, return_lse, starts, max_lengths, scale=scale, window=window, softcap=softcap
        )
    if device not in (None, "gpu"):
        raise ValueError(f"device: {device!r} is not known; allowed: 'gpu', 'simulator'")
    output, lse = run_on_gpu(
        config, q, k, v, scale=scale, window=window, softcap=softcap, return_lse=return_lse, out=out,
        starts=starts, max_lengths=max_lengths,
    )  # fmt: skip
    return (output, lse) if return_lse else output


def _packed(
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[tuple[Any, Any], tuple[int, int]]:
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts is None:
            raise ValueError(f"{name}: missing; packed sequences need cu_seqlens of both q and k")
        if starts.ndim != 1 or len(starts) < 2 or str(starts.dtype).rpartition(".")[2] != "int32":
            raise ValueError(
                f"{name}: {tuple(starts.shape)} of {starts.dtype} is not allowed; allowed: int32, one dimension, "
                "one more entry than sequences"
            )
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(f"cu_seqlens_q has {len(cu_seqlens_q)} entries, cu_seqlens_k {len(cu_seqlens_k)}")
    longest = [
        int((starts[1:] - starts[:-1]).max()) if given is None else given
        for starts, given in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k))
    ]
    return (cu_seqlens_q, cu_seqlens_k), (longest[0], longest[1])


# --- The simulated GPU -------------------------------------------------------------------------------------------


def _run_on_simulator(
    config: ForwardKernelConfig,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    return_lse: bool,
    starts: tuple[Any, Any] | None,
    max_lengths: tuple[int, int],
    **options: Any,
) -> Any:
    arrays = [_as_numpy(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v))]
    array_starts = None if starts is None else (np.asarray(starts[0]), np.asarray(starts[1]))
    simulated = simulate_forward(
        config, *arrays, return_lse=return_lse, starts=array_starts, max_lengths=max_lengths, **options
    )
    output, lse = simulated.output, simulated.lse
    if not isinstance(q, np.ndarray):
        output, lse = _as_torch(output, q.dtype), None if lse is None else _as_torch(lse)
    if out is not None:
        out[...] = output
        output = out
    return (output, lse) if return_lse else output


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
