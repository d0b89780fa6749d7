"""Warp-level convergence: instructions that several lanes of a warp must execute together.

``.sync`` instructions with a member mask (``shfl.sync``, ``bar.warp.sync``) wait for the lanes they name.
``.aligned`` instructions (``mma``, ``ldmatrix``, ``bar.sync``) require the whole warp: they wait for lanes that may
still come; a lane that has passed them by, to where the ways join, is an error. Lanes that have exited are not waited
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..architecture import WARP_SIZE
from ..errors import ErrorKind
from ..registry import RESCHEDULE, Operation
from ..scheduler import FAR

if TYPE_CHECKING:
    from ..wave import Wave

_LANE_BITS = (np.uint32(1) << np.arange(WARP_SIZE, dtype=np.uint32)).astype(np.uint32)


def _bits(mask: np.ndarray) -> np.ndarray:
    """For every thread, the lanes of its warp in the mask."""
    per_warp = np.where(_by_warp(mask), _LANE_BITS, np.uint32(0)).sum(axis=1, dtype=np.uint32)
    return np.repeat(per_warp, WARP_SIZE)


def _by_warp(mask: np.ndarray) -> np.ndarray:
    return mask.reshape(-1, WARP_SIZE)


class Convergence:
    """Lanes that wait, at a ``.sync`` instruction, for other lanes of their warp."""

    deadlock_kind: ErrorKind = "barrier"

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        self._waiting: dict[int, np.ndarray] = {}
        self.aligned: set[int] = set()  # program counters of .aligned instructions that somebody waits at

    def gather(self, members: np.ndarray | None, aligned: bool) -> bool:
        """Keep warps in the running group whose lanes are all here; block the others. False: none is left.

        ``members``: per thread the lanes it wants to meet; None: all lanes of its warp.
        """
        wave = self._wave
        pc = wave.pc
        present = wave.active_mask
        earlier = self._waiting.pop(pc, None)
        if earlier is not None:
            self.aligned.discard(pc)
            present = present | earlier
        missing = _bits(wave.alive) & ~_bits(present)
        if members is not None:
            missing = missing & members
        waits = present & (missing != 0)
        if not waits.any():
            if earlier is not None:
                wave.activate(present)
            return True
        if aligned:
            self.aligned.add(pc)
        # They will execute it when the others have come.
        wave.postpone(waits & wave.active_mask)
        self._waiting[pc] = waits
        complete = present & ~waits
        if not complete.any():
            return False
        wave.activate(complete)
        return True

    def next_place(self, place: int) -> int:
        """The first place in the program's order, from ``place`` on, that no lane may pass without a look."""
        flow = self._wave.program.flow
        points = [flow.meeting_point(pc) for pc in self.aligned]
        places = [flow.order[point] for point in points if point is not None]
        return min((found for found in places if found >= place), default=FAR)

    def refuse_passing(self, pc: int, mask: np.ndarray) -> None:
        """Threads are about to run on from ``pc``: a fault if lanes of their warps wait for them in vain."""
        wave = self._wave
        flow = wave.program.flow
        if flow.ends_thread[pc]:
            return
        for waits_at in self.aligned:
            if not flow.is_past(pc, waits_at):
                continue
            waits = self._waiting[waits_at] & ~wave.meetings.runs_ahead
            warps = np.flatnonzero(_by_warp(waits).any(axis=1) & _by_warp(mask).any(axis=1))
            if warps.size:
                thread, other = (int(warps[0]) * WARP_SIZE + int(_by_warp(m)[warps[0]].argmax()) for m in (waits, mask))
                elsewhere = wave.program.code[pc]
                wave.fault_thread(
                    "barrier",
                    f"executed by part of the warp only: lane {other % WARP_SIZE} has gone another way, to PTX line "
                    f"{elsewhere.ptx_line} `{elsewhere.text}`",
                    thread,
                    pc=waits_at,
                )

    def on_exit(self) -> None:
        """Fewer lanes are waited for now: let the waiting ones look again."""
        for pc, mask in self._waiting.items():
            self._wave.scheduler.add(pc, mask)
        self._waiting = {}
        self.aligned.clear()

    def waiting_threads(self) -> Iterator[tuple[int, np.ndarray, str]]:
        for pc, mask in self._waiting.items():
            yield pc, mask, "other lanes of the warp never arrive"


def warp_synchronous(
    execute: Callable[[Wave], Any],
    members: Callable[[Wave], np.ndarray] | None = None,
    aligned: bool = True,
    tensor_flops: int = 0,
) -> Operation:
    """An operation that runs ``execute`` once the lanes it needs have met."""

    def run(wave: Wave) -> int:
        pc = wave.pc
        # With every lane of the wave here there is nobody to wait for.
        if wave.mask is not None and not wave.convergence.gather(None if members is None else members(wave), aligned):
            return RESCHEDULE
        execute(wave)
        return pc + 1

    return Operation(run, is_control=True, tensor_flops=tensor_flops)
