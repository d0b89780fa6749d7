"""Device memory: allocations with guard gaps, quarantine of freed ones, and bounds of every access."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
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
_WORD_BYTES = 8  # of the largest integers


@dataclass
class Allocation:
    address: int
    size: int
    reserved: int
    freed: bool = False
    unwritten: np.ndarray | None = None  # per byte, whether nobody has written it; None: all is written

    @property
    def end(self) -> int:
        return self.address + self.size


def _words(unwritten: np.ndarray, offsets: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Bytes at offsets as whole words of a view, with the words of each offset; None: they are none."""
    word = min(width, _WORD_BYTES)
    if width not in WIDTH_DTYPES or (offsets & (word - 1)).any():
        return None
    first = offsets >> WIDTH_SHIFT[word]
    return unwritten.view(WIDTH_DTYPES[word]), first[:, None] + np.arange(width // word)


class GlobalMemory:
    """One growing array of bytes behind all device addresses."""

    def __init__(self) -> None:
        self._allocations: dict[int, Allocation] = {}
        self._starts: list[int] = []
        self._by_start: list[Allocation] = []
        self._quarantine: list[Allocation] = []
        self._reusable: list[tuple[int, int]] = []  # (offset, reserved bytes)
        self._used = _GUARD_BYTES
        self._unwritten: set[int] = set()  # allocations with bytes that nobody has written
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
        if size:
            allocation.unwritten = np.zeros(-(-size // _WORD_BYTES) * _WORD_BYTES, bool)
            allocation.unwritten[:size] = True
            self._unwritten.add(allocation.address)
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
        allocation.unwritten = None
        self._unwritten.discard(address)
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
        self.mark_written(np.array([address]), data.nbytes)
        self.settle()

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
        if access == "store":
            self.mark_written(addresses, width)
        else:
            self.check_written(wave, addresses, width, access)
        if wave.global_hazards is not None:
            wave.global_hazards.check(addresses, width, access, data)
        view, index = self.views[width], (addresses - GLOBAL_BASE) >> WIDTH_SHIFT[width]
        wave.spinning.watch(access, view, index)
        return view, index

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

    # Memory that nobody has written --------------------------------------------------------------------

    def mark_written(self, addresses: np.ndarray, width: int) -> None:
        """``width`` bytes at each address, checked before, have a value from now on."""
        for unwritten, offsets, _ in self._unwritten_parts(addresses):
            words = _words(unwritten, offsets, width)
            if words is not None:
                view, index = words
                view[index] = 0
            else:
                for offset in offsets:
                    unwritten[offset : offset + width] = False

    def settle(self) -> None:
        """Look no more at allocations of which everything has been written."""
        for address in list(self._unwritten):
            allocation = self._allocations[address]
            if allocation.unwritten is None or not allocation.unwritten.any():
                allocation.unwritten = None
                self._unwritten.remove(address)

    @property
    def has_unwritten(self) -> bool:
        """Whether there are allocations of which not everything has been written."""
        return bool(self._unwritten)

    def unwritten_among(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """Positions of the addresses whose ``width`` bytes include some that nobody has written."""
        found = []
        for unwritten, offsets, positions in self._unwritten_parts(addresses):
            words = _words(unwritten, offsets, width)
            if words is not None:
                view, index = words
                bad = (view[index] != 0).any(axis=1)
            else:
                bad = np.array([unwritten[offset : offset + width].any() for offset in offsets])
            found.append(positions[bad])
        return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def check_written(self, wave: Wave, addresses: np.ndarray, width: int, access: str) -> None:
        """A hazard if an active thread reads, at its address, bytes that nobody has written."""
        if not wave.hazard_policy.looks_for("uninitialised-global"):
            return
        positions = self.unwritten_among(addresses, width)
        if positions.size:
            first = int(positions[0])
            detail = f"global {access} of {width} bytes that nobody wrote, {self._describe(int(addresses[first]))}"
            thread = wave.thread_at(first)
            wave.hazard("uninitialised-global", detail, thread, int(addresses[first]), count=positions.size)

    def _unwritten_parts(self, addresses: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(bytes of an allocation that are unwritten, offsets in it, positions) of each such allocation in use."""
        if not self._unwritten or not addresses.size:
            return
        lowest = self.allocation_at(int(addresses.min()))
        if lowest is not None and int(addresses.max()) < lowest.end:
            if lowest.unwritten is not None:
                yield lowest.unwritten, addresses - lowest.address, np.arange(addresses.size)
            return
        owners = np.searchsorted(np.array(self._starts, np.int64), addresses, side="right") - 1
        for owner in np.unique(owners):
            allocation = self._by_start[owner]
            if allocation.unwritten is not None:
                positions = np.flatnonzero(owners == owner)
                yield allocation.unwritten, addresses[positions] - allocation.address, positions

    def _describe(self, address: int) -> str:
        allocation = self.allocation_at(address)
        if allocation is None:
            return "before the first allocation"
        where = f"the allocation of {allocation.size} bytes at {allocation.address:#x}"
        if allocation.freed and address < allocation.end:
            return f"in {where}, which was freed"
        return f"{address - allocation.address} bytes after the start of {where}"
