"""Floating-point rounding as PTX defines it, on arrays.

The exact result of an operation is carried as a double that was *rounded to odd*: truncated, with the last
bit set if anything was lost. Rounding that double to a type of fewer bits, in any mode, gives the correctly
rounded result of the exact value (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import isqrt
from typing import Any

import numpy as np

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
_U16, _U32, _I64, _U64 = np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.int64), np.dtype(np.uint64)
_F32_MIN_NORMAL = np.float32(2.0**-126)
ROUNDING_MODES = ("rn", "rz", "rm", "rp", "rna")

Array = Any


def odd(value: Array, error: Array) -> Array:
    """``value + error`` rounded to odd, where ``value`` is the double nearest to that sum."""
    error = np.where(np.isfinite(error) & np.isfinite(value), error, 0.0)
    bits = np.asarray(value).view(_I64)
    inexact = error != 0
    away = inexact & ((error < 0) != (value < 0)) & (value != 0)
    return np.where(inexact, (bits - away) | 1, bits).view(F64)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum of two doubles and its exact error."""
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded product of two doubles and its exact error (no overflow or underflow)."""
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _split(value: Array) -> tuple[Array, Array]:
    scaled = value * 134217729.0  # 2^27 + 1 (Veltkamp)
    high = scaled - (scaled - value)
    return high, value - high


def exact_sum(a: Array, b: Array) -> Array:
    return odd(*two_sum(a.astype(F64), b.astype(F64)))


def exact_fma(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of floats of at most 24 bits, rounded to odd: their product is exact in a double."""
    return odd(*two_sum(a.astype(F64) * b.astype(F64), c.astype(F64)))


def round_to(value: Array, dtype: np.dtype, mode: str) -> Array:
    """A double (rounded to odd if it was not exact) to ``dtype`` in a PTX rounding mode."""
    nearest = value.astype(dtype)
    if mode == "rn":
        return nearest
    wide = nearest.astype(F64)
    infinity = dtype.type(np.inf)
    if mode == "rz":
        return np.where(np.abs(wide) > np.abs(value), np.nextafter(nearest, dtype.type(0)), nearest)
    if mode == "rm":
        return np.where(wide > value, np.nextafter(nearest, -infinity), nearest)
    if mode == "rp":
        return np.where(wide < value, np.nextafter(nearest, infinity), nearest)
    raise ValueError(f"rounding mode .{mode}")


def directed(result: Array, error: Array, mode: str) -> Array:
    """The nearest number and its exact error (what it lacks to the exact value) → the number in a rounding mode."""
    if mode == "rn":
        return result
    error = np.where(np.isfinite(result), error, 0)
    if mode == "rz":
        step = (error != 0) & ((error < 0) != (result < 0))
        return np.where(step, np.nextafter(result, result.dtype.type(0)), result)
    if mode == "rm":
        return np.where(error < 0, np.nextafter(result, result.dtype.type(-np.inf)), result)
    return np.where(error > 0, np.nextafter(result, result.dtype.type(np.inf)), result)


def zero_of_sum(result: Array, exact: Array, mode: str, *addends: Array) -> Array:
    """IEEE 754, "The sign bit": a sum that is exactly zero is -0 with ``.rm``, unless all its addends are +0."""
    if mode != "rm":
        return result
    negative = np.logical_or.reduce(np.broadcast_arrays(*(np.signbit(addend) for addend in addends)))
    return np.where((exact == 0) & negative, result.dtype.type(-0.0), result)


def by_fractions(exact: Callable[..., Fraction], plain: Callable[..., Array], mode: str) -> Callable[..., Array]:
    """A double operation in a directed rounding mode, element by element.

    Exact zeros, and results of operands that are not finite, are those of ``plain``, the operation with ``.rn``.
    """

    def compute(*values: Array) -> Array:
        results = np.array(plain(*values), F64, ndmin=1)
        columns = [np.broadcast_to(value, results.shape) for value in values]
        finite = np.logical_and.reduce([np.isfinite(column) for column in columns]) & ~np.isnan(results)
        for index in np.flatnonzero(finite):
            try:
                value = exact(*(Fraction(float(column[index])) for column in columns))
            except ZeroDivisionError:
                continue
            if value:
                results[index] = _directed_fraction(value, mode)
        return results

    return compute


def _directed_fraction(value: Fraction, mode: str) -> float:
    try:
        nearest = value.numerator / value.denominator
    except OverflowError:
        nearest = np.inf if value > 0 else -np.inf
    toward = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}[mode]
    if nearest > value and (mode == "rm" or (mode == "rz" and value > 0)):
        return float(np.nextafter(nearest, toward))
    if nearest < value and (mode == "rp" or (mode == "rz" and value < 0)):
        return float(np.nextafter(nearest, toward))
    return float(nearest)


def root_of(value: Fraction) -> Fraction:
    """The square root of a double, or a fraction so near to it that every rounding of the two to a double is the same.

    A root is a double, or differs from each by more than 2⁻¹⁰⁰ of itself; the fraction errs by less, and never rounds
    to an exact result.
    """
    if value < 0:
        raise ZeroDivisionError
    shift = 4096
    scaled = (value.numerator << (2 * shift)) // value.denominator
    root = isqrt(scaled)
    is_exact = root * root == scaled and (value.numerator << (2 * shift)) % value.denominator == 0
    return Fraction(2 * root + (not is_exact), 2 << shift)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f32. The plain double computation is right unless it lands on a tie of single precision."""
    total = np.multiply(a, b, dtype=F64) + c
    result = total.astype(F32)
    tie = (total.view(_I64) & 0x1FFFFFFF) == 0x10000000
    if tie.any() or ((np.abs(result) < _F32_MIN_NORMAL) & (total != 0)).any():
        return exact_fma(a, b, c).astype(F32)
    return result


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f64 (Boldo and Melquiond); element by element with fractions where an exponent is extreme."""
    a, b, c = np.broadcast_arrays(a, b, c)
    high, low = two_product(a, b)
    sum_high, sum_low = two_sum(c, low)
    total, total_low = two_sum(high, sum_high)
    result = total + odd(*two_sum(sum_low, total_low))
    # A finite product that is too large for a double is small beside an infinite c.
    plain = np.where(np.isinf(c) & np.isfinite(a) & np.isfinite(b), c, a * b + c)
    magnitude = [np.abs(part) for part in (a, b, c, high)]
    safe = np.ones(result.shape, bool)
    for part in magnitude:
        safe &= (part == 0) | ((part > 2.0**-480) & (part < 2.0**480))
    safe &= ~((high == 0) & (a != 0) & (b != 0))
    # The parts of a sum that is exactly zero lose the signs of its addends.
    result = np.where(safe & (result != 0), result, plain)
    for index in np.flatnonzero(~safe & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(float(a[index])) * Fraction(float(b[index])) + Fraction(float(c[index]))
        if exact:
            try:
                result[index] = exact.numerator / exact.denominator
            except OverflowError:
                result[index] = np.inf if exact > 0 else -np.inf
    return result


def fma_or_its_sign(result: Array, a: Array, b: Array, c: Array) -> Array:
    """A rounded a·b + c of doubles; where that is zero, the sign of the exact value."""
    found = np.array(result, F64, ndmin=1)
    columns = [np.broadcast_to(value, found.shape) for value in (a, b, c)]
    for index in np.flatnonzero(found == 0):
        x, y, z = (Fraction(float(column[index])) for column in columns)
        exact = x * y + z
        found[index] = (exact > 0) - (exact < 0)
    return found


def flush_subnormals(value: Array) -> Array:
    """``.ftz``: subnormal single-precision numbers become zero of the same sign."""
    bits = value.view(_U32)
    tiny = (bits & np.uint32(0x7F800000)) == 0
    return np.where(tiny, bits & np.uint32(0x80000000), bits).view(F32)


def flush_subnormals_f16(value: Array) -> Array:
    bits = value.view(_U16)
    tiny = (bits & np.uint16(0x7C00)) == 0
    return np.where(tiny, bits & np.uint16(0x8000), bits).view(F16)


def saturate(value: Array) -> Array:
    """``.sat``: to [0, 1]; NaN and -0 to +0."""
    return np.where(value > 0, np.minimum(value, value.dtype.type(1)), value.dtype.type(0))


def rectified(value: Array) -> Array:
    """``.relu``: negative numbers and -0 become +0; NaN stays."""
    return np.where(value <= 0, value.dtype.type(0), value)


def minimum(a: Array, b: Array, propagate_nan: bool = False) -> Array:
    """PTX min: -0 < +0; NaN only if both are NaN, unless ``.NaN``."""
    result = np.minimum(a, b) if propagate_nan else np.fmin(a, b)
    return _order_zeros(result, a, b, np.bitwise_or)


def maximum(a: Array, b: Array, propagate_nan: bool = False) -> Array:
    result = np.maximum(a, b) if propagate_nan else np.fmax(a, b)
    return _order_zeros(result, a, b, np.bitwise_and)


def _order_zeros(result: Array, a: Array, b: Array, combine: Any) -> Array:
    zero = (result == 0) & (a == b)
    if not zero.any():
        return result
    raw = np.dtype(f"uint{result.dtype.itemsize * 8}")
    return np.where(zero, combine(a.view(raw), b.view(raw)), result.view(raw)).view(result.dtype)


# bfloat16, held as raw 16 bits ---------------------------------------------------------------------------


def bf16_to_f32(raw: Array) -> Array:
    return (raw.astype(_U32) << np.uint32(16)).view(F32)


def f32_to_bf16(value: Array, mode: str = "rn") -> Array:
    """Single precision to bfloat16 bits; NaN becomes the canonical 0x7FFF."""
    bits = value.view(_U32)
    if mode == "rn":
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    else:  # truncated; away from zero where the mode says so for the sign
        is_negative = (bits >> np.uint32(31)) != 0
        away = {"rz": False, "rm": is_negative, "rp": ~is_negative}[mode]
        rounded = (bits + np.where(away, np.uint32(0xFFFF), np.uint32(0))) >> np.uint32(16)
        rounded = np.where(np.isinf(value), bits >> np.uint32(16), rounded)
    nan = np.isnan(value)
    if nan.any():
        rounded = np.where(nan, np.uint32(0x7FFF), rounded)
    return rounded.astype(_U16)


def f64_to_bf16(value: Array, mode: str = "rn") -> Array:
    """A double rounded to odd to bfloat16, rounding once: through single precision rounded to odd."""
    nearest = value.astype(F32)
    return f32_to_bf16(odd_f32(nearest, value), mode)


def odd_f32(nearest: Array, value: Array) -> Array:
    """``value`` rounded to odd in single precision, given its nearest single."""
    wide = nearest.astype(F64)
    bits = nearest.view(_U32)
    inexact = (wide != value) & np.isfinite(value)
    away = inexact & (np.abs(wide) > np.abs(value))
    return np.where(inexact, (bits - away) | np.uint32(1), bits).astype(_U32).view(F32)


def f32_to_f16(value: Array, mode: str = "rn") -> Array:
    """To half precision; NaN becomes the canonical 0x7FFF."""
    if mode == "rn":
        result = value.astype(F16)
    else:
        result = round_to(value.astype(F64), F16, mode)
    nan = np.isnan(value)
    if nan.any():
        result = np.where(nan, np.uint16(0x7FFF), result.view(_U16)).view(F16)
    return result
