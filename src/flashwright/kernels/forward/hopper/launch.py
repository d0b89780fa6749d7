"""How launches of the Hopper kernel depend on a problem: tensor maps, and a schedule of tiles."""

from __future__ import annotations

from flashwright.kernels.forward.hopper.config import WARPGROUP_ROWS, HopperForwardKernelConfig
from flashwright.kernels.forward.hopper.schedule import NEVER, Schedule, balanced_schedule, schedule_in_rounds
from flashwright.kernels.forward.hopper.shapes import PANEL_COLUMNS
from flashwright.kernels.launch import Grid, LaunchRules, Sizes
from flashwright.problem.variant import AttentionVariant
from flashwright.problem.window import Window


def _grid(config: HopperForwardKernelConfig, q_blocks: int, heads: int, batches: int, multiprocessors: int) -> Grid:
    tiles = q_blocks * heads * batches
    return min(tiles, multiprocessors) if config.persistent else tiles, 1, 1


def _boxes(config: HopperForwardKernelConfig) -> tuple[int, int, int, int]:
    return PANEL_COLUMNS, WARPGROUP_ROWS, config.B_c, config.B_c


def _deals_tiles(config: HopperForwardKernelConfig, variant: AttentionVariant) -> bool:
    return config.persistent and variant.masks_right and not variant.variable_lengths


def _schedule(
    config: HopperForwardKernelConfig, variant: AttentionVariant, sizes: Sizes, window: Window, blocks: int
) -> Schedule:
    if _deals_tiles(config, variant):
        return balanced_schedule(_steps(config, sizes, window), sizes.q_heads, sizes.batches, blocks)
    return schedule_in_rounds(sizes.q_blocks(config), sizes.q_heads, sizes.lines)


def _schedule_by_rule(q_blocks: int, heads: int, batches: int) -> tuple[int, int]:
    """`schedule_in_rounds`, as words."""
    return q_blocks | heads << 32, batches | NEVER << 32


def _steps(config: HopperForwardKernelConfig, sizes: Sizes, window: Window) -> tuple[int, ...]:
    """KV blocks that each block of query rows attends to: `KeyBlocks` of ranges.cuh."""
    q_length, kv_length = sizes.q_length, sizes.kv_length
    shift = kv_length - q_length if window.bottom_right else 0

    def steps(first_row: int) -> int:
        last_row = min(first_row + config.B_r, q_length) - 1
        first_key = 0 if window.left is None else max(0, first_row + shift - window.left)
        last_key = kv_length - 1 if window.right is None else min(last_row + shift + window.right, kv_length - 1)
        return max(0, last_key // config.B_c - first_key // config.B_c + 1)

    return tuple(map(steps, range(0, q_length, config.B_r)))


RULES = LaunchRules(
    grid=_grid, boxes=_boxes, schedule=_schedule, deals_tiles=_deals_tiles, schedule_by_rule=_schedule_by_rule
)
