"""Races on shared memory, by happens-before.

Each warp has a clock that advances when it synchronises, and knows how far it has seen every other warp of
its block (a vector clock, joined at barriers). Each *granule* of shared memory (the smallest access of the
kernel) remembers its last writer and, per warp, its last reader. Two accesses conflict when one is a write,
their threads differ, and the earlier one's stamp is not below what the later one's warp has seen.

What a warp starts and does not wait for (bulk copies, wgmma) accesses memory as a *party* of its own, with its own
column in the vector clocks (see `parties`); `async_hazards` checks those accesses.

A record of an access is one 64-bit number, so that one comparison decides:

    bit  62      61 … 36    35 … 17   16       15      14 … 6   5         4 … 0
        pending  stamp      pc        strong   async   party    several   lane
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .architecture import WARP_SIZE
from .errors import ErrorKind, OtherParty
from .memory_order import MemoryOrder, Observations, Ordering
from .parties import Parties

if TYPE_CHECKING:
    from .wave import Wave

_SEVERAL = np.int64(1 << 5)
PARTY_SHIFT, PARTY_MASK = 6, np.int64((1 << 9) - 1)
_ASYNC = np.int64(1 << 15)
_STRONG = np.int64(1 << 16)  # volatile, relaxed, acquire, release or atomic
_PC_SHIFT = 17
_PC_MASK = (1 << 19) - 1
_STAMP_SHIFT = 36
_PENDING = np.int64(1 << 62)
THREAD_MASK = np.int64((1 << 15) - 1)
TICK = np.int64(1 << _STAMP_SHIFT)
_ORDERED = np.int64(1)  # a record before every stamp


class WarpClocks:
    """``seen[w, u]``: warp ``w`` is ordered after the accesses of its block's party ``u`` with smaller stamps.

    ``seen[w, w]`` is the stamp of w's own accesses; it advances at each synchronisation. Values are kept
    shifted to the stamp's place in a record. Clocks are per warp: a barrier that only some lanes pass counts
    for all.
    """

    def __init__(self, warps: int, warps_per_block: int, parties: Parties) -> None:
        self._per_block = warps_per_block
        self.parties = parties
        self.seen = np.full((warps, parties.columns), TICK)
        self._own = np.arange(warps) % warps_per_block
        self._all = np.arange(warps)
        self.met = np.full(warps, TICK)
        """Stamp of each warp when its lanes last met: what they did before is ordered before what any of them does."""

    @property
    def columns(self) -> int:
        return int(self.seen.shape[1])

    def own(self) -> np.ndarray:
        """The current stamp of every warp."""
        return self.seen[self._all, self._own]

    def has_seen(self, warp: int, other: int, stamp: int) -> bool:
        """Whether a warp is ordered after what another of its block, or it itself, did at a stamp."""
        if warp == other:
            return True
        return warp // self._per_block == other // self._per_block and stamp < self.seen[warp, self._own[other]]

    def advance(self, warps: np.ndarray | slice) -> None:
        """Warp-level synchronisation: later accesses of these warps are ordered after their earlier ones."""
        index: np.ndarray = self._all[warps]
        self.seen[index, self._own[index]] += TICK

    def meet(self, warps: np.ndarray | slice | int) -> None:
        """All lanes of these warps are at a barrier."""
        index: np.ndarray = self._all[warps]
        self.met[index] = self.seen[index, self._own[index]]

    def fence_proxy(self, warps: np.ndarray | slice) -> None:
        """Asynchronous parties ordered after this will see what these warps wrote, and have seen, before it."""
        index: np.ndarray = self._all[warps]
        self.advance(index)
        by_warp = self.seen[index]
        fences = slice(self.parties.fences, self.parties.fences + self._per_block)
        by_warp[:, fences] = np.maximum(by_warp[:, fences], by_warp[:, : self._per_block])
        self.seen[index] = by_warp

    def publish(self, warp: int) -> np.ndarray:
        """The warp arrives somewhere: what it has seen and done so far, to be handed over by `join`."""
        self.seen[warp, self._own[warp]] += TICK
        return self.seen[warp].copy()

    def join(self, published: list[np.ndarray], receivers: list[int]) -> None:
        """The receivers have now seen all that was published."""
        self.seen[receivers] = np.maximum(self.seen[receivers], self.latest(published))

    def latest(self, published: list[np.ndarray]) -> np.ndarray:
        """All that was published, as one clock."""
        widest = [
            clock if clock.size == self.columns else np.pad(clock, (0, self.columns - clock.size))
            for clock in published
        ]
        return widest[0] if len(widest) == 1 else np.max(widest, axis=0)

    def see(self, warps: np.ndarray | list[int], column: int, stamp: np.int64) -> None:
        """These warps have waited for a party: they have seen all that it did before ``stamp``."""
        self.seen[warps, column] = np.maximum(self.seen[warps, column], stamp)

    def add_columns(self, columns: int) -> None:
        """Make room for at least this many parties."""
        if columns > self.columns:
            more = np.full((self._all.size, max(columns, 2 * self.columns) - self.columns), TICK)
            self.seen = np.concatenate([self.seen, more], axis=1)

    def join_blocks(self, threads: np.ndarray | None) -> None:
        """A barrier among all these threads of each block; None: among all threads."""
        by_block = self.seen.reshape(-1, self._per_block, self.columns)
        if threads is None:
            self.seen[self._all, self._own] += TICK
            self.meet(slice(None))
            by_block[:] = by_block.max(axis=1, keepdims=True)
            return
        takes_part: np.ndarray = np.any(threads.reshape(-1, self._per_block, WARP_SIZE), axis=2)
        self.advance(np.flatnonzero(takes_part))
        self.meet(np.flatnonzero(takes_part))
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
    ordering: Ordering | None = None  # of a strong access

    def by_granule(self, parts: int) -> np.ndarray:
        """[granule, byte]: what is written to all of the access's granules, ``parts`` per thread."""
        assert self.data is not None
        return self.data.view(np.uint8).reshape(-1, self.width // parts)


def one_per_place(records: np.ndarray, accesses: np.ndarray, kinds: np.ndarray | int = 0) -> list[tuple[int, int]]:
    """Of conflicts with ``records``, one per recorded instruction, state of its copy and kind (0 or 1), in order.

    Each is (index of the first, number of distinct ``accesses``).
    """
    if not records.size:
        return []
    keys = records & (_PENDING | _ASYNC | np.int64(_PC_MASK << _PC_SHIFT)) | kinds
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    pairs = np.unique(np.stack([place.ravel(), accesses]), axis=1)
    counts = np.bincount(pairs[0])
    return sorted(zip(first.tolist(), counts.tolist(), strict=True))


class RecentAccesses:
    """Of each warp, since its lanes last met: what a lane alone cannot tell others of."""

    _LIMIT = 256  # of a warp; older ones are forgotten

    def __init__(self, clocks: WarpClocks) -> None:
        self._clocks = clocks
        # By warp: (its stamp, granules, warp and lane of each, whether they were read).
        self._by_warp: dict[int, list[tuple[int, np.ndarray, np.ndarray, np.ndarray, bool]]] = {}

    def add(self, granules: np.ndarray, warps: np.ndarray, lanes: np.ndarray, is_read: bool) -> None:
        stamps, met = self._clocks.own(), self._clocks.met
        for warp in np.unique(warps).tolist():
            known = self._by_warp.setdefault(warp, [])
            if known and (known[-1][0] < met[warp] or len(known) >= self._LIMIT):
                known.clear()
            known.append((int(stamps[warp]), granules, warps, lanes, is_read))

    def of_others(self, warp: int, lanes: np.ndarray, told: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
        """(granules, whether they were read) of accesses by other lanes of the warp than these ([lane] of bool), but
        for those before a lane's stamp in ``told``."""
        met = self._clocks.met[warp]
        for stamp, granules, warps, own_lanes, is_read in self._by_warp.get(warp, ()):
            if stamp >= met:
                others = (warps == warp) & ~lanes[own_lanes] & (stamp >= told[own_lanes])
                if others.any():
                    yield granules[others], is_read


class HazardTracker:
    """Shadow state of a wave's shared memory."""

    def __init__(self, wave: Wave, granule: int) -> None:
        self._wave = wave
        self._shift = granule.bit_length() - 1
        granules = wave.blocks * wave.shared.stride // granule
        self.writes = np.zeros(granules, np.int64)
        self.parties = Parties(wave.warps_per_block, wave.program.has_asynchronous_parties)
        self._readers = self.parties.readers
        self._reads = np.zeros(granules * self._readers, np.int64)
        self.clocks = WarpClocks(wave.warps, wave.warps_per_block, self.parties)
        self.order = MemoryOrder(self.clocks)
        self._observations = Observations(self.clocks)
        self._recent = RecentAccesses(self.clocks) if self.parties.is_asynchronous else None
        self._thread_warp = np.arange(wave.threads) // WARP_SIZE
        self.thread_id = (wave.warp_in_block.astype(np.int64) << PARTY_SHIFT) | wave.lane

    # Accesses ----------------------------------------------------------------------------------------

    def check(self, access: SharedAccess) -> None:
        """Check an access of the active threads against those before it, and record it."""
        lanes = self._wave.lanes
        warp = self._thread_warp if lanes is None else self._thread_warp[lanes]
        me = self.thread_id if lanes is None else self.thread_id[lanes]
        parts = self._parts(access.width)
        granules = self._granules(access.flat, parts)
        if parts > 1:
            warp, me = np.repeat(warp, parts), np.repeat(me, parts)
        self._check_writer(access, granules, warp, me, parts)
        own = self.clocks.own()[warp]
        record = own | me | self._pc_field(self._wave.pc)
        if access.ordering is not None:
            record |= _STRONG
        if access.kind == "load":
            self._record_read(access, granules, me, record, own)
        else:
            self._check_readers(access, granules, warp, me, parts)
            if access.kind == "async-copy":
                record |= _PENDING | _ASYNC | _SEVERAL
            self.writes[granules] = record
            if access.ordering is None:
                self._check_same_instruction(access, granules, record, parts)
        if self._recent is not None and access.kind != "async-copy":
            self._recent.add(granules, warp, me & (WARP_SIZE - 1), access.kind == "load")
        if access.ordering is not None:
            self._synchronise(access, access.ordering, warp, granules)

    def publish_lanes(self, warp: int, lanes: np.ndarray, told: np.ndarray) -> np.ndarray:
        """These lanes of a warp ([lane] of bool) arrive somewhere: what they have done, and the warp has seen.

        What the other lanes did since all met is not ordered before: it counts as done after the arrival. An exception
        is what a lane did before its stamp in ``told``, which is brought up to date: it arrived there by itself, and
        whoever hears of this arrival hears of that one, too.
        """
        clock = self.clocks.publish(warp)
        if self._recent is None or lanes.all():
            return clock
        column = warp % self._wave.warps_per_block
        now, fence = clock[column], self.parties.fences + column
        far = self._wave.global_hazards
        is_moved = far is not None and far.leave_behind(warp, lanes, int(now), told)
        was_fenced = False
        for granules, is_read in self._recent.of_others(warp, lanes, told):
            state, places = (self._reads, granules * self._readers + column) if is_read else (self.writes, granules)
            records = state[places]
            of_lane = records & (WARP_SIZE - 1)
            chosen = ~lanes[of_lane] & (records >= told[of_lane])
            if is_read:
                chosen |= (records & _SEVERAL) != 0
            else:
                chosen &= ((records & _ASYNC) == 0) & ((records >> PARTY_SHIFT) & PARTY_MASK == column)
            chosen &= (records >= self.clocks.met[warp]) & (records < now)
            if chosen.any():
                is_moved = True
                was_fenced |= not is_read and bool((records[chosen] < clock[fence]).any())
                state[places[chosen]] = now | (records[chosen] & (TICK - 1))
        if is_moved:
            self.clocks.advance(np.array([warp]))
            if was_fenced:
                self.clocks.seen[warp, fence] = now + TICK
        told[lanes] = now
        return clock

    def _synchronise(self, access: SharedAccess, ordering: Ordering, warp: np.ndarray, granules: np.ndarray) -> None:
        if access.kind != "store":
            self.order.read(ordering, warp, granules)
        if access.kind != "load":
            self.order.write(ordering, warp, granules, is_atomic=access.kind == "atomic")

    def arrived(
        self, threads: np.ndarray, flat: np.ndarray, width: int, pc: int, stamps: np.ndarray | None = None
    ) -> None:
        """Data of ``cp.async`` is there for the threads that waited; others need a barrier after this.

        ``stamps`` say when the threads wrote it; without them, now.
        """
        parts = self._parts(width)
        if stamps is None:
            stamps = self.clocks.own()[self._thread_warp[threads]]
        record = stamps | self.thread_id[threads] | _ASYNC
        self.writes[self._granules(flat, parts)] = np.repeat(record | self._pc_field(pc), parts)

    def written_from_elsewhere(self, flat: np.ndarray, width: int) -> None:
        """Another block of the cluster wrote here, which is not checked for races: it counts as ordered."""
        self.writes[self._granules(flat, self._parts(width))] = _ORDERED

    # Accesses of asynchronous parties, in chunks -----------------------------------------------------

    def granules_of_chunks(self, flat: np.ndarray, width: int) -> np.ndarray:
        """[chunk, part]: the granules of chunks of ``width`` bytes."""
        parts = self._parts(width)
        return (flat >> self._shift)[:, None] + np.arange(parts)

    def reads_of(self, granules: np.ndarray) -> np.ndarray:
        """[granule, party]: the last reads."""
        return self._reads.reshape(-1, self._readers).take(granules, axis=0)

    def record_async_reads(self, granules: np.ndarray, columns: np.ndarray, stamps: np.ndarray) -> None:
        record = stamps | (columns << PARTY_SHIFT) | _SEVERAL | self._pc_field(self._wave.pc)
        self._reads[granules * self._readers + columns] = record

    def record_async_write(self, granules: np.ndarray, column: int, stamp: np.int64) -> None:
        self.writes[granules] = stamp | np.int64(column << PARTY_SHIFT) | _ASYNC | self._pc_field(self._wave.pc)

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
        written = self.writes[granules]
        if access.kind == "load" and not written.all():
            positions = np.unique(np.flatnonzero(written == 0) // parts)
            detail = f"shared load of {access.width} bytes that nobody wrote"
            self._report("uninitialised-shared", detail, access, int(positions[0]), None, positions.size)
        writer = (written >> PARTY_SHIFT) & PARTY_MASK
        unordered = written >= self.clocks.seen.ravel()[warp * self.clocks.columns + writer]
        if not unordered.any():
            return
        unordered &= (written & THREAD_MASK) != me
        is_strong = (written & _STRONG) != 0
        if access.ordering is not None:
            if access.kind == "load":
                found = unordered & is_strong
                self._observations.add(warp[found], granules[found], written[found])
            unordered &= ~is_strong
        elif (unordered & is_strong).any():
            chosen = np.flatnonzero(unordered & is_strong)
            unordered[chosen] = ~self._observations.include(warp[chosen], granules[chosen], written[chosen])
        items = np.flatnonzero(unordered)
        if access.kind == "store" and items.size:
            # The same value again is harmless, and a common idiom for flags.
            pending = (written[items] & _PENDING) != 0
            items = items[pending | ~self._is_unchanged(access, granules, items, parts)]
        for item, count in one_per_place(written[items], items // parts):
            record = int(written[items[item]])
            kind, detail = self.classify_write(record, f"shared {access.kind}")
            other = self.other_party(record, "write")
            self._report(kind, detail, access, int(items[item]) // parts, other, count)

    def _is_unchanged(self, access: SharedAccess, granules: np.ndarray, items: np.ndarray, parts: int) -> np.ndarray:
        """Which of a store's granules keep their value."""
        values = access.by_granule(parts)[items]
        stored = self._wave.shared.store.bytes.reshape(-1, values.shape[1])[granules[items]]
        return (stored == values).all(axis=1)

    def _record_read(
        self, access: SharedAccess, granules: np.ndarray, me: np.ndarray, record: np.ndarray, own: np.ndarray
    ) -> None:
        index = granules * self._readers + (me >> PARTY_SHIFT)
        before = self._reads[index]
        if access.ordering is not None:
            # A weak read of the warp since it last synchronised conflicts with more: its record stays.
            kept = (before >= own) & ((before & _STRONG) == 0)
            if kept.any():
                index, before, me, record, own = (array[~kept] for array in (index, before, me, record, own))
        also_read = (before >= own) & ((before & THREAD_MASK) != me)
        if also_read.any():  # another lane of the warp has read it since the warp last synchronised
            record = np.where(also_read, record | _SEVERAL, record)
        self._reads[index] = record
        lost = ((self._reads[index] ^ record) & THREAD_MASK) != 0
        if lost.any():  # several lanes of a warp read it in this instruction
            self._reads[index[lost]] = record[lost] | _SEVERAL

    def _check_readers(
        self, access: SharedAccess, granules: np.ndarray, warp: np.ndarray, me: np.ndarray, parts: int
    ) -> None:
        """A write against the last reads of each granule, by all warps."""
        readers = self.reads_of(granules)
        unordered = readers >= self.clocks.seen[:, : self._readers].take(warp, axis=0)
        if unordered.any():
            unordered &= (readers & THREAD_MASK) != me[:, None]
            if access.ordering is not None:
                unordered &= (readers & _STRONG) == 0
        if unordered.any():
            items, columns = np.nonzero(unordered)
            records = readers[items, columns]
            for place, count in one_per_place(records, items // parts):
                record = int(records[place])
                detail = self.classify_read(record, f"shared {access.kind}")
                other = self.other_party(record, "read")
                self._report("race", detail, access, int(items[place]) // parts, other, count)

    def _check_same_instruction(
        self, access: SharedAccess, granules: np.ndarray, record: np.ndarray, parts: int
    ) -> None:
        """Two threads that store to one granule in the same instruction; equal values are accepted."""
        losers = np.flatnonzero(self.writes[granules] != record)
        if not losers.size:
            return
        # Of several stores to a granule the last one's record stays.
        order = np.argsort(granules, kind="stable")
        last = order[np.searchsorted(granules, granules[losers], side="right", sorter=order) - 1]
        values = access.by_granule(parts)
        differs = (values[losers] != values[last]).any(axis=1)
        if differs.any():
            loser, winner = int(losers[differs][0]), int(last[differs][0])
            detail = "two threads store different values in one instruction"
            other = self.other_party(int(record[winner]), "write")
            self._report("race", detail, access, loser // parts, other, int(np.count_nonzero(differs)))

    # Reports -----------------------------------------------------------------------------------------

    def other_party(self, record: int, access: str) -> OtherParty:
        """Who made a record, for a report."""
        item = self._wave.program.code[(record >> _PC_SHIFT) & _PC_MASK]
        party = (record >> PARTY_SHIFT) & int(PARTY_MASK)
        is_copy = bool(record & int(_ASYNC))
        several = bool(record & int(_SEVERAL)) and not is_copy
        warp: int | None = party
        if party >= self.parties.warps:
            warp, access = self.parties.warp_behind(party), self.parties.access_of(party)
        elif is_copy:
            access = "asynchronous copy"
        return OtherParty(
            warp=warp,
            lane=None if several or warp is None else record & (WARP_SIZE - 1),
            access=access,
            ptx_line=item.ptx_line,
            source_line=item.source.line if item.source else None,
            source_file=item.source.file if item.source else None,
            instruction=item.text,
        )

    def _report(
        self,
        kind: ErrorKind,
        detail: str,
        access: SharedAccess,
        position: int,
        other: OtherParty | None,
        count: int,
    ) -> None:
        thread = self._wave.thread_at(position)
        self._wave.hazard(kind, detail, thread, int(access.addresses[position]), other, count=count)

    def classify_write(self, record: int, access: str) -> tuple[ErrorKind, str]:
        """The kind of a conflict of an access with an earlier write."""
        if record & int(_PENDING):
            return "async-copy", f"{access} while an asynchronous copy to it has not been waited for"
        if (record >> PARTY_SHIFT) & int(PARTY_MASK) >= self.parties.readers:
            return "async-copy", f"{access} while a bulk copy to it may be in flight: its mbarrier was not waited for"
        if record & int(_ASYNC) and access == "shared load":
            return (
                "async-copy",
                "shared load of data another thread copied asynchronously, without a barrier after its wait",
            )
        return "race", f"{access} not ordered after a write by another thread"

    def classify_read(self, record: int, access: str) -> str:
        """What is wrong with a write while an earlier read may not have ended."""
        party = (record >> PARTY_SHIFT) & int(PARTY_MASK)
        if party < self.parties.warps:
            return f"{access} while another thread may still read"
        return f"{access} while a {self.parties.access_of(party)} that was not waited for may be in progress"
