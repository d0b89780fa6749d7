"""Arithmetic of f32 and f64: rounding modes, .ftz, .sat, fused multiply-add."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np

from .. import numerics as num
from ..binding import Binder, check_operands, data_type
from ..ptx.syntax import Instruction
from ..ptx.types import TYPES, PtxType
from ..registry import Unsupported, instruction

Execute = Callable[..., Any]
Compute = Callable[..., Any]

FLOATS = ("f32", "f64")


def rounding_mode(syntax: Instruction, allowed: tuple[str, ...] = ("rn", "rz", "rm", "rp")) -> str:
    mode = next((m for m in syntax.modifiers if m in num.ROUNDING_MODES), "rn")
    if mode not in allowed:
        raise Unsupported(f"rounding mode .{mode}; allowed: {', '.join(f'.{name}' for name in allowed)}")
    return mode


def with_modifiers(syntax: Instruction, ptx_type: PtxType, compute: Compute) -> Compute:
    """``.ftz`` on inputs and output, then ``.sat``."""
    flush = syntax.has("ftz") and ptx_type.bits == 32
    clamp = syntax.has("sat")
    if not flush and not clamp:
        return compute

    def wrapped(*values: Any) -> Any:
        if flush:
            values = tuple(num.flush_subnormals(value) for value in values)
        result = compute(*values)
        if flush:
            result = num.flush_subnormals(result)
        return num.saturate(result) if clamp else result

    return wrapped


def _sum(ptx_type: PtxType, mode: str) -> Compute:
    if mode == "rn":
        return np.add

    double_sum = num.by_fractions(lambda a, b: a + b, np.add, mode)

    def compute(a: Any, b: Any) -> Any:
        if ptx_type.bits == 64:
            result = double_sum(a, b)
            return num.zero_of_sum(result, result, mode, a, b)
        exact = num.exact_sum(a, b)
        return num.zero_of_sum(num.round_to(exact, num.F32, mode), exact, mode, a, b)

    return compute


def _product(ptx_type: PtxType, mode: str) -> Compute:
    if mode == "rn":
        return np.multiply
    if ptx_type.bits == 64:
        return num.by_fractions(lambda a, b: a * b, np.multiply, mode)
    return lambda a, b: num.round_to(a.astype(num.F64) * b.astype(num.F64), num.F32, mode)


def _binary(root: str, ptx_type: PtxType, mode: str) -> Compute:
    """add, sub or mul in a rounding mode."""
    if root == "mul":
        return _product(ptx_type, mode)
    total = _sum(ptx_type, mode)
    if root == "add":
        return total
    return np.subtract if mode == "rn" else lambda a, b: total(a, -b)


@instruction("add", "sub", "mul", types=FLOATS)
def add_sub_mul(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    compute = _binary(syntax.root, ptx_type, rounding_mode(syntax))
    return bind.elementwise(syntax, with_modifiers(syntax, ptx_type, compute), ptx_type, ptx_type, ptx_type)


def _fused(ptx_type: PtxType, mode: str) -> Compute:
    is_double = ptx_type.bits == 64
    if mode == "rn":
        return num.fma_f64 if is_double else num.fma_f32
    directed = num.by_fractions(lambda a, b, c: a * b + c, num.fma_f64, mode)

    def compute(a: Any, b: Any, c: Any) -> Any:
        product = np.copysign(1, a) * np.copysign(1, b)  # its sign
        if is_double:
            result = directed(a, b, c)
            return num.zero_of_sum(result, num.fma_or_its_sign(result, a, b, c), mode, product, c)
        exact = num.exact_fma(a, b, c)
        return num.zero_of_sum(num.round_to(exact, num.F32, mode), exact, mode, product, c)

    return compute


@instruction("fma", "mad", types=FLOATS)
def fma(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    compute = with_modifiers(syntax, ptx_type, _fused(ptx_type, rounding_mode(syntax)))
    return bind.elementwise(syntax, compute, *[ptx_type] * 4)


@instruction("add", "sub", "mul", "fma", types=("f32x2",))
def pairs(syntax: Instruction, bind: Binder) -> Execute:
    """Two singles in a register, each by itself."""
    check_operands(syntax, 4 if syntax.root == "fma" else 3)
    single, pair = TYPES["f32"], TYPES["f32x2"]
    mode = rounding_mode(syntax)
    compute = _fused(single, mode) if syntax.root == "fma" else _binary(syntax.root, single, mode)
    compute = with_modifiers(syntax, single, compute)

    def of_pairs(*values: Any) -> Any:
        singles = [np.ascontiguousarray(np.atleast_1d(value)).view(num.F32).reshape(-1, 2) for value in values]
        return np.ascontiguousarray(compute(*np.broadcast_arrays(*singles))).view(pair.raw).ravel()

    return bind.elementwise(syntax, of_pairs, *[pair] * len(syntax.operands))


def _via_double(compute: Compute, mode: str) -> Compute:
    """f32 division, reciprocal or root with a directed rounding.

    The double result is not exact, but a quotient or root of 24-bit numbers is either a 24-bit number itself
    or too far from one for the double to reach it, so comparing with the double decides correctly.
    """
    return lambda *values: num.round_to(compute(*(value.astype(num.F64) for value in values)), num.F32, mode)


@instruction("div", types=FLOATS)
def div(syntax: Instruction, bind: Binder) -> Execute:
    """.approx and .full are computed correctly rounded."""
    ptx_type = data_type(syntax)
    compute = _directed(np.divide, ptx_type, rounding_mode(syntax), lambda a, b: a / b)
    return bind.elementwise(syntax, with_modifiers(syntax, ptx_type, compute), ptx_type, ptx_type, ptx_type)


@instruction("rcp", "sqrt", types=FLOATS)
def reciprocal_and_root(syntax: Instruction, bind: Binder) -> Execute:
    """.approx is computed correctly rounded."""
    ptx_type = data_type(syntax)
    functions: dict[str, tuple[Compute, Callable[[Fraction], Fraction]]] = {
        "rcp": (lambda a: a.dtype.type(1) / a, lambda a: 1 / a),
        "sqrt": (np.sqrt, num.root_of),
    }
    compute, exact = functions[syntax.root]
    compute = _directed(compute, ptx_type, rounding_mode(syntax), exact)
    return bind.elementwise(syntax, with_modifiers(syntax, ptx_type, compute), ptx_type, ptx_type)


def _directed(compute: Compute, ptx_type: PtxType, mode: str, exact: Callable[..., Fraction]) -> Compute:
    if mode == "rn":
        return compute
    return num.by_fractions(exact, compute, mode) if ptx_type.bits == 64 else _via_double(compute, mode)


@instruction("neg", "abs", types=FLOATS)
def neg_abs(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    compute = with_modifiers(syntax, ptx_type, np.negative if syntax.root == "neg" else np.abs)
    return bind.elementwise(syntax, compute, ptx_type, ptx_type)


@instruction("min", "max", types=FLOATS)
def min_max(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    operation = num.minimum if syntax.root == "min" else num.maximum
    propagate = syntax.has("NaN")
    flip_sign = syntax.has("xorsign")
    raw = ptx_type.raw
    sign_bit = raw.type(1 << (ptx_type.bits - 1))

    def compute(*values: Any) -> Any:
        magnitudes = [np.abs(value) for value in values] if flip_sign else values
        result = magnitudes[0]
        for value in magnitudes[1:]:
            result = operation(result, value, propagate)
        if flip_sign:
            sign = reduce(np.bitwise_xor, (value.view(raw) for value in values)) & sign_bit
            result = (result.view(raw) ^ sign).view(ptx_type.dtype)
        return result

    count = len(syntax.operands)
    return bind.elementwise(syntax, with_modifiers(syntax, ptx_type, compute), *[ptx_type] * count)


@instruction("copysign")
def copysign(syntax: Instruction, bind: Binder) -> Execute:
    """The sign of a with the magnitude of b."""
    ptx_type = data_type(syntax)
    return bind.elementwise(syntax, lambda a, b: np.copysign(b, a), ptx_type, ptx_type, ptx_type)
