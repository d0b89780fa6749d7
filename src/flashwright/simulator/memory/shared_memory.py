"""Shared memory of every thread block in a wave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..hazards import SharedAccess
from ..memory_order import RELAXED
from .bytes import WIDTH_SHIFT, ByteStore
from .thread_memory import check_range

if TYPE_CHECKING:
    from ..wave import Wave

_UNINITIALISED = 0xFF  # NaN in every floating-point type


class SharedMemory:
    """``blocks`` windows of ``size`` bytes. Addresses of threads are offsets in their own block's window; in clusters
    they name the block (`Clusters`)."""

    def __init__(self, blocks: int, size: int, thread_block: np.ndarray) -> None:
        self.size = size
        self.stride = -(-size // 128) * 128
        self.store = ByteStore(blocks * self.stride, _UNINITIALISED)
        self.thread_base = thread_block.astype(np.int64) * self.stride

    def locate(
        self, wave: Wave, addresses: np.ndarray, width: int, access: str, data: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Check and count accesses of the active threads to their own blocks; a view and the index of each thread's
        item."""
        if wave.clusters.size > 1:
            addresses = self.own_offsets(wave, addresses, f"shared {access}")
        check_range(wave, "shared", addresses, width, access, self.size)
        wave.counters.count_shared(wave, addresses, width)
        wave.counters.count_bytes(wave, "shared", access, addresses.size * width)
        flat = addresses + self.bases(wave)
        if wave.hazards is not None:
            ordering = RELAXED if wave.ordering is None and access == "atomic" else wave.ordering
            wave.hazards.check(SharedAccess(access, width, addresses, flat, data, ordering))
        view, index = self.store.views[width], flat >> WIDTH_SHIFT[width]
        wave.spinning.watch(access, view, index)
        return view, index

    def own_offsets(self, wave: Wave, addresses: np.ndarray, access: str) -> np.ndarray:
        """Addresses of the active threads, for instructions that reach their own block alone, as offsets there."""
        if wave.clusters.size == 1:
            return addresses
        for position in np.flatnonzero(wave.clusters.are_remote(wave.active, addresses)):
            self.own_offset(wave, wave.thread_at(int(position)), int(addresses[position]), access)
        return wave.clusters.offsets(addresses)

    def own_offset(self, wave: Wave, thread: int, address: int, access: str) -> int:
        """The same of one thread's address."""
        block, offset = wave.clusters.target(thread, address)
        if block != wave.block_of_thread[thread]:
            rank, own = int(wave.clusters.ranks(np.array(address))), int(wave.clusters.rank_of_thread[thread])
            detail = f"{access} at a shared address of rank {rank} of the cluster; this thread block has rank {own}"
            wave.fault_thread("out-of-bounds", detail, thread, address)
        return offset

    def check_running(self, wave: Wave, thread: int, block: int, address: int) -> None:
        """A block's memory is there for others of its cluster as long as it runs."""
        if not wave.clusters.holds(thread, block):
            wave.fault_thread("out-of-bounds", "shared memory of no thread block of the cluster", thread, address)
        if not wave.alive[wave.block_of_thread == block].any():
            detail = "shared memory of a thread block of the cluster that has ended"
            wave.fault_thread("out-of-bounds", detail, thread, address)

    def bases(self, wave: Wave) -> np.ndarray:
        return self.thread_base if wave.lanes is None else self.thread_base[wave.lanes]


class ClusterSharedMemory:
    """The shared memory of a cluster: what ``.shared::cluster`` and generic addresses reach."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    def locate(
        self, wave: Wave, addresses: np.ndarray, width: int, access: str, data: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Like `SharedMemory.locate`, in every block. Accesses to other blocks are not checked for races."""
        shared = self._shared
        if wave.clusters.size == 1 or not wave.clusters.are_remote(wave.active, addresses).any():
            return shared.locate(wave, addresses, width, access, data)
        blocks, offsets = wave.clusters.targets(wave.active, addresses)
        is_remote = blocks != wave.block_of_thread[wave.active]
        for block in np.unique(blocks):
            position = int(np.flatnonzero(blocks == block)[0])
            shared.check_running(wave, wave.thread_at(position), int(block), int(addresses[position]))
        if wave.remote_accesses is not None:
            pairs = np.stack([wave.block_of_thread[wave.active], blocks])[:, is_remote]
            for index in np.unique(pairs, axis=1, return_index=True)[1]:
                position = int(np.flatnonzero(is_remote)[index])
                wave.remote_accesses.access(wave.thread_at(position), int(blocks[position]), f"shared {access}")
        check_range(wave, "shared", offsets, width, access, shared.size)
        flat = offsets + blocks * shared.stride
        local = np.flatnonzero(~is_remote)
        if local.size:
            with wave.only(local):
                shared.locate(wave, addresses[local], width, access, None if data is None else data[local])
        wave.counters.count_bytes(wave, "shared", access, int(np.count_nonzero(is_remote)) * width)
        if wave.hazards is not None and access != "load":
            wave.hazards.written_from_elsewhere(flat[is_remote], width)
        view, index = shared.store.views[width], flat >> WIDTH_SHIFT[width]
        wave.spinning.watch(access, view, index)
        return view, index
