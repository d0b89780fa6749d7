"""The sixteen barriers of a thread block: ``bar`` and ``barrier`` with sync, arrive and red.

Arrivals count threads. An aligned arrival of a warp counts 32, as on hardware, even if lanes of it have
exited. Without a thread count a barrier waits for all threads of the block that have not exited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..architecture import WARP_SIZE
from ..errors import ErrorKind
from ..registry import RESCHEDULE

if TYPE_CHECKING:
    from ..wave import Wave

BARRIERS_PER_BLOCK = 16
_ALL = 0  # expected count of a barrier without a thread count

# (votes of the participants of one block) → the reduced value
Reduction = Callable[[np.ndarray], int]


class _Barrier:
    """State of one barrier of one block, from its first arrival to its completion."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.arrived = 0
        self.waiting: list[np.ndarray] = []  # thread indices, per arrival
        self.resume: list[int] = []
        self.published: list[np.ndarray] = []  # clocks of all that arrived, also of those that do not wait
        self.completions: list[Callable[[np.ndarray, np.ndarray], None]] = []
        self.votes: list[np.ndarray] = []


class NamedBarriers:
    """All barriers of a wave that somebody has arrived at."""

    deadlock_kind: ErrorKind = "deadlock"

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        self._barriers: dict[tuple[int, int], _Barrier] = {}

    def sync(
        self,
        ids: np.ndarray,
        counts: np.ndarray | None,
        aligned: bool,
        waits: bool = True,
        votes: np.ndarray | None = None,
        finish: Callable[[np.ndarray, np.ndarray], None] | None = None,
    ) -> int:
        """Arrive with the running group; the next program counter, or RESCHEDULE while it waits.

        ``finish(threads, votes)`` is called for the waiting threads of a block when its barrier completes.
        """
        wave = self._wave
        if counts is None and votes is None and waits and not self._barriers and ids.min() == ids.max():
            self._check_id(int(ids.flat[0]), 0)
            if self._complete_whole_blocks():
                return wave.pc + 1
        for pc, mask in self._arrive_one_by_one(ids, counts, aligned, waits, votes, finish):
            wave.scheduler.add(pc, mask)
        return RESCHEDULE if waits else wave.pc + 1

    def _complete_whole_blocks(self) -> bool:
        """The common case: all living threads of each block have arrived together, so nobody needs to wait."""
        wave = self._wave
        if wave.mask is None:
            wave.counters.barriers += wave.blocks
        else:
            arrived = wave.mask.reshape(wave.blocks, -1)
            takes_part: np.ndarray = np.any(arrived, axis=1)
            if (arrived != wave.alive.reshape(wave.blocks, -1))[takes_part].any():
                return False
            wave.counters.barriers += int(np.count_nonzero(takes_part))
        if wave.hazards is not None:
            wave.hazards.clocks.join_blocks(wave.mask)
        return True

    def _arrive_one_by_one(
        self,
        ids: np.ndarray,
        counts: np.ndarray | None,
        aligned: bool,
        waits: bool,
        votes: np.ndarray | None,
        finish: Callable[[np.ndarray, np.ndarray], None] | None,
    ) -> list[tuple[int, np.ndarray]]:
        """Warp after warp, because a barrier may complete and start again between two warps of one step."""
        wave = self._wave
        mask = wave.active_mask
        ids = np.broadcast_to(ids, mask.shape)
        counts = None if counts is None else np.broadcast_to(counts, mask.shape)
        released: list[tuple[int, np.ndarray]] = []
        for warp in np.flatnonzero(mask.reshape(-1, WARP_SIZE).any(axis=1)):
            threads = warp * WARP_SIZE + np.flatnonzero(mask[warp * WARP_SIZE : (warp + 1) * WARP_SIZE])
            first = int(threads[0])
            barrier_id = int(ids[first])
            expected = _ALL if counts is None else int(counts[first])
            self._check_id(barrier_id, first)
            if expected % WARP_SIZE or (ids[threads] != barrier_id).any():
                wave.fault_thread(
                    "barrier",
                    f"thread count {expected} is not a multiple of {WARP_SIZE}, or lanes of "
                    "the warp name different barriers",
                    first,
                )
            block = int(wave.block_of_thread[first])
            key = (block, barrier_id)
            barrier = self._barriers.get(key)
            if barrier is None:
                barrier = self._barriers[key] = _Barrier(expected)
            elif barrier.expected != expected:
                wave.fault_thread(
                    "barrier",
                    f"barrier {barrier_id} waits for {barrier.expected or 'all'} threads, this warp says "
                    f"{expected or 'all'}",
                    first,
                )
            self._arrive(barrier, threads, aligned, waits, votes, finish)
            if self._is_complete(block, barrier):
                released += self._complete(key, barrier)
        return released

    def _arrive(
        self,
        barrier: _Barrier,
        threads: np.ndarray,
        aligned: bool,
        waits: bool,
        votes: np.ndarray | None,
        finish: Callable[[np.ndarray, np.ndarray], None] | None,
    ) -> None:
        wave = self._wave
        barrier.arrived += WARP_SIZE if aligned and barrier.expected != _ALL else threads.size
        if wave.hazards is not None:
            warp = int(threads[0]) // WARP_SIZE
            barrier.published.append(wave.hazards.clocks.publish(warp))
            wave.hazards.clocks.meet(warp)
        if waits:
            barrier.waiting.append(threads)
            barrier.resume.append(wave.pc + 1)
            if votes is not None and finish is not None:
                barrier.votes.append(votes[threads])
                barrier.completions.append(finish)

    def _is_complete(self, block: int, barrier: _Barrier) -> bool:
        if barrier.expected != _ALL:
            return barrier.arrived >= barrier.expected
        wave = self._wave
        return barrier.arrived >= int(np.count_nonzero(wave.alive & (wave.block_of_thread == block)))

    def _complete(self, key: tuple[int, int], barrier: _Barrier) -> list[tuple[int, np.ndarray]]:
        wave = self._wave
        del self._barriers[key]
        wave.counters.barriers += 1
        if wave.hazards is not None:
            receivers = sorted({int(threads[0]) // WARP_SIZE for threads in barrier.waiting})
            wave.hazards.clocks.join(barrier.published, receivers)
        if barrier.completions:
            votes = np.concatenate(barrier.votes)
            for threads, finish in zip(barrier.waiting, barrier.completions, strict=True):
                finish(threads, votes)
        released = []
        for threads, pc in zip(barrier.waiting, barrier.resume, strict=True):
            mask = np.zeros(wave.threads, bool)
            mask[threads] = True
            released.append((pc, mask))
        return released

    def _check_id(self, barrier_id: int, thread: int) -> None:
        if not 0 <= barrier_id < BARRIERS_PER_BLOCK:
            self._wave.fault_thread("barrier", f"there is no barrier {barrier_id}, only 0–15", thread)

    def on_exit(self) -> None:
        """A barrier without a count stops waiting for threads that have exited."""
        for key, barrier in list(self._barriers.items()):
            if barrier.expected == _ALL and self._is_complete(key[0], barrier):
                for pc, mask in self._complete(key, barrier):
                    self._wave.scheduler.add(pc, mask)

    def arrivals(self) -> dict[tuple[int, int], int]:
        """How many threads have arrived at each barrier that is not complete, by block and number."""
        return {key: barrier.arrived for key, barrier in self._barriers.items()}

    def waiting_threads(self) -> Iterator[tuple[int, np.ndarray, str]]:
        for (block, barrier_id), barrier in self._barriers.items():
            expected = barrier.expected or int(
                np.count_nonzero(self._wave.alive & (self._wave.block_of_thread == block))
            )
            for pc in sorted(set(barrier.resume)):
                mask = np.zeros(self._wave.threads, bool)
                for threads, resume in zip(barrier.waiting, barrier.resume, strict=True):
                    if resume == pc:
                        mask[threads] = True
                yield pc - 1, mask, f"barrier {barrier_id} has {barrier.arrived} of {expected} threads"
