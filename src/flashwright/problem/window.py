"""Which keys a query row attends to."""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """The keys that a query row attends to: row i to [i + shift - left, i + shift + right]; None: no limit.

    The shift is `kv_length - q_length` if the window is aligned to the bottom right (the last row to the last key),
    and 0 if to the top left (the first row to the first key).
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = True


FULL = Window()
