"""Shared memory of a thread block that others of its cluster access: it has begun before, and does not end before.

Order between the blocks of a cluster is kept per block, coarsely: what one thread of a block does or sees counts for
the block. Each block has a time, which advances when it tells others something: at a barrier of the cluster, or by an
arrival at an mbarrier of another block. ``seen[b, a]`` is how far b knows a: accesses of a at smaller times have ended.

A copy in flight belongs to the mbarrier that hears of it. Once a block has waited for that phase, the copy counts as an
access by that block, at its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..wave import Wave
    from .mbarriers import Mbarrier


@dataclass(frozen=True)
class _Access:
    """By a thread, at a time of its block."""

    time: int
    thread: int
    pc: int
    what: str


@dataclass(frozen=True)
class _Copy:
    """In flight, from or to the shared memory of ``owner``."""

    owner: int
    access: _Access
    barrier: Mbarrier
    phase: int


class RemoteAccesses:
    """Of all clusters of a wave. Blocks are numbered in the wave."""

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        self._time = np.ones(wave.blocks, np.int64)
        self._seen = np.zeros((wave.blocks, wave.blocks), np.int64)
        self._last: dict[tuple[int, int], _Access] = {}  # by owner of the memory and accessing block
        self._copies: list[_Copy] = []
        self._handed_over: dict[Mbarrier, np.ndarray] = {}  # by arrivals of other blocks, to those that wait

    def access(self, thread: int, owner: int, what: str) -> None:
        """A thread accesses the memory of another block."""
        block = self._block_of(thread)
        self._check_begun(thread, block, owner, what)
        self._last[owner, block] = _Access(int(self._time[block]), thread, self._wave.pc, what)

    def copy(self, thread: int, owner: int, barrier: Mbarrier) -> None:
        """A copy between two blocks is started, of which this block's memory is the source or the target."""
        self._check_begun(thread, self._block_of(thread), barrier.block, "bulk copy")
        access = _Access(0, thread, self._wave.pc, "bulk copy")
        self._copies.append(_Copy(owner, access, barrier, barrier.phase))

    def arrive(self, thread: int, barrier: Mbarrier) -> None:
        """A thread arrives at an mbarrier of another block: it tells that one what its own has done and seen."""
        self.access(thread, barrier.block, "arrival at an mbarrier")
        before = self._handed_over.get(barrier)
        clock = self._publish(self._block_of(thread))
        self._handed_over[barrier] = clock if before is None else np.maximum(before, clock)

    def observe(self, barrier: Mbarrier) -> None:
        """The barrier's block has waited for a phase."""
        block = barrier.block
        clock = self._handed_over.get(barrier)
        if clock is not None:
            np.maximum(self._seen[block], clock, out=self._seen[block])
        if any(copy.barrier is barrier and copy.phase < barrier.phase for copy in self._copies):
            self._end_copies(barrier)

    def _end_copies(self, barrier: Mbarrier) -> None:
        remaining = []
        for copy in self._copies:
            if copy.barrier is not barrier or copy.phase >= barrier.phase:
                remaining.append(copy)
            elif copy.owner != barrier.block:
                access = copy.access
                ended = _Access(int(self._time[barrier.block]), access.thread, access.pc, access.what)
                self._last[copy.owner, barrier.block] = ended
        self._copies = remaining

    def meet(self, blocks: np.ndarray) -> None:
        """A barrier among all threads of these blocks has completed."""
        clocks = np.array([self._publish(int(block)) for block in blocks])
        self._seen[blocks] = clocks.max(axis=0)

    def end(self, block: int) -> None:
        """The last thread of a block ends: a hazard if somebody may still access its memory."""
        unordered = [
            access
            for (owner, other), access in self._last.items()
            if owner == block and self._seen[block, other] <= access.time
        ]
        in_flight = [copy.access for copy in self._copies if copy.owner == block]
        for access in (*in_flight, *unordered):
            detail = (
                f"{access.what} in the shared memory of a thread block of the cluster that may have ended: no "
                "barrier.cluster or mbarrier tells that block of it"
            )
            self._wave.hazard("race", detail, access.thread, pc=access.pc)

    def _check_begun(self, thread: int, block: int, owner: int, what: str) -> None:
        if block != owner and not self._seen[block, owner]:
            detail = (
                f"{what} in the shared memory of a thread block of the cluster that may not have begun: no "
                "barrier.cluster or mbarrier tells of it"
            )
            self._wave.hazard("race", detail, thread)

    def _publish(self, block: int) -> np.ndarray:
        """All that a block has done and seen so far."""
        self._time[block] += 1
        self._seen[block, block] = self._time[block]
        return self._seen[block].copy()

    def _block_of(self, thread: int) -> int:
        return int(self._wave.block_of_thread[thread])
