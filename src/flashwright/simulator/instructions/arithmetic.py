"""Integer arithmetic, including wide products and carry chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..binding import Binder, data_type
from ..ptx.syntax import Instruction
from ..ptx.types import TYPES, PtxType
from ..registry import Unsupported, instruction

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]

INTEGERS = tuple(f"{kind}{bits}" for kind in "usb" for bits in (16, 32, 64))
_I64, _U64, _U32 = np.dtype(np.int64), np.dtype(np.uint64), np.dtype(np.uint32)
_S32 = np.iinfo(np.int32)


def _wider(ptx_type: PtxType) -> PtxType:
    return TYPES[f"{ptx_type.kind}{2 * ptx_type.bits}"]


@instruction("add", "sub", types=INTEGERS)
def add_sub(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    if syntax.has("cc"):
        return _carry_chain(syntax, bind)
    operation = np.add if syntax.root == "add" else np.subtract
    if syntax.has("sat"):
        if ptx_type.name != "s32":
            raise Unsupported(".sat of this type")

        def saturated(a: Any, b: Any) -> Any:
            return np.clip(operation(a.astype(_I64), b.astype(_I64)), _S32.min, _S32.max).astype(np.int32)

        return bind.elementwise(syntax, saturated, ptx_type, ptx_type, ptx_type)
    return bind.elementwise(syntax, operation, ptx_type, ptx_type, ptx_type)


@instruction("addc", "subc")
def add_sub_with_carry(syntax: Instruction, bind: Binder) -> Execute:
    return _carry_chain(syntax, bind)


def _carry_chain(syntax: Instruction, bind: Binder) -> Execute:
    """add.cc, addc, sub.cc, subc: the carry flag is one more predicate register.

    A subtraction adds the complement plus one, as hardware does, so that its carry is 1 where nothing is borrowed.
    """
    ptx_type = data_type(syntax)
    unsigned = TYPES[f"u{ptx_type.bits}"]
    subtracts = syntax.root.startswith("sub")
    reads, writes = syntax.root.endswith("c"), syntax.has("cc")
    put = bind.destination(syntax.operands[0], ptx_type)
    get_a, get_b = bind.sources(syntax.operands[1:], unsigned, unsigned)
    get_carry, put_carry = bind.carry()

    def execute(wave: Wave) -> None:
        a, b = get_a(wave), ~get_b(wave) if subtracts else get_b(wave)
        carry_in = get_carry(wave).astype(unsigned.raw) if reads else unsigned.raw.type(subtracts)
        first = a + b
        result = first + carry_in
        put(wave, result)
        if writes:
            put_carry(wave, (first < a) | (result < first))

    return execute


def _high_product(a: Any, b: Any, ptx_type: PtxType) -> Any:
    if ptx_type.bits < 64:
        wide = _wider(ptx_type)
        product = a.astype(wide.dtype) * b.astype(wide.dtype)
        return (product >> wide.dtype.type(ptx_type.bits)).astype(ptx_type.dtype)
    unsigned_a, unsigned_b = a.view(_U64), b.view(_U64)
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1 = unsigned_a & mask, unsigned_a >> shift
    b0, b1 = unsigned_b & mask, unsigned_b >> shift
    middle = a1 * b0 + ((a0 * b0) >> shift)
    other = a0 * b1 + (middle & mask)
    high = a1 * b1 + (middle >> shift) + (other >> shift)
    if ptx_type.is_signed:  # subtract the other factor for each negative one
        high = high - np.where(a < 0, unsigned_b, np.uint64(0)) - np.where(b < 0, unsigned_a, np.uint64(0))
    return high.view(ptx_type.dtype)


def _product(syntax: Instruction, ptx_type: PtxType) -> tuple[Callable[[Any, Any], Any], PtxType]:
    """The product of mul/mad in the instruction's mode, and its type."""
    if syntax.has("wide"):
        wide = _wider(ptx_type)
        return (lambda a, b: a.astype(wide.dtype) * b.astype(wide.dtype)), wide
    if syntax.has("hi"):
        return (lambda a, b: _high_product(a, b, ptx_type)), ptx_type
    return np.multiply, ptx_type


@instruction("mul", types=INTEGERS)
def mul(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    product, result = _product(syntax, ptx_type)
    return bind.elementwise(syntax, product, result, ptx_type, ptx_type)


@instruction("mad", types=INTEGERS)
def mad(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    product, result = _product(syntax, ptx_type)
    if syntax.has("cc"):
        return _mad_carry(syntax, bind)
    if syntax.has("sat"):
        if ptx_type.name != "s32" or not syntax.has("hi"):
            raise Unsupported(".sat of this form; there is mad.hi.sat.s32")

        def saturated(a: Any, b: Any, c: Any) -> Any:
            return np.clip(product(a, b).astype(_I64) + c, _S32.min, _S32.max).astype(np.int32)

        return bind.elementwise(syntax, saturated, *[ptx_type] * 4)
    return bind.elementwise(syntax, lambda a, b, c: product(a, b) + c, result, ptx_type, ptx_type, result)


@instruction("madc")
def mad_with_carry(syntax: Instruction, bind: Binder) -> Execute:
    return _mad_carry(syntax, bind)


def _mad_carry(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    product, _ = _product(syntax, ptx_type)
    raw = ptx_type.raw
    reads, writes = syntax.root == "madc", syntax.has("cc")
    put = bind.destination(syntax.operands[0], ptx_type)
    get_a, get_b, get_c = bind.sources(syntax.operands[1:], ptx_type, ptx_type, ptx_type)
    get_carry, put_carry = bind.carry()

    def execute(wave: Wave) -> None:
        partial = np.asarray(product(get_a(wave), get_b(wave))).view(raw)
        carry_in = get_carry(wave).astype(raw) if reads else raw.type(0)
        first = partial + get_c(wave).view(raw)
        result = first + carry_in
        put(wave, result)
        if writes:
            put_carry(wave, (first < partial) | (result < first))

    return execute


@instruction("mul24", "mad24")
def mul24(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    high = syntax.has("hi")

    def product(a: Any, b: Any) -> Any:
        wide = np.dtype(f"{'int' if ptx_type.is_signed else 'uint'}64")
        left, right = (((x.astype(wide) << wide.type(40)) >> wide.type(40)) for x in (a, b))
        full = left * right
        return (full >> wide.type(16) if high else full).astype(ptx_type.dtype)

    if syntax.root == "mul24":
        return bind.elementwise(syntax, product, ptx_type, ptx_type, ptx_type)
    if syntax.has("sat"):
        if ptx_type.name != "s32" or not high:
            raise Unsupported(".sat of this form; there is mad24.hi.sat.s32")

        def saturated(a: Any, b: Any, c: Any) -> Any:
            return np.clip(product(a, b).astype(_I64) + c, _S32.min, _S32.max).astype(np.int32)

        return bind.elementwise(syntax, saturated, *[ptx_type] * 4)
    return bind.elementwise(syntax, lambda a, b, c: product(a, b) + c, *[ptx_type] * 4)


def _truncating_division(a: Any, b: Any, ptx_type: PtxType) -> tuple[Any, ...]:
    """Quotient and remainder toward zero; by zero, all ones, as on an H200."""
    zero = b == 0
    divisor = np.where(zero, ptx_type.dtype.type(1), b)
    if ptx_type.is_signed:
        quotient = np.floor_divide(a, divisor)
        remainder = a - quotient * divisor
        adjust = (remainder != 0) & ((a < 0) != (divisor < 0))
        quotient = quotient + adjust
        remainder = a - quotient * divisor
    else:
        quotient = a // divisor
        remainder = a - quotient * divisor
    ones = np.array(-1).astype(ptx_type.dtype)
    return tuple(np.where(zero, ones, part).astype(ptx_type.dtype) for part in (quotient, remainder))


@instruction("div", "rem", types=INTEGERS)
def div_rem(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    part = 0 if syntax.root == "div" else 1
    return bind.elementwise(
        syntax, lambda a, b: _truncating_division(a, b, ptx_type)[part], ptx_type, ptx_type, ptx_type
    )


@instruction("abs", "neg", types=INTEGERS)
def abs_neg(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    return bind.elementwise(syntax, np.abs if syntax.root == "abs" else np.negative, ptx_type, ptx_type)


@instruction("min", "max", types=INTEGERS)
def min_max(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    operation = np.minimum if syntax.root == "min" else np.maximum
    if syntax.has("relu"):
        zero = ptx_type.dtype.type(0)
        return bind.elementwise(syntax, lambda a, b: np.maximum(operation(a, b), zero), *[ptx_type] * 3)
    return bind.elementwise(syntax, operation, ptx_type, ptx_type, ptx_type)


@instruction("add", "min", "max", types=("u16x2", "s16x2"))
def pairs(syntax: Instruction, bind: Binder) -> Execute:
    """Two 16-bit integers in a register, each by itself."""
    if syntax.has("sat"):
        raise Unsupported(".sat of pairs of integers")
    ptx_type = data_type(syntax)
    dtype = np.dtype(np.int16 if ptx_type.name == "s16x2" else np.uint16)
    operations: dict[str, Callable[[Any, Any], Any]] = {"add": np.add, "min": np.minimum, "max": np.maximum}
    operation, rectify = operations[syntax.root], syntax.has("relu")

    def halves(value: Any) -> Any:
        return np.ascontiguousarray(np.atleast_1d(value)).view(dtype).reshape(-1, 2)

    def compute(a: Any, b: Any) -> Any:
        result = operation(halves(a), halves(b))
        if rectify:
            result = np.maximum(result, dtype.type(0))
        return np.ascontiguousarray(result).view(_U32).ravel()

    return bind.elementwise(syntax, compute, ptx_type, ptx_type, ptx_type)


@instruction("sad", types=INTEGERS)
def sad(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    unsigned = TYPES[f"u{ptx_type.bits}"]

    def compute(a: Any, b: Any, c: Any) -> Any:
        return c + (np.maximum(a, b) - np.minimum(a, b)).view(unsigned.raw)

    return bind.elementwise(syntax, compute, unsigned, ptx_type, ptx_type, unsigned)


@instruction("dp4a", "dp2a")
def dot_product(syntax: Instruction, bind: Binder) -> Execute:
    """Dot product of bytes (dp4a), or of two 16-bit numbers with the low or high bytes (dp2a)."""
    left_type, right_type = (TYPES[name] for name in [m for m in syntax.modifiers if m in TYPES][:2])
    signed = left_type.is_signed or right_type.is_signed
    result = TYPES["s32" if signed else "u32"]
    wide = result.dtype

    def parts(value: Any, ptx_type: PtxType, bits: int) -> Any:
        dtype = np.dtype(f"{'int' if ptx_type.is_signed else 'uint'}{bits}")
        return np.ascontiguousarray(np.atleast_1d(value)).view(dtype).reshape(-1, 32 // bits).astype(wide)

    def compute(a: Any, b: Any, c: Any) -> Any:
        right = parts(b, right_type, 8)
        if syntax.root == "dp4a":
            return c + (parts(a, left_type, 8) * right).sum(axis=1, dtype=wide)
        half = right[:, 2:] if syntax.has("hi") else right[:, :2]
        return c + (parts(a, left_type, 16) * half).sum(axis=1, dtype=wide)

    return bind.elementwise(syntax, compute, result, TYPES["b32"], TYPES["b32"], result)
