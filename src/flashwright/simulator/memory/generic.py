"""Generic addresses: each thread's address says by its window which space it means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .shared_memory import SharedMemory
from .thread_memory import ConstantMemory, LocalMemory
from .windows import CLUSTER_SHARED, GLOBAL_BASE, SPACE_OF_WINDOW, WINDOW_BASE, WINDOW_BITS

if TYPE_CHECKING:
    from ..wave import Wave


_REACHED = {"shared": CLUSTER_SHARED}


def split_by_space(wave: Wave, addresses: np.ndarray) -> Iterator[tuple[str, np.ndarray | slice, np.ndarray]]:
    """(space, positions among the active threads, addresses in that space) for each space in use.

    Shared memory is that of the cluster.
    """
    windows = addresses >> WINDOW_BITS
    first = int(windows[0])
    if (windows == first).all():
        space = SPACE_OF_WINDOW.get(first, "global")
        yield _REACHED.get(space, space), slice(None), addresses - WINDOW_BASE[space]
        return
    for window in np.unique(windows):
        positions = np.flatnonzero(windows == window)
        space = SPACE_OF_WINDOW.get(int(window), "global")
        yield _REACHED.get(space, space), positions, addresses[positions] - WINDOW_BASE[space]


def bytes_at(wave: Wave, thread: int, address: int, size: int) -> bytes:
    """Memory as a thread sees it at a generic address; not an access of the kernel's, so that nothing is counted."""
    data = _stretch(wave, thread, address)
    if len(data) < size:
        wave.fault_thread("out-of-bounds", f"read of {size} bytes outside of any memory", thread, address)
    return data[:size].tobytes()


def string_at(wave: Wave, thread: int, address: int) -> str:
    """The string that begins at a generic address and ends with a zero."""
    data = _stretch(wave, thread, address)
    end = np.flatnonzero(data == 0)
    if not end.size:
        wave.fault_thread("out-of-bounds", "a string that does not end, or is outside of any memory", thread, address)
    return data[: end[0]].tobytes().decode(errors="replace")


def _stretch(wave: Wave, thread: int, address: int) -> np.ndarray:
    """All bytes from a generic address to the end of what it lies in."""
    space = SPACE_OF_WINDOW.get(address >> WINDOW_BITS, "global")
    offset = address - WINDOW_BASE[space]
    if space == "global":
        allocation = wave.global_memory.allocation_at(address)
        if allocation is None or allocation.freed:
            return np.zeros(0, np.uint8)
        return wave.global_memory.bytes[address - GLOBAL_BASE : allocation.end - GLOBAL_BASE]
    memory = wave.spaces[space]
    assert isinstance(memory, (SharedMemory, LocalMemory, ConstantMemory))
    if isinstance(memory, SharedMemory):
        block, offset = wave.clusters.target(thread, offset)
        base = block * memory.stride
    else:
        base = 0 if isinstance(memory, ConstantMemory) else int(memory.thread_base[thread])
    return memory.store.bytes[base + offset : base + memory.size]
