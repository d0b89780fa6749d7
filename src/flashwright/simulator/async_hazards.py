"""Hazards of what runs on without the warp that started it: bulk copies, and wgmma's reads of shared memory.

These go through the *asynchronous proxy*. What ordinary instructions wrote becomes visible to it by a proxy fence, of
the writing warp or of one that is ordered after it, on the way to the reader. What it writes becomes visible by the
mbarrier's phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import ErrorKind, OtherParty
from .hazards import PARTY_MASK, PARTY_SHIFT, THREAD_MASK, TICK, HazardTracker, one_per_place

if TYPE_CHECKING:
    from .wave import Wave

CHUNK_BYTES = 16  # asynchronous accesses are made of aligned chunks


@dataclass(frozen=True)
class AsyncAccess:
    """Chunks of shared memory that asynchronous parties touch.

    ``clocks[observer[i]]`` is what the issuer of chunk i has seen, ``threads[i]`` a thread to name in a report.
    """

    what: str
    flat: np.ndarray  # byte positions in the wave's shared memory
    clocks: np.ndarray
    observer: np.ndarray
    threads: np.ndarray


class AsyncHazards:
    """Checks accesses of asynchronous parties, and keeps their records beside those of threads."""

    def __init__(self, wave: Wave, tracker: HazardTracker) -> None:
        self._wave = wave
        self._tracker = tracker
        self._parties = tracker.parties

    def read(self, access: AsyncAccess, columns: np.ndarray, groups: np.ndarray) -> None:
        """Check a read, and record it (per chunk) for a party's column and the commit group it belongs to."""
        granules = self.check_read(access)
        stamps = (groups.astype(np.int64) + 1) * TICK
        self._tracker.record_async_reads(granules, columns.astype(np.int64)[:, None], stamps[:, None])

    def check_read(self, access: AsyncAccess) -> np.ndarray:
        """Check a read against the writes before it; its granules."""
        granules = self._tracker.granules_of_chunks(access.flat, CHUNK_BYTES)
        written = self._tracker.writes[granules]
        if not written.all():
            chunks = np.unique(np.nonzero(written == 0)[0])
            detail = f"{access.what} of shared memory that nobody wrote"
            self._report(access, int(chunks[0]), "uninitialised-shared", detail, None, chunks.size)
        self._check_writers(access, written)
        return granules

    def write_elsewhere(self, flat: np.ndarray, width: int, column: int, phase: int) -> None:
        """A write to another block of the cluster: recorded for the mbarrier's phase, not checked for races."""
        granules = self._tracker.granules_of_chunks(flat, width)
        self._tracker.record_async_write(granules, column, np.int64(phase + 1) * TICK)

    def write(self, access: AsyncAccess, column: int, phase: int) -> None:
        """Check a bulk copy's write, and record it for the mbarrier's phase that it will complete."""
        granules = self._tracker.granules_of_chunks(access.flat, CHUNK_BYTES)
        self._check_writers(access, self._tracker.writes[granules])
        self._check_readers(access, granules)
        self._tracker.record_async_write(granules, column, np.int64(phase + 1) * TICK)

    def _check_writers(self, access: AsyncAccess, written: np.ndarray) -> None:
        party = (written >> PARTY_SHIFT) & PARTY_MASK
        is_warp = party < self._parties.warps
        # What a warp wrote must lie before a fence; a fence that was seen orders the write as well.
        column = np.where(is_warp, party + self._parties.fences, party)
        unseen = written >= access.clocks[access.observer[:, None], column]
        if not unseen.any():
            return
        chunks, parts = np.nonzero(unseen)
        records = written[chunks, parts]
        # Ordered after the writer, though no fence lies between.
        lacks_fence = records < access.clocks[access.observer[chunks], party[chunks, parts]]
        for place, count in one_per_place(records, chunks, lacks_fence):
            chunk, record = int(chunks[place]), int(records[place])
            if lacks_fence[place]:
                kind: ErrorKind = "proxy-fence"
                detail = f"{access.what} after a write by ordinary instructions, without fence.proxy.async in between"
            else:
                kind, detail = self._tracker.classify_write(record, access.what)
            self._report(access, chunk, kind, detail, self._tracker.other_party(record, "write"), count)

    def _check_readers(self, access: AsyncAccess, granules: np.ndarray) -> None:
        readers = self._tracker.reads_of(granules.ravel())
        unseen = readers >= access.clocks[access.observer[0], : self._parties.readers]
        if unseen.any():
            # Its own thread's earlier loads have ended.
            unseen &= (readers & THREAD_MASK) != self._tracker.thread_id[access.threads[0]]
        if unseen.any():
            items, columns = np.nonzero(unseen)
            records = readers[items, columns]
            for place, count in one_per_place(records, items // granules.shape[1]):
                record = int(records[place])
                detail = self._tracker.classify_read(record, access.what)
                chunk = int(items[place]) // granules.shape[1]
                self._report(access, chunk, "race", detail, self._tracker.other_party(record, "read"), count)

    def _report(
        self, access: AsyncAccess, chunk: int, kind: ErrorKind, detail: str, other: OtherParty | None, count: int
    ) -> None:
        thread = int(access.threads[chunk])
        address = int(access.flat[chunk]) - int(self._wave.shared.thread_base[thread])
        self._wave.hazard(kind, detail, thread, address, other, count=count)
