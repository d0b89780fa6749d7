"""wgmma: asynchronous matrix multiply-accumulate of a warpgroup, D = A·B + D with a 64×N accumulator.

A is in shared memory (a descriptor) or in registers, B in shared memory. Products of 16-bit numbers are exact in
float32; they are added in float32, in the order of NumPy's matrix product, and the sum is added to the accumulator.
Tensor cores add in another order and truncate, so that the last bits can differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..architecture import WARP_SIZE
from ..async_hazards import AsyncAccess
from ..binding import Binder, Getter, elements_of
from ..matrix_descriptor import CHUNK_BYTES, DEPTH, MatrixDescriptor
from ..parties import WARPS_PER_WARPGROUP
from ..ptx.syntax import Immediate, Instruction, Operand, Register, Vector
from ..ptx.types import TYPES
from ..registry import Operation, Unsupported, instruction
from ..sync.convergence import warp_synchronous
from ..sync.warpgroups import WARPGROUP_THREADS, warpgroup_synchronous
from ..sync.wgmma_groups import ROWS
from .matrix import full_warps

if TYPE_CHECKING:
    from ..wave import Wave

_F16, _F32, _U16, _U32 = (np.dtype(t) for t in (np.float16, np.float32, np.uint16, np.uint32))
_ROWS_PER_WARP = ROWS // WARPS_PER_WARPGROUP

# The active warpgroups' operand as [group, rows, 16] of float32.
ReadOperand = Callable[["Wave"], np.ndarray]


@instruction("wgmma.fence")
def fence(syntax: Instruction, bind: Binder) -> Operation:
    def execute(wave: Wave) -> None:
        full_warps(wave)
        if wave.register_hazards is not None:
            wave.register_hazards.fence()

    return warp_synchronous(execute)


@instruction("wgmma.commit_group")
def commit_group(syntax: Instruction, bind: Binder) -> Operation:
    def execute(wave: Wave) -> None:
        full_warps(wave)
        wave.wgmma.commit()

    return warp_synchronous(execute)


@instruction("wgmma.wait_group")
def wait_group(syntax: Instruction, bind: Binder) -> Operation:
    (newest,) = syntax.operands
    assert isinstance(newest, Immediate)
    allowed = int(newest.value)

    def execute(wave: Wave) -> None:
        full_warps(wave)
        wave.wgmma.wait(allowed)

    return warp_synchronous(execute)


@instruction("wgmma.mma_async")
def mma_async(syntax: Instruction, bind: Binder) -> Operation:
    shape = next((re.fullmatch(r"m64n(\d+)k16", m) for m in syntax.modifiers if m.startswith("m64")), None)
    types = [m for m in syntax.modifiers if m in TYPES]
    if shape is None or syntax.has("sp"):
        raise Unsupported("this shape of wgmma")
    if types not in (["f32", "f16", "f16"], ["f32", "bf16", "bf16"]):
        raise Unsupported(f"these types of wgmma: {', '.join(types)}")
    columns = int(shape.group(1))
    target, a, b, scale, *immediates = syntax.operands
    accumulators = elements_of(target)
    if columns % 8 or not 8 <= columns <= 256 or len(accumulators) != columns // 2:
        raise Unsupported(f"{len(accumulators)} accumulators for N = {columns}")
    options = [int(item.value) for item in immediates if isinstance(item, Immediate)]
    if len(options) != len(immediates) or len(options) != (3 if isinstance(a, Vector) else 4):
        raise Unsupported("number of immediate operands")
    scale_a, scale_b, *transposed = options
    if {scale_a, scale_b} - {1, -1} or set(transposed) - {0, 1}:
        raise Unsupported("immediate scales other than 1 and -1, or transpositions other than 0 and 1")
    widen = _widen_bf16 if types[1] == "bf16" else _widen_f16
    slots = tuple(_slot(bind, operand) for operand in accumulators)
    fragments: frozenset[int] = frozenset()
    if isinstance(a, Vector):
        fragments = frozenset(_slot(bind, register) for register in a.elements)
        read_a = _fragments(a, widen, bind)
    else:
        read_a = _shared_operand(a, "A", ROWS, bool(transposed[0]), widen, bind)
    bind.wgmma_registers.update(slots, fragments)
    read_b = _shared_operand(b, "B", columns, bool(transposed[-1]), widen, bind)
    get_scale = bind.predicate(scale)
    sign = _F32.type(scale_a * scale_b)
    bind.shared_widths.add(CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        if wave.register_hazards is not None:
            wave.register_hazards.issue(slots, fragments)
        left, right = read_a(wave), read_b(wave)
        products = left @ right.swapaxes(1, 2)
        keeps = _per_group(wave, get_scale(wave), "scale-d")
        wave.wgmma.accumulate(slots, products if sign > 0 else -products, keeps)

    flops = 2 * ROWS * columns * DEPTH // WARPS_PER_WARPGROUP
    return warpgroup_synchronous(execute, tensor_flops=flops)


def _slot(bind: Binder, operand: Operand) -> int:
    if not isinstance(operand, Register):
        raise Unsupported(f"operand {operand} of a register fragment")
    slot = bind.slot_of(operand.name)
    if slot.type.bits != 32:
        raise Unsupported(f"register {operand.name} of a fragment has {slot.type.bits} bits")
    return slot.index


def _widen_f16(halves: np.ndarray) -> np.ndarray:
    return halves.view(_F16).astype(_F32)


def _widen_bf16(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(_U32) << np.uint32(16)).view(_F32)


def _per_group(wave: Wave, values: Any, what: str) -> np.ndarray:
    """One value per active warpgroup; a fault if its threads disagree."""
    values = np.broadcast_to(values, (wave.threads,))
    by_group = (values if wave.lanes is None else values[wave.lanes]).reshape(-1, WARPGROUP_THREADS)
    differs = by_group != by_group[:, :1]
    if differs.any():
        position = int(np.flatnonzero(differs.ravel())[0])
        wave.fault("descriptor", f"{what} is not the same in all threads of the warpgroup", position)
    return by_group[:, 0]


def _fragments(a: Vector, widen: Callable[[np.ndarray], np.ndarray], bind: Binder) -> ReadOperand:
    """A in four registers: register r holds row g + 8·(r % 2), columns 8·(r / 2) + 2t and + 1 of its warp's 16 rows."""
    getters = [bind.source(operand, TYPES["b32"]) for operand in a.elements]
    if len(getters) != 4:
        raise Unsupported("number of registers of A")

    def read(wave: Wave) -> np.ndarray:
        threads = slice(None) if wave.lanes is None else wave.lanes
        registers = np.array([get(wave)[threads] for get in getters])
        # [k half, row half, group, warp, g, t, element] → [group, warp, row half, g, k half, t, element]
        halves = registers.view(_U16).reshape(2, 2, -1, WARPS_PER_WARPGROUP, 8, 4, 2).transpose(2, 3, 1, 4, 0, 5, 6)
        return widen(np.ascontiguousarray(halves).reshape(-1, ROWS, DEPTH))

    return read


def _shared_operand(
    operand: Operand, name: str, rows: int, is_mn_major: bool, widen: Callable[[np.ndarray], np.ndarray], bind: Binder
) -> ReadOperand:
    get: Getter = bind.source(operand, TYPES["b64"])
    what = f"wgmma read of {name}"

    def read(wave: Wave) -> np.ndarray:
        bits = _per_group(wave, get(wave), f"the descriptor of {name}")
        tile = _Tile(wave, bits, rows, is_mn_major)
        tile.check_range(name)
        if wave.async_hazards is not None:
            tile.check_hazards(what, by_warp=name == "A")
        data = wave.shared.store.views[CHUNK_BYTES][tile.flat >> 4]
        elements = widen(data.view(_U16).reshape(tile.flat.shape[0], -1, 8 * tile.flat.shape[2]))
        return elements.swapaxes(1, 2) if is_mn_major else elements

    return read


@dataclass
class _Tile:
    """Where an operand of each active warpgroup is: ``flat`` [group, rows or k, chunks] in the wave's memory."""

    wave: Wave
    bits: np.ndarray
    rows: int
    is_mn_major: bool

    def __post_init__(self) -> None:
        wave = self.wave
        first = np.arange(0, wave.threads, WARPGROUP_THREADS) if wave.lanes is None else wave.lanes[::WARPGROUP_THREADS]
        self.first_threads = first
        self.descriptors = [MatrixDescriptor.decode(int(value)) for value in self.bits]
        known: dict[MatrixDescriptor, np.ndarray] = {}
        for descriptor in self.descriptors:
            if descriptor not in known:
                known[descriptor] = descriptor.chunk_addresses(self.rows, self.is_mn_major)
        self.addresses = np.array([known[descriptor] for descriptor in self.descriptors])
        self.flat = self.addresses + wave.shared.thread_base[first][:, None, None]

    def check_range(self, name: str) -> None:
        wave = self.wave
        for descriptor, thread in zip(self.descriptors, self.first_threads, strict=True):
            problem = descriptor.problem(self.rows, self.is_mn_major)
            if problem is not None:
                wave.fault_thread("descriptor", f"descriptor of {name}: {problem}", int(thread), descriptor.start)
        beyond = (self.addresses + CHUNK_BYTES > wave.shared.size) | (self.addresses < 0)
        if beyond.any():
            group = int(np.nonzero(beyond)[0][0])
            address = int(self.addresses[beyond][0])
            wave.fault_thread(
                "out-of-bounds",
                f"wgmma reads {name} at offset {address} of {wave.shared.size} bytes of shared memory "
                f"({self.descriptors[group]})",
                int(self.first_threads[group]),
                address,
            )

    def check_hazards(self, what: str, by_warp: bool) -> None:
        """Each warp reads its own 16 rows of A; all four read all of B, so all must be ordered after its writers."""
        wave = self.wave
        assert wave.async_hazards is not None and wave.hazards is not None
        groups, lines, chunks = self.flat.shape
        warps = (self.first_threads // WARP_SIZE)[:, None] + np.arange(WARPS_PER_WARPGROUP)
        seen = wave.hazards.clocks.seen[warps]  # [group, warp, column]
        group = np.repeat(np.arange(groups), lines * chunks)
        if by_warp:
            row = np.arange(chunks) * 8 if self.is_mn_major else np.arange(lines)[:, None]
            warp_of_row = np.broadcast_to(row // _ROWS_PER_WARP, (groups, lines, chunks)).ravel()
            clocks = seen.reshape(-1, seen.shape[2])
            observer = group * WARPS_PER_WARPGROUP + warp_of_row
            threads = self.first_threads[group] + warp_of_row * WARP_SIZE
        else:
            clocks, observer, threads = seen.min(axis=1), group, self.first_threads[group]
        warpgroup = self.first_threads // WARP_SIZE % wave.warps_per_block // WARPS_PER_WARPGROUP
        columns = wave.hazards.parties.wgmma(warpgroup)
        commits = wave.wgmma.commits[self.first_threads // WARP_SIZE]
        wave.async_hazards.read(
            AsyncAccess(what, self.flat.ravel(), clocks, observer, threads), columns[group], commits[group]
        )
