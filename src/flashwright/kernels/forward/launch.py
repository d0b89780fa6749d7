"""What a launch of a forward kernel is given, checked and packed; the same for a GPU and for the simulator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from flashwright.hardware.tensor_map import Swizzle, TensorMap
from flashwright.hardware.units import ELEMENT_BYTES
from flashwright.kernels.launch import Blocking, LaunchRules, Sizes
from flashwright.kernels.operation import Operation
from flashwright.kernels.tensors import DeviceTensor, TensorView, check_layout
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.lengths import MAX_LENGTH
from flashwright.problem.options import AttentionOptions
from flashwright.problem.variant import AttentionVariant

NO_OPTIONS = AttentionOptions()
MAX_BLOCKS = 2**31 - 1
"""Thread blocks of a launch, along the first dimension of its grid."""
MAX_HEADS = 65_535
"""Thread blocks along another dimension."""


@dataclass(frozen=True)
class PackedSequences:
    """Where sequences of different lengths lie in tensors whose batch dimension is 1."""

    count: int
    q_starts_address: int
    """int32, count + 1 of them: sequence b is rows starts[b] … starts[b + 1] - 1."""
    kv_starts_address: int
    max_q_length: int
    max_kv_length: int


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
        ("q_heads", ctypes.c_int32),
        ("q_heads_per_kv_head", ctypes.c_int32),
        ("q_blocks", ctypes.c_int32),
        ("batches", ctypes.c_int32),
        ("window_left", ctypes.c_int32),
        ("window_right", ctypes.c_int32),
        ("align_bottom_right", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("capping_scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class ForwardLaunch:
    """The variant that computes a problem, a grid, and the parameters to launch it with."""

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


def forward_launch(
    rules: LaunchRules,
    config: Blocking,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    *,
    multiprocessors: int,
    options: AttentionOptions = NO_OPTIONS,
    lse_address: int = 0,
    packed: PackedSequences | None = None,
    lse_strides: tuple[int, int] | None = None,
) -> ForwardLaunch:
    """How to compute `o` (and the log-sum-exp at `lse_address`, unless 0) from inputs that are checked here.

    With `lse_strides`, of batches and heads, results are mixed into what is there: `o` is a view of fp32 sums as twice
    as many 16-bit columns, and the log-sum-exps are theirs.
    """
    check_inputs(config, q, k, v, packed)
    accumulates = lse_strides is not None
    for tensor in (q, k, v, o):
        check_layout(tensor)
        if tensor is not o or not accumulates:
            check_row_stride(rules.row_stride(config), tensor.name, tensor.shape[2], tensor.strides[2])
    options.check()
    variant = forward_variant(
        config,
        options,
        head_dim=q.shape[3],
        grouped_heads=q.shape[1] != k.shape[1],
        packed=packed is not None,
        returns_lse=lse_address != 0,
        accumulates=accumulates,
    )
    sizes = Sizes(
        packed.count if packed else q.shape[0],
        q.shape[1],
        k.shape[1],
        packed.max_q_length if packed else q.shape[2],
        packed.max_kv_length if packed else k.shape[2],
        q.shape[2] if packed else None,
    )
    check_tiles(config, sizes)
    grid = rules.grid(config, sizes.q_blocks(config), sizes.q_heads, sizes.lines, multiprocessors)
    schedule = None if rules.schedule is None else rules.schedule(config, variant, sizes, options.window, grid[0])
    return ForwardLaunch(
        variant=variant,
        grid=grid,
        arguments=forward_arguments(config, q, k, v, o, sizes, options, lse_address, packed, lse_strides),
        tensor_maps=() if rules.boxes is None else tensor_maps(rules.boxes(config), q, k, v),
        schedule=schedule,
    )


FORWARD = Operation("forward", forward_launch)


def forward_variant(
    config: Blocking,
    options: AttentionOptions,
    *,
    head_dim: int,
    grouped_heads: bool,
    packed: bool,
    returns_lse: bool,
    accumulates: bool = False,
) -> AttentionVariant:
    """What is compiled into the kernel that computes such problems: nothing that lengths decide."""
    return AttentionVariant(
        returns_lse=returns_lse,
        masks_left=options.window.left is not None,
        masks_right=options.window.right is not None,
        softcaps=options.softcap != 0,
        grouped_heads=grouped_heads,
        variable_lengths=packed,
        accumulates=accumulates,
        head_dim=0 if head_dim == config.d_head else head_dim,
    )


def check_tiles(config: Blocking, sizes: Sizes) -> None:
    """Raises `ValueError` for more tiles than a launch can have."""
    if (tiles := sizes.q_blocks(config) * sizes.q_heads * sizes.lines) > MAX_BLOCKS:
        raise ValueError(
            f"batch {sizes.batches} × {sizes.q_heads} heads × {sizes.q_length} rows are {tiles} tiles of {config.B_r} "
            f"rows; allowed: up to {MAX_BLOCKS}"
        )
    if sizes.q_heads > MAX_HEADS:
        raise ValueError(f"heads: {sizes.q_heads} are not allowed; allowed: up to {MAX_HEADS}")


def forward_arguments(
    config: Blocking,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    sizes: Sizes,
    options: AttentionOptions,
    lse_address: int,
    packed: PackedSequences | None,
    lse_strides: tuple[int, int] | None = None,
) -> ForwardArguments:
    _, q_heads, q_rows, head_dim = q.shape
    lse_batch_stride, lse_head_stride = lse_strides or (q_heads * q_rows, q_rows)
    softmax_scale, capping_scale = options.kernel_scales(head_dim)
    window = options.window
    arguments = ForwardArguments(
        *(TensorView(t.address, *t.strides[:3]) for t in (q, k, v, o)),
        lse=lse_address,
        lse_batch_stride=0 if packed else lse_batch_stride,
        lse_head_stride=lse_head_stride,
        q_starts=packed.q_starts_address if packed else 0,
        kv_starts=packed.kv_starts_address if packed else 0,
        q_length=q_rows,
        kv_length=k.shape[2],
        q_heads=q_heads,
        q_heads_per_kv_head=q_heads // k.shape[1],
        q_blocks=sizes.q_blocks(config),
        batches=sizes.batches,
        window_left=-min(window.left or 0, MAX_LENGTH),
        window_right=min(window.right or 0, MAX_LENGTH),
        align_bottom_right=window.bottom_right,
        softmax_scale=softmax_scale,
        capping_scale=capping_scale,
    )
    for view, tensor in ((arguments.Q, q), (arguments.K, k), (arguments.V, v), (arguments.O, o)):
        if tensor.shape[0] == 1:  # whose stride means nothing; packed sequences are found by their first rows
            view.batch_stride = 0
    return arguments


def tensor_maps(
    boxes: tuple[int, int, int, int], q: DeviceTensor, k: DeviceTensor, v: DeviceTensor
) -> tuple[TensorMap, ...]:
    columns, *rows = boxes
    return tuple(tensor_map(tensor, columns, count) for tensor, count in zip((q, k, v), rows, strict=True))


def tensor_map(tensor: DeviceTensor, columns: int, rows: int) -> TensorMap:
    """Boxes of so many rows and columns. Outside of the tensor there are zeros: this is what fills the columns up to
    d_head, and the rows of the last block."""
    return TensorMap(
        address=tensor.address,
        dtype=NUMPY_DTYPES[tensor.dtype],
        shape=tuple(reversed(tensor.shape)),
        strides=map_strides(tensor.shape, tensor.strides),
        box=(columns, rows, 1, 1),
        swizzle=Swizzle.B128,
    )


def map_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """Bytes from a row to the next, from a head, from a batch. The stride of a dimension of size 1 means nothing, and
    need not obey the rules that others do."""
    batch, head, row, _ = strides
    return (
        0 if shape[2] == 1 else ELEMENT_BYTES * row,
        0 if shape[1] == 1 else ELEMENT_BYTES * head,
        0 if shape[0] == 1 else ELEMENT_BYTES * batch,
    )


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


def check_row_stride(wanted: int, name: str, rows: int, stride: int) -> None:
    """Raises `ValueError` for a tensor of another row stride than a kernel was compiled for (0: any)."""
    if wanted and rows > 1 and stride != wanted:
        raise ValueError(
            f"{name}: the row stride is {stride} elements, but the kernel was specialised for "
            f"static_row_stride = {wanted}"
        )
