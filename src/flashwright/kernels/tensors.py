"""Tensors in device memory as a launch sees them, and the rules for reading them in 16-byte vectors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from flashwright.hardware.units import ELEMENT_BYTES, VECTOR_BYTES
from flashwright.problem.dtypes import DType


@dataclass(frozen=True)
class DeviceTensor:
    """A (batch, heads, rows, head_dim) tensor in device memory; strides in elements."""

    name: str
    address: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TensorView(ctypes.Structure):
    """`TensorView` of arguments.cuh."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    )


def check_layout(tensor: DeviceTensor) -> None:
    """Raises `ValueError` for a tensor whose rows the kernel cannot move in 16-byte vectors."""
    if (problem := layout_problem(tensor)) is not None:
        raise ValueError(f"{tensor.name}: {problem}")


def layout_problem(tensor: DeviceTensor) -> str | None:
    """What keeps a tensor's rows from being moved in 16-byte vectors; None if nothing does."""
    vector = VECTOR_BYTES // ELEMENT_BYTES
    if tensor.strides[3] != 1:
        return f"the last dimension has stride {tensor.strides[3]}; it must be contiguous (1)"
    if tensor.address % VECTOR_BYTES:
        return f"address {tensor.address:#x} is not aligned to {VECTOR_BYTES} bytes"
    for axis, name in enumerate(("batch", "head", "row")):
        if tensor.shape[axis] > 1 and tensor.strides[axis] % vector:
            return (
                f"the {name} stride of {tensor.strides[axis]} elements is not a multiple of {vector} "
                f"({VECTOR_BYTES} bytes)"
            )
    return None
