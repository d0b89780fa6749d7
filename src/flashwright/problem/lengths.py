"""Lengths of sequences, and the ranges of them that one config serves."""

from __future__ import annotations

MAX_LENGTH = 2**30
"""Rows of a sequence: positions and window offsets are 32-bit integers in the kernel."""

SHORTEST, SHORT, MEDIUM, LONG, LONGEST = LENGTH_BUCKETS = ("1-16", "17-64", "65-1024", "1025-4096", "4097-")
"""Ranges of query rows, and of keys, that one config serves. Up to 64 rows, a block of 128 would be half empty; up to
16 rows fill one warp."""


def length_bucket(length: int) -> str:
    if length <= 16:
        return SHORTEST
    if length <= 64:
        return SHORT
    if length <= 1024:
        return MEDIUM
    return LONG if length <= 4096 else LONGEST


def bucket_bounds(length: int) -> tuple[int, int]:
    """The least and the greatest length in a length's bucket."""
    least, _, most = length_bucket(length).partition("-")
    return int(least), int(most or MAX_LENGTH)


PACKED_ROWS = (16, 32, 64, 128)
"""What tiles of packed rows hold: one config serves those that fill the same tile."""


def packed_rows_bucket(rows: int) -> str:
    """Of rows of all heads that share a head of keys, in the place of a bucket of query rows: `p1-16`."""
    first = 1
    for most in PACKED_ROWS:
        if rows <= most:
            return f"p{first}-{most}"
        first = most + 1
    return f"p{first}-"
