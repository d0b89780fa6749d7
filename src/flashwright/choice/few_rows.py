"""Which calls a decode kernel computes: few rows, of all heads that share keys, on many keys."""

from __future__ import annotations

from flashwright.problem.window import Window

MOST_PACKED_ROWS = 128
"""Of all heads that share a head of keys: above, the forward's larger tiles are faster."""
FEWEST_KEYS = 256


def decodes(window: Window, batch: int, heads: int, kv_heads: int, rows: int, keys: int) -> bool:
    """Whether decoding is faster than the forward, by what was measured on an H200."""
    attended = attended_keys(rows, keys, window)
    packed_rows = rows * (heads // kv_heads)
    return packed_rows <= MOST_PACKED_ROWS and attended >= FEWEST_KEYS


def attended_keys(rows: int, keys: int, window: Window) -> int:
    """How many keys any of the rows attends to."""
    first, _ = window.keys_of(0, rows, keys)
    _, last = window.keys_of(rows - 1, rows, keys)
    return max(0, last + 1 - first)
