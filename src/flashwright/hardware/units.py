"""Sizes of the instructions of every supported GPU."""

from __future__ import annotations

ELEMENT_BYTES = 2
VECTOR_BYTES = 16
FRAGMENT = 8
"""Rows and columns of the 8×8 matrices that `ldmatrix` moves."""
MMA_ROWS = 16
MMA_K = 16
WARP_THREADS = 32
MAX_BLOCK_THREADS = 1024
BANK_LINE_BYTES = 128
"""32 banks of 4 bytes: what one shared-memory wavefront moves."""
