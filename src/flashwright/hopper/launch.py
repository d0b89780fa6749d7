"""What a launch of the Hopper kernel is given: tensor maps, and a schedule of tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashwright.hopper.config import WARPGROUP_ROWS, HopperForwardKernelConfig
from flashwright.hopper.schedule import balanced_schedule, schedule_in_rounds
from flashwright.hopper.shapes import PANEL_COLUMNS
from flashwright.launch_arguments import DeviceTensor, ForwardLaunch, forward_launch
from flashwright.numpy_dtypes import NUMPY_DTYPES
from flashwright.tensor_map import Swizzle, TensorMap
from flashwright.tile_shapes import ELEMENT_BYTES


def hopper_launch(
    config: HopperForwardKernelConfig,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    *,
    multiprocessors: int,
    **options: Any,
) -> ForwardLaunch:
    """How to compute `o` on a GPU with so many multiprocessors; options as of `forward_launch`."""
    launch = forward_launch(config, q, k, v, o, **options)
    q_blocks, heads, batches = launch.grid
    tiles = q_blocks * heads * batches
    blocks = min(tiles, multiprocessors) if config.persistent else tiles
    if config.persistent and launch.variant.masks_right and not launch.variant.variable_lengths:
        schedule = balanced_schedule(_steps(config, launch), heads, batches, blocks)
    else:
        schedule = schedule_in_rounds(q_blocks, heads, batches)
    return replace(
        launch,
        grid=(blocks, 1, 1),
        tensor_maps=(
            _tensor_map(q, WARPGROUP_ROWS),
            _tensor_map(k, config.B_c),
            _tensor_map(v, config.B_c),
        ),
        schedule=schedule,
    )


def _steps(config: HopperForwardKernelConfig, launch: ForwardLaunch) -> tuple[int, ...]:
    """KV blocks that each block of query rows looks at: `KVRange` of sequence.cuh."""
    arguments = launch.arguments
    q_length, kv_length = arguments.q_length, arguments.kv_length
    shift = kv_length - q_length if arguments.align_bottom_right else 0

    def steps(first_row: int) -> int:
        last_row = min(first_row + config.B_r, q_length) - 1
        first_key = max(0, first_row + shift + arguments.window_left) if launch.variant.masks_left else 0
        last_key = min(last_row + shift + arguments.window_right, kv_length - 1)
        return max(0, last_key // config.B_c - first_key // config.B_c + 1)

    return tuple(map(steps, range(0, q_length, config.B_r)))


def _tensor_map(tensor: DeviceTensor, rows: int) -> TensorMap:
    """Boxes of so many rows and one panel of columns. Outside of the tensor there are zeros: this is what fills the
    columns up to d_head, and the rows of the last block."""
    batch, heads, all_rows, columns = tensor.shape
    # The stride of a dimension of size 1 means nothing, and need not obey the rules that others do.
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)]
    return TensorMap(
        address=tensor.address,
        dtype=NUMPY_DTYPES[tensor.dtype],
        shape=(columns, all_rows, heads, batch),
        strides=tuple(ELEMENT_BYTES * strides[axis] for axis in (2, 1, 0)),
        box=(PANEL_COLUMNS, rows, 1, 1),
        swizzle=Swizzle.B128,
    )
