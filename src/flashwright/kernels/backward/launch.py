"""What the launches of a backward pass are given, checked and packed; the same for a GPU and for the simulator.

Three kernels: one before, which finds what the backward needs of each row of q and clears the sums of dq; the family's
own; and one after, which rounds the sums, unless the family's own does. All take the same arguments.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from flashwright.hardware.tensor_map import TensorMap
from flashwright.kernels.forward.launch import (
    MAX_BLOCKS,
    NO_OPTIONS,
    ForwardArguments,
    PackedSequences,
    check_inputs,
    check_tiles,
    forward_arguments,
    forward_variant,
    tensor_map,
)
from flashwright.kernels.launch import Blocking, Grid, LaunchRules, Sizes
from flashwright.kernels.operation import OVER_QUERIES, Operation
from flashwright.kernels.tensors import DeviceTensor, TensorView, check_layout
from flashwright.problem.options import AttentionOptions
from flashwright.problem.variant import AttentionVariant

TURN_BYTES = 16
"""What is counted of turns at a block of dq (`Turn::words` of backward/dq_sums.cuh)."""
ROWS, DQ = "rows", "dq"
"""The companions of a backward kernel: the first runs before it, the second after it."""


class BackwardArguments(ctypes.Structure):
    """`BackwardArguments` of backward_arguments.cuh."""

    _fields_ = (
        ("forward", ForwardArguments),
        ("dO", TensorView),
        ("dQ", TensorView),
        ("dK", TensorView),
        ("dV", TensorView),
        ("dlse", ctypes.c_uint64),
        ("row_lse", ctypes.c_uint64),
        ("row_dot", ctypes.c_uint64),
        ("dQ_sums", ctypes.c_uint64),
        ("turns", ctypes.c_uint64),
        ("padded_rows", ctypes.c_int32),
        ("kv_blocks", ctypes.c_int32),
        ("pairs_at_once", ctypes.c_int32),
        ("gradient_scale", ctypes.c_float),
        ("tiles_taken", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Scratch:
    """Memory that a backward pass works in, in bytes from its beginning: nothing of it is read before it is written."""

    padded_rows: int
    """Of each head: whole blocks of a sequence, or of all packed ones."""
    row_lse: int
    row_dot: int
    dQ_sums: int
    turns: int
    tiles_taken: int
    total: int

    ALIGNMENT = 256

    @classmethod
    def of(cls, config: Blocking, sizes: Sizes) -> Scratch:
        """A packed sequence begins with a whole block, too."""
        block = config.B_r
        padded_rows = sizes.q_blocks(config) * block
        rows = padded_rows * sizes.lines * sizes.q_heads
        row_bytes = _aligned(4 * rows)
        sums = 2 * row_bytes
        turns = sums + _aligned(4 * rows * config.d_head)
        tiles_taken = turns + TURN_BYTES * (rows // block)
        return cls(padded_rows, 0, row_bytes, sums, turns, tiles_taken, _aligned(tiles_taken + 8))

    PLACES = ("row_lse", "row_dot", "dQ_sums", "turns", "tiles_taken")
    """The arguments that are addresses in it."""


def _aligned(size: int) -> int:
    return -(-size // Scratch.ALIGNMENT) * Scratch.ALIGNMENT


@dataclass(frozen=True)
class BackwardLaunch:
    """The variant that differentiates a problem, grids, and the parameters to launch with."""

    variant: AttentionVariant
    rows_grid: Grid
    """Of the kernels before and after."""
    grid: Grid
    arguments: BackwardArguments
    tensor_maps: tuple[TensorMap, ...] = ()
    """Of q, k, v and dO, for kernels that copy by them."""
    finishes_dq: bool = False
    """Whether no kernel has to run after the family's own."""

    @property
    def parameters(self) -> tuple[TensorMap | ctypes.Structure, ...]:
        """What the family's kernel takes, in order; the others take the arguments alone."""
        return (*self.tensor_maps, self.arguments)


def scratch_for(config: Blocking, q: DeviceTensor, k: DeviceTensor, packed: PackedSequences | None) -> Scratch:
    return Scratch.of(config, _sizes(q, k, packed))


def backward_launch(
    rules: LaunchRules,
    config: Blocking,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    do: DeviceTensor,
    dq: DeviceTensor,
    dk: DeviceTensor,
    dv: DeviceTensor,
    *,
    lse_address: int,
    scratch_address: int,
    multiprocessors: int,
    options: AttentionOptions = NO_OPTIONS,
    dlse_address: int = 0,
    packed: PackedSequences | None = None,
    accumulates: bool = False,
) -> BackwardLaunch:
    """How to compute `dq`, `dk` and `dv` from inputs that are checked here, and from the output and the log-sum-exp of
    the forward. Gradients of the log-sum-exp, unless their address is 0, are laid out as it is. With `accumulates`,
    gradients are added to what is there: `dq`, `dk` and `dv` are views of fp32 sums as twice as many 16-bit columns."""
    check_inputs(config, q, k, v, packed)
    for tensor, like, times in (
        (o, q, 1),
        (do, q, 1),
        *((x, y, 1 + accumulates) for x, y in zip((dq, dk, dv), (q, k, v), strict=True)),
    ):
        expected = (*like.shape[:3], times * like.shape[3])
        if tensor.shape != expected or tensor.dtype != like.dtype:
            raise ValueError(
                f"{tensor.name}: {tensor.shape} of {tensor.dtype.name} does not match {like.name}: {expected} of "
                f"{like.dtype.name}"
            )
    for tensor in (q, k, v, o, do, dq, dk, dv):
        check_layout(tensor)
    options.check()
    variant = forward_variant(
        config,
        options,
        head_dim=q.shape[3],
        grouped_heads=q.shape[1] != k.shape[1],
        packed=packed is not None,
        returns_lse=False,
        accumulates=accumulates,
    )
    sizes = _sizes(q, k, packed)
    check_tiles(config, sizes)
    scratch = scratch_for(config, q, k, packed)
    kv_blocks = _kv_blocks(rules, config, sizes, k, packed)
    if (tiles := kv_blocks * sizes.kv_heads * sizes.lines) > MAX_BLOCKS:
        raise ValueError(
            f"batch {sizes.batches} × {sizes.kv_heads} heads × {k.shape[2]} keys are {tiles} tiles of {config.B_c} "
            f"keys; allowed: up to {MAX_BLOCKS}"
        )
    arguments = BackwardArguments(
        forward_arguments(config, q, k, v, o, sizes, options, lse_address, packed),
        *(TensorView(t.address, *t.strides[:3]) for t in (do, dq, dk, dv)),
        dlse=dlse_address,
        **{name: scratch_address + getattr(scratch, name) for name in Scratch.PLACES},
        padded_rows=scratch.padded_rows,
        kv_blocks=kv_blocks,
        pairs_at_once=_pairs_at_once(config, sizes, kv_blocks, rules.key_blocks_at_once * multiprocessors),
        gradient_scale=options.scale_of(q.shape[3]),
    )
    if packed:
        for view in (arguments.dO, arguments.dQ, arguments.dK, arguments.dV):
            view.batch_stride = 0
    maps: tuple[TensorMap, ...] = ()
    if rules.boxes is not None:
        columns, q_rows, k_rows, v_rows = rules.boxes(config)
        boxes = ((q, q_rows), (k, k_rows), (v, v_rows), (do, q_rows))
        maps = tuple(tensor_map(tensor, columns, rows) for tensor, rows in boxes)
    return BackwardLaunch(
        variant=variant,
        rows_grid=(sizes.q_blocks(config) * sizes.lines, sizes.q_heads, 1),
        grid=rules.grid(config, kv_blocks, sizes.kv_heads, sizes.lines, multiprocessors),
        arguments=arguments,
        tensor_maps=maps,
        finishes_dq=rules.finishes_dq(config),
    )


BACKWARD = Operation("backward", backward_launch, OVER_QUERIES)


def _kv_blocks(
    rules: LaunchRules, config: Blocking, sizes: Sizes, k: DeviceTensor, packed: PackedSequences | None
) -> int:
    together = rules.key_blocks_together(config)
    group_keys = config.B_c * together
    groups = k.shape[2] // group_keys + packed.count if packed else -(-sizes.kv_length // group_keys)
    return groups * together


def _pairs_at_once(config: Blocking, sizes: Sizes, kv_blocks: int, key_blocks: int) -> int:
    """Heads and batches whose blocks of keys take turns: together they have so many, or as many rows of queries as
    those have keys. A causal mask gives the first block twice the queries of an average one: it does not begin last.
    In order, blocks of few queries would wait for one another if fewer heads took turns. More would not share the
    cache."""
    q_rows = sizes.q_length * sizes.q_heads // sizes.kv_heads
    at_once = max(key_blocks // kv_blocks, key_blocks * config.B_c // q_rows)
    return max(1, min(sizes.kv_heads * sizes.lines, at_once))


def _sizes(q: DeviceTensor, k: DeviceTensor, packed: PackedSequences | None) -> Sizes:
    if packed is None:
        return Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    longest = max(1, packed.max_q_length), max(1, packed.max_kv_length)
    return Sizes(packed.count, q.shape[1], k.shape[1], *longest, packed_rows=q.shape[2])
