"""What a launch of the forward kernel is given, checked and packed; the same for a GPU and for the simulator."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Protocol

from flashwright.kernel_configs import DType, FlashForwardKernelConfig
from flashwright.tensor_map import TensorMap
from flashwright.tile_shapes import ELEMENT_BYTES, VECTOR_BYTES
from flashwright.variant import FULL, AttentionVariant, Window

MAX_GRID_YZ = 65_535
MAX_LENGTH = 2**30
"""Rows of a sequence: positions and window offsets are 32-bit integers in the kernel."""
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class DeviceTensor:
    """A (batch, heads, rows, head_dim) tensor in device memory; strides in elements."""

    name: str
    address: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class PackedSequences:
    """Where sequences of different lengths lie in tensors whose batch dimension is 1."""

    count: int
    q_starts_address: int
    """int32, count + 1 of them: sequence b is rows starts[b] … starts[b + 1] - 1."""
    kv_starts_address: int
    max_q_length: int
    max_kv_length: int


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
        ("lse_batch_stride", ctypes.c_int64),
        ("lse_head_stride", ctypes.c_int64),
        ("q_starts", ctypes.c_uint64),
        ("kv_starts", ctypes.c_uint64),
        ("q_length", ctypes.c_int32),
        ("kv_length", ctypes.c_int32),
        ("q_heads_per_kv_head", ctypes.c_int32),
        ("window_left", ctypes.c_int32),
        ("window_right", ctypes.c_int32),
        ("align_bottom_right", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("capping_scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class ForwardLaunch:
    """The variant that computes a problem, a grid, and the struct to launch it with."""

    variant: AttentionVariant
    grid: tuple[int, int, int]
    arguments: ForwardArguments
    tensor_maps: tuple[TensorMap, ...] = ()
    """Of q, k and v, for kernels that copy by them."""
    schedule: ctypes.Structure | None = None

    @property
    def parameters(self) -> tuple[TensorMap | ctypes.Structure, ...]:
        """What the kernel takes, in order."""
        return (*self.tensor_maps, self.arguments, *(() if self.schedule is None else (self.schedule,)))


class Blocking(Protocol):
    """What a launch depends on of a config of any family."""

    @property
    def dtype(self) -> DType: ...
    @property
    def d_head(self) -> int: ...
    @property
    def B_r(self) -> int: ...
    @property
    def B_c(self) -> int: ...


def forward_launch(
    config: Blocking,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    *,
    lse_address: int = 0,
    scale: float | None = None,
    window: Window = FULL,
    softcap: float = 0.0,
    packed: PackedSequences | None = None,
) -> ForwardLaunch:
    """How to compute `o` (and the log-sum-exp at `lse_address`, unless 0) from inputs that are checked here."""
    check_inputs(config, q, k, v, packed)
    for tensor in (q, k, v, o):
        check_layout(tensor)
        if isinstance(config, FlashForwardKernelConfig):
            _check_row_stride(config, tensor)
    batch, q_heads, q_rows, head_dim = q.shape
    kv_heads, kv_rows = k.shape[1:3]
    softmax_scale, capping_scale = _scales(scale, softcap, head_dim)
    _check_window(window)
    q_length, kv_length = (packed.max_q_length, packed.max_kv_length) if packed else (q_rows, kv_rows)

    arguments = ForwardArguments(
        *(TensorView(t.address, *t.strides[:3]) for t in (q, k, v, o)),
        lse=lse_address,
        lse_batch_stride=0 if packed else q_heads * q_rows,
        lse_head_stride=q_rows,
        q_starts=packed.q_starts_address if packed else 0,
        kv_starts=packed.kv_starts_address if packed else 0,
        q_length=q_rows,
        kv_length=kv_rows,
        q_heads_per_kv_head=q_heads // kv_heads,
        window_left=-min(window.left or 0, MAX_LENGTH),
        window_right=min(window.right or 0, MAX_LENGTH),
        align_bottom_right=window.bottom_right,
        softmax_scale=softmax_scale,
        capping_scale=capping_scale,
    )
    if packed:
        for tensor in (arguments.Q, arguments.K, arguments.V, arguments.O):
            tensor.batch_stride = 0  # sequences are told apart by their first row
    variant = AttentionVariant(
        returns_lse=lse_address != 0,
        masks_left=window.left is not None and _masks_left(window, q_length, kv_length, packed),
        masks_right=window.right is not None and _masks_right(window, q_length, kv_length, packed),
        softcaps=softcap != 0,
        grouped_heads=q_heads != kv_heads,
        variable_lengths=packed is not None,
        ragged_q=packed is not None or q_length % config.B_r != 0,
        ragged_kv=packed is not None or kv_length % config.B_c != 0,
        head_dim=0 if head_dim == config.d_head else head_dim,
    )
    grid = (-(-q_length // config.B_r), q_heads, packed.count if packed else batch)
    return ForwardLaunch(variant, grid, arguments)


def _masks_left(window: Window, q_length: int, kv_length: int, packed: PackedSequences | None) -> bool:
    """Whether the left edge cuts anything off: it does most for the last row."""
    shift = kv_length - q_length if window.bottom_right else 0
    assert window.left is not None
    return packed is not None or q_length - 1 + shift - window.left > 0


def _masks_right(window: Window, q_length: int, kv_length: int, packed: PackedSequences | None) -> bool:
    """Whether the right edge cuts anything off: it does most for the first row."""
    shift = kv_length - q_length if window.bottom_right else 0
    assert window.right is not None
    return packed is not None or shift + window.right < kv_length - 1


# --- Checks ------------------------------------------------------------------------------------------------------


def check_inputs(
    config: Blocking,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    packed: PackedSequences | None = None,
) -> None:
    """Raises `ValueError` for inputs that the config's kernel does not compute."""
    for tensor in (q, k, v):
        if len(tensor.shape) != 4:
            raise ValueError(
                f"{tensor.name}: shape {tensor.shape} has {len(tensor.shape)} dimensions; "
                "expected 4: (batch, heads, rows, head_dim)"
            )
        if tensor.dtype != config.dtype:
            raise ValueError(
                f"{tensor.name}: dtype is {tensor.dtype.name}, but the config computes {config.dtype.name}"
            )
        head_dim = tensor.shape[3]
        if not 0 < head_dim <= config.d_head or head_dim % 8:
            raise ValueError(
                f"{tensor.name}: head_dim is {head_dim}, but the config computes multiples of 8 "
                f"up to d_head = {config.d_head}"
            )
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape; got {k.shape} and {v.shape}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and head_dim; got {q.shape} and {k.shape}")
    batch, q_heads, q_rows, _ = q.shape
    kv_heads, kv_rows = k.shape[1:3]
    for name, count in (("batch", batch), ("q heads", q_heads), ("k heads", kv_heads)):
        if count == 0:
            raise ValueError(f"{name}: 0 leaves nothing to compute")
    if q_heads % kv_heads:
        raise ValueError(f"q has {q_heads} heads, which is not a multiple of the {kv_heads} heads of k and v")
    for name, count in (("q", q_rows), ("k", kv_rows)):
        if not 0 < count <= MAX_LENGTH:
            raise ValueError(f"{name}: {count} rows are not allowed; allowed: 1 to {MAX_LENGTH}")
    if packed is not None and batch != 1:
        raise ValueError(f"packed sequences need tensors of batch 1; got {batch}")
    sequences = batch if packed is None else packed.count
    for name, count in (("batch", sequences), ("heads", q_heads)):
        if count > MAX_GRID_YZ:
            raise ValueError(f"{name}: {count} is more than a launch can have ({MAX_GRID_YZ})")


def check_layout(tensor: DeviceTensor) -> None:
    """Raises `ValueError` for a tensor whose rows the kernel cannot move in 16-byte vectors."""
    if (problem := layout_problem(tensor)) is not None:
        raise ValueError(f"{tensor.name}: {problem}")


def _check_row_stride(config: FlashForwardKernelConfig, tensor: DeviceTensor) -> None:
    if config.static_row_stride and tensor.shape[2] > 1 and tensor.strides[2] != config.static_row_stride:
        raise ValueError(
            f"{tensor.name}: the row stride is {tensor.strides[2]} elements, but the kernel was specialised for "
            f"static_row_stride = {config.static_row_stride}"
        )


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


def _check_window(window: Window) -> None:
    for name in ("left", "right"):
        value = getattr(window, name)
        if value is not None and not value >= -MAX_LENGTH:
            raise ValueError(f"window.{name}: {value} is not allowed; allowed: None, or a number of keys")


def _scales(scale: float | None, softcap: float, head_dim: int) -> tuple[float, float]:
    """What scores are multiplied by in the softmax, and inside the soft cap."""
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    _check_positive("scale", scale)
    if softcap == 0:
        return scale, 0.0
    _check_positive("softcap", softcap)
    # softcap · tanh(score · scale / softcap), with tanh(x) computed from exp2(2·log2(e)·x).
    return softcap, 2 * LOG2_E * scale / softcap


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(as_float32 := ctypes.c_float(value).value) and as_float32 > 0):
        raise ValueError(f"{name}: {value} is not allowed; allowed: positive finite numbers of fp32")
