"""Warpgroups: four consecutive warps of a block that execute an instruction together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..architecture import WARP_SIZE
from ..errors import ErrorKind
from ..parties import WARPS_PER_WARPGROUP
from ..registry import RESCHEDULE, Operation

if TYPE_CHECKING:
    from ..wave import Wave

WARPGROUP_THREADS = WARPS_PER_WARPGROUP * WARP_SIZE


class Warpgroups:
    """Warps that wait, at a warpgroup-level instruction, for the others of their warpgroup."""

    deadlock_kind: ErrorKind = "barrier"

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        per_block = -(-wave.warps_per_block // WARPS_PER_WARPGROUP)
        self.count = wave.blocks * per_block
        self.of_thread = wave.block_of_thread * per_block + wave.warp_in_block // WARPS_PER_WARPGROUP
        self._waiting: dict[int, np.ndarray] = {}

    def gather(self) -> bool:
        """Keep warpgroups in the running group that are here with all threads; block the others. False: none is."""
        wave = self._wave
        pc = wave.pc
        arrived = wave.active_mask
        earlier = self._waiting.pop(pc, None)
        present = arrived if earlier is None else arrived | earlier
        here = np.bincount(self.of_thread[present], minlength=self.count)
        if ((here == 0) | (here == WARPGROUP_THREADS)).all():
            if earlier is not None:
                wave.catch_up(pc, earlier)
                wave.activate(present)
            return True
        alive = np.bincount(self.of_thread[wave.alive], minlength=self.count)
        waits = present & (here[self.of_thread] < WARPGROUP_THREADS)
        hopeless = waits & (alive[self.of_thread] < WARPGROUP_THREADS)
        if hopeless.any():
            thread = int(np.flatnonzero(hopeless)[0])
            wave.fault_thread(
                "barrier",
                f"needs a warpgroup: all {WARPGROUP_THREADS} threads of four warps from a multiple of four on; "
                f"{alive[self.of_thread[thread]]} exist or have not exited",
                thread,
            )
        wave.postpone(waits & arrived)
        self._waiting[pc] = waits
        complete = present & ~waits
        if not complete.any():
            return False
        if earlier is not None:
            wave.catch_up(pc, complete & earlier)
        wave.activate(complete)
        return True

    def active(self) -> np.ndarray:
        """Numbers of the warpgroups in the running group, which holds whole ones."""
        wave = self._wave
        threads = self.of_thread if wave.lanes is None else self.of_thread[wave.lanes]
        return threads[::WARPGROUP_THREADS]

    def on_exit(self) -> None:
        """Let the waiting ones look again: what they wait for may have gone."""
        for pc, mask in self._waiting.items():
            self._wave.scheduler.add(pc, mask)
        self._waiting = {}

    def waiting_threads(self) -> Iterator[tuple[int, np.ndarray, str]]:
        for pc, mask in self._waiting.items():
            yield pc, mask, "other warps of the warpgroup never arrive"


def warpgroup_synchronous(execute: Callable[[Wave], Any], tensor_flops: int = 0) -> Operation:
    """An operation that runs ``execute`` once all four warps of each warpgroup have met."""

    def run(wave: Wave) -> int:
        pc = wave.pc
        if not wave.warpgroups.gather():
            return RESCHEDULE
        execute(wave)
        return pc + 1

    return Operation(run, is_control=True, tensor_flops=tensor_flops)
