"""``cp.async``: copies from global to shared memory that complete when their issuer waits for them.

Data is read from global memory when the copy is issued and written to shared memory only when the issuing
thread waits for its group (or at the end of the kernel): the latest moment hardware may choose, so a missing
wait shows in the results as well as in the hazard check. ``cp.async.mbarrier.arrive`` lets an mbarrier hear of
them instead: copies and arrival come when no thread can run without them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..architecture import WARP_SIZE
from ..memory.bytes import WIDTH_SHIFT
from .mbarriers import Mbarrier

if TYPE_CHECKING:
    from ..wave import Wave


@dataclass
class Copy:
    """One ``cp.async`` of several threads. ``group`` is each thread's commit group, -1 before the commit."""

    threads: np.ndarray
    flat: np.ndarray  # byte positions in the wave's shared memory
    data: np.ndarray
    width: int
    pc: int
    group: np.ndarray
    number: int  # in the order of issue


@dataclass(frozen=True)
class Arrival:
    """Arrivals of several threads, at one mbarrier each, as soon as their copies issued before have come."""

    threads: np.ndarray
    barriers: list[Mbarrier]
    number: int
    pc: int
    stamps: np.ndarray | None  # of the threads' warps when they issued it: their copies count as written then
    clocks: list[np.ndarray]


class AsyncCopies:
    """Copies in flight of a wave, and the groups its threads have put them in."""

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        self._uncommitted: list[Copy] = []
        self._committed: list[Copy] = []
        self._groups = np.zeros(wave.threads, np.int64)  # commit groups each thread has made
        self._first_pending = np.zeros(wave.threads, np.int64)  # oldest group not yet waited for
        self._empty = np.zeros(wave.threads, np.int64)  # pending groups without a copy
        self._arrivals: list[Arrival] = []
        self._issued = 0

    def issue(self, flat: np.ndarray, data: np.ndarray, width: int) -> None:
        wave = self._wave
        threads = np.arange(wave.threads) if wave.lanes is None else wave.lanes
        self._issued += 1
        self._uncommitted.append(Copy(threads, flat, data, width, wave.pc, np.full(threads.size, -1), self._issued))

    def commit(self) -> None:
        """Close a group in every active thread."""
        wave = self._wave
        mask = wave.mask
        used = np.zeros(wave.threads, bool)
        remaining = []
        for copy in self._uncommitted:
            for part, is_mine in _split(copy, mask):
                if not is_mine:
                    remaining.append(part)
                    continue
                part.group = self._groups[part.threads]
                used[part.threads] = True
                self._committed.append(part)
        self._uncommitted = remaining
        active = wave.active_mask
        self._groups = self._groups + active
        self._empty = self._empty + (active & ~used)
        in_flight = self._groups - self._first_pending - self._empty
        wave.counters.max_async_groups_in_flight = max(
            wave.counters.max_async_groups_in_flight, int(in_flight[active].max())
        )

    def wait_group(self, newest_allowed: int) -> None:
        """Complete, for the active threads, all groups but the newest ``newest_allowed``."""
        wave = self._wave
        active = wave.active_mask
        done_before = np.where(active, self._groups - newest_allowed, np.int64(0))
        remaining = []
        for copy in self._committed:
            finished = copy.group < done_before[copy.threads]
            if finished.all():
                self._deliver(copy)
            elif not finished.any():
                remaining.append(copy)
            else:
                self._deliver(_select(copy, finished))
                remaining.append(_select(copy, ~finished))
        self._committed = remaining
        self._first_pending = np.maximum(self._first_pending, done_before)
        if self._empty.any():
            self._empty = np.minimum(self._empty, self._groups - self._first_pending)

    def wait_all(self) -> None:
        """Complete every copy of the active threads, committed or not."""
        self.commit()
        self.wait_group(0)

    def arrive_later(self, threads: np.ndarray, barriers: list[Mbarrier]) -> None:
        """Each of these threads arrives at its mbarrier when the copies it has issued so far have come."""
        wave = self._wave
        self._issued += 1
        stamps, clocks = None, []
        if wave.hazards is not None:
            warps = threads // WARP_SIZE
            stamps = wave.hazards.clocks.own()[warps]
            published = {warp: wave.hazards.clocks.publish(warp) for warp in map(int, np.unique(warps))}
            clocks = [published[int(warp)] for warp in warps]
        self._arrivals.append(Arrival(threads, barriers, self._issued, wave.pc, stamps, clocks))

    def deliver_arrivals(self) -> bool:
        """Copies that an mbarrier is to hear of have come. False: there were none."""
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            self._committed = self._deliver_before(arrival, self._committed)
            self._uncommitted = self._deliver_before(arrival, self._uncommitted)
            for position, (thread, barrier) in enumerate(zip(arrival.threads, arrival.barriers, strict=True)):
                clock = arrival.clocks[position] if arrival.clocks else None
                self._wave.mbarriers.arrive_asynchronously(barrier, int(thread), clock, arrival.pc)
        return bool(arrivals)

    def _deliver_before(self, arrival: Arrival, copies: list[Copy]) -> list[Copy]:
        """Deliver those that the arrival is about; the rest."""
        stamps = np.zeros(self._wave.threads, np.int64)
        mask = np.zeros(self._wave.threads, bool)
        mask[arrival.threads] = True
        if arrival.stamps is not None:
            stamps[arrival.threads] = arrival.stamps
        remaining = []
        for copy in copies:
            for part, is_due in _split(copy, mask) if copy.number < arrival.number else [(copy, False)]:
                if is_due:
                    self._deliver(part, stamps[part.threads])
                else:
                    remaining.append(part)
        return remaining

    def deliver_all(self) -> None:
        """The kernel has ended: whatever was in flight arrives."""
        for copy in [*self._committed, *self._uncommitted]:
            self._store(copy)

    def _deliver(self, copy: Copy, stamps: np.ndarray | None = None) -> None:
        self._store(copy)
        if self._wave.hazards is not None:
            self._wave.hazards.arrived(copy.threads, copy.flat, copy.width, copy.pc, stamps)

    def _store(self, copy: Copy) -> None:
        self._wave.shared.store.views[copy.width][copy.flat >> WIDTH_SHIFT[copy.width]] = copy.data


def _split(copy: Copy, mask: np.ndarray | None) -> list[tuple[Copy, bool]]:
    """The parts of a copy whose threads are in the mask, and not."""
    if mask is None:
        return [(copy, True)]
    mine = mask[copy.threads]
    if mine.all():
        return [(copy, True)]
    if not mine.any():
        return [(copy, False)]
    return [(_select(copy, mine), True), (_select(copy, ~mine), False)]


def _select(copy: Copy, keep: np.ndarray) -> Copy:
    return replace(copy, threads=copy.threads[keep], flat=copy.flat[keep], data=copy.data[keep], group=copy.group[keep])
