"""Generic addresses: each thread's address says by its window which space it means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .windows import SPACE_OF_WINDOW, WINDOW_BASE, WINDOW_BITS

if TYPE_CHECKING:
    from ..wave import Wave


def split_by_space(wave: Wave, addresses: np.ndarray) -> Iterator[tuple[str, np.ndarray | slice, np.ndarray]]:
    """(space, positions among the active threads, addresses in that space) for each space in use."""
    windows = addresses >> WINDOW_BITS
    first = int(windows[0])
    if (windows == first).all():
        space = SPACE_OF_WINDOW.get(first, "global")
        yield space, slice(None), addresses - WINDOW_BASE[space]
        return
    for window in np.unique(windows):
        positions = np.flatnonzero(windows == window)
        space = SPACE_OF_WINDOW.get(int(window), "global")
        yield space, positions, addresses[positions] - WINDOW_BASE[space]
