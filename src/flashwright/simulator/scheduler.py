"""Which threads run next.

Threads that stand at the same instruction are one group. The group with the lowest program counter runs
first, so that the two sides of a branch meet again where their paths join: compilers place the join after
both sides.
"""

from __future__ import annotations

import numpy as np

FAR = 1 << 60


class Scheduler:
    """Runnable groups: program counter → mask of threads."""

    def __init__(self) -> None:
        self._groups: dict[int, np.ndarray] = {}

    def add(self, pc: int, mask: np.ndarray) -> None:
        waiting = self._groups.get(pc)
        self._groups[pc] = mask if waiting is None else waiting | mask

    def lowest_pc(self, start: int = 0) -> int:
        """The lowest program counter of a group at or after ``start``."""
        return min((pc for pc in self._groups if pc >= start), default=FAR)

    def take_lowest(self) -> tuple[int, np.ndarray] | None:
        if not self._groups:
            return None
        pc = min(self._groups)
        return pc, self._groups.pop(pc)

    def take_after(self, pc: int) -> tuple[int, np.ndarray] | None:
        """The next group in program order after ``pc``, wrapping around: used when one group spins."""
        later = [candidate for candidate in self._groups if candidate > pc]
        if not later:
            return self.take_lowest()
        chosen = min(later)
        return chosen, self._groups.pop(chosen)

    def pc_of(self, thread: int) -> int | None:
        """Where a runnable thread stands; None if it is not among the runnable ones."""
        for pc, mask in self._groups.items():
            if mask[thread]:
                return pc
        return None
