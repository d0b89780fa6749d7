"""What a launch of the forward kernel is given, checked and packed; the same for a GPU and for the simulator."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from flashwright.kernel_configs import DType, FlashForwardKernelConfig
from flashwright.tile_shapes import ELEMENT_BYTES, VECTOR_BYTES

MAX_GRID_YZ = 65_535


@dataclass(frozen=True)
class DeviceTensor:
    """A (batch, heads, rows, d_head) tensor in device memory; strides in elements."""

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


class ForwardArguments(ctypes.Structure):
    """`ForwardArguments` of arguments.cuh."""

    _fields_ = (
        ("Q", TensorView),
        ("K", TensorView),
        ("V", TensorView),
        ("O", TensorView),
        ("lse", ctypes.c_uint64),
        ("q_length", ctypes.c_int32),
        ("kv_length", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class ForwardLaunch:
    """A grid and the struct to launch it with."""

    grid: tuple[int, int, int]
    arguments: ForwardArguments


def check_inputs(config: FlashForwardKernelConfig, q: DeviceTensor, k: DeviceTensor, v: DeviceTensor) -> None:
    """Raises `ValueError` for inputs that the config's kernel does not compute."""
    for tensor in (q, k, v):
        if len(tensor.shape) != 4:
            raise ValueError(
                f"{tensor.name}: shape {tensor.shape} has {len(tensor.shape)} dimensions; "
                "expected 4: (batch, heads, rows, d_head)"
            )
        if tensor.dtype != config.dtype:
            raise ValueError(
                f"{tensor.name}: dtype is {tensor.dtype.name}, but the config computes {config.dtype.name}"
            )
        if tensor.shape[3] != config.d_head:
            raise ValueError(f"{tensor.name}: d_head is {tensor.shape[3]}, but the config computes {config.d_head}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape; got {k.shape} and {v.shape}")
    if q.shape[:2] != k.shape[:2]:
        raise ValueError(f"q and k must agree in batch and heads; got {q.shape[:2]} and {k.shape[:2]}")
    batch, heads, q_length, _ = q.shape
    for name, count in (("batch", batch), ("heads", heads), ("q rows", q_length), ("k rows", k.shape[2])):
        if count == 0:
            raise ValueError(f"{name}: 0 leaves nothing to compute")
    for name, count in (("batch", batch), ("heads", heads)):
        if count > MAX_GRID_YZ:
            raise ValueError(f"{name}: {count} is more than a launch can have ({MAX_GRID_YZ})")
    for name, length, block_name, block in (
        ("q", q_length, "B_r", config.B_r),
        ("k", k.shape[2], "B_c", config.B_c),
    ):
        if length % block:
            raise ValueError(
                f"{name}: {length} rows are not a multiple of {block_name} = {block}, which this kernel needs"
            )


def check_layout(config: FlashForwardKernelConfig, tensor: DeviceTensor) -> None:
    """Raises `ValueError` for a tensor whose rows the kernel cannot move in 16-byte vectors."""
    vector = VECTOR_BYTES // ELEMENT_BYTES
    if tensor.strides[3] != 1:
        raise ValueError(f"{tensor.name}: the last dimension has stride {tensor.strides[3]}; it must be contiguous (1)")
    if tensor.address % VECTOR_BYTES:
        raise ValueError(f"{tensor.name}: address {tensor.address:#x} is not aligned to {VECTOR_BYTES} bytes")
    for axis, name in enumerate(("batch", "head", "row")):
        if tensor.shape[axis] > 1 and tensor.strides[axis] % vector:
            raise ValueError(
                f"{tensor.name}: the {name} stride of {tensor.strides[axis]} elements is not a multiple of {vector} "
                f"({VECTOR_BYTES} bytes)"
            )
    if config.static_row_stride and tensor.shape[2] > 1 and tensor.strides[2] != config.static_row_stride:
        raise ValueError(
            f"{tensor.name}: the row stride is {tensor.strides[2]} elements, but the kernel was specialised for "
            f"static_row_stride = {config.static_row_stride}"
        )


def forward_launch(
    config: FlashForwardKernelConfig,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    *,
    lse_address: int = 0,
    scale: float | None = None,
) -> ForwardLaunch:
    """The grid and arguments that compute `o` (and the log-sum-exp at `lse_address`) from checked inputs."""
    check_inputs(config, q, k, v)
    for tensor in (q, k, v, o):
        check_layout(config, tensor)
    if scale is None:
        scale = 1 / math.sqrt(config.d_head)
    if not (math.isfinite(as_float32 := ctypes.c_float(scale).value) and as_float32 > 0):
        raise ValueError(f"scale: {scale} is not allowed; allowed: positive finite numbers of fp32")
    batch, heads, q_length, _ = q.shape
    arguments = ForwardArguments(
        *(TensorView(t.address, *t.strides[:3]) for t in (q, k, v, o)),
        lse=lse_address,
        q_length=q_length,
        kv_length=k.shape[2],
        softmax_scale=scale,
    )
    return ForwardLaunch((q_length // config.B_r, heads, batch), arguments)
