"""Launch limits of the simulated GPU that every architecture shares, and the table of those that differ."""

from __future__ import annotations

from flashwright.hardware.architectures import Architecture, architecture

__all__ = ["MAX_BLOCK_DIM", "MAX_GRID_DIM", "MAX_THREADS_PER_BLOCK", "WARP_SIZE", "Architecture", "architecture"]

WARP_SIZE = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_BLOCK_DIM = (1024, 1024, 64)
MAX_GRID_DIM = (2**31 - 1, 65535, 65535)
