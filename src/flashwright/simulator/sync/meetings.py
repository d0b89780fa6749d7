"""Where ways join: lanes that are there first wait for lanes of their warp that are still on the way.

The order in which groups run (see `control_flow`) makes runnable lanes come first. Lanes that wait on their way, for an
mbarrier for example, would be left behind without this. It is an arrangement of the schedule, not a rule of PTX: if
nobody else can run, or somebody spins, the waiting lanes go on alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..architecture import WARP_SIZE
from ..errors import ErrorKind
from ..scheduler import FAR

if TYPE_CHECKING:
    from ..wave import Wave


class Meetings:
    """Lanes that wait at a meeting point; ``runs_ahead`` marks threads of warps that have stopped to do so."""

    deadlock_kind: ErrorKind = "deadlock"

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        self.waiting: dict[int, np.ndarray] = {}
        self.runs_ahead = np.zeros(wave.threads, bool)

    def ready(self, pc: int, mask: np.ndarray) -> np.ndarray | None:
        """Those of the threads at ``pc``, and of those that waited there, that can go on; None: nobody."""
        flow = self._wave.program.flow
        if not flow.is_meeting_point(pc) or flow.ends_thread[pc]:
            return mask
        earlier = self.waiting.pop(pc, None)
        if earlier is not None:
            mask = mask | earlier
        absent = self._absent_of_split_warps(mask) & ~self.runs_ahead
        if not absent.any():
            return mask
        late = np.zeros_like(mask)
        for blocker in self._wave.blockers:
            for waits_at, waiting, _ in blocker.waiting_threads():
                if flow.is_past(pc, waits_at):
                    late |= waiting
        waits = mask & _whole_warps(late & absent)
        if not waits.any():
            return mask
        self.waiting[pc] = waits
        goes_on = mask & ~waits
        return goes_on if goes_on.any() else None

    def stops_at_meeting_points(self, mask: np.ndarray) -> bool:
        """Whether lanes of these threads' warps wait somewhere, and may be waited for where ways join."""
        late = self._absent_of_split_warps(mask) & ~self.runs_ahead
        if not late.any():
            return False
        for others in (*self._wave.scheduler.groups.values(), *self.waiting.values()):
            late &= ~others
        return bool(late.any())

    def next_place(self, place: int) -> int:
        """The first place in the program's order, from ``place`` on, where somebody waits."""
        order = self._wave.program.flow.order
        return min((order[pc] for pc in self.waiting if order[pc] >= place), default=FAR)

    def _absent_of_split_warps(self, mask: np.ndarray) -> np.ndarray:
        """Living threads that are not in the mask, of warps of which others are."""
        absent = self._wave.alive & ~mask
        return absent & _whole_warps(mask) if absent.any() else absent

    def run_ahead(self, mask: np.ndarray) -> None:
        """These threads run out of order."""
        self.runs_ahead = self.runs_ahead | _whole_warps(self._absent_of_split_warps(mask))

    def give_up(self) -> bool:
        """Let those that wait go on alone; whether there are any."""
        if not self.waiting:
            return False
        for mask in self.waiting.values():
            self.run_ahead(mask)
        self.on_exit()
        return True

    def on_exit(self) -> None:
        """Let the waiting ones look again: who they wait for may have exited."""
        for pc, mask in self.waiting.items():
            self._wave.scheduler.add(pc, mask)
        self.waiting.clear()

    def waiting_threads(self) -> Iterator[tuple[int, np.ndarray, str]]:
        for pc, mask in self.waiting.items():
            yield pc, mask, "other lanes of the warp are on their way here"


def _whole_warps(mask: np.ndarray) -> np.ndarray:
    """All threads of the warps of which one is in the mask."""
    return np.repeat(mask.reshape(-1, WARP_SIZE).any(axis=1), WARP_SIZE)
