"""Bulk copies between global and shared memory, which threads start and do not perform.

Copies to shared memory read their source when they are issued and arrive when no thread can run any more: the latest
moment hardware may choose. Copies to global memory read shared memory when the issuing thread waits until their group
has read (`.read`), and write when it waits until their group is complete, or at the end. So a missing wait shows in the
results, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..architecture import WARP_SIZE
from ..hazards import TICK
from .mbarriers import Mbarrier

if TYPE_CHECKING:
    from ..global_hazards import BulkWrite
    from ..wave import Wave


@dataclass(frozen=True)
class BulkLoad:
    """A copy to shared memory: chunks of ``width`` bytes, and the mbarrier that hears of its bytes."""

    chunks: np.ndarray  # indices in the wave's shared memory
    data: np.ndarray
    barrier: Mbarrier
    bytes: int
    thread: int
    pc: int
    width: int = 16
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None  # (old, new) → what is written


@dataclass(eq=False)
class BulkStore:
    """A copy from shared memory. ``group`` is the thread's commit group, -1 before the commit."""

    read: Callable[[], np.ndarray]
    write: Callable[[np.ndarray], None]
    thread: int
    pc: int
    record: BulkWrite | None = None  # for the hazard check
    group: int = -1
    stamp: int = 0  # commit groups its warp had made before


class BulkCopies:
    """Copies of a wave that are in flight."""

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        self._loads: list[BulkLoad] = []
        self._stores: list[BulkStore] = []
        self._read: list[tuple[BulkStore, np.ndarray]] = []  # stores that have read shared memory, and what
        self._groups: dict[int, int] = {}  # commit groups of each thread
        self._warp_groups: dict[int, int] = {}  # and of each warp: stamps for the hazard check

    # To shared memory --------------------------------------------------------------------------------

    def issue_load(self, load: BulkLoad) -> None:
        self._loads.append(load)

    def deliver(self) -> bool:
        """Everything on its way to shared memory arrives, if somebody can hear of it. False: nothing was."""
        arrived = self._wave.async_copies.deliver_arrivals()
        loads, self._loads = self._loads, []
        for load in loads:
            view = self._wave.shared.store.views[load.width]
            view[load.chunks] = load.data if load.combine is None else load.combine(view[load.chunks], load.data)
            self._wave.mbarriers.complete_bytes(load.barrier, load.bytes)
        return bool(loads) or arrived

    # To global memory --------------------------------------------------------------------------------

    def store_stamp(self, thread: int) -> int:
        """The commit group of its warp that a store issued now will belong to."""
        return self._warp_groups.get(thread // WARP_SIZE, 0)

    def issue_store(self, store: BulkStore) -> None:
        self._stores.append(store)

    def commit(self) -> None:
        """Close a group in every active thread."""
        for thread in self._active():
            group = self._groups.get(thread, 0)
            self._groups[thread] = group + 1
            warp = thread // WARP_SIZE
            stamp = self._warp_groups.get(warp, 0)
            self._warp_groups[warp] = stamp + 1
            for store in self._stores:
                if store.thread == thread and store.group < 0:
                    store.group, store.stamp = group, stamp

    def wait_group(self, newest_allowed: int, until_read: bool) -> None:
        """For the active threads, all groups but the newest ``newest_allowed`` have read, or are complete."""
        active = self._active()
        limit = {thread: self._groups.get(thread, 0) - newest_allowed for thread in active}
        self._have_read([store for store in self._stores if 0 <= store.group < limit.get(store.thread, 0)])
        if not until_read:
            written = [(store, data) for store, data in self._read if store.group < limit.get(store.thread, 0)]
            self._read = [item for item in self._read if item[0].group >= limit.get(item[0].thread, 0)]
            self._write(written)
        if self._wave.hazards is not None:
            self._see_completed(active)

    def _have_read(self, stores: list[BulkStore]) -> None:
        self._read += [(store, store.read()) for store in stores]
        self._stores = [store for store in self._stores if store not in stores]

    def _write(self, stores: list[tuple[BulkStore, np.ndarray]]) -> None:
        for store, data in stores:
            store.write(data)
            if store.record is not None and self._wave.global_hazards is not None:
                self._wave.global_hazards.complete(store.record)

    def _see_completed(self, threads: list[int]) -> None:
        """What has been read may be overwritten by whoever is ordered after these threads."""
        wave = self._wave
        assert wave.hazards is not None
        for warp in {thread // WARP_SIZE for thread in threads}:
            pending = [store.stamp for store in self._stores if store.thread // WARP_SIZE == warp and store.group >= 0]
            completed = min(pending, default=self._warp_groups.get(warp, 0))
            column = wave.hazards.parties.bulk_store(warp % wave.warps_per_block)
            wave.hazards.clocks.see([warp], column, np.int64(completed + 1) * TICK)

    def _active(self) -> list[int]:
        wave = self._wave
        return list(range(wave.threads)) if wave.lanes is None else [int(thread) for thread in wave.lanes]

    # Ends --------------------------------------------------------------------------------------------

    def on_exit(self, exiting: np.ndarray) -> None:
        """Threads exit: their stores must have read shared memory, which goes away with the block."""
        unread = [store for store in self._stores if exiting[store.thread]]
        for store in unread if self._wave.hazards is not None else ():
            detail = "the thread that issued this bulk store exits without waiting until it has read shared memory"
            self._wave.hazard("async-copy", detail, store.thread, pc=store.pc)
        self._have_read(unread)

    def finish(self) -> None:
        """Every thread has exited: nothing may be on its way to shared memory that is no longer the block's."""
        written, self._read = self._read, []
        self._write(written)
        for load in self._loads if self._wave.hazards is not None else ():
            detail = f"the kernel ends while this bulk copy is in flight: nobody waited for its {load.bytes} bytes"
            self._wave.hazard("async-copy", detail, load.thread, pc=load.pc)
        self.deliver()
