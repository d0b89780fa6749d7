"""mbarriers: counters of arrivals and bytes in shared memory, and the threads that wait for their phases.

A phase completes when all expected arrivals and all expected bytes have come; the next one begins at once. A
thread that waits for an incomplete phase is parked until it completes. Should nobody be able to run, parked threads
are told that the phase is not complete yet (hardware does that after a time limit); when they come back again and
again without any progress, it is a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..architecture import WARP_SIZE
from ..errors import ErrorKind
from ..hazards import TICK

if TYPE_CHECKING:
    from ..wave import Wave

MBARRIER_BYTES = 8
# Where the pending arrivals are in a state; the phase is below.
PENDING_SHIFT = 44
MAX_COUNT = (1 << 20) - 1  # of arrivals, and of bytes in either direction
# Rounds in which every waiting thread looked at its barrier and nothing completed, before it is called a deadlock: a
# kernel that gives up by itself after a few attempts may still do so.
_PATIENCE = 64
# What the records of `hazards` have room for beside a block's other parties.
MAX_MBARRIERS = 256


class Mbarrier:
    """One mbarrier of one block."""

    def __init__(self, block: int, address: int, index: int) -> None:
        self.block = block
        self.address = address
        self.index = index
        self.phase = 0  # counts on when the barrier is initialised again
        self.parity = 0
        self.expected = 0
        self.pending = 0
        self.bytes = 0  # expected and not yet copied
        self.is_valid = False
        self.initialiser = -1  # warp, of the wave
        self.init_stamp = np.int64(0)
        self.arrivals: list[np.ndarray] = []  # clocks of those that arrived in this phase
        self.arrived: list[tuple[int, int]] = []  # warps in this phase, and their stamps
        self.told: dict[int, np.ndarray] = {}  # by warp, in this phase: of each lane, before which stamp it has arrived
        self.ends_by_itself = True  # whether this phase ends by those arrivals alone: no copies, no other blocks
        self.arrived_before: list[tuple[int, int]] | None = []  # in the phase before; None: it did not end by itself
        self.handed_over: np.ndarray | None = None  # what a thread that waited has seen

    @property
    def state(self) -> str:
        arrived = self.expected - self.pending
        text = f"phase {self.phase} (parity {self.parity}) has {arrived} of {self.expected} arrivals"
        if self.bytes > 0:
            return f"{text}, and a tx-count of {self.bytes} bytes expected but not copied"
        return f"{text}, and {-self.bytes} bytes copied beyond those expected" if self.bytes else text


@dataclass(frozen=True)
class _Parked:
    pc: int
    threads: np.ndarray
    barrier: Mbarrier
    parity: int
    put: Callable[[Wave, np.ndarray], None]


class Mbarriers:
    """All mbarriers of a wave."""

    deadlock_kind: ErrorKind = "deadlock"

    def __init__(self, wave: Wave, fails_spuriously: bool) -> None:
        self._wave = wave
        self._fails_spuriously = fails_spuriously
        self._has_failed = np.zeros(wave.threads, bool)  # whether a thread's last wait failed spuriously
        self._barriers: dict[tuple[int, int], Mbarrier] = {}
        self._per_block: dict[int, int] = {}
        self._parked: list[_Parked] = []
        self._phases = 0
        self._progress_at_timeout: tuple[int, ...] = ()
        self._fruitless = 0

    # Life --------------------------------------------------------------------------------------------

    def initialise(self, thread: int, address: int, count: int) -> None:
        wave = self._wave
        if not 1 <= count <= MAX_COUNT:
            wave.fault_thread("mbarrier", f"initialised for {count} arrivals; allowed: 1 to {MAX_COUNT}", thread)
        block, address = (
            int(wave.block_of_thread[thread]),
            wave.shared.own_offset(wave, thread, address, "mbarrier.init"),
        )
        barrier = self._barriers.get((block, address))
        if barrier is None:
            index = self._per_block.get(block, 0)
            if index >= MAX_MBARRIERS:
                wave.fault_thread("unsupported", f"more than {MAX_MBARRIERS} mbarriers in a block", thread, address)
            self._per_block[block] = index + 1
            barrier = self._barriers[block, address] = Mbarrier(block, address, index)
        else:
            barrier.phase += 1
        barrier.expected = barrier.pending = count
        barrier.bytes = barrier.parity = 0
        barrier.is_valid = True
        barrier.arrivals = []
        barrier.arrived, barrier.arrived_before = [], []
        barrier.told = {}
        barrier.ends_by_itself = True
        barrier.handed_over = None
        if wave.hazards is not None:
            clocks = wave.hazards.clocks
            clocks.add_columns(wave.hazards.parties.mbarrier(barrier.index) + 1)
            barrier.initialiser = thread // WARP_SIZE
            barrier.init_stamp = clocks.own()[barrier.initialiser]

    def invalidate(self, thread: int, address: int) -> None:
        self.find(thread, address).is_valid = False

    def find(self, thread: int, address: int, asynchronous: bool = False) -> Mbarrier:
        """The barrier a thread means; a fault if it is none, or its initialisation is not ordered before this."""
        wave = self._wave
        barrier = self._barriers.get(wave.clusters.target(thread, address))
        if barrier is None or not barrier.is_valid:
            wave.fault_thread("mbarrier", "there is no initialised mbarrier at this address", thread, address)
        if self._is_remote(barrier, thread):
            wave.shared.check_running(wave, thread, barrier.block, address)
        elif wave.hazards is not None:
            self._check_initialised(barrier, thread, asynchronous)
        return barrier

    def _is_remote(self, barrier: Mbarrier, thread: int) -> bool:
        """Whether it is in another block than the thread: their clocks say nothing to each other."""
        return barrier.block != int(self._wave.block_of_thread[thread])

    def _check_initialised(self, barrier: Mbarrier, thread: int, asynchronous: bool) -> None:
        wave = self._wave
        assert wave.hazards is not None
        warp = thread // WARP_SIZE
        seen = wave.hazards.clocks.seen[warp]
        column = barrier.initialiser % wave.warps_per_block
        if warp != barrier.initialiser and barrier.init_stamp >= seen[column]:
            detail = "mbarrier used without a barrier after its initialisation by another warp"
            wave.hazard("race", detail, thread, barrier.address)
        if asynchronous and barrier.init_stamp >= seen[wave.hazards.parties.fences + column]:
            detail = (
                "bulk copy to an mbarrier whose initialisation was not followed by fence.mbarrier_init or "
                "fence.proxy.async"
            )
            wave.hazard("proxy-fence" if wave.clusters.size > 1 else "mbarrier-fence", detail, thread, barrier.address)

    def within(self, block: int, start: int, end: int) -> Mbarrier | None:
        """A valid barrier of the block that overlaps a range of shared memory."""
        for (owner, address), barrier in self._barriers.items():
            if owner == block and barrier.is_valid and start < address + MBARRIER_BYTES and address < end:
                return barrier
        return None

    # Arrivals and bytes ------------------------------------------------------------------------------

    def arrive(
        self,
        thread: int,
        address: int,
        count: int,
        expect_bytes: int = 0,
        drop: bool = False,
        may_complete: bool = True,
    ) -> int:
        """Returns the state before the arrival: the phase, and above it the pending arrivals."""
        wave = self._wave
        barrier = self.find(thread, address)
        state = barrier.phase | barrier.pending << PENDING_SHIFT
        self._check_phase_before(barrier, thread)
        if expect_bytes:
            self._add_bytes(barrier, thread, expect_bytes)
        if not 1 <= count <= barrier.pending:
            detail = f"an arrival of {count} too many at an mbarrier whose {barrier.state}"
            wave.fault_thread("mbarrier", detail, thread, address)
        if count == barrier.pending and not may_complete:
            detail = f"an arrival with .noComplete is the last one at an mbarrier whose {barrier.state}"
            wave.fault_thread("mbarrier", detail, thread, address)
        if drop:
            barrier.expected -= count
        barrier.pending -= count
        if wave.hazards is not None and not self._is_remote(barrier, thread):
            warp = thread // WARP_SIZE
            lanes = wave.active_mask[warp * WARP_SIZE : (warp + 1) * WARP_SIZE]
            barrier.arrived.append((warp, int(wave.hazards.clocks.own()[warp])))
            told = barrier.told.setdefault(warp, np.zeros(WARP_SIZE, np.int64))
            barrier.arrivals.append(wave.hazards.publish_lanes(warp, lanes, told))
        elif wave.remote_accesses is not None:
            barrier.ends_by_itself = False
            wave.remote_accesses.arrive(thread, barrier)
        self._complete_if_done(barrier)
        return state

    def _check_phase_before(self, barrier: Mbarrier, thread: int) -> None:
        """A hazard if an arrival is not ordered after the end of the phase before: it might count for that one."""
        wave = self._wave
        if wave.hazards is None or self._is_remote(barrier, thread):
            return
        clocks, warp = wave.hazards.clocks, thread // WARP_SIZE
        if clocks.seen[warp, wave.hazards.parties.mbarrier(barrier.index)] >= (barrier.phase + 1) * TICK:
            return
        before = barrier.arrived_before
        if before is not None and all(clocks.has_seen(warp, other, stamp) for other, stamp in before):
            return
        detail = "arrival at an mbarrier, not ordered after the end of its phase before: it may count for that one"
        wave.hazard("race", detail, thread, barrier.address)

    def expect_arrival(self, thread: int, address: int, is_counted: bool) -> Mbarrier:
        """A later arrival by itself (see `arrive_asynchronously`); if counted, one more is pending until then."""
        barrier = self.find(thread, address)
        self._check_phase_before(barrier, thread)
        barrier.pending += is_counted
        if barrier.pending > MAX_COUNT:
            detail = f"{barrier.pending} arrivals are pending at an mbarrier; allowed: up to {MAX_COUNT}"
            self._wave.fault_thread("mbarrier", detail, thread, address)
        return barrier

    def arrive_asynchronously(self, barrier: Mbarrier, thread: int, clock: np.ndarray | None, pc: int) -> None:
        """What the thread started at ``pc``, having published ``clock``, has come."""
        if barrier.pending < 1:
            detail = f"an arrival too many at an mbarrier whose {barrier.state}"
            self._wave.fault_thread("mbarrier", detail, thread, barrier.address, pc=pc)
        barrier.pending -= 1
        barrier.ends_by_itself = False
        if clock is not None:
            barrier.arrivals.append(clock)
        self._complete_if_done(barrier)

    def expect_bytes(self, thread: int, address: int, amount: int) -> None:
        self._add_bytes(self.find(thread, address), thread, amount)

    def _add_bytes(self, barrier: Mbarrier, thread: int, amount: int) -> None:
        barrier.bytes += amount
        barrier.ends_by_itself = False
        if abs(barrier.bytes) > MAX_COUNT:
            detail = f"the mbarrier's tx-count becomes {barrier.bytes}; its range is ±{MAX_COUNT}"
            self._wave.fault_thread("mbarrier", detail, thread, barrier.address)

    def complete_bytes(self, barrier: Mbarrier, amount: int) -> None:
        """A bulk copy has arrived."""
        barrier.bytes -= amount
        self._complete_if_done(barrier)

    def _complete_if_done(self, barrier: Mbarrier) -> None:
        if barrier.pending or barrier.bytes:
            return
        wave = self._wave
        barrier.phase += 1
        barrier.parity ^= 1
        barrier.pending = barrier.expected
        self._phases += 1
        wave.counters.mbarrier_phases += 1
        if wave.hazards is not None:
            clocks = wave.hazards.clocks
            known = [*barrier.arrivals, *([] if barrier.handed_over is None else [barrier.handed_over])]
            handed_over = clocks.latest(known).copy() if known else np.zeros(clocks.columns, np.int64)
            # Bulk copies of all phases up to the one just completed can be seen.
            handed_over[wave.hazards.parties.mbarrier(barrier.index)] = np.int64(barrier.phase + 1) * TICK
            barrier.handed_over = handed_over
            barrier.arrivals = []
            barrier.arrived_before = barrier.arrived if barrier.ends_by_itself else None
            barrier.arrived, barrier.told, barrier.ends_by_itself = [], {}, True
        waiting = [entry for entry in self._parked if entry.barrier is barrier]
        if waiting:
            self._parked = [entry for entry in self._parked if entry.barrier is not barrier]
            for entry in waiting:
                wave.scheduler.add(entry.pc, self._mask(entry.threads))

    # Waiting -----------------------------------------------------------------------------------------

    def spurious_failures(self) -> np.ndarray | None:
        """Which of the active threads hear "not complete" this time, whatever the phase; None: nobody."""
        if not self._fails_spuriously:
            return None
        active = self._wave.active_mask
        fails = active & ~self._has_failed
        if not fails.any():
            self._has_failed = self._has_failed & ~active
            return None
        self._has_failed = self._has_failed | fails
        return fails

    def is_complete(self, barrier: Mbarrier, parity: int) -> bool:
        """Whether the phase of that parity has completed: it is not the current one."""
        return barrier.parity != parity & 1

    def observe(self, barrier: Mbarrier, threads: np.ndarray) -> None:
        """These threads know that a phase has completed: they have seen what its parties did before."""
        wave = self._wave
        if wave.hazards is not None and barrier.handed_over is not None:
            receivers = sorted({int(thread) // WARP_SIZE for thread in threads})
            wave.hazards.clocks.join([barrier.handed_over], receivers)
        if wave.remote_accesses is not None:
            wave.remote_accesses.observe(barrier)

    def park(
        self, threads: np.ndarray, barrier: Mbarrier, parity: int, put: Callable[[Wave, np.ndarray], None]
    ) -> None:
        """These threads look again when a phase of the barrier has completed. ``put`` writes their answer."""
        wave = self._wave
        wave.counters.mbarrier_blocked += len({int(thread) // WARP_SIZE for thread in threads})
        self._parked.append(_Parked(wave.pc, threads, barrier, parity, put))

    def time_out(self) -> bool:
        """Nobody can run: tell those that wait that the phase is not complete. False: it would be in vain."""
        wave = self._wave
        if not self._parked:
            return False
        progress = (self._phases, wave.counters.barriers, wave.alive_count)
        self._fruitless = self._fruitless + 1 if progress == self._progress_at_timeout else 0
        self._progress_at_timeout = progress
        if self._fruitless >= _PATIENCE:
            return False
        parked, self._parked = self._parked, []
        for entry in parked:
            mask = self._mask(entry.threads)
            wave.activate(mask)
            wave.catch_up(entry.pc, mask)
            entry.put(wave, np.zeros(wave.threads, bool))
            wave.scheduler.add(entry.pc + 1, mask)
        return True

    def _mask(self, threads: np.ndarray) -> np.ndarray:
        mask = np.zeros(self._wave.threads, bool)
        mask[threads] = True
        return mask

    def on_exit(self) -> None:
        """An mbarrier goes on expecting the arrivals of threads that have exited."""

    def waiting_threads(self) -> Iterator[tuple[int, np.ndarray, str]]:
        for entry in self._parked:
            barrier = entry.barrier
            yield (
                entry.pc,
                self._mask(entry.threads),
                f"parity {entry.parity} of the mbarrier at {barrier.address:#x}: {barrier.state}",
            )
