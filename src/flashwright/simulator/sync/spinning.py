"""Threads that spin: they run in a loop until somebody else changes the memory they look at.

A group that jumps back to where it was with the same registers, and has changed no memory on the way, will do so for
ever, unless others change what it reads. Such threads are parked, and look again when others have run. Looking for them
costs little: every so many backward jumps, the state of the threads is compared with that of a few jumps later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ErrorKind

if TYPE_CHECKING:
    from ..program import BoundInstruction
    from ..wave import Wave

# Backward jumps of a wave from one look to the next: more and more, because most loops are no spins.
_FIRST_INTERVAL, _LAST_INTERVAL = 64, 256
# A loop may jump back several times in one round.
_JUMPS_COMPARED = 8
# Writes after which a group is taken not to spin, without a comparison.
_MOST_WRITES = 64
# Looks without any progress of the wave after which other thread blocks get a chance; twice as many where barriers
# complete, which they also do in loops that wait for another block.
_FRUITLESS_LOOKS = 8
_LOOK, _LOOK_WITH_BARRIERS = 2, 1
# What these do is seen in neither registers nor memory.
_EFFECTS = (
    "cp.", "mbarrier.", "bar.", "barrier.", "wgmma.", "setmaxnreg.", "tensormap.", "st.async.", "st.bulk.",
    "red.async.",
)  # fmt: skip
_NO_EFFECTS = ("bar.warp.",)
# What these do is over when all have passed.
_BLOCK_BARRIERS = ("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync", "bar.red", "bar.cta.red",
                   "barrier.red", "barrier.cta.red")  # fmt: skip


class Verdict(Enum):
    """What a group shall do after a backward jump."""

    GO_ON = auto()
    YIELD = auto()  # let others run
    PARK = auto()  # it spins


@dataclass
class Activity:
    """How often threads of a launch have run that did not merely spin."""

    count: int = 0


@dataclass(frozen=True)
class _Parked:
    pc: int
    mask: np.ndarray
    activity: int  # of the launch when they looked last


@dataclass
class _Snapshot:
    """The state of a wave when a group was about to execute ``pc``."""

    pc: int
    mask: np.ndarray
    groups: dict[int, np.ndarray]
    registers: list[np.ndarray]
    executed: list[int]
    arrivals: dict[tuple[int, int], int]  # at barriers of blocks
    is_whole_turn: bool  # taken when the group's turn began
    written: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(
        default_factory=list
    )  # memory, index, values before
    jumps_left: int = _JUMPS_COMPARED


class Spinning:
    """Finds groups of a wave that spin, and keeps them parked."""

    deadlock_kind: ErrorKind = "deadlock"

    def __init__(self, wave: Wave, activity: Activity, step_limit: int) -> None:
        self._wave = wave
        self._activity = activity
        self._steps_left = step_limit
        self._parked: list[_Parked] = []
        self._woken: dict[int, np.ndarray] = {}
        self._snapshot: _Snapshot | None = None
        self._interval = _FIRST_INTERVAL
        self._progress = 0, 0, 0  # living threads, phases of mbarriers, barriers
        self._fruitless = 0
        self.jumps_to_look = _FIRST_INTERVAL

    # Finding -----------------------------------------------------------------------------------------

    def begin_turn(self, pc: int, mask: np.ndarray) -> None:
        """A group is about to run. One that was parked is watched from the start."""
        woken = self._woken.pop(pc, None)
        if woken is not None and np.array_equal(woken, mask):
            self._drop_snapshot()
            self._take_snapshot(pc, mask, is_whole_turn=True)

    def acted(self) -> None:
        """A turn is over, and was no mere spinning. While a parked group is watched that is not yet known."""
        if self._snapshot is None or not self._snapshot.is_whole_turn:
            self._activity.count += 1

    def look(self, pc: int, mask: np.ndarray) -> Verdict:
        """The running group has jumped back to ``pc``, and it is time for a look."""
        snapshot = self._snapshot
        if snapshot is None:
            self._charge(self._interval)
            self._take_snapshot(pc, mask, is_whole_turn=False)
            return Verdict.GO_ON
        if self._is_as_in(snapshot, pc, mask):
            return Verdict.PARK
        snapshot.jumps_left -= 1
        self.jumps_to_look = 1
        if snapshot.jumps_left == 0:
            if not snapshot.is_whole_turn:
                self._interval = min(2 * self._interval, _LAST_INTERVAL)
            self._drop_snapshot()
            if self._is_fruitless():
                return Verdict.YIELD
        return Verdict.GO_ON

    def _drop_snapshot(self) -> None:
        """The group that was watched does not spin."""
        if self._snapshot is None:
            return
        if self._snapshot.is_whole_turn:
            self._activity.count += 1
        self._snapshot = None
        self.jumps_to_look = self._interval

    def _take_snapshot(self, pc: int, mask: np.ndarray, is_whole_turn: bool) -> None:
        wave = self._wave
        self._snapshot = _Snapshot(
            pc,
            mask,
            dict(wave.scheduler.groups),
            list(wave.registers),
            list(wave.counters.executed),
            wave.barriers.arrivals(),
            is_whole_turn,
        )
        self.jumps_to_look = 1

    def _charge(self, jumps: int) -> None:
        self._steps_left -= jumps
        if self._steps_left <= 0:
            thread = int(np.flatnonzero(self._wave.active_mask)[0])
            self._wave.fault_thread("deadlock", "no end within the step limit: an endless loop?", thread)

    def _is_fruitless(self) -> bool:
        """Whether the wave has not got anywhere for many looks."""
        counters = self._wave.counters
        *before, barriers = self._progress
        progress = self._wave.alive_count, counters.mbarrier_phases
        if (*before,) != progress:
            self._fruitless = 0
        else:
            self._fruitless += _LOOK if barriers == counters.barriers else _LOOK_WITH_BARRIERS
        self._progress = *progress, counters.barriers
        return self._is_in_vain()

    def _is_in_vain(self) -> bool:
        return self._fruitless >= _FRUITLESS_LOOKS * _LOOK

    def gives_way(self) -> bool:
        """Whether threads run in vain, it seems, so that other thread blocks shall have a turn."""
        if not self._is_in_vain():
            return False
        self._fruitless = 0
        return True

    def watch(self, access: str, memory: np.ndarray, index: np.ndarray) -> None:
        """Threads are about to access these items of a memory."""
        if self._snapshot is None or access == "load":
            return
        self._snapshot.written.append((memory, index, memory[index]))
        if len(self._snapshot.written) > _MOST_WRITES:
            self._drop_snapshot()

    def _is_as_in(self, snapshot: _Snapshot, pc: int, mask: np.ndarray) -> bool:
        """Whether the wave is in the same state again, and nothing else has happened since."""
        wave = self._wave
        if pc != snapshot.pc or wave.scheduler.groups.keys() != snapshot.groups.keys():
            return False
        if not np.array_equal(mask, snapshot.mask) or not all(
            np.array_equal(group, snapshot.groups[at]) for at, group in wave.scheduler.groups.items()
        ):
            return False
        alive = wave.alive
        for now, before in zip(wave.registers, snapshot.registers, strict=True):
            if now is not before and now[alive].tobytes() != before[alive].tobytes():
                return False
        if wave.barriers.arrivals() != snapshot.arrivals:
            return False
        if any(memory[index].tobytes() != values.tobytes() for memory, index, values in snapshot.written):
            return False
        return not any(
            now != before and _has_effect(item)
            for now, before, item in zip(wave.counters.executed, snapshot.executed, wave.program.code, strict=True)
        )

    # Parking -----------------------------------------------------------------------------------------

    def park(self, pc: int, mask: np.ndarray) -> None:
        """The running group spins, at ``pc``."""
        assert self._snapshot is not None
        if not self._snapshot.is_whole_turn:
            self._activity.count += 1  # it may have changed something before it began to spin
        self._snapshot = None
        self._interval = self.jumps_to_look = _FIRST_INTERVAL
        self._parked.append(_Parked(pc, mask, self._activity.count))

    def wake(self) -> bool:
        """Nobody can run: let those look again that have not looked since others ran; whether there are any."""
        self._drop_snapshot()
        woken = [entry for entry in self._parked if entry.activity != self._activity.count]
        self._parked = [entry for entry in self._parked if entry.activity == self._activity.count]
        for entry in woken:
            self._wave.scheduler.add(entry.pc, entry.mask)
            earlier = self._woken.get(entry.pc)
            self._woken[entry.pc] = entry.mask if earlier is None else earlier | entry.mask
        return bool(woken)

    def end(self) -> None:
        """All threads have exited."""
        self._drop_snapshot()

    @property
    def has_parked(self) -> bool:
        return bool(self._parked)

    def on_exit(self) -> None:
        """They look again when nobody else can run."""

    def waiting_threads(self) -> Iterator[tuple[int, np.ndarray, str]]:
        for entry in self._parked:
            yield entry.pc, entry.mask, "they spin, and nothing that they read changes"


def _has_effect(item: BoundInstruction) -> bool:
    if item.opcode.startswith("call"):
        return not item.operation.is_control  # it prints; others jump
    return item.opcode.startswith(_EFFECTS) and not item.opcode.startswith((*_NO_EFFECTS, *_BLOCK_BARRIERS))
