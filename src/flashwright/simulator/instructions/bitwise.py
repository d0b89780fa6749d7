"""Logic, shifts, bit fields and bit counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..binding import Binder, data_type
from ..ptx.syntax import Immediate, Instruction, Pair, Sink
from ..ptx.types import TYPES
from ..registry import Unsupported, instruction

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]

_U8, _U32, _U64, _I64 = np.dtype(np.uint8), np.dtype(np.uint32), np.dtype(np.uint64), np.dtype(np.int64)
_PREDICATES = {"or": np.logical_or, "and": np.logical_and}
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@instruction("and", "or", "xor")
def logic(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    return bind.elementwise(syntax, _LOGIC[syntax.root], ptx_type, ptx_type, ptx_type)


@instruction("not")
def not_(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    return bind.elementwise(syntax, np.invert, ptx_type, ptx_type)


@instruction("cnot")
def cnot(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    return bind.elementwise(syntax, lambda a: (a == 0).astype(ptx_type.raw), ptx_type, ptx_type)


@instruction("lop3")
def lop3(syntax: Instruction, bind: Binder) -> Execute:
    """Any function of three bits: bit ``a·4 + b·2 + c`` of the table is its value.

    ``lop3.or.b32 d|p, a, b, c, table, q`` has a second result: p = (d != 0) or q.
    """
    combine = next((_PREDICATES[m] for m in syntax.modifiers if m in _PREDICATES), None)
    operands = syntax.operands
    target = operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    if len(operands) != (5 if combine is None else 6) or isinstance(target, Pair) != (combine is not None):
        raise Unsupported("these operands of lop3: d, a, b, c, table, or with .or and .and d|p, a, b, c, table, q")
    table = operands[4]
    if not isinstance(table, Immediate):
        raise Unsupported(f"operand {table} as the table of lop3; it must be a constant")
    lut = int(table.value)
    b32 = TYPES["b32"]
    get_a, get_b, get_c = bind.sources(operands[1:4], b32, b32, b32)
    put, put_predicate = bind.destination(first, b32), bind.destination(second, TYPES["pred"])
    compute = _COMMON_TABLES.get(lut) or _sum_of_minterms(lut)
    if combine is None:
        return lambda wave: put(wave, compute(get_a(wave), get_b(wave), get_c(wave)))
    get_q = bind.predicate(operands[5])

    def execute(wave: Wave) -> None:
        result = compute(get_a(wave), get_b(wave), get_c(wave))
        predicate = combine(result != 0, get_q(wave))
        put(wave, result)
        put_predicate(wave, predicate)

    return execute


_COMMON_TABLES: dict[int, Callable[[Any, Any, Any], Any]] = {
    0x80: lambda a, b, c: a & b & c,
    0xF8: lambda a, b, c: a | (b & c),
    0xEA: lambda a, b, c: (a & b) | c,
    0x96: lambda a, b, c: a ^ b ^ c,
    0x78: lambda a, b, c: a ^ (b & c),
    0x6A: lambda a, b, c: (a & b) ^ c,
    0xFE: lambda a, b, c: a | b | c,
    0xCA: lambda a, b, c: (a & b) | (~a & c),
    0xE8: lambda a, b, c: (a & b) | (a & c) | (b & c),
}


def _sum_of_minterms(lut: int) -> Callable[[Any, Any, Any], Any]:
    def compute(a: Any, b: Any, c: Any) -> Any:
        result = (a ^ a) | (b ^ b) | (c ^ c)
        for minterm in range(8):
            if lut >> minterm & 1:
                result = result | ((a if minterm & 4 else ~a) & (b if minterm & 2 else ~b) & (c if minterm & 1 else ~c))
        return result

    return compute


@instruction("shl")
def shl(syntax: Instruction, bind: Binder) -> Execute:
    """Shift amounts beyond the width give zero."""
    ptx_type = data_type(syntax)
    bits = ptx_type.bits
    amount = syntax.operands[2]
    if isinstance(amount, Immediate):
        count = int(amount.value) & 0xFFFFFFFF
        put = bind.destination(syntax.operands[0], ptx_type)
        (get,) = bind.sources(syntax.operands[1:2], ptx_type)
        if count >= bits:
            return lambda wave: put(wave, np.zeros_like(get(wave)))
        fixed = ptx_type.raw.type(count)
        return lambda wave: put(wave, get(wave) << fixed)

    def compute(a: Any, b: Any) -> Any:
        return np.where(b < bits, a << np.minimum(b, bits - 1).astype(ptx_type.raw), ptx_type.raw.type(0))

    return bind.elementwise(syntax, compute, ptx_type, ptx_type, TYPES["u32"])


@instruction("shr")
def shr(syntax: Instruction, bind: Binder) -> Execute:
    """Shift amounts are clamped: a large one gives zero, or all sign bits."""
    ptx_type = data_type(syntax)
    bits, dtype = ptx_type.bits, ptx_type.dtype
    amount = syntax.operands[2]
    if isinstance(amount, Immediate) and (int(amount.value) & 0xFFFFFFFF) < bits:
        fixed = dtype.type(int(amount.value))
        put = bind.destination(syntax.operands[0], ptx_type)
        (get,) = bind.sources(syntax.operands[1:2], ptx_type)
        return lambda wave: put(wave, get(wave) >> fixed)

    def compute(a: Any, b: Any) -> Any:
        shifted = a >> np.minimum(b, bits - 1).astype(dtype)
        return shifted if ptx_type.is_signed else np.where(b < bits, shifted, dtype.type(0))

    return bind.elementwise(syntax, compute, ptx_type, ptx_type, TYPES["u32"])


@instruction("shf")
def funnel_shift(syntax: Instruction, bind: Binder) -> Execute:
    """Shift of the 64 bits {b, a}; left keeps the upper half, right the lower one."""
    u32 = TYPES["u32"]
    left, wraps = syntax.has("l"), syntax.has("wrap")

    def compute(a: Any, b: Any, c: Any) -> Any:
        count = (c & np.uint32(31) if wraps else np.minimum(c, np.uint32(32))).astype(_U64)
        both = (b.astype(_U64) << np.uint64(32)) | a.astype(_U64)
        if left:
            return ((both << count) >> np.uint64(32)).astype(_U32)
        return (both >> count).astype(_U32)

    return bind.elementwise(syntax, compute, u32, u32, u32, u32)


def _field_limits(position: Any, length: Any, bits: int) -> tuple[Any, Any]:
    """The PTX ISA allows 0 to 255: of more, hardware takes the low 8 bits in 32-bit fields, and all in 64-bit ones."""
    if bits == 64:
        return position, length
    return position & np.uint32(0xFF), length & np.uint32(0xFF)


@instruction("bfe")
def bit_field_extract(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    bits, dtype, raw = ptx_type.bits, ptx_type.dtype, ptx_type.raw

    def compute(a: Any, b: Any, c: Any) -> Any:
        position, length = _field_limits(b, c, bits)
        start = np.minimum(position, bits - 1).astype(raw)
        # Bits above the top are copies of the sign (zero for unsigned).
        value = np.where(position < bits, a >> start.astype(dtype), a >> dtype.type(bits - 1))
        if not ptx_type.is_signed:
            value = np.where(position < bits, value, dtype.type(0))
        unused = (bits - np.minimum(length, bits)).astype(np.int64)
        shift = np.minimum(unused, bits - 1).astype(dtype)
        kept = np.minimum(length, bits)
        if ptx_type.is_signed:
            # The sign of the field is its own top bit, or the number's if the field reaches past the end.
            result = (value.view(raw) << shift.view(raw)).view(dtype) >> shift
        else:
            result = (value << shift) >> shift
        return np.where(kept == 0, dtype.type(0), result)

    return bind.elementwise(syntax, compute, ptx_type, ptx_type, TYPES["u32"], TYPES["u32"])


@instruction("bfi")
def bit_field_insert(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    bits, raw = ptx_type.bits, ptx_type.raw
    ones = raw.type((1 << bits) - 1)

    def compute(a: Any, b: Any, c: Any, d: Any) -> Any:
        position, length = _field_limits(c, d, bits)
        length = np.minimum(length, bits)
        start = np.minimum(position, bits - 1).astype(raw)
        unused = np.minimum(bits - length.astype(np.int64), bits - 1).astype(raw)
        field = np.where((length > 0) & (position < bits), (ones >> unused) << start, raw.type(0))
        return (b & ~field) | ((a << start) & field)

    return bind.elementwise(syntax, compute, ptx_type, ptx_type, ptx_type, TYPES["u32"], TYPES["u32"])


@instruction("bmsk")
def bit_mask(syntax: Instruction, bind: Binder) -> Execute:
    wraps = syntax.has("wrap")

    def compute(a: Any, b: Any) -> Any:
        if wraps:
            a, b = a & np.uint32(31), b & np.uint32(31)
        start, length = np.minimum(a, 32).astype(_U64), np.minimum(b, 32).astype(_U64)
        return (((np.uint64(1) << length) - np.uint64(1)) << start).astype(_U32)

    return bind.elementwise(syntax, compute, *[TYPES["u32"]] * 3)


@instruction("szext")
def extend(syntax: Instruction, bind: Binder) -> Execute:
    """The lowest b bits of a, extended by their sign or by zeros; with .clamp, all of a from 32 bits on."""
    ptx_type = data_type(syntax)
    wraps = syntax.has("wrap")

    def compute(a: Any, b: Any) -> Any:
        length = (b & np.uint32(31) if wraps else np.minimum(b, np.uint32(32))).astype(_I64)
        unused = np.minimum(64 - length, 63).astype(_I64)
        wide = a.astype(_I64) << unused
        kept = wide >> unused if ptx_type.is_signed else (wide.view(_U64) >> unused.astype(_U64)).view(_I64)
        return np.where(length == 0, 0, kept).astype(ptx_type.dtype)

    return bind.elementwise(syntax, compute, ptx_type, ptx_type, TYPES["u32"])


@instruction("fns")
def find_nth_set(syntax: Instruction, bind: Binder) -> Execute:
    """The place of the offset-th bit of the mask that is set, from bit ``base`` on, upward or downward."""
    positions = np.arange(32)[:, None]

    def compute(mask: Any, base: Any, offset: Any) -> Any:
        mask, base, offset = np.broadcast_arrays(mask, base.astype(_I64), offset.astype(_I64))
        is_set = ((mask[None] >> positions.astype(_U32)) & np.uint32(1)) != 0
        upward = is_set & (positions >= base)
        downward = is_set & (positions <= base)
        from_base = np.where(offset < 0, np.cumsum(downward[::-1], axis=0)[::-1], np.cumsum(upward, axis=0))
        usable = np.where(offset < 0, downward, upward)
        found = usable & (from_base == np.abs(offset))
        found = np.where(offset == 0, is_set & (positions == base), found)
        return np.where(found.any(axis=0), found.argmax(axis=0), 0xFFFFFFFF).astype(_U32)

    return bind.elementwise(syntax, compute, TYPES["b32"], TYPES["b32"], TYPES["u32"], TYPES["s32"])


@instruction("brev")
def bit_reverse(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    table = np.array([int(f"{value:08b}"[::-1], 2) for value in range(256)], _U8)

    def compute(a: Any) -> Any:
        reversed_bits = table[np.ascontiguousarray(a).view(_U8).reshape(-1, ptx_type.bytes)]
        return np.ascontiguousarray(reversed_bits[:, ::-1]).view(ptx_type.raw).ravel()

    return bind.elementwise(syntax, compute, ptx_type, ptx_type)


def _bit_length(value: Any) -> Any:
    """Number of bits up to the highest one, of unsigned arrays."""
    value = value.astype(_U64)
    length = np.zeros(value.shape, _U32)
    for step in (32, 16, 8, 4, 2, 1):
        above = value >> np.uint64(step)
        large = above != 0
        length += np.where(large, np.uint32(step), np.uint32(0))
        value = np.where(large, above, value)
    return length + (value != 0)


@instruction("popc")
def popc(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    counts = np.array([bin(value).count("1") for value in range(256)], _U32)

    def compute(a: Any) -> Any:
        parts = counts[np.ascontiguousarray(a).view(_U8).reshape(-1, ptx_type.bytes)]
        return parts.sum(axis=1, dtype=_U32)

    return bind.elementwise(syntax, compute, TYPES["u32"], ptx_type)


@instruction("clz")
def clz(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    return bind.elementwise(syntax, lambda a: np.uint32(ptx_type.bits) - _bit_length(a), TYPES["u32"], ptx_type)


@instruction("bfind")
def bfind(syntax: Instruction, bind: Binder) -> Execute:
    """Position of the highest bit that differs from the sign; all ones if there is none."""
    ptx_type = data_type(syntax)
    shift_amount = syntax.has("shiftamt")

    def compute(a: Any) -> Any:
        value = np.where(a < 0, ~a, a).view(ptx_type.raw) if ptx_type.is_signed else a
        length = _bit_length(value)
        position = np.uint32(ptx_type.bits) - length if shift_amount else length - np.uint32(1)
        return np.where(length == 0, np.uint32(0xFFFFFFFF), position)

    return bind.elementwise(syntax, compute, TYPES["u32"], ptx_type)


@instruction("prmt")
def byte_permute(syntax: Instruction, bind: Binder) -> Execute:
    """Four bytes chosen from the eight of {b, a} by selectors of four bits; bit 3 replicates the sign."""
    b32 = TYPES["b32"]
    get_a, get_b, get_c = bind.sources(syntax.operands[1:4], b32, b32, b32)
    put = bind.destination(syntax.operands[0], b32)
    mode = next((m for m in syntax.modifiers if m in _PRMT_MODES), None)
    selector = syntax.operands[3]
    fixed = int(selector.value) if isinstance(selector, Immediate) and mode is None else None

    def compute(a: Any, b: Any, c: Any) -> Any:
        both = a.astype(_U64) | (b.astype(_U64) << np.uint64(32))
        result = np.uint32(0)
        for index in range(4):
            if fixed is not None:
                select: Any = np.uint64(fixed >> (4 * index) & 15)
            elif mode is None:
                select = (c.astype(_U64) >> np.uint64(4 * index)) & np.uint64(15)
            else:
                select = _PRMT_MODES[mode][:, index].take(c & np.uint32(3))
            byte = (both >> ((select & np.uint64(7)) << np.uint64(3))) & np.uint64(0xFF)
            if fixed is None or fixed >> (4 * index) & 8:
                sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
                byte = np.where(select & np.uint64(8), sign, byte)
            result = result | (byte.astype(_U32) << np.uint32(8 * index))
        return result

    return lambda wave: put(wave, compute(get_a(wave), get_b(wave), get_c(wave)))


# Selectors of byte 0…3 for each value of c[1:0] (PTX ISA, prmt).
_PRMT_MODES = {
    "f4e": np.array([[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]], _U64),
    "b4e": np.array([[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]], _U64),
    "rc8": np.array([[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]], _U64),
    "ecl": np.array([[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]], _U64),
    "ecr": np.array([[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]], _U64),
    "rc16": np.array([[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]], _U64),
}
