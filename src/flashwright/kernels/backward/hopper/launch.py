"""How launches of the Hopper backward kernel depend on a problem: one thread block per block of keys, tensor maps."""

from __future__ import annotations

from flashwright.kernels.backward.hopper.config import WARPGROUP_ROWS, HopperBackwardKernelConfig
from flashwright.kernels.backward.hopper.shapes import PANEL_COLUMNS, HopperBackwardShapes
from flashwright.kernels.launch import LaunchRules


def _boxes(config: HopperBackwardKernelConfig) -> tuple[int, int, int, int]:
    return PANEL_COLUMNS, config.B_r, WARPGROUP_ROWS, WARPGROUP_ROWS


RULES = LaunchRules(boxes=_boxes, key_blocks_together=lambda config: HopperBackwardShapes(config).together)
