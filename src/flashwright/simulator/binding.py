"""Operands of an instruction, bound to register slots and addresses: what decoders build closures from.

Every register of a kernel is a slot in ``wave.registers``, holding one array over the wave's threads. Arrays
are never modified in place: a result replaces the slot, so that ``mov`` is a reference and aliasing is safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory.windows import WINDOW_BASE
from .ptx.syntax import Address, Immediate, Instruction, Not, Operand, Register, Sink, Symbol, Vector
from .ptx.types import RAW_DTYPES, TYPES, PtxType
from .registry import Unsupported

if TYPE_CHECKING:
    from .wave import Wave

Getter = Callable[["Wave"], Any]
Setter = Callable[["Wave", Any], None]

_I64 = np.dtype(np.int64)
CARRY_FLAG = "%carry"


@dataclass(frozen=True)
class SymbolAddress:
    """Where a variable lives: a state space and an offset in it."""

    space: str
    offset: int


@dataclass(frozen=True)
class Slot:
    index: int
    type: PtxType


class Binder:
    """Resolves the operands of instructions of one function instance (see `program`)."""

    def __init__(
        self,
        slot_of: Callable[[str], Slot],
        symbol_of: Callable[[str], SymbolAddress],
        label_of: Callable[[str], int],
        branch_targets: Callable[[str], list[int]],
        return_target: int | None,
        call_end: int | None = None,
        callees: dict[int, int] | None = None,
        pc: int = 0,
    ) -> None:
        self.slot_of = slot_of
        self.symbol_of = symbol_of
        self.label_of = label_of
        self.branch_targets = branch_targets
        self.return_target = return_target
        self.call_end = call_end
        self.callees = callees or {}  # of a call through a pointer: address of a function → where it was expanded
        self.pc = pc
        self.shared_widths: set[int] = set()
        self.global_widths: set[int] = set()
        self.touched: set[int] = set()  # slots that the instruction reads or writes
        self.wgmma_registers: set[int] = set()  # slots that stay in use after it, until a wgmma.wait_group
        self.rename: tuple[int | None, int] | None = None  # slots of a 32-bit mov; None as source: a constant
        self.unpacks: tuple[int, tuple[int | None, ...]] | None = (
            None  # slots of a mov to 16-bit halves; None: not wanted
        )

    # Sources -----------------------------------------------------------------------------------------

    def source(self, operand: Operand, ptx_type: PtxType) -> Getter:
        """A function from the wave to the operand's values, viewed as ``ptx_type.dtype``."""
        if isinstance(operand, Register):
            return self._register_source(operand, ptx_type)
        if isinstance(operand, Immediate):
            constant = immediate(operand, ptx_type)
            return lambda wave: constant
        if isinstance(operand, Symbol):
            return self.symbol_address(operand, ptx_type.dtype)
        if isinstance(operand, Not):
            get = self.source(operand.register, ptx_type)
            return lambda wave: ~get(wave)
        raise Unsupported(f"operand {operand} as a source")

    def symbol_address(self, operand: Symbol, dtype: np.dtype, offset: int = 0) -> Getter:
        """The address of a variable in its state space, the same in all threads unless blocks form clusters."""
        address = self.symbol_of(operand.name)
        constant = np.array(address.offset + operand.offset + offset, _I64).astype(dtype)
        if address.space != "shared":
            return lambda wave: constant
        return lambda wave: (
            constant if wave.clusters.size == 1 else constant + wave.clusters.first_address.astype(dtype)
        )

    def sources(self, operands: tuple[Operand, ...], *types: PtxType) -> list[Getter]:
        """Sources that together have at least one value per thread, even if all are immediates."""
        getters = [self.source(operand, ptx_type) for operand, ptx_type in zip(operands, types, strict=True)]
        if not any(isinstance(operand, (Register, Not)) for operand in operands):
            scalar = getters[0]
            getters[0] = lambda wave: np.full(wave.threads, scalar(wave))
        return getters

    def _register_source(self, operand: Register, ptx_type: PtxType) -> Getter:
        slot = self.slot_of(operand.name)
        self.touched.add(slot.index)
        index, dtype = slot.index, ptx_type.dtype
        if slot.type.bits == ptx_type.bits or ptx_type.kind == "pred":
            if (slot.type.kind == "pred") != (ptx_type.kind == "pred"):
                raise Unsupported(f"register {operand.name} has the wrong type")
            if ptx_type.kind == "pred":
                return lambda wave: wave.registers[index]
            return lambda wave: wave.registers[index].view(dtype)
        if slot.type.bits == 128:
            raise Unsupported(f"register {operand.name} has 128 bits, an operand of .{ptx_type.name} {ptx_type.bits}")
        if slot.type.bits > ptx_type.bits:  # the low part of a wider register
            narrow = ptx_type.raw
            wide = slot.type.raw
            return lambda wave: wave.registers[index].view(wide).astype(narrow).view(dtype)
        raise Unsupported(f"register {operand.name} is narrower than .{ptx_type.name}")

    def raw_source(self, operand: Operand) -> tuple[Getter, int]:
        """The raw bits of a register and their number; for instructions whose type is the register's."""
        assert isinstance(operand, Register)
        slot = self.slot_of(operand.name)
        return self.source(operand, slot.type), slot.type.bits

    def predicate(self, operand: Operand) -> Getter:
        if isinstance(operand, Immediate):
            constant = np.array(bool(operand.value))
            return lambda wave: constant
        return self.source(operand, TYPES["pred"])

    def carry(self) -> tuple[Getter, Setter]:
        register = Register(CARRY_FLAG)
        return self.predicate(register), self.destination(register, TYPES["pred"])

    # Destinations ------------------------------------------------------------------------------------

    def destination(self, operand: Operand, ptx_type: PtxType) -> Setter:
        """A function that writes one value per thread of the wave to the active threads' registers."""
        if isinstance(operand, Sink):
            return _discard
        index, convert, raw = self._target(operand, ptx_type)

        def put(wave: Wave, value: Any) -> None:
            if wave.merge is None:
                wave.registers[index] = value
            else:
                wave.registers[index] = np.where(wave.merge, value.view(raw), wave.registers[index].view(raw))

        if convert is None:
            return put
        narrow, wide = convert
        return lambda wave, value: put(wave, value.view(narrow).astype(wide))

    def active_destination(self, operand: Operand, ptx_type: PtxType) -> Setter:
        """A function that writes one value per *active* thread, in thread order."""
        if isinstance(operand, Sink):
            return _discard
        index, convert, raw = self._target(operand, ptx_type)

        def put(wave: Wave, value: Any) -> None:
            if convert is not None:
                value = value.view(convert[0]).astype(convert[1])
            lanes = wave.lanes
            if lanes is None:
                wave.registers[index] = value
            else:
                merged = wave.registers[index].view(raw).copy()
                merged[lanes] = value.view(raw)
                wave.registers[index] = merged

        return put

    def _target(self, operand: Operand, ptx_type: PtxType) -> tuple[int, tuple[np.dtype, np.dtype] | None, np.dtype]:
        if not isinstance(operand, Register):
            raise Unsupported(f"operand {operand} as a destination")
        slot = self.slot_of(operand.name)
        self.touched.add(slot.index)
        if (slot.type.kind == "pred") != (ptx_type.kind == "pred"):
            raise Unsupported(f"register {operand.name} has the wrong type")
        if slot.type.bits < ptx_type.bits:
            raise Unsupported(f"register {operand.name} is narrower than .{ptx_type.name}")
        convert = None
        if slot.type.bits > ptx_type.bits:  # widened by the sign of the instruction's type
            kind = "int" if ptx_type.is_signed else "uint"
            convert = (np.dtype(f"{kind}{ptx_type.bits}"), np.dtype(f"{kind}{slot.type.bits}"))
        return slot.index, convert, slot.type.raw

    # Addresses ---------------------------------------------------------------------------------------

    def address(self, operand: Operand) -> Getter:
        """A function to the byte addresses of all threads (int64)."""
        assert isinstance(operand, Address)
        if isinstance(operand.base, Register):
            slot = self.slot_of(operand.base.name)
            index, raw = slot.index, slot.type.raw
            offset = _I64.type(operand.offset)
            if slot.type.bits == 64:
                if operand.offset == 0:
                    return lambda wave: wave.registers[index].view(_I64)
                return lambda wave: wave.registers[index].view(_I64) + offset
            return lambda wave: wave.registers[index].view(raw).astype(_I64) + offset
        if isinstance(operand.base, Symbol):
            variable = self.symbol_address(operand.base, _I64, operand.offset)
            return lambda wave: np.full(wave.threads, variable(wave))
        fixed = operand.offset + int(operand.base.value)
        return lambda wave: np.full(wave.threads, fixed, _I64)

    def address_space_of(self, operand: Operand) -> str | None:
        """The state space of an address that names a variable; None for a register or a number."""
        assert isinstance(operand, Address)
        return self.symbol_of(operand.base.name).space if isinstance(operand.base, Symbol) else None

    def generic_address(self, operand: Operand) -> Getter:
        """Like `address`, for an access without a state space: variables get their window's base."""
        space = self.address_space_of(operand)
        get = self.address(operand)
        if space is None:
            return get
        base = _I64.type(WINDOW_BASE[space])
        return lambda wave: get(wave) + base

    # Whole instructions ------------------------------------------------------------------------------

    def elementwise(self, syntax: Instruction, compute: Callable[..., Any], *types: PtxType) -> Callable[..., None]:
        """``d, a, b, …`` with ``types`` of d, a, b, … and ``compute(a, b, …)`` on arrays."""
        put = self.destination(syntax.operands[0], types[0])
        getters = self.sources(syntax.operands[1:], *types[1:])
        if len(getters) == 1:
            (get_a,) = getters
            return lambda wave: put(wave, compute(get_a(wave)))
        if len(getters) == 2:
            get_a, get_b = getters
            return lambda wave: put(wave, compute(get_a(wave), get_b(wave)))
        if len(getters) == 3:
            get_a, get_b, get_c = getters
            return lambda wave: put(wave, compute(get_a(wave), get_b(wave), get_c(wave)))
        return lambda wave: put(wave, compute(*[get(wave) for get in getters]))


def immediate(operand: Immediate, ptx_type: PtxType) -> np.ndarray:
    """A literal as a zero-dimensional array of the type."""
    if ptx_type.kind == "pred":
        return np.array(bool(operand.value))
    if operand.bits is not None and ptx_type.bits == operand.width:
        return np.array(operand.bits, RAW_DTYPES[ptx_type.bits]).view(ptx_type.dtype)
    if ptx_type.kind == "f":
        return np.array(operand.value, ptx_type.dtype)
    if ptx_type.kind in ("bf", "packed") and isinstance(operand.value, float):
        raise Unsupported("a floating-point literal of a packed or bfloat16 type")
    pattern = int(operand.value) & ((1 << ptx_type.bits) - 1)
    return np.frombuffer(pattern.to_bytes(ptx_type.bytes, "little"), ptx_type.dtype).reshape(())


def check_operands(syntax: Instruction, count: int) -> None:
    """Refuses an instruction that has not ``count`` operands."""
    if len(syntax.operands) != count:
        raise Unsupported(f"{len(syntax.operands)} operands; {count} are needed")


def elements_of(operand: Operand) -> tuple[Operand, ...]:
    """The elements of ``{a, b}``, or the operand alone."""
    return operand.elements if isinstance(operand, Vector) else (operand,)


def data_type(syntax: Instruction) -> PtxType:
    """The last modifier that is a type."""
    for modifier in reversed(syntax.modifiers):
        if modifier in TYPES:
            return TYPES[modifier]
    raise Unsupported("no type this simulator knows")


def _discard(wave: Wave, value: Any) -> None:
    """Destination of ``_``."""
