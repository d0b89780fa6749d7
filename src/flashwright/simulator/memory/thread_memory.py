"""Spaces without sharing between threads: local memory, constants, and kernel parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .bytes import WIDTH_SHIFT, ByteStore

if TYPE_CHECKING:
    from ..wave import Wave


def check_range(wave: Wave, space: str, addresses: np.ndarray, width: int, access: str, size: int) -> None:
    """Fault the first active thread whose access is misaligned or leaves ``[0, size)`` of a space."""
    if width > 1 and (addresses & (width - 1)).any():
        position = int(np.flatnonzero(addresses & (width - 1))[0])
        wave.fault("misaligned", f"{space} {access} of {width} bytes", position, int(addresses[position]))
    if int(addresses.min()) < 0 or int(addresses.max()) + width > size:
        position = int(np.flatnonzero((addresses < 0) | (addresses + width > size))[0])
        address = int(addresses[position])
        wave.fault(
            "out-of-bounds",
            f"{space} {access} of {width} bytes at offset {address} of {size}",
            position,
            address,
        )


class LocalMemory:
    """Per-thread memory (spills, indexed arrays, parameters of device functions)."""

    def __init__(self, threads: int, bytes_per_thread: int) -> None:
        self.size = bytes_per_thread
        self.stride = -(-bytes_per_thread // 32) * 32
        self.store = ByteStore(threads * self.stride)
        self.thread_base = np.arange(threads, dtype=np.int64) * self.stride

    def locate(
        self, wave: Wave, addresses: np.ndarray, width: int, access: str, data: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        check_range(wave, "local", addresses, width, access, self.size)
        wave.counters.count_bytes(wave, "local", access, addresses.size * width)
        base = self.thread_base if wave.lanes is None else self.thread_base[wave.lanes]
        view, index = self.store.views[width], (addresses + base) >> WIDTH_SHIFT[width]
        wave.spinning.watch(access, view, index)
        return view, index


class ConstantMemory:
    """A read-only bank that all threads see: `.const` variables, or the kernel's parameters."""

    def __init__(self, space: str, content: bytes) -> None:
        self.space = space
        self.size = len(content)
        self.store = ByteStore(len(content))
        self.store.bytes[: len(content)] = np.frombuffer(content, np.uint8)

    def locate(
        self, wave: Wave, addresses: np.ndarray, width: int, access: str, data: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        check_range(wave, self.space, addresses, width, access, self.size)
        if access != "load":
            wave.fault("out-of-bounds", f"{access} to read-only {self.space} memory", 0, int(addresses[0]))
        return self.store.views[width], addresses >> WIDTH_SHIFT[width]
