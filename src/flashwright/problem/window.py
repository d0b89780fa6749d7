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

    def keys_of(self, row: int, q_length: int, kv_length: int) -> tuple[int, int]:
        """The first and the last key that a row attends to; of none, the last is before the first."""
        position = row + (kv_length - q_length if self.bottom_right else 0)
        first = 0 if self.left is None else max(0, position - self.left)
        last = kv_length - 1 if self.right is None else min(position + self.right, kv_length - 1)
        return first, last


FULL = Window()
