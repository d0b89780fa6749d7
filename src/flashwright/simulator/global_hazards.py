"""Races on global memory, between warps of the same thread block and of different ones, by happens-before.

Within a block the order is that of the vector clocks of `hazards`. Between blocks it is made by flags alone: a release
of gpu scope hands over what its warp knows, an acquire receives it. What a warp *knows* is a clock over all warps of
the launch: a number per warp, whose accesses of smaller stamps are ordered before what the knowing warp does next.

Knowledge of other blocks is not carried through the barriers of a block. Each warp keeps what it acquired, with its
stamp at that time; another warp of its block knows it if it has seen a later stamp of the acquirer. So a barrier costs
nothing more, and a kernel pays where it releases and acquires.

Each granule of memory (the narrowest global access of the kernel) remembers its last write and its last read. A record
is one 64-bit number:

    bit  60 … 35   34 … 16   15 … 2   1      0
         stamp     pc        warp     wide   strong

A strong access (volatile, relaxed, acquire, release, atomic) of gpu or system scope is *wide*. One of block scope is
strong to its own block alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .architecture import WARP_SIZE
from .errors import ErrorKind, OtherParty
from .hazards import TICK, RecentAccesses, WarpClocks
from .memory.windows import GLOBAL_BASE
from .memory_order import RELAXED, Observations, Ordering, distinct_pairs

if TYPE_CHECKING:
    from .wave import Wave

MAX_WARPS = 1 << 14
"""Of a launch whose global memory is checked for races: what a record has room for."""

_STRONG, _WIDE = np.int64(1), np.int64(2)
_WARP_SHIFT, _PC_SHIFT, _STAMP_SHIFT = 2, 16, 35
_WARP_MASK = np.int64(MAX_WARPS - 1)
_WARP_FIELD = _WARP_MASK << np.int64(_WARP_SHIFT)
_PC_MASK = (1 << (_STAMP_SHIFT - _PC_SHIFT)) - 1
_NEVER = np.int64(((1 << 26) - 1) << _STAMP_SHIFT)  # a stamp that nobody has seen
_TICK_SHIFT = int(TICK).bit_length() - 1
_KEPT_FENCES = 4  # of each warp: others may have seen an older one than its last

Knowledge = np.ndarray  # of every warp of the launch, how far it is known


@dataclass(frozen=True)
class _Released:
    """What a value in memory hands over: to every block, and to the blocks that released it for themselves."""

    wide: Knowledge | None = None
    by_block: dict[int, Knowledge] = field(default_factory=dict)


class GlobalShadow:
    """What all waves of a launch remember of its accesses to global memory."""

    def __init__(self, memory_bytes: int, granule: int, warps: int) -> None:
        self.granule = granule
        self.warps = warps
        self.writes = np.zeros(memory_bytes // granule, np.int64)
        self.reads = np.zeros(memory_bytes // granule, np.int64)
        self.released: dict[int, _Released] = {}  # by granule
        self.version = 0
        """Advances with every write and every fence."""


class _BlockOrder:
    """What the warps of a wave know of other thread blocks, and hand over to them."""

    def __init__(self, clocks: WarpClocks, shadow: GlobalShadow, first_warp: int, warps_per_block: int) -> None:
        self._clocks = clocks
        self._shadow = shadow
        self._first_warp = first_warp
        self._per_block = warps_per_block
        # By block of the wave and warp: (stamp, everything acquired until then).
        self._acquired: dict[int, dict[int, list[tuple[int, Knowledge]]]] = {}
        # By block of the wave and warp: (stamp, what lies before the fence, whether it is of gpu scope).
        self._fences: dict[int, dict[int, list[tuple[int, Knowledge, bool]]]] = {}
        # By warp: what a fence of gpu scope, and one of block scope, makes of its relaxed reads.
        self._read: dict[int, tuple[Knowledge | None, Knowledge | None]] = {}
        self._last_acquired: dict[tuple[int, int], _Released] = {}

    def knowledge(self, warp: int) -> Knowledge | None:
        """Of other blocks; None: of none."""
        known = None
        for other, acquired in self._acquired.get(warp // self._per_block, {}).items():
            for stamp, clock in reversed(acquired):
                if self._clocks.has_seen(warp, other, stamp):
                    known = _latest(known, clock)
                    break
        return known

    def fence(self, warps: np.ndarray, is_wide: bool) -> None:
        for warp in warps.tolist():
            if warp in self._read:
                wide, own = self._read.pop(warp)
                self._acquire(warp, wide if is_wide else own)
            clock = self._publish(warp)
            fences = self._fences.setdefault(warp // self._per_block, {}).setdefault(warp, [])
            fences.append((self._stamp(warp), clock, is_wide))
            del fences[:-_KEPT_FENCES]

    def access(self, ordering: Ordering, what: str, warps: np.ndarray, granules: np.ndarray) -> None:
        """Strong accesses by threads of these warps, of a granule each; atomic ones one after the other."""
        reads, writes = what != "store" and ordering.observes, what != "load"
        released = self._shadow.released
        if not (released or (writes and (ordering.releases or self._fences))):
            return
        for warp, granule in distinct_pairs(warps, granules):
            value = released.get(granule)
            if reads and value is not None:
                self._read_value(ordering, warp, granule, value)
            if writes:
                before = value if value is not None and what == "atomic" else _Released()
                after = self._written_value(ordering, warp, before)
                if after.wide is not None or after.by_block:
                    released[granule] = after
                elif value is not None:
                    del released[granule]

    def _read_value(self, ordering: Ordering, warp: int, granule: int, value: _Released) -> None:
        if not ordering.acquires:
            before = self._read.get(warp, (None, None))
            wide = self._received(value, warp, ordering.is_wide)
            own = self._received(value, warp, is_wide=False)
            self._read[warp] = _latest(before[0], wide), _latest(before[1], own)
        elif self._last_acquired.get((warp, granule)) is not value:
            self._last_acquired[warp, granule] = value
            self._acquire(warp, self._received(value, warp, ordering.is_wide))

    def _written_value(self, ordering: Ordering, warp: int, before: _Released) -> _Released:
        """What a value hands over: what its writer does, and what an atomic access found there."""
        wide, own = self._handed_over(warp, ordering)
        by_block, block = before.by_block, (self._first_warp + warp) // self._per_block
        latest = _latest(by_block.get(block), own)
        if latest is not None:
            by_block = {**by_block, block: latest}
        return _Released(_latest(before.wide, wide), by_block)

    def _handed_over(self, warp: int, ordering: Ordering) -> tuple[Knowledge | None, Knowledge | None]:
        """What a write hands over to all blocks, and to its own."""
        wide = own = None
        if ordering.releases:
            published = self._publish(warp)
            wide, own = (published, None) if ordering.is_wide else (None, published)
        for other, fences in self._fences.get(warp // self._per_block, {}).items():
            seen = [(clock, is_wide) for stamp, clock, is_wide in fences if self._clocks.has_seen(warp, other, stamp)]
            for clock, is_wide in seen:
                if is_wide and ordering.is_wide:
                    wide = _latest(wide, clock)
                else:
                    own = _latest(own, clock)
        return wide, own

    def _received(self, value: _Released, warp: int, is_wide: bool) -> Knowledge | None:
        block = self._block_of(warp)
        own = value.by_block.get(block.start // self._per_block)
        if value.wide is None:
            return own
        if is_wide:
            return _latest(value.wide, own)
        masked = np.zeros_like(value.wide)
        masked[block] = value.wide[block]
        return _latest(masked, own)

    def _acquire(self, warp: int, clock: Knowledge | None) -> None:
        if clock is None:
            return
        seen = self._clocks.seen[warp, : self._per_block]
        np.maximum(seen, clock[self._block_of(warp)] << np.int64(_TICK_SHIFT), out=seen)
        acquired = self._acquired.setdefault(warp // self._per_block, {}).setdefault(warp, [])
        everything = _latest(acquired[-1][1], clock) if acquired else clock
        assert everything is not None
        if acquired and acquired[-1][0] == self._stamp(warp):
            acquired.pop()
        acquired.append((self._stamp(warp), everything))

    def _publish(self, warp: int) -> Knowledge:
        """All that the warp knows and has done so far."""
        own = self._clocks.publish(warp)[: self._per_block] >> _TICK_SHIFT
        known = self.knowledge(warp)
        clock = np.zeros(self._shadow.warps, np.int64) if known is None else known.copy()
        block = self._block_of(warp)
        clock[block] = np.maximum(clock[block], own)
        return clock

    def _block_of(self, warp: int) -> slice:
        """The warps of its block, in the launch."""
        first = self._first_warp + warp // self._per_block * self._per_block
        return slice(first, first + self._per_block)

    def _stamp(self, warp: int) -> int:
        return int(self._clocks.seen[warp, warp % self._per_block])


def _latest(one: Knowledge | None, other: Knowledge | None) -> Knowledge | None:
    if one is None or one is other:
        return other
    return one if other is None else np.maximum(one, other)


@dataclass(frozen=True)
class _Access:
    """One access to global memory by each active thread, granule by granule."""

    what: str  # load, store, atomic or async-copy
    addresses: np.ndarray
    parts: int
    granules: np.ndarray
    warps: np.ndarray  # of the wave
    data: np.ndarray | None
    ordering: Ordering | None
    thread: int | None = None  # which has the copy engine access all of it

    @property
    def flags(self) -> np.int64:
        if self.ordering is None:
            return np.int64(0)
        return _STRONG | _WIDE if self.ordering.is_wide else _STRONG


@dataclass(frozen=True)
class BulkWrite:
    """By the copy engine: the granules, and what they remember until the thread that started it has waited for it."""

    granules: np.ndarray
    record: np.int64
    warp: int


class GlobalHazards:
    """Checks the accesses of a wave to global memory."""

    def __init__(self, wave: Wave, clocks: WarpClocks, shadow: GlobalShadow, first_warp: int) -> None:
        self._wave = wave
        self._clocks = clocks
        self._shadow = shadow
        self._first_warp = first_warp
        self._shift = shadow.granule.bit_length() - 1
        self._thread_warp = np.arange(wave.threads) // WARP_SIZE
        self._order = _BlockOrder(clocks, shadow, first_warp, wave.warps_per_block)
        # By place in the program: version of the shadow, active threads, and addresses of the last strong load.
        self._last_loads: dict[int, tuple[int, np.ndarray | None, np.ndarray]] = {}
        self._looks_for_sums = wave.hazard_policy.looks_for("unordered-sum")
        self._observations = Observations(clocks)
        self._recent = RecentAccesses(clocks) if clocks.parties.is_asynchronous else None

    def fence(self, warps: np.ndarray, is_wide: bool) -> None:
        """A fence of memory by these warps, of gpu scope or of their block's."""
        self._shadow.version += 1
        self._order.fence(warps, is_wide)

    def check(self, addresses: np.ndarray, width: int, what: str, data: np.ndarray | None) -> None:
        """Check an access of the active threads against those before it, and record it."""
        wave, shadow = self._wave, self._shadow
        if what not in ("load", "async-copy"):
            shadow.version += 1
        elif wave.ordering is not None and self._is_repeated(addresses):
            return
        access = self._access(addresses, width, what, data)
        granules = access.granules
        me = (self._first_warp + access.warps) << _WARP_SHIFT
        writes = shadow.writes[granules]
        unchanged = self._compare(access, writes, me, "write")
        stamps = self._clocks.own() >> np.int64(_TICK_SHIFT)
        record = (stamps[access.warps] << _STAMP_SHIFT) | me | access.flags | (min(wave.pc, _PC_MASK) << _PC_SHIFT)
        if what in ("load", "async-copy"):
            shadow.reads[granules] = record
            if access.ordering is not None:
                found = ((writes & _STRONG) != 0) & (((writes ^ me) & _WARP_FIELD) != 0)
                self._observations.add(access.warps[found], granules[found], writes[found])
        else:
            self._compare(access, shadow.reads[granules], me, "read")
            shadow.writes[granules] = record
            shadow.writes[granules[unchanged]] = 0
            self._check_same_instruction(access, record)
        if self._recent is not None:
            lanes = self._wave.lane if self._wave.lanes is None else self._wave.lane[self._wave.lanes]
            lanes = np.repeat(lanes, access.parts) if access.parts > 1 else lanes
            self._recent.add(granules, access.warps, lanes, what in ("load", "async-copy"))
        if access.ordering is not None and access.ordering.is_flag:
            self._order.access(access.ordering, what, access.warps, granules)

    def leave_behind(self, warp: int, lanes: np.ndarray, now: int, told: np.ndarray) -> bool:
        """These lanes of a warp ([lane] of bool) arrive somewhere: what others did since all met, and have not told
        before (`HazardTracker.publish_lanes`), counts as done now.

        Whether there was any.
        """
        if self._recent is None:
            return False
        is_moved = False
        met, stamp = (np.int64(time >> _TICK_SHIFT) for time in (self._clocks.met[warp], now))
        for granules, is_read in self._recent.of_others(warp, lanes, told):
            records = self._shadow.reads if is_read else self._shadow.writes
            found = records[granules]
            stamps = found >> _STAMP_SHIFT
            is_mine = (found >> _WARP_SHIFT) & _WARP_MASK == self._first_warp + warp
            chosen = is_mine & (stamps >= met) & (stamps < stamp) & (found != 0)
            if chosen.any():
                rest = np.int64((1 << _STAMP_SHIFT) - 1)
                records[granules[chosen]] = (stamp << np.int64(_STAMP_SHIFT)) | (found[chosen] & rest)
                is_moved = True
        return is_moved

    def bulk_write(self, thread: int, starts: np.ndarray, length: int, ordering: Ordering | None) -> BulkWrite | None:
        """Check a write that the copy engine makes for a thread, ``length`` bytes from each of ``starts`` on.

        Nobody is ordered after it until the thread has waited for it (`complete`). None: it is not made of granules.
        """
        granule = self._shadow.granule
        if length % granule or (starts % granule).any():
            return None
        self._shadow.version += 1
        addresses = (starts[:, None] + np.arange(0, length, granule)).ravel()
        granules = (addresses - GLOBAL_BASE) >> self._shift
        warp = thread // WARP_SIZE
        warps = np.full(granules.size, warp)
        access = _Access("bulk write", addresses, 1, granules, warps, None, ordering, thread)
        me = np.int64((self._first_warp + warp) << _WARP_SHIFT)
        for records, earlier in ((self._shadow.writes[granules], "write"), (self._shadow.reads[granules], "read")):
            self._compare(access, records, np.full(granules.size, me), earlier)
        record = _NEVER | me | access.flags | np.int64(min(self._wave.pc, _PC_MASK) << _PC_SHIFT)
        self._shadow.writes[granules] = record
        return BulkWrite(granules, record, warp)

    def complete(self, write: BulkWrite) -> None:
        """The thread has waited until it was made: it is one of the thread's own by now."""
        own = np.int64(self._clocks.own()[write.warp] >> np.int64(_TICK_SHIFT)) << np.int64(_STAMP_SHIFT)
        kept = write.granules[self._shadow.writes[write.granules] == write.record]
        self._shadow.writes[kept] = (write.record & ~_NEVER) | own

    def _is_repeated(self, addresses: np.ndarray) -> bool:
        """Whether the active threads, maybe spinning, have just made this load, and nothing was written since."""
        wave, lanes = self._wave, self._wave.lanes
        version, last_lanes, before = self._last_loads.get(wave.pc, (-1, None, addresses))
        self._last_loads[wave.pc] = self._shadow.version, lanes, addresses
        if version != self._shadow.version or not np.array_equal(before, addresses):
            return False
        if lanes is None or last_lanes is None:
            return lanes is last_lanes
        return np.array_equal(last_lanes, lanes)

    def _access(self, addresses: np.ndarray, width: int, what: str, data: np.ndarray | None) -> _Access:
        lanes = self._wave.lanes
        warps = self._thread_warp if lanes is None else self._thread_warp[lanes]
        granules, parts = (addresses - GLOBAL_BASE) >> self._shift, width >> self._shift
        if parts > 1:
            granules = (granules[:, None] + np.arange(parts)).ravel()
            warps = np.repeat(warps, parts)
        ordering = RELAXED if what == "atomic" and self._wave.ordering is None else self._wave.ordering
        return _Access(what, addresses, parts, granules, warps, data, ordering)

    def _compare(self, access: _Access, records: np.ndarray, me: np.ndarray, earlier: str) -> np.ndarray:
        """Check against earlier accesses; which granules a store leaves as an unordered one had made them."""
        items = np.flatnonzero((records != 0) & (((records ^ me) & _WARP_FIELD) != 0))
        none = items[:0]
        if not items.size:
            return none
        records, warps = records[items], access.warps[items]
        theirs = (records >> _WARP_SHIFT) & _WARP_MASK
        is_near = self._is_near(warps, theirs)
        is_sum = False
        if access.ordering is not None:
            are_atomic = (records & _STRONG) != 0
            if not access.ordering.is_wide:
                are_atomic &= is_near
            are_atomic &= is_near | ((records & _WIDE) != 0)
            is_sum = access.ordering.is_sum and self._looks_for_sums and earlier == "write"
            if not is_sum:
                chosen = np.flatnonzero(~are_atomic)
                items, records, warps, theirs, is_near = (
                    array[chosen] for array in (items, records, warps, theirs, is_near)
                )
                are_atomic = are_atomic[chosen]
        if not items.size:
            return none
        unordered = np.flatnonzero((records >> _STAMP_SHIFT) >= self._known(warps, theirs, is_near))
        if not unordered.size:
            return none
        items, records = items[unordered], records[unordered]
        if access.ordering is None and earlier == "write":
            unseen = ~self._observations.include(access.warps[items], access.granules[items], records)
            items, records = items[unseen], records[unseen]
        if access.ordering is None and access.what == "store":
            is_same = self._is_unchanged(access, items)
            self._report(access, items[~is_same], records[~is_same], earlier)
            return items[is_same]
        if is_sum:
            are_atomic = are_atomic[unordered]
            self._report(access, items[are_atomic], records[are_atomic], earlier, is_sum=True)
            items, records = items[~are_atomic], records[~are_atomic]
        self._report(access, items, records, earlier)
        return none

    def _is_near(self, warps: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        """Which of the wave's warps are of the same block as those of the launch."""
        per_block = self._wave.warps_per_block
        return theirs // per_block == (self._first_warp + warps) // per_block

    def _known(self, warps: np.ndarray, theirs: np.ndarray, is_near: np.ndarray) -> np.ndarray:
        """How far each of these warps knows another of the launch."""
        known = self._clocks.seen[warps, theirs % self._wave.warps_per_block] >> np.int64(_TICK_SHIFT)
        far = np.flatnonzero(~is_near)
        if far.size:
            known[far] = 0
            for warp in np.unique(warps[far]).tolist():
                clock = self._order.knowledge(warp)
                if clock is not None:
                    mine = far[warps[far] == warp]
                    known[mine] = clock[theirs[mine]]
        return known

    def _is_unchanged(self, access: _Access, items: np.ndarray) -> np.ndarray:
        """Which of a store's granules keep their value: several threads may store the same."""
        stored = self._wave.global_memory.bytes.reshape(-1, self._shadow.granule)[access.granules[items]]
        return (stored == self._values(access)[items]).all(axis=1)

    def _values(self, access: _Access) -> np.ndarray:
        """[granule, byte]: what is stored."""
        assert access.data is not None
        return np.ascontiguousarray(access.data).view(np.uint8).reshape(-1, self._shadow.granule)

    def _check_same_instruction(self, access: _Access, record: np.ndarray) -> None:
        """Two warps that write to one granule in the same instruction; stores of equal values are accepted."""
        granules, ordering = access.granules, access.ordering
        is_sum = ordering is not None and ordering.is_sum and self._looks_for_sums
        if ordering is not None and ordering.is_wide and not is_sum:
            return
        kept = self._shadow.writes[granules]
        losers = np.flatnonzero((kept != record) & (kept != 0))
        if not losers.size:
            return
        if ordering is not None:
            theirs = (kept[losers] >> _WARP_SHIFT) & _WARP_MASK
            is_near = self._is_near(access.warps[losers], theirs)
            self._report(access, losers[~is_near], kept[losers[~is_near]], "write", is_sum and ordering.is_wide)
            if is_sum:
                self._report(access, losers[is_near], kept[losers[is_near]], "write", is_sum=True)
            return
        # Of several stores to a granule the last one's record stays.
        order = np.argsort(granules, kind="stable")
        last = order[np.searchsorted(granules, granules[losers], side="right", sorter=order) - 1]
        values = self._values(access)
        differs = (values[losers] != values[last]).any(axis=1)
        self._report(access, losers[differs], kept[losers[differs]], "write")
        self._shadow.writes[granules[losers[~differs]]] = 0

    def _report(
        self, access: _Access, items: np.ndarray, records: np.ndarray, earlier: str, is_sum: bool = False
    ) -> None:
        """One hazard for each instruction that made the earlier accesses."""
        if not items.size:
            return
        kind: ErrorKind = "unordered-sum" if is_sum else "global-race"
        detail = f"global {access.what} not ordered after a {earlier} by another warp"
        if is_sum:
            detail = "an addition not ordered after one by another warp: the sum's last bits may vary from run to run"
        pcs = (records >> _PC_SHIFT) & _PC_MASK
        for pc in np.unique(pcs).tolist():
            chosen = np.flatnonzero(pcs == pc)
            count = np.unique(items[chosen] // access.parts).size
            position, record = int(items[chosen[0]]) // access.parts, int(records[chosen[0]])
            self._wave.hazard(
                kind,
                detail,
                self._wave.thread_at(position) if access.thread is None else access.thread,
                int(access.addresses[position]),
                self._other(record, earlier),
                count=count,
            )

    def _other(self, record: int, earlier: str) -> OtherParty:
        item = self._wave.program.code[(record >> _PC_SHIFT) & _PC_MASK]
        block, warp = divmod((record >> _WARP_SHIFT) & int(_WARP_MASK), self._wave.warps_per_block)
        columns, rows, _ = self._wave.grid_shape
        return OtherParty(
            warp=warp,
            lane=None,
            access=earlier,
            ptx_line=item.ptx_line,
            source_line=item.source.line if item.source else None,
            source_file=item.source.file if item.source else None,
            instruction=item.text,
            thread_block=(block % columns, block // columns % rows, block // (columns * rows)),
        )
