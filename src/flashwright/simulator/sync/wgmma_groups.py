"""wgmma in flight: accumulators whose registers change only when their warp waits.

Operands are read when a product is issued. Its result is kept here and written to the registers by the wait for its
group: the latest moment hardware may choose, so a missing wait shows in the results, too. Products in flight on the
same registers add up here, in the order of issue.

Compilers rename accumulators between products with `mov`, or take pairs of 16-bit ones apart, which the assembler turns
into nothing: such a move hands on the value in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..architecture import WARP_SIZE
from ..hazards import TICK
from ..parties import WARPS_PER_WARPGROUP
from .warpgroups import WARPGROUP_THREADS

if TYPE_CHECKING:
    from ..wave import Wave

ROWS = 64
_U16, _U32 = np.dtype(np.uint16), np.dtype(np.uint32)
# A warpgroup's 64×N matrix in words of 32 bits is [warp, row half, row in half, column octet, quad lane, word]. A
# register is an octet, a row half and a word; a thread is a warp, a row in half and a quad lane. A quad lane has two
# columns of an octet: two words, or one with two 16-bit numbers.
_MATRIX_TO_REGISTERS = (4, 2, 6, 0, 1, 3, 5)
_REGISTERS_TO_MATRIX = tuple(int(axis) for axis in np.argsort(_MATRIX_TO_REGISTERS))


def to_registers(matrices: np.ndarray, words: int) -> np.ndarray:
    """[group, 64, columns in words] → [register, group, 128 threads], with ``words`` per quad lane and octet."""
    groups, _, columns = matrices.shape
    split = matrices.reshape(groups, WARPS_PER_WARPGROUP, 2, 8, columns // (4 * words), 4, words)
    return split.transpose(_MATRIX_TO_REGISTERS).reshape(columns // 2, groups, WARPGROUP_THREADS)


def from_registers(registers: np.ndarray, groups: int, words: int) -> np.ndarray:
    """[register, group · 128 threads] → [group, 64, columns in words]."""
    octets = registers.shape[0] // (2 * words)
    split = registers.reshape(octets, 2, words, groups, WARPS_PER_WARPGROUP, 8, 4)
    return np.ascontiguousarray(split.transpose(_REGISTERS_TO_MATRIX)).reshape(groups, ROWS, -1)


@dataclass
class _Accumulator:
    """The matrix that a tuple of registers will hold, for every warpgroup of the wave."""

    slots: tuple[int, ...]
    values: np.ndarray  # [warpgroup, 64, N] of f32, s32 or f16
    in_flight: np.ndarray  # [warp]
    group: np.ndarray  # [warp]: the commit group of the last product

    @property
    def words(self) -> int:
        """Words of a quad lane in an octet of columns."""
        return self.values.dtype.itemsize // 2

    def register(self, register: int, warpgroup: int, warp: int) -> np.ndarray:
        """[8, 4]: what the lanes of a warp of a warpgroup have in one register (a view)."""
        octet, half, word = register // (2 * self.words), register // self.words % 2, register % self.words
        row, first = 16 * warp + 8 * half, 4 * self.words * octet
        columns = slice(first + word, first + 4 * self.words, self.words)
        return self.values.view(_U32)[warpgroup, row : row + 8, columns]


class WgmmaGroups:
    """Commit groups and accumulators in flight of a wave."""

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        self._accumulators: dict[tuple[tuple[int, ...], np.dtype], _Accumulator] = {}
        self._places: dict[int, list[tuple[_Accumulator, int]]] = {}  # of a slot, in accumulators
        self._any_in_flight = False
        self.commits = np.zeros(wave.warps, np.int64)

    def accumulate(
        self, slots: tuple[int, ...], products: np.ndarray, keeps: np.ndarray, dtype: np.dtype, saturates: bool = False
    ) -> None:
        """Add products [group, 64, N] to the accumulators of the active warpgroups; where not ``keeps``, replace."""
        wave = self._wave
        groups = wave.warpgroups.active()
        warps = self._active_warps()
        accumulator = self._accumulators.get((slots, dtype))
        if accumulator is None:
            accumulator = self._accumulators[slots, dtype] = _Accumulator(
                slots,
                np.zeros((wave.warpgroups.count, ROWS, products.shape[2]), dtype),
                np.zeros(wave.warps, bool),
                np.zeros(wave.warps, np.int64),
            )
            for register, slot in enumerate(slots):
                self._places.setdefault(slot, []).append((accumulator, register))
        in_flight = accumulator.in_flight[warps].reshape(-1, WARPS_PER_WARPGROUP)
        if keeps.any():
            if in_flight.all():
                before = accumulator.values[groups]
            else:
                before = self._from_wave(accumulator, groups.size)
                rows = np.repeat(in_flight, ROWS // WARPS_PER_WARPGROUP, axis=1)[:, :, None]
                before = np.where(rows, accumulator.values[groups], before)
            kept = before if keeps.all() else np.where(keeps[:, None, None], before, dtype.type(0))
            products = _sum(products, kept, saturates)
        accumulator.values[groups] = products
        self._any_in_flight = True
        accumulator.in_flight[warps] = True
        accumulator.group[warps] = self.commits[warps]

    def _from_wave(self, accumulator: _Accumulator, groups: int) -> np.ndarray:
        wave = self._wave
        threads = slice(None) if wave.lanes is None else wave.lanes
        registers = np.array([wave.registers[slot].view(_U32)[threads] for slot in accumulator.slots])
        return from_registers(registers, groups, accumulator.words).view(accumulator.values.dtype)

    def hand_on(self, source: int | None, target: int) -> None:
        """A `mov` of the active threads, already executed, renamed a register: the value in flight goes with it."""
        held = self._places.get(source, []) if source is not None else []
        kept = self._places.get(target, [])
        if not self._any_in_flight or not (held or kept):
            return
        wave = self._wave
        for warp in np.flatnonzero(wave.active_mask.reshape(-1, WARP_SIZE).any(axis=1)):
            lanes = wave.active_mask[warp * WARP_SIZE : (warp + 1) * WARP_SIZE]
            group = int(wave.warpgroups.of_thread[warp * WARP_SIZE])
            in_group = int(wave.warp_in_block[warp * WARP_SIZE]) % WARPS_PER_WARPGROUP
            threads = slice(warp * WARP_SIZE, (warp + 1) * WARP_SIZE)
            for accumulator, register in held:
                if accumulator.in_flight[warp]:
                    merged = wave.registers[target].view(_U32).copy()
                    value = accumulator.register(register, group, in_group).ravel()
                    merged[threads] = np.where(lanes, value, merged[threads])
                    wave.registers[target] = merged
            for accumulator, register in kept:
                if accumulator.in_flight[warp]:
                    before = accumulator.register(register, group, in_group)
                    moved = wave.registers[target].view(_U32)[threads].reshape(8, 4)
                    before[...] = np.where(lanes.reshape(8, 4), moved, before)

    def hand_on_halves(self, source: int, targets: tuple[int | None, ...]) -> None:
        """A `mov` of the active threads, already executed, took a register apart: the value in flight goes with it."""
        wave = self._wave
        for accumulator, register in self._places.get(source, []):
            for warp in np.flatnonzero(accumulator.in_flight):
                threads = slice(warp * WARP_SIZE, (warp + 1) * WARP_SIZE)
                lanes = wave.active_mask[threads]
                group = int(wave.warpgroups.of_thread[warp * WARP_SIZE])
                in_group = int(wave.warp_in_block[warp * WARP_SIZE]) % WARPS_PER_WARPGROUP
                value = accumulator.register(register, group, in_group).ravel()
                for index, target in enumerate(targets):
                    if target is not None:
                        merged = wave.registers[target].view(_U16).copy()
                        half = (value >> np.uint32(16 * index)).astype(_U16)
                        merged[threads] = np.where(lanes, half, merged[threads])
                        wave.registers[target] = merged

    def commit(self) -> None:
        self.commits[self._active_warps()] += 1

    def wait(self, newest_allowed: int) -> None:
        """Complete, for the active warps, all groups but the newest ``newest_allowed``."""
        wave = self._wave
        warps = self._active_warps()
        completed = np.zeros(wave.warps, np.int64)
        completed[warps] = self.commits[warps] - newest_allowed
        for accumulator in self._accumulators.values():
            done = accumulator.in_flight & (accumulator.group < completed)
            if done.any():
                self._write_back(accumulator, np.flatnonzero(done))
        self._any_in_flight = any(accumulator.in_flight.any() for accumulator in self._accumulators.values())
        if wave.register_hazards is not None:
            wave.register_hazards.complete(completed)
        if wave.hazards is not None:
            self._see_completed(warps, completed)

    def _write_back(self, accumulator: _Accumulator, warps: np.ndarray) -> None:
        wave = self._wave
        in_block = warps % wave.warps_per_block
        groups = wave.warpgroups.of_thread[warps * WARP_SIZE]
        registers = to_registers(accumulator.values.view(_U32), accumulator.words)
        registers = registers.reshape(len(accumulator.slots), -1, WARP_SIZE)
        values = registers[:, groups * WARPS_PER_WARPGROUP + in_block % WARPS_PER_WARPGROUP].reshape(
            len(accumulator.slots), -1
        )
        threads = (warps[:, None] * WARP_SIZE + np.arange(WARP_SIZE)).ravel()
        for slot, value in zip(accumulator.slots, values, strict=True):
            merged = wave.registers[slot].view(_U32).copy()
            merged[threads] = value
            wave.registers[slot] = merged
        accumulator.in_flight[warps] = False

    def _see_completed(self, warps: np.ndarray, completed: np.ndarray) -> None:
        """What their finished products read may be overwritten by whoever is ordered after these warps."""
        wave = self._wave
        assert wave.hazards is not None
        seen = wave.hazards.clocks.seen
        columns = wave.hazards.parties.wgmma(warps % wave.warps_per_block // WARPS_PER_WARPGROUP)
        seen[warps, columns] = np.maximum(seen[warps, columns], (completed[warps] + 1) * TICK)

    def _active_warps(self) -> np.ndarray:
        wave = self._wave
        if wave.mask is None:
            return np.arange(wave.warps)
        return np.flatnonzero(wave.mask.reshape(-1, WARP_SIZE)[:, 0])


def _sum(products: np.ndarray, kept: np.ndarray, saturates: bool) -> np.ndarray:
    """In single precision for floats (16-bit ones are rounded when they are stored), exactly for integers."""
    if kept.dtype.kind != "i":
        return products + kept
    total = products.astype(np.int64) + kept
    limits = np.iinfo(kept.dtype)
    return (np.clip(total, limits.min, limits.max) if saturates else total).astype(kept.dtype)
