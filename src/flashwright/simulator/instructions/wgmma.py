"""wgmma: asynchronous matrix multiply-accumulate of a warpgroup, D = A·B + D with a 64×N accumulator.

A is in shared memory (a descriptor) or in registers, B in shared memory. One product is 32 bytes deep. Products of
elements are exact in float32; they are added in float64, the sum is rounded to float32 and added to the accumulator.
Tensor cores add in another order and truncate, so that the last bits can differ. Sums of integers are exact.
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
from ..matrix_descriptor import CHUNK_BYTES, DEPTH_BYTES, MatrixDescriptor
from ..parties import WARPS_PER_WARPGROUP
from ..ptx.syntax import Immediate, Instruction, Operand, Register, Vector
from ..ptx.types import TYPES
from ..registry import Operation, Unsupported, instruction
from ..sync.convergence import warp_synchronous
from ..sync.warpgroups import WARPGROUP_THREADS, warpgroup_synchronous
from ..sync.wgmma_groups import ROWS
from .matrix import full_warps
from .matrix_types import MATRIX_TYPES, MatrixType

if TYPE_CHECKING:
    from ..wave import Wave

_F16, _F32, _U32 = (np.dtype(t) for t in (np.float16, np.float32, np.uint32))
_ROWS_PER_WARP = ROWS // WARPS_PER_WARPGROUP

# The active warpgroups' operand as [group, rows, K] of float32.
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


@dataclass(frozen=True)
class _Form:
    """What an element type of A allows: the types of B and of the accumulator, and which immediates follow scale-d."""

    b_types: tuple[str, ...]
    accumulators: tuple[str, ...]
    has_scales: bool = True
    has_transposition: bool = False


_FP8_FORM = _Form(("e4m3", "e5m2"), ("f32", "f16"))
_BYTE_FORM = _Form(("s8", "u8"), ("s32",), has_scales=False)
_FORMS = {
    "f16": _Form(("f16",), ("f32", "f16"), has_transposition=True),
    "bf16": _Form(("bf16",), ("f32",), has_transposition=True),
    "tf32": _Form(("tf32",), ("f32",)),
    "e4m3": _FP8_FORM,
    "e5m2": _FP8_FORM,
    "s8": _BYTE_FORM,
    "u8": _BYTE_FORM,
    "b1": _Form(("b1",), ("s32",), has_scales=False),
}
_ACCUMULATORS = {"f32": _F32, "f16": _F16, "s32": np.dtype(np.int32)}


@instruction("wgmma.mma_async")
def mma_async(syntax: Instruction, bind: Binder) -> Operation:
    shape = next((re.fullmatch(r"m64n(\d+)k(\d+)", m) for m in syntax.modifiers if m.startswith("m64")), None)
    types = [m for m in syntax.modifiers if m in MATRIX_TYPES or m in _ACCUMULATORS]
    if shape is None or syntax.has("sp"):
        raise Unsupported("this shape of wgmma")
    if len(types) != 3 or types[1] not in _FORMS:
        raise Unsupported(f"these types of wgmma: {', '.join(types)}")
    d_name, a_name, b_name = types
    form, a_type, b_type = _FORMS[a_name], MATRIX_TYPES[a_name], MATRIX_TYPES[b_name]
    if b_name not in form.b_types or d_name not in form.accumulators:
        raise Unsupported(f"these types of wgmma: {', '.join(types)}")
    columns, depth = int(shape.group(1)), int(shape.group(2))
    if depth * a_type.bits != 8 * DEPTH_BYTES:
        raise Unsupported(f"K = {depth} of .{a_name}; K is {8 * DEPTH_BYTES // a_type.bits}")
    target, a, b, scale, *immediates = syntax.operands
    accumulators, dtype = elements_of(target), _ACCUMULATORS[d_name]
    if columns % 8 or not 8 <= columns <= 256 or len(accumulators) != columns * dtype.itemsize // 8:
        raise Unsupported(f"{len(accumulators)} accumulators for N = {columns}")
    sign, transposed = _immediates(immediates, form, a_in_registers=isinstance(a, Vector))
    slots = tuple(_slot(bind, operand) for operand in accumulators)
    fragments: frozenset[int] = frozenset()
    if isinstance(a, Vector):
        fragments = frozenset(_slot(bind, register) for register in a.elements)
        read_a = _fragments(a, a_type, bind)
    else:
        read_a = _shared_operand(a, "A", ROWS, transposed[0], a_type, bind)
    bind.wgmma_registers.update(slots, fragments)
    read_b = _shared_operand(b, "B", columns, transposed[-1], b_type, bind)
    get_scale = bind.predicate(scale)
    saturates = syntax.has("satfinite")
    bind.shared_widths.add(CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        if wave.register_hazards is not None:
            wave.register_hazards.issue(slots, fragments)
        left, right = read_a(wave), read_b(wave)
        # Sums of float32 would depend on a row's place in the matrix, where the processor's vectors are wide.
        products = np.matmul(left, right.swapaxes(1, 2), dtype=np.float64).astype(_F32)
        keeps = _per_group(wave, get_scale(wave), "scale-d")
        wave.wgmma.accumulate(slots, products if sign > 0 else -products, keeps, dtype, saturates)

    flops = 2 * ROWS * columns * depth // WARPS_PER_WARPGROUP
    return warpgroup_synchronous(execute, tensor_flops=flops)


def _immediates(operands: list[Operand], form: _Form, a_in_registers: bool) -> tuple[int, tuple[bool, ...]]:
    """The sign of the products, and which of A and B in shared memory are transposed."""
    options = [int(item.value) for item in operands if isinstance(item, Immediate)]
    transpositions = (1 if a_in_registers else 2) * form.has_transposition
    if len(options) != len(operands) or len(options) != 2 * form.has_scales + transpositions:
        raise Unsupported(f"{len(operands)} immediate operands; {2 * form.has_scales + transpositions} are needed")
    scales, transposed = options[: 2 * form.has_scales], options[2 * form.has_scales :]
    if set(scales) - {1, -1} or set(transposed) - {0, 1}:
        raise Unsupported("immediate scales other than 1 and -1, or transpositions other than 0 and 1")
    return int(np.prod(scales)), tuple(map(bool, transposed)) or (False,)


def _slot(bind: Binder, operand: Operand) -> int:
    if not isinstance(operand, Register):
        raise Unsupported(f"operand {operand} of a register fragment")
    slot = bind.slot_of(operand.name)
    if slot.type.bits != 32:
        raise Unsupported(f"register {operand.name} of a fragment has {slot.type.bits} bits")
    return slot.index


def _per_group(wave: Wave, values: Any, what: str) -> np.ndarray:
    """One value per active warpgroup; a fault if its threads disagree."""
    values = np.broadcast_to(values, (wave.threads,))
    by_group = (values if wave.lanes is None else values[wave.lanes]).reshape(-1, WARPGROUP_THREADS)
    differs = by_group != by_group[:, :1]
    if differs.any():
        position = int(np.flatnonzero(differs.ravel())[0])
        wave.fault("descriptor", f"{what} is not the same in all threads of the warpgroup", position)
    return by_group[:, 0]


def _fragments(a: Vector, a_type: MatrixType, bind: Binder) -> ReadOperand:
    """A in four registers of e elements: register r holds row g + 8·(r % 2) of its warp's 16 rows.

    Columns: 4e·(r / 2) + e·t + (0…e-1).
    """
    getters = [bind.source(operand, TYPES["b32"]) for operand in a.elements]
    if len(getters) != 4:
        raise Unsupported(f"{len(getters)} registers of A; 4 are needed")

    def read(wave: Wave) -> np.ndarray:
        registers = np.array([get(wave)[wave.active] for get in getters])
        # [k half, row half, group, warp, g, t] → [group, warp, row half, g, k half, t]
        words = registers.reshape(2, 2, -1, WARPS_PER_WARPGROUP, 8, 4).transpose(2, 3, 1, 4, 0, 5)
        return a_type.numbers(np.ascontiguousarray(words).reshape(-1, ROWS, 8)).astype(_F32, copy=False)

    return read


def _shared_operand(
    operand: Operand, name: str, rows: int, is_mn_major: bool, element: MatrixType, bind: Binder
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
        elements = element.numbers(data.view(_U32)).astype(_F32, copy=False)
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
