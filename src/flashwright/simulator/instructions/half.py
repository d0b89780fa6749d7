"""Arithmetic of 16-bit floats: f16 and bf16, single and packed in pairs.

Sums and products are computed in f32 and rounded once more to 16 bits, which is exact rounding because 24
bits are at least twice 11 plus two; fused multiply-add goes through doubles rounded to odd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import numerics as num
from ..binding import Binder, check_operands, data_type
from ..ptx.syntax import Instruction
from ..ptx.types import TYPES
from ..registry import Unsupported, instruction
from .floating import rounding_mode

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]

HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_U16 = np.dtype(np.uint16)


class _Format:
    """How one of the two formats is widened and rounded. Values are flat arrays of raw 16 bits."""

    def __init__(self, is_bf16: bool, flush: bool) -> None:
        self.is_bf16 = is_bf16
        self.flush = flush

    def widen(self, raw: Any) -> Any:
        if self.is_bf16:
            wide = num.bf16_to_f32(raw)
            return num.flush_subnormals(wide) if self.flush else wide
        value = raw.view(num.F16)
        return (num.flush_subnormals_f16(value) if self.flush else value).astype(num.F32)

    def narrow(self, value: Any) -> Any:
        """From f32, or from f64 rounded to odd."""
        if self.is_bf16:
            raw = num.f64_to_bf16(value) if value.dtype == num.F64 else num.f32_to_bf16(value)
            return np.where(raw & 0x7F80, raw, raw & 0x8000).astype(_U16) if self.flush else raw
        result = num.f32_to_f16(value)
        return (num.flush_subnormals_f16(result) if self.flush else result).view(_U16)


def _bind_halves(syntax: Instruction, bind: Binder, sources: int, compute: Callable[..., Any]) -> Execute:
    """An elementwise instruction: ``compute`` gets f32 arrays and gives f32, or f64 rounded to odd."""
    check_operands(syntax, 1 + sources)
    ptx_type = data_type(syntax)
    raw_type = TYPES[f"b{ptx_type.bits}"]
    format_ = _Format(ptx_type.name.startswith("bf16"), syntax.has("ftz"))
    clamp, rectify = syntax.has("sat"), syntax.has("relu")
    put = bind.destination(syntax.operands[0], raw_type)
    getters = [bind.source(operand, raw_type) for operand in syntax.operands[1:]]

    def halves(wave: Wave, get: Any) -> Any:
        value = get(wave)
        if value.ndim == 0:
            value = np.full(wave.threads, value)
        return format_.widen(np.ascontiguousarray(value).view(_U16))

    def execute(wave: Wave) -> None:
        result = compute(*[halves(wave, get) for get in getters])
        if rectify:
            result = num.rectified(result)
        if clamp:
            result = num.saturate(result)
        put(wave, format_.narrow(result).view(raw_type.raw))

    return execute


def _mixed(syntax: Instruction, bind: Binder) -> Execute:
    """``add.f32.f16 d, a, c`` and ``fma.f32.f16 d, a, b, c``: c and d are of f32, the others of 16 bits."""
    check_operands(syntax, 4 if syntax.root == "fma" else 3)
    f32, raw = TYPES["f32"], TYPES["b16"]
    widen = _Format(data_type(syntax).name == "bf16", flush=False).widen
    mode = rounding_mode(syntax)
    clamp = syntax.has("sat")
    sign = np.float32(-1 if syntax.root == "sub" else 1)

    def compute(*values: Any) -> Any:
        *halves, c = values
        wide = [widen(half) for half in halves]
        exact = num.exact_fma(wide[0], wide[1], c) if len(wide) == 2 else num.exact_sum(wide[0], sign * c)
        result = num.round_to(exact, num.F32, mode)
        return num.saturate(result) if clamp else result

    return bind.elementwise(syntax, compute, f32, *[raw] * (len(syntax.operands) - 2), f32)


@instruction("add", "sub", "mul", types=HALVES)
def add_sub_mul(syntax: Instruction, bind: Binder) -> Execute:
    if syntax.has("f32") and syntax.root != "mul":
        return _mixed(syntax, bind)
    return _bind_halves(syntax, bind, 2, {"add": np.add, "sub": np.subtract, "mul": np.multiply}[syntax.root])


@instruction("fma", types=HALVES)
def fma(syntax: Instruction, bind: Binder) -> Execute:
    if syntax.has("oob"):
        raise Unsupported("fma.oob")
    if syntax.has("f32"):
        return _mixed(syntax, bind)
    return _bind_halves(syntax, bind, 3, num.exact_fma)


@instruction("min", "max", types=HALVES)
def min_max(syntax: Instruction, bind: Binder) -> Execute:
    operation = num.minimum if syntax.root == "min" else num.maximum
    propagate = syntax.has("NaN")
    if not syntax.has("xorsign"):
        return _bind_halves(syntax, bind, 2, lambda a, b: operation(a, b, propagate))

    def of_magnitudes(a: Any, b: Any) -> Any:
        result = operation(np.abs(a), np.abs(b), propagate)
        return np.where(np.signbit(a) != np.signbit(b), -result, result)

    return _bind_halves(syntax, bind, 2, of_magnitudes)


@instruction("neg", "abs", types=HALVES)
def neg_abs(syntax: Instruction, bind: Binder) -> Execute:
    return _bind_halves(syntax, bind, 1, np.negative if syntax.root == "neg" else np.abs)


@instruction("ex2", "tanh", types=HALVES)
def approximations(syntax: Instruction, bind: Binder) -> Execute:
    return _bind_halves(syntax, bind, 1, np.exp2 if syntax.root == "ex2" else np.tanh)
