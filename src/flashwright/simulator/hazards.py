"""Races on shared memory, by happens-before.

Each warp has a clock that advances when it synchronises, and knows how far it has seen every other warp of
its block (a vector clock, joined at barriers). Each *granule* of shared memory (the smallest access of the
kernel) remembers its last writer and, per warp, its last reader. Two accesses conflict when one is a write,
their threads differ, and the earlier one's stamp is not below what the later one's warp has seen.

A record of an access is one 64-bit number, so that one comparison decides:

    bit  62      61 … 32    31 … 13   12       11      10 … 6   5         4 … 0
        pending  stamp      pc        atomic   async   warp     several   lane
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from .architecture import WARP_SIZE
from .errors import ErrorKind, OtherParty

if TYPE_CHECKING:
    from .wave import Wave

_SEVERAL = np.int64(1 << 5)
_ASYNC = np.int64(1 << 11)
_ATOMIC = np.int64(1 << 12)
_PC_SHIFT = 13
_PC_MASK = (1 << 19) - 1
_STAMP_SHIFT = 32
_PENDING = np.int64(1 << 62)
_THREAD_MASK = np.int64((1 << 11) - 1)
_WARP_SHIFT, _WARP_MASK = 6, np.int64(31)


class WarpClocks:
    """``seen[w, u]``: warp ``w`` is ordered after the accesses of its block's warp ``u`` with smaller stamps.

    ``seen[w, w]`` is the stamp of w's own accesses; it advances at each synchronisation. Values are kept
    shifted to the stamp's place in a record. Clocks are per warp: a barrier that only some lanes pass counts
    for all.
    """

    def __init__(self, warps: int, warps_per_block: int) -> None:
        self._per_block = warps_per_block
        self._tick = np.int64(1 << _STAMP_SHIFT)
        self.seen = np.full((warps, warps_per_block), self._tick)
        self._own = np.arange(warps) % warps_per_block
        self._all = np.arange(warps)

    def own(self) -> np.ndarray:
        """The current stamp of every warp."""
        return self.seen[self._all, self._own]

    def advance(self, warps: np.ndarray | slice) -> None:
        """Warp-level synchronisation: later accesses of these warps are ordered after their earlier ones."""
        index: np.ndarray = self._all[warps]
        self.seen[index, self._own[index]] += self._tick

    def publish(self, warp: int) -> np.ndarray:
        """The warp arrives somewhere: what it has seen and done so far, to be handed over by `join`."""
        self.seen[warp, self._own[warp]] += self._tick
        return self.seen[warp].copy()

    def join(self, published: list[np.ndarray], receivers: list[int]) -> None:
        """The receivers have now seen all that was published."""
        self.seen[receivers] = np.maximum(self.seen[receivers], np.max(published, axis=0))

    def join_blocks(self, threads: np.ndarray | None) -> None:
        """A barrier among all these threads of each block; None: among all threads."""
        by_block = self.seen.reshape(-1, self._per_block, self._per_block)
        if threads is None:
            self.seen[self._all, self._own] += self._tick
            by_block[:] = by_block.max(axis=1, keepdims=True)
            return
        takes_part: np.ndarray = np.any(threads.reshape(-1, self._per_block, WARP_SIZE), axis=2)
        self.advance(np.flatnonzero(takes_part))
        takes_part = takes_part[:, :, None]
        known = np.where(takes_part, by_block, 0).max(axis=1, keepdims=True)
        by_block[:] = np.where(takes_part, np.maximum(by_block, known), by_block)


@dataclass(frozen=True)
class SharedAccess:
    """One access to shared memory by each active thread."""

    kind: str  # load, store, atomic or async-copy
    width: int
    addresses: np.ndarray  # offsets in the block's shared memory
    flat: np.ndarray  # the same in the wave's memory
    data: np.ndarray | None  # what a store or copy will write

    def part_of_data(self, item: int, parts: int) -> bytes:
        """The bytes written to granule ``item`` of all the access's granules, ``parts`` per thread."""
        assert self.data is not None
        by_part = self.data.view(np.uint8).reshape(-1, parts, self.width // parts)
        return by_part[item // parts, item % parts].tobytes()


class HazardTracker:
    """Shadow state of a wave's shared memory."""

    def __init__(self, wave: Wave, granule: int) -> None:
        self._wave = wave
        self._shift = granule.bit_length() - 1
        granules = wave.blocks * wave.shared.stride // granule
        self._writes = np.zeros(granules, np.int64)
        self._warps = wave.warps_per_block
        self._reads = np.zeros(granules * self._warps, np.int64)
        self.clocks = WarpClocks(wave.warps, wave.warps_per_block)
        self._thread_warp = np.arange(wave.threads) // WARP_SIZE
        self._thread_id = (wave.warp_in_block.astype(np.int64) << _WARP_SHIFT) | wave.lane

    # Accesses ----------------------------------------------------------------------------------------

    def check(self, access: SharedAccess) -> None:
        """Check an access of the active threads against those before it, and record it."""
        lanes = self._wave.lanes
        warp = self._thread_warp if lanes is None else self._thread_warp[lanes]
        me = self._thread_id if lanes is None else self._thread_id[lanes]
        parts = self._parts(access.width)
        granules = self._granules(access.flat, parts)
        if parts > 1:
            warp, me = np.repeat(warp, parts), np.repeat(me, parts)
        self._check_writer(access, granules, warp, me, parts)
        own = self.clocks.own()[warp]
        record = own | me | self._pc_field(self._wave.pc)
        if access.kind == "load":
            self._record_read(granules, me, record, own)
            return
        self._check_readers(access, granules, warp, me, parts)
        if access.kind == "atomic":
            record |= _ATOMIC
        elif access.kind == "async-copy":
            record |= _PENDING | _ASYNC | _SEVERAL
        self._writes[granules] = record
        if access.kind != "atomic":
            self._check_same_instruction(access, granules, record, parts)

    def arrived(self, threads: np.ndarray, flat: np.ndarray, width: int, pc: int) -> None:
        """Data of ``cp.async`` is there for the threads that waited; others need a barrier after this."""
        parts = self._parts(width)
        record = self.clocks.own()[self._thread_warp[threads]] | self._thread_id[threads] | _ASYNC
        self._writes[self._granules(flat, parts)] = np.repeat(record | self._pc_field(pc), parts)

    def _parts(self, width: int) -> int:
        """Granules of an access."""
        return width >> self._shift

    def _granules(self, flat: np.ndarray, parts: int) -> np.ndarray:
        first = flat >> self._shift
        return first if parts == 1 else (first[:, None] + np.arange(parts)).ravel()

    def _pc_field(self, pc: int) -> np.int64:
        return np.int64(min(pc, _PC_MASK) << _PC_SHIFT)

    def _check_writer(
        self, access: SharedAccess, granules: np.ndarray, warp: np.ndarray, me: np.ndarray, parts: int
    ) -> None:
        """Against the last write of each granule."""
        written = self._writes[granules]
        if access.kind == "load" and not written.all():
            position = int(np.flatnonzero(written == 0)[0]) // parts
            detail = f"shared load of {access.width} bytes that nobody wrote"
            self._wave.fault("uninitialised-shared", detail, position, int(access.addresses[position]))
        writer_warp = (written >> _WARP_SHIFT) & _WARP_MASK
        unordered = written >= self.clocks.seen.ravel()[warp * self._warps + writer_warp]
        if not unordered.any():
            return
        unordered &= (written & _THREAD_MASK) != me
        if access.kind == "atomic":
            unordered &= (written & _ATOMIC) == 0
        for item in np.flatnonzero(unordered):
            record = int(written[item])
            if access.kind == "store" and not record & int(_PENDING) and self._is_unchanged(access, int(item), parts):
                continue  # the same value again: harmless, and a common idiom for flags
            kind, detail = _classify(record, access.kind)
            self._fault(kind, detail, access, int(item) // parts, record, "write")

    def _is_unchanged(self, access: SharedAccess, item: int, parts: int) -> bool:
        """Whether a store would leave a granule's value as it is."""
        value = access.part_of_data(item, parts)
        start = int(access.flat[item // parts]) + item % parts * len(value)
        return self._wave.shared.store.bytes[start : start + len(value)].tobytes() == value

    def _record_read(self, granules: np.ndarray, me: np.ndarray, record: np.ndarray, own: np.ndarray) -> None:
        index = granules * self._warps + (me >> _WARP_SHIFT)
        before = self._reads[index]
        also_read = (before >= own) & ((before & _THREAD_MASK) != me)
        if also_read.any():  # another lane of the warp has read it since the warp last synchronised
            record = np.where(also_read, record | _SEVERAL, record)
        self._reads[index] = record
        lost = ((self._reads[index] ^ record) & _THREAD_MASK) != 0
        if lost.any():  # several lanes of a warp read it in this instruction
            self._reads[index[lost]] = record[lost] | _SEVERAL

    def _check_readers(
        self, access: SharedAccess, granules: np.ndarray, warp: np.ndarray, me: np.ndarray, parts: int
    ) -> None:
        """A write against the last reads of each granule, by all warps."""
        readers = self._reads.reshape(-1, self._warps).take(granules, axis=0)
        unordered = readers >= self.clocks.seen.take(warp, axis=0)
        if unordered.any():
            unordered &= (readers & _THREAD_MASK) != me[:, None]
        if unordered.any():
            item, reader = (int(axis[0]) for axis in np.nonzero(unordered))
            detail = f"shared {access.kind} while another thread may still read"
            self._fault("race", detail, access, item // parts, int(readers[item, reader]), "read")

    def _check_same_instruction(
        self, access: SharedAccess, granules: np.ndarray, record: np.ndarray, parts: int
    ) -> None:
        """Two threads that store to one granule in the same instruction; equal values are accepted."""
        stored = self._writes[granules]
        for item in np.flatnonzero(stored != record):
            winner = int(np.flatnonzero((record == stored[item]) & (granules == granules[item]))[0])
            if access.part_of_data(int(item), parts) == access.part_of_data(winner, parts):
                continue
            detail = "two threads store different values in one instruction"
            self._fault("race", detail, access, int(item) // parts, int(record[winner]), "write")

    # Reports -----------------------------------------------------------------------------------------

    def _fault(
        self, kind: ErrorKind, detail: str, access: SharedAccess, position: int, record: int, other_access: str
    ) -> NoReturn:
        item = self._wave.program.code[(record >> _PC_SHIFT) & _PC_MASK]
        is_copy = bool(record & int(_ASYNC))
        several = bool(record & int(_SEVERAL)) and not is_copy
        other = OtherParty(
            warp=(record >> _WARP_SHIFT) & int(_WARP_MASK),
            lane=None if several else record & (WARP_SIZE - 1),
            access="asynchronous copy" if is_copy else other_access,
            ptx_line=item.ptx_line,
            source_line=item.source.line if item.source else None,
            instruction=item.text,
        )
        self._wave.fault(kind, detail, position, int(access.addresses[position]), other)


def _classify(record: int, access: str) -> tuple[ErrorKind, str]:
    """The kind of a conflict with an earlier write."""
    if record & int(_PENDING):
        return "async-copy", f"shared {access} while an asynchronous copy to it has not been waited for"
    if record & int(_ASYNC) and access == "load":
        return (
            "async-copy",
            "shared load of data another thread copied asynchronously, without a barrier after its wait",
        )
    return "race", f"shared {access} not ordered after a write by another thread"
