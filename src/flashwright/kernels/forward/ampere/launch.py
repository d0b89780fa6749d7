"""How launches of the Ampere kernel depend on a problem: one thread block per tile of query rows."""

from __future__ import annotations

from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.launch import Grid, LaunchRules

MAX_GRID_Z = 65_535


def _grid(config: FlashForwardKernelConfig, q_blocks: int, heads: int, batches: int, multiprocessors: int) -> Grid:
    """(blocks of query rows, heads, batches); batches that the third dimension cannot hold go along the first."""
    if batches <= MAX_GRID_Z:
        return q_blocks, heads, batches
    layers = -(-batches // MAX_GRID_Z)
    return q_blocks * layers, heads, -(-batches // layers)


def _row_stride(config: FlashForwardKernelConfig) -> int:
    return config.static_row_stride


RULES = LaunchRules(grid=_grid, row_stride=_row_stride)
