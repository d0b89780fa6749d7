"""Which calls a decode kernel computes: few rows, of all heads that share keys, on many keys."""

from __future__ import annotations

from flashwright.problem.window import Window

TILE_ROWS = 16
"""Packed rows that cost a decode kernel no more than one: the least that its products have."""
MOST_PACKED_ROWS = 128
"""Of all heads that share a head of keys: above, the forward's larger tiles are faster."""
MANY_KEYS = 2048
"""That several tiles of packed rows have to share, for decoding to be faster than the forward."""


def decodes(window: Window, batch: int, heads: int, kv_heads: int, rows: int, keys: int) -> bool:
    """Whether decoding is to be chosen before the forward.

    A generation's steps stay with one kernel, whatever the number of keys, so that none of them compiles: a single row,
    or a few behind a cache. More rows are decoded where that was faster on an H200, as far as it was timed: up to 128
    packed rows on 4,096 and 32,768 keys.
    """
    packed_rows = rows * (heads // kv_heads)
    if rows == 1 or (packed_rows <= TILE_ROWS and keys > rows):
        return packed_rows <= MOST_PACKED_ROWS and (window.bottom_right or window.right is None)
    return packed_rows <= MOST_PACKED_ROWS and keys >= MANY_KEYS <= attended_keys(rows, keys, window)


def attended_keys(rows: int, keys: int, window: Window) -> int:
    """How many keys any of the rows attends to."""
    first, _ = window.keys_of(0, rows, keys)
    _, last = window.keys_of(rows - 1, rows, keys)
    return max(0, last + 1 - first)
