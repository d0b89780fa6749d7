"""Which threads run next.

Threads that stand at the same instruction are one group. The group that comes first in the program's order (see
`control_flow`) runs first, so that lanes that went different ways meet where their ways join.
"""

from __future__ import annotations

import numpy as np

FAR = 1 << 60


class Scheduler:
    """Runnable groups: program counter → mask of threads. ``order[pc]``: the place of an instruction in the order."""

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self.groups: dict[int, np.ndarray] = {}

    def add(self, pc: int, mask: np.ndarray) -> None:
        waiting = self.groups.get(pc)
        self.groups[pc] = mask if waiting is None else waiting | mask

    def first_place(self, start: int = 0) -> int:
        """The first place in the order, from ``start`` on, that a group stands at."""
        order = self._order
        return min((order[pc] for pc in self.groups if order[pc] >= start), default=FAR)

    def take_first(self) -> tuple[int, np.ndarray] | None:
        if not self.groups:
            return None
        pc = min(self.groups, key=self._order.__getitem__)
        return pc, self.groups.pop(pc)

    def take_after(self, pc: int) -> tuple[int, np.ndarray] | None:
        """The next group in the order after ``pc``, wrapping around: used when one group spins."""
        order = self._order
        later = [candidate for candidate in self.groups if order[candidate] > order[pc]]
        if not later:
            return self.take_first()
        chosen = min(later, key=order.__getitem__)
        return chosen, self.groups.pop(chosen)
