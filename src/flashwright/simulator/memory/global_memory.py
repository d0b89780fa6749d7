"""Device memory: allocations with guard gaps, quarantine of freed ones, and bounds of every access."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .bytes import WIDTH_DTYPES, WIDTH_SHIFT
from .windows import GLOBAL_BASE

if TYPE_CHECKING:
    from ..wave import Wave

_ALIGNMENT = 256  # what cudaMalloc guarantees
_GUARD_BYTES = 4096  # unmapped bytes after each allocation, so that small overruns never reach a neighbour
_QUARANTINE_BYTES = 64 << 20  # freed memory is kept this long before its addresses are used again
_UNINITIALISED = 0xFF  # NaN in every floating-point type


@dataclass
class Allocation:
    address: int
    size: int
    reserved: int
    freed: bool = False

    @property
    def end(self) -> int:
        return self.address + self.size


class GlobalMemory:
    """One growing array of bytes behind all device addresses."""

    def __init__(self) -> None:
        self._allocations: dict[int, Allocation] = {}
        self._starts: list[int] = []
        self._by_start: list[Allocation] = []
        self._quarantine: list[Allocation] = []
        self._reusable: list[tuple[int, int]] = []  # (offset, reserved bytes)
        self._used = _GUARD_BYTES
        self.bytes = np.zeros(0, np.uint8)
        self._grow(1 << 20)

    def _grow(self, size: int) -> None:
        stored = np.zeros(size, np.uint8)
        stored[: self.bytes.size] = self.bytes
        self.bytes = stored
        self.views = {width: stored.view(dtype) for width, dtype in WIDTH_DTYPES.items()}

    # Allocation --------------------------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        if size < 0:
            raise ValueError(f"cannot allocate {size} bytes")
        reserved = -(-(size + _GUARD_BYTES) // _ALIGNMENT) * _ALIGNMENT
        offset = self._place(reserved)
        allocation = Allocation(GLOBAL_BASE + offset, size, reserved)
        index = bisect_right(self._starts, allocation.address)
        self._starts.insert(index, allocation.address)
        self._by_start.insert(index, allocation)
        self._allocations[allocation.address] = allocation
        self.bytes[offset : offset + size] = _UNINITIALISED
        return allocation.address

    def _place(self, reserved: int) -> int:
        for index, (offset, available) in enumerate(self._reusable):
            if available >= reserved:
                if available == reserved:
                    del self._reusable[index]
                else:
                    self._reusable[index] = (offset + reserved, available - reserved)
                return offset
        offset = self._used
        self._used += reserved
        if self._used > self.bytes.size:
            self._grow(max(2 * self.bytes.size, -(-self._used // _ALIGNMENT) * _ALIGNMENT))
        return offset

    def free(self, address: int) -> None:
        allocation = self.allocation(address)
        allocation.freed = True
        self._quarantine.append(allocation)
        while sum(item.reserved for item in self._quarantine) > _QUARANTINE_BYTES:
            oldest = self._quarantine.pop(0)
            index = self._starts.index(oldest.address)
            del self._starts[index], self._by_start[index], self._allocations[oldest.address]
            self._reusable.append((oldest.address - GLOBAL_BASE, oldest.reserved))

    def allocation(self, address: int) -> Allocation:
        """The live allocation that starts at ``address``; ValueError otherwise."""
        allocation = self._allocations.get(address)
        if allocation is None:
            raise ValueError(f"{address:#x} is not the start of an allocation")
        if allocation.freed:
            raise ValueError(f"the allocation at {address:#x} was already freed")
        return allocation

    def allocation_at(self, address: int) -> Allocation | None:
        """The allocation, live or freed, that starts nearest at or before ``address``."""
        index = bisect_right(self._starts, address) - 1
        return self._by_start[index] if index >= 0 else None

    def write(self, address: int, data: np.ndarray) -> None:
        offset = address - GLOBAL_BASE
        self.bytes[offset : offset + data.nbytes] = np.frombuffer(data.tobytes(), np.uint8)

    def read(self, address: int, size: int) -> bytes:
        offset = address - GLOBAL_BASE
        return self.bytes[offset : offset + size].tobytes()

    # Access by threads -------------------------------------------------------------------------------

    def locate(
        self, wave: Wave, addresses: np.ndarray, width: int, access: str, data: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Check the accesses of the active threads; returns a view and the index of each thread's item."""
        self.check(wave, addresses, width, access)
        wave.counters.count_global(wave, addresses, width, access)
        return self.views[width], (addresses - GLOBAL_BASE) >> WIDTH_SHIFT[width]

    def check(self, wave: Wave, addresses: np.ndarray, width: int, access: str) -> None:
        """Fault the first thread whose access is misaligned, out of bounds, or to freed memory."""
        if width > 1 and (addresses & (width - 1)).any():
            position = int(np.flatnonzero(addresses & (width - 1))[0])
            wave.fault("misaligned", f"global {access} of {width} bytes", position, int(addresses[position]))
        lowest = int(addresses.min())
        allocation = self.allocation_at(lowest)
        if allocation is not None and not allocation.freed and int(addresses.max()) + width <= allocation.end:
            return  # every thread within one allocation: by far the most common case
        starts = np.array(self._starts, np.int64)
        ends = np.array([0 if item.freed else item.end for item in self._by_start], np.int64)
        if not starts.size:
            wave.fault("out-of-bounds", f"global {access} without any allocation", 0, lowest)
        index = np.searchsorted(starts, addresses, side="right") - 1
        bad = (index < 0) | (addresses + width > ends[index])
        if bad.any():
            position = int(np.flatnonzero(bad)[0])
            address = int(addresses[position])
            wave.fault(
                "out-of-bounds",
                f"global {access} of {width} bytes {self._describe(address)}",
                position,
                address,
            )

    def _describe(self, address: int) -> str:
        allocation = self.allocation_at(address)
        if allocation is None:
            return "before the first allocation"
        where = f"the allocation of {allocation.size} bytes at {allocation.address:#x}"
        if allocation.freed and address < allocation.end:
            return f"in {where}, which was freed"
        return f"{address - allocation.address} bytes after the start of {where}"
