"""cvt between all types, with rounding, saturation and packing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .. import numerics as num
from ..binding import Binder
from ..ptx.syntax import Instruction
from ..ptx.types import TYPES, PtxType
from ..registry import Unsupported, instruction
from .floating import rounding_mode

Execute = Callable[..., Any]

_INTEGER_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_U16, _U32 = np.dtype(np.uint16), np.dtype(np.uint32)
# Of the types that .satfinite is for.
_LARGEST = {"f16": np.float32(65504.0), "bf16": np.float32(3.3895314e38)}
_FP8 = {"e4m3x2": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2x2": np.dtype(ml_dtypes.float8_e5m2)}


@instruction("cvt")
def cvt(syntax: Instruction, bind: Binder) -> Execute:
    if syntax.has("pack"):
        return _pack_integers(syntax, bind)
    if any(m in _FP8 for m in syntax.modifiers):
        return _fp8(syntax, bind)
    result, source = (TYPES[name] for name in [m for m in syntax.modifiers if m in TYPES][:2])
    if result.kind == "packed":
        return _pack_halves(syntax, bind, result, source)
    if syntax.has("tf32"):
        return _to_tf32(syntax, bind)
    if result.is_float and source.is_float:
        compute = _float_to_float(syntax, result, source)
    elif result.is_float:
        compute = _integer_to_float(syntax, result, source)
    elif source.is_float:
        compute = _float_to_integer(syntax, result, source)
    else:
        compute = _integer_to_integer(syntax, result, source)
    return bind.elementwise(syntax, compute, result, source)


def _integer_to_integer(syntax: Instruction, result: PtxType, source: PtxType) -> Callable[[Any], Any]:
    if not syntax.has("sat"):
        return lambda a: a.astype(result.dtype)
    limits, own = np.iinfo(result.dtype), np.iinfo(source.dtype)
    low, high = max(limits.min, own.min), min(limits.max, own.max)
    return lambda a: np.clip(a, source.dtype.type(low), source.dtype.type(high)).astype(result.dtype)


def _integer_to_float(syntax: Instruction, result: PtxType, source: PtxType) -> Callable[[Any], Any]:
    mode = next((m for m in syntax.modifiers if m in num.ROUNDING_MODES), "rn")
    clamp = syntax.has("sat")

    def compute(a: Any) -> Any:
        value = _round_integer(a, result, mode)
        return num.saturate(value) if clamp else value

    return compute


def _round_integer(a: Any, result: PtxType, mode: str) -> Any:
    if result.kind == "f" and mode == "rn" and result.bits >= 32:
        return a.astype(result.dtype)
    # A double holds integers up to 53 bits; the rest of a 64-bit one only matters for rounding, so keep it as
    # the error of a sum of its two halves.
    high = (a >> a.dtype.type(min(32, a.dtype.itemsize * 8 - 1))).astype(num.F64) * 2.0 ** min(
        32, a.dtype.itemsize * 8 - 1
    )
    low = (a & a.dtype.type((1 << min(32, a.dtype.itemsize * 8 - 1)) - 1)).astype(num.F64)
    exact, error = num.two_sum(high, low)
    if result.bits == 64:
        return num.directed(exact, error, mode)
    value = num.odd(exact, error)
    if result.kind == "bf":
        return num.f64_to_bf16(value, mode)
    return num.round_to(value, result.dtype, mode)


def _widen(a: Any, source: PtxType) -> Any:
    return num.bf16_to_f32(a) if source.kind == "bf" else a


def _float_to_integer(syntax: Instruction, result: PtxType, source: PtxType) -> Callable[[Any], Any]:
    """Rounded, then clamped to the range. NaN: zero, or the top bit alone where 64 bits are involved."""
    rounding = next(_INTEGER_ROUNDING[m] for m in syntax.modifiers if m in _INTEGER_ROUNDING)
    limits = np.iinfo(result.dtype)
    flush = syntax.has("ftz") and source.bits == 32
    has_64 = source.bits == 64 or result.bits == 64
    for_nan = np.array(1 << (result.bits - 1) if has_64 else 0, np.uint64).astype(result.raw).view(result.dtype)
    # 2^63 and 2^64 are doubles, their predecessors are not: compare with the first value out of range.
    above = float(limits.max) + (1.0 if result.bits < 64 else 0.0)

    def compute(a: Any) -> Any:
        value = _widen(a, source)
        value = rounding((num.flush_subnormals(value) if flush else value).astype(num.F64))
        too_high, too_low, nan = value >= above, value < float(limits.min), np.isnan(value)
        inside = np.where(too_high | too_low | nan, 0.0, value).astype(result.dtype)
        clamped = np.where(too_high, limits.max, np.where(too_low, limits.min, inside))
        return np.where(nan, for_nan, clamped.astype(result.dtype))

    return compute


def _float_to_float(syntax: Instruction, result: PtxType, source: PtxType) -> Callable[[Any], Any]:
    mode = next((m for m in syntax.modifiers if m in num.ROUNDING_MODES), "rn")
    to_integral = next((_INTEGER_ROUNDING[m] for m in syntax.modifiers if m in _INTEGER_ROUNDING), None)
    flush = syntax.has("ftz")
    clamp, rectify = syntax.has("sat"), syntax.has("relu")
    largest = _LARGEST.get(result.name) if syntax.has("satfinite") else None
    if syntax.has("satfinite") and largest is None:
        raise Unsupported(f".satfinite to .{result.name}")

    def compute(a: Any) -> Any:
        value = _widen(a, source)
        if flush and value.dtype == num.F32:
            value = num.flush_subnormals(value)
        if to_integral is not None:
            value = to_integral(value)
        if clamp:
            value = num.saturate(value)
        if rectify:
            value = num.rectified(value)
        if largest is not None:
            value = np.clip(value, -largest, largest)
        return narrow(value)

    def narrow(value: Any) -> Any:
        if result.kind == "bf":
            if value.dtype == num.F64:
                return num.f64_to_bf16(value, mode)
            return num.f32_to_bf16(value.astype(num.F32), mode)
        if result.bits == 16:
            return value if value.dtype == num.F16 else num.f32_to_f16(value, mode)
        if result.bits == 32:
            rounded = num.round_to(value, num.F32, mode) if value.dtype == num.F64 else value.astype(num.F32)
            return num.flush_subnormals(rounded) if flush else rounded
        return value.astype(num.F64)

    return compute


def _pack_halves(syntax: Instruction, bind: Binder, result: PtxType, source: PtxType) -> Execute:
    """``cvt.rn.bf16x2.f32 d, a, b``: a becomes the high half, b the low one."""
    if source.name != "f32" or len(syntax.operands) != 3:
        raise Unsupported("packed conversion from this type")
    is_bf16 = result.name == "bf16x2"
    mode = next((m for m in syntax.modifiers if m in num.ROUNDING_MODES), "rn")
    rectify, finite = syntax.has("relu"), syntax.has("satfinite")
    largest = _LARGEST["bf16" if is_bf16 else "f16"]

    def narrow(value: Any) -> Any:
        if rectify:
            value = num.rectified(value)
        if finite:
            value = np.clip(value, -largest, largest)
        return num.f32_to_bf16(value, mode) if is_bf16 else num.f32_to_f16(value, mode).view(_U16)

    def compute(high: Any, low: Any) -> Any:
        return (narrow(high).astype(_U32) << np.uint32(16)) | narrow(low)

    return bind.elementwise(syntax, compute, TYPES["b32"], source, source)


# Bits and range of the results of cvt.pack.
_PACKED = {
    "u16": (16, 0, 0xFFFF), "s16": (16, -0x8000, 0x7FFF), "u8": (8, 0, 0xFF), "s8": (8, -0x80, 0x7F),
    "u4": (4, 0, 15), "s4": (4, -8, 7), "u2": (2, 0, 3), "s2": (2, -2, 1),
}  # fmt: skip


def _pack_integers(syntax: Instruction, bind: Binder) -> Execute:
    """``cvt.pack.sat.u8.s32.b32 d, a, b, c``: saturated a and b, b lowest, below the bits of c (with 16 bits: no c)."""
    names = syntax.modifiers[2:]
    if syntax.modifiers[:2] != ("pack", "sat") or names[:2][-1] != "s32" or names[0] not in _PACKED:
        raise Unsupported("this form of cvt.pack")
    bits, low, high = _PACKED[names[0]]
    sources = len(syntax.operands) - 1
    if sources != (2 if bits == 16 else 3):
        raise Unsupported(f"cvt.pack of .{names[0]} with {sources} sources")
    mask = np.uint32((1 << bits) - 1)

    def narrow(value: Any) -> Any:
        return np.clip(value, low, high).astype(np.int32).view(_U32) & mask

    def compute(a: Any, b: Any, *rest: Any) -> Any:
        both = narrow(a) << np.uint32(bits) | narrow(b)
        return both | rest[0] << np.uint32(2 * bits) if rest else both

    s32, b32 = TYPES["s32"], TYPES["b32"]
    return bind.elementwise(syntax, compute, b32, s32, s32, *[b32] * (sources - 2))


def _to_tf32(syntax: Instruction, bind: Binder) -> Execute:
    """Single precision to 10 bits of mantissa: .rna rounds ties away, .rn to even, .rz toward zero."""
    mode = rounding_mode(syntax, ("rna", "rn", "rz"))
    rectify, finite = syntax.has("relu"), syntax.has("satfinite")
    largest, infinity = np.uint32(0x7F7FE000), np.uint32(0x7F800000)

    def compute(a: Any) -> Any:
        if rectify:
            a = num.rectified(a)
        bits = a.view(_U32)
        added = {"rna": np.uint32(0x1000), "rz": np.uint32(0), "rn": 0xFFF + ((bits >> np.uint32(13)) & np.uint32(1))}
        rounded = (bits + added[mode]) & np.uint32(0xFFFFE000)
        rounded = np.where(np.isfinite(a), rounded, bits)
        if finite:
            too_large = (rounded & np.uint32(0x7FFFFFFF)) == infinity
            rounded = np.where(too_large, largest | (rounded & np.uint32(0x80000000)), rounded)
        if mode != "rna":
            rounded = np.where(np.isnan(a), np.uint32(0x7FFFE000), rounded)
        return rounded.astype(_U32)

    return bind.elementwise(syntax, compute, TYPES["b32"], TYPES["f32"])


def _fp8(syntax: Instruction, bind: Binder) -> Execute:
    """Pairs of 8-bit floats: from two f32 or from f16x2 with .satfinite, and to f16x2."""
    name = next(m for m in syntax.modifiers if m in _FP8)
    fp8 = _FP8[name]
    other = syntax.modifiers[-1] if syntax.modifiers[-1] != name else syntax.modifiers[-2]
    to_fp8 = syntax.modifiers[-1] != name
    rectify = syntax.has("relu")
    largest = np.float32(ml_dtypes.finfo(fp8).max)

    def narrow(value: Any) -> Any:
        bits = np.clip(num.rectified(value) if rectify else value, -largest, largest).astype(fp8).view(np.uint8)
        return np.where(np.isnan(value), np.uint8(0x7F), bits)

    if to_fp8 and other == "f32":
        return bind.elementwise(
            syntax,
            lambda high, low: (narrow(high).astype(_U16) << np.uint16(8)) | narrow(low),
            TYPES["b16"],
            TYPES["f32"],
            TYPES["f32"],
        )
    if other != "f16x2":
        raise Unsupported("this conversion of 8-bit floats")

    def from_halves(pair: Any) -> Any:
        return narrow(np.ascontiguousarray(pair).view(num.F16).astype(num.F32)).view(_U16)

    def to_halves(pair: Any) -> Any:
        # Through f32: a NaN becomes the canonical one.
        halves = num.f32_to_f16(np.ascontiguousarray(pair).view(fp8).astype(num.F32))
        return (num.rectified(halves) if rectify else halves).view(_U32)

    if to_fp8:
        return bind.elementwise(syntax, from_halves, TYPES["b16"], TYPES["b32"])
    return bind.elementwise(syntax, to_halves, TYPES["b32"], TYPES["b16"])
