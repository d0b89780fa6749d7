"""``barrier.cluster``: all threads of a cluster arrive, and those that wait go on when all others have arrived.

Within a block it orders memory accesses as a block barrier does. Between blocks it tells who has begun, and who has
accessed whose shared memory (`remote_accesses`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..architecture import WARP_SIZE
from ..errors import ErrorKind
from ..registry import RESCHEDULE

if TYPE_CHECKING:
    from ..wave import Wave


class ClusterBarriers:
    """The barrier of each cluster of a wave."""

    deadlock_kind: ErrorKind = "deadlock"

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        self._arrived = np.zeros(wave.threads, bool)  # in the phase that has not completed
        self._owes_wait = np.zeros(wave.threads, bool)
        self._parked: list[tuple[int, np.ndarray]] = []  # program counter after the wait, threads
        self._published: dict[int, list[np.ndarray]] = {}  # of a block, in the phase that has not completed
        self._handed_over: dict[int, np.ndarray] = {}  # to a block, by the last phase

    def arrive(self, orders: bool) -> None:
        """The running group arrives; ``orders``: its accesses before are seen by those that wait."""
        wave = self._wave
        active = wave.active_mask
        twice = active & self._owes_wait
        if twice.any():
            thread = int(np.flatnonzero(twice)[0])
            wave.fault_thread("barrier", "barrier.cluster.arrive twice without barrier.cluster.wait", thread)
        self._arrived = self._arrived | active
        self._owes_wait = self._owes_wait | active
        if wave.hazards is not None and orders:
            for warp in np.flatnonzero(active.reshape(-1, WARP_SIZE).any(axis=1)):
                block = int(wave.block_of_thread[warp * WARP_SIZE])
                self._published.setdefault(block, []).append(wave.hazards.clocks.publish(int(warp)))
                wave.hazards.clocks.meet(int(warp))
        self._complete_those_done()

    def wait(self) -> int:
        """The running group waits for its clusters; the next program counter, or RESCHEDULE."""
        wave = self._wave
        active, pc = wave.active_mask, wave.pc
        alone = active & ~self._owes_wait
        if alone.any():
            thread = int(np.flatnonzero(alone)[0])
            wave.fault_thread("barrier", "barrier.cluster.wait without barrier.cluster.arrive before it", thread)
        waiting = active & self._arrived
        ready = active & ~waiting
        if waiting.any():
            self._parked.append((pc + 1, waiting))
        if not ready.any():
            return RESCHEDULE
        if waiting.any():
            wave.activate(ready)
        self._pass(ready)
        return pc + 1

    def _pass(self, threads: np.ndarray) -> None:
        """These threads have waited."""
        wave = self._wave
        self._owes_wait = self._owes_wait & ~threads
        if wave.hazards is None:
            return
        for warp in np.flatnonzero(threads.reshape(-1, WARP_SIZE).any(axis=1)):
            clock = self._handed_over.get(int(wave.block_of_thread[warp * WARP_SIZE]))
            if clock is not None:
                wave.hazards.clocks.join([clock], [int(warp)])

    def _complete_those_done(self) -> None:
        wave = self._wave
        of_thread = wave.clusters.of_thread
        for cluster in np.unique(of_thread[self._arrived]):
            members = of_thread == cluster
            if (members & wave.alive & ~self._arrived).any():
                continue
            self._arrived = self._arrived & ~members
            wave.counters.barriers += 1
            if wave.remote_accesses is not None:
                wave.remote_accesses.meet(np.unique(wave.block_of_thread[members]))
            if wave.hazards is not None:
                for block in np.unique(wave.block_of_thread[members]):
                    published = self._published.pop(int(block), [])
                    if published:
                        self._handed_over[int(block)] = wave.hazards.clocks.latest(published).copy()
            remaining = []
            for pc, mask in self._parked:
                released = mask & members
                if released.any():
                    self._pass(released)
                    wave.scheduler.add(pc, released)
                if (mask & ~members).any():
                    remaining.append((pc, mask & ~members))
            self._parked = remaining

    def on_exit(self) -> None:
        """Threads that have exited are not waited for."""
        if self._arrived.any():
            self._complete_those_done()

    def waiting_threads(self) -> Iterator[tuple[int, np.ndarray, str]]:
        wave = self._wave
        for pc, mask in self._parked:
            cluster = wave.clusters.of_thread == wave.clusters.of_thread[int(np.flatnonzero(mask)[0])]
            arrived, all_ = (int(np.count_nonzero(cluster & part)) for part in (self._arrived, wave.alive))
            yield pc - 1, mask, f"the barrier of the cluster has {arrived} of {all_} threads"
