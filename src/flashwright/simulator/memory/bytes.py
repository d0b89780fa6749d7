"""A block of bytes that can be gathered and scattered at every access width."""

from __future__ import annotations

from typing import Any

import numpy as np

# 32 bytes: the 256-bit vectors of sm_100.
WIDTH_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype("V16"),
    32: np.dtype("V32"),
}
WIDTH_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 32: 5}


class ByteStore:
    """``size`` bytes with one view per access width; ``views[w][i]`` is the aligned w-byte item i."""

    def __init__(self, size: int, fill: int = 0) -> None:
        padded = (size + 63) // 32 * 32
        self.bytes = np.full(padded, fill, np.uint8) if fill else np.zeros(padded, np.uint8)
        self.views = {width: self.bytes.view(dtype) for width, dtype in WIDTH_DTYPES.items()}
