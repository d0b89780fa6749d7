"""PyTorch's tensors as kernels see them: checks, views, and rows that can be read in 16-byte vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flashwright.hardware.units import ELEMENT_BYTES, VECTOR_BYTES
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.tensors import DeviceTensor
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.runtime.devices import GPUError, require_torch
from flashwright.runtime.parameters import SOME_ADDRESS

if TYPE_CHECKING:
    import torch

VECTOR_MASK = VECTOR_BYTES // ELEMENT_BYTES - 1

Packed = tuple[int, int, int]
"""(sequences, rows of the longest, keys of the longest) of packed sequences."""


def check_is_tensor(name: str, x: Any) -> None:
    """Raises `TypeError` for anything but a tensor of PyTorch."""
    torch = require_torch("attention")
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Raises for tensors that are not of one device and one floating-point dtype."""
    torch = require_torch("attention")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, tensor)
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}; all tensors must be on one device")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: layout {tensor.layout} is not allowed; allowed: dense tensors (torch.strided)")
        if not has_allowed_dtype(tensor):
            raise ValueError(f"{name}: dtype {tensor.dtype} is not allowed; allowed: floating point of 16 bits or more")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: dtype {tensor.dtype} differs from q's, {q.dtype}")


def has_allowed_dtype(tensor: Any) -> bool:
    """Whether attention is computed in the tensor's dtype; 8-bit ones come with scales, which no argument carries."""
    return tensor.is_floating_point() and tensor.element_size() >= 2


def check_kernel_dtype(q: Any) -> None:
    torch = require_torch("attention")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"q: dtype {q.dtype} is not allowed; allowed: torch.float16, torch.bfloat16 (backend='reference' computes "
            "any floating point)"
        )


def check_tensors_for(
    config: KernelConfig, inputs: dict[str, Any], like_q: dict[str, Any], starts: tuple[Any, Any] | None
) -> None:
    """Raises for inputs, q first, that a config's kernel does not compute, and for others that are not of q's shape,
    dtype and device."""
    torch = require_torch("running on a GPU")
    for name, tensor in inputs.items():
        check_is_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)} has {tensor.dim()} dimensions; expected 4: (batch, heads, rows, "
                "head_dim)"
            )
        if 0 in tensor.shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)} has no elements, which leaves nothing to compute")
        if DType.parse(str(tensor.dtype)) != config.dtype:
            raise ValueError(f"{name}: dtype is {tensor.dtype}, but the config computes {config.dtype.name}")
    q = inputs["q"]
    if q.shape[3] > config.d_head:
        raise ValueError(f"q: head_dim is {q.shape[3]}, but the config computes up to d_head = {config.d_head}")
    if q.device.type != "cuda":
        missing = "" if torch.cuda.is_available() else ", and PyTorch sees no CUDA GPU on this machine"
        raise GPUError(f"q is on {q.device}, not on a GPU{missing}")
    everything = inputs | like_q
    if starts is not None:
        everything |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    for name, tensor in everything.items():
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}; all tensors must be on one GPU")
    for name, tensor in like_q.items():
        if tensor.shape != q.shape or tensor.dtype != q.dtype:
            raise ValueError(
                f"{name}: {tuple(tensor.shape)} of {tensor.dtype} does not match q: {tuple(q.shape)} of {q.dtype}"
            )


def longest_of(starts: Any, given: int | None) -> int:
    """Of packed sequences; reads the starts unless it is given."""
    return int((starts[1:] - starts[:-1]).max()) if given is None else given


# --- For launches ----------------------------------------------------------------------------------------------------


def device_tensor(name: str, tensor: torch.Tensor) -> DeviceTensor:
    """The view that a launch needs of a PyTorch tensor."""
    return DeviceTensor(
        name, tensor.data_ptr(), DType.parse(str(tensor.dtype)), tuple(tensor.shape), tuple(tensor.stride())
    )


def placed_anywhere(name: str, tensor: torch.Tensor) -> DeviceTensor:
    """The same with some address: the real one is filled in at every run."""
    return replace(device_tensor(name, tensor), address=SOME_ADDRESS)


Allocate = Callable[[tuple[int, ...], tuple[int, ...], "torch.dtype"], "torch.Tensor"]
"""A tensor of a shape, strides and a dtype, its elements undefined."""


@cache
def allocator(device_type: str) -> Allocate:
    """On the current device of a type: `torch.empty_strided` beside the dispatcher, by the function that code of
    `torch.compile` calls. It takes a third of the time."""
    import torch
    from torch._C._dynamo import guards

    def dispatched(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device_type)

    return getattr(guards, f"_empty_strided_{device_type}", dispatched)


def allocator_like(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Of tensors like another, on the current device of its type."""
    return partial(allocator(x.device.type), tuple(x.shape), x.stride(), x.dtype)


def empty_output(q: torch.Tensor) -> torch.Tensor:
    """Room for something of a tensor's shape: laid out as it, or contiguous where its rows are not."""
    import torch

    out = torch.empty_like(q)
    return out if out.stride(-1) == 1 else torch.empty_like(q, memory_format=torch.contiguous_format)


def in_vectors(x: torch.Tensor) -> bool:
    """Whether rows can be moved in 16-byte vectors, the address apart. Strides of dimensions of size 1 mean nothing."""
    *outer, inner = x.stride()
    return inner == 1 and not any(s & VECTOR_MASK and n > 1 for s, n in zip(outer, x.shape, strict=False))


def are_vector_strides(strides: Sequence[int]) -> bool:
    """Whether they suit rows of 16-byte vectors, whatever the sizes."""
    batch, head, row, column = strides
    return column == 1 and not (batch | head | row) & VECTOR_MASK


def has_vector_rows(x: Any) -> bool:
    """Whether a kernel can read the rows of a tensor in 16-byte vectors."""
    return in_vectors(x) and x.data_ptr() % VECTOR_BYTES == 0


def with_vector_rows(x: Any) -> Any:
    """The tensor itself if a kernel can read its rows in 16-byte vectors, otherwise a copy."""
    import torch

    return x if has_vector_rows(x) else x.clone(memory_format=torch.contiguous_format)


# --- As NumPy's arrays -----------------------------------------------------------------------------------------------


def as_numpy(name: str, tensor: Any) -> np.ndarray:
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


def as_torch(array: np.ndarray, dtype: Any = None) -> Any:
    import torch

    return torch.from_numpy(array) if dtype is None else torch.from_numpy(array.view(np.int16)).view(dtype)
