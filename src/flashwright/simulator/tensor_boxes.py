"""The box a bulk tensor copy moves: which bytes of global memory, to which chunks of shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashwright.hardware.tensor_map import Fill, TensorMap

from .access_patterns import SECTOR_BYTES
from .async_hazards import CHUNK_BYTES
from .memory.bytes import WIDTH_SHIFT
from .memory.global_memory import GlobalMemory
from .memory.windows import GLOBAL_BASE
from .ptx.types import ptx_type_of


@dataclass(frozen=True)
class TensorBox:
    """One box at given coordinates (innermost first, possibly negative or beyond the tensor)."""

    tensor_map: TensorMap
    coordinates: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Contiguous stretches of the innermost dimension."""
        return self.tensor_map.box_bytes // self.tensor_map.row_bytes

    def row_addresses(self) -> tuple[np.ndarray, np.ndarray]:
        """Device address of the element at the box's first column, and whether the row is in the tensor, per row."""
        tensor = self.tensor_map
        addresses = np.array([tensor.address + self.coordinates[0] * tensor.dtype.itemsize], np.int64)
        inside = np.ones(1, bool)
        for axis in range(1, tensor.rank):
            index = self.coordinates[axis] + np.arange(tensor.box_elements[axis]) * tensor.element_strides[axis]
            valid = (index >= 0) & (index < tensor.shape[axis])
            addresses = ((index * tensor.strides[axis - 1])[:, None] + addresses).ravel()
            inside = (valid[:, None] & inside).ravel()
        return addresses, inside

    def columns(self) -> tuple[int, int]:
        """First and last (exclusive) byte of a row that are in the tensor."""
        tensor = self.tensor_map
        size = tensor.dtype.itemsize
        first = min(max(-self.coordinates[0], 0), tensor.box[0])
        last = min(max(tensor.shape[0] - self.coordinates[0], first), tensor.box[0])
        return first * size, last * size

    def chunk_addresses(self, shared_address: int) -> np.ndarray:
        """Shared-memory addresses of the box's 16-byte chunks, in the order of the box."""
        return self.tensor_map.swizzle.apply(shared_address + CHUNK_BYTES * np.arange(self.tensor_map.box_bytes // 16))

    def sectors(self) -> tuple[int, int, int]:
        """Bytes of the tensor in the box, the 32-byte sectors they lie in, and the fewest they could lie in."""
        (addresses, inside), (first, last) = self.row_addresses(), self.columns()
        starts = addresses[inside] + first
        if first == last or not starts.size:
            return 0, 0, 0
        moved = starts.size * (last - first)
        sectors = (starts + (last - first) - 1) // SECTOR_BYTES - starts // SECTOR_BYTES + 1
        return moved, int(sectors.sum()), -(-moved // SECTOR_BYTES)

    def outside(self, memory: GlobalMemory) -> int | None:
        """An address of the box that is in no allocation, though the tensor map says it is in the tensor."""
        (addresses, inside), (first, last) = self.row_addresses(), self.columns()
        starts = addresses[inside] + first
        if first == last or not starts.size:
            return None
        lowest, highest = int(starts.min()), int(starts.max()) + last - first
        allocation = memory.allocation_at(lowest)
        if allocation is None or allocation.freed or lowest >= allocation.end:
            return lowest
        return None if highest <= allocation.end else allocation.end

    def read(self, memory: GlobalMemory) -> np.ndarray:
        """The box's chunks, filled where it leaves the tensor."""
        tensor = self.tensor_map
        filler = np.zeros(1, tensor.dtype) if tensor.fill is Fill.ZERO else np.full(1, np.nan, tensor.dtype)
        data = np.repeat(filler, tensor.box_bytes // tensor.dtype.itemsize).view(np.uint8).reshape(self.rows, -1)
        items, view, index, inside = self._items(memory, data)
        if index.size:
            items[inside] = view[index]
        return data.view(np.dtype("V16")).ravel()

    def write(self, memory: GlobalMemory, chunks: np.ndarray) -> None:
        """Store the box's chunks, except what leaves the tensor."""
        items, view, index, inside = self._items(memory, chunks.view(np.uint8).reshape(self.rows, -1))
        if index.size:
            view[index] = items[inside]
            if memory.has_unwritten:
                memory.mark_written(*self.stretches())

    def stretches(self) -> tuple[np.ndarray, int]:
        """Where the box's rows lie in the tensor: their addresses, and their length in bytes."""
        (addresses, inside), (first, last) = self.row_addresses(), self.columns()
        return addresses[inside] + first, last - first

    def unwritten(self, memory: GlobalMemory) -> int | None:
        """An address of a row of the box in which there are bytes that nobody has written."""
        if not memory.has_unwritten:
            return None
        starts, length = self.stretches()
        rows = memory.unwritten_among(starts, length) if length else starts[:0]
        return int(starts[rows[0]]) if rows.size else None

    def combine(self, memory: GlobalMemory, chunks: np.ndarray, update: Callable[[Any, Any], Any]) -> None:
        """Like `write`, with ``update(old, new)`` of the tensor's elements in the place of the new ones."""
        items, view, index, inside = self._items(memory, chunks.view(np.uint8).reshape(self.rows, -1))
        if index.size:
            dtype = ptx_type_of(self.tensor_map.dtype).dtype
            old, new = (np.ascontiguousarray(part).view(dtype) for part in (view[index], items[inside]))
            view[index] = np.asarray(update(old, new)).view(view.dtype)

    def _items(self, memory: GlobalMemory, data: np.ndarray) -> tuple[np.ndarray, Any, np.ndarray, np.ndarray]:
        """Rows of ``data`` and of memory as the widest items that fit, and the rows in the tensor."""
        (addresses, inside), (first, last) = self.row_addresses(), self.columns()
        starts = addresses[inside] + first
        if first == last or not starts.size:
            return data, memory.bytes, np.zeros(0, np.int64), inside
        together = int(np.bitwise_or.reduce(starts)) | first | last
        width = min(together & -together, 16)
        view = memory.views[width]
        index = (starts[:, None] - GLOBAL_BASE >> WIDTH_SHIFT[width]) + np.arange((last - first) // width)
        items = data.view(view.dtype)[:, first // width : last // width]
        return items, view, index, inside
