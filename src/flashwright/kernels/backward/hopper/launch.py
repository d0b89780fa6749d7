"""How launches of the Hopper backward kernel depend on a problem: a thread block per block of keys, or per
multiprocessor if it is persistent; tensor maps."""

from __future__ import annotations

from flashwright.kernels.backward.hopper.config import WARPGROUP_ROWS, HopperBackwardKernelConfig
from flashwright.kernels.backward.hopper.shapes import PANEL_COLUMNS, HopperBackwardShapes
from flashwright.kernels.launch import Grid, LaunchRules, one_block_per_tile


def _boxes(config: HopperBackwardKernelConfig) -> tuple[int, int, int, int]:
    return PANEL_COLUMNS, config.B_r, WARPGROUP_ROWS, WARPGROUP_ROWS


def _grid(config: HopperBackwardKernelConfig, kv_blocks: int, heads: int, lines: int, multiprocessors: int) -> Grid:
    tiles, *_ = one_block_per_tile(config, kv_blocks, heads, lines, multiprocessors)
    shapes = HopperBackwardShapes(config)
    if not shapes.announces_tiles:
        return tiles, 1, 1
    return min(tiles, max(1, multiprocessors // shapes.together) * shapes.together), 1, 1


RULES = LaunchRules(
    grid=_grid,
    boxes=_boxes,
    key_blocks_together=lambda config: HopperBackwardShapes(config).together,
    key_blocks_at_once=1,
    finishes_dq=lambda config: bool(config.finishes_dQ),
)
