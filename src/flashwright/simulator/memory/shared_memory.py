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
    """``blocks`` windows of ``size`` bytes. Addresses of threads are offsets in their own block's window."""

    def __init__(self, blocks: int, size: int, thread_block: np.ndarray) -> None:
        self.size = size
        self.stride = -(-size // 128) * 128
        self.store = ByteStore(blocks * self.stride, _UNINITIALISED)
        self.thread_base = thread_block.astype(np.int64) * self.stride

    def locate(
        self, wave: Wave, addresses: np.ndarray, width: int, access: str, data: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Check and count the accesses of the active threads; a view and the index of each thread's item."""
        check_range(wave, "shared", addresses, width, access, self.size)
        wave.counters.count_shared(wave, addresses, width)
        wave.counters.count_bytes(wave, "shared", access, addresses.size * width)
        flat = addresses + self.bases(wave)
        if wave.hazards is not None:
            ordering = RELAXED if wave.ordering is None and access == "atomic" else wave.ordering
            wave.hazards.check(SharedAccess(access, width, addresses, flat, data, ordering))
        view, index = self.store.views[width], flat >> WIDTH_SHIFT[width]
        if wave.spinning.is_watching and access != "load":
            wave.spinning.watch(view, index)
        return view, index

    def bases(self, wave: Wave) -> np.ndarray:
        return self.thread_base if wave.lanes is None else self.thread_base[wave.lanes]
