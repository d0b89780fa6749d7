"""setp and set: comparisons of integers and floats, with a boolean operation on a third predicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..binding import Binder
from ..numerics import bf16_to_f32, flush_subnormals, flush_subnormals_f16
from ..ptx.syntax import Instruction, Pair, Sink
from ..ptx.types import TYPES, PtxType
from ..registry import Unsupported, instruction

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]
Comparison = Callable[[Any, Any], Any]

_ORDERED: dict[str, Comparison] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),  # false for NaN, unlike np.not_equal
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str, is_float: bool) -> Comparison | None:
    if name in _UNSIGNED and not is_float:
        return _ORDERED[_UNSIGNED[name]]
    if name == "ne" and not is_float:
        return np.not_equal
    if name in _ORDERED:
        return _ORDERED[name]
    if not is_float:
        return None
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name.endswith("u") and name[:-1] in _ORDERED:  # true if either is NaN
        ordered = _ORDERED[name[:-1]]
        return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)
    return None


def _comparable(value: Any, ptx_type: PtxType, flush: bool) -> Any:
    """Values NumPy can compare (bfloat16 is held as raw bits)."""
    if ptx_type.name == "bf16":
        return bf16_to_f32(value)
    if flush and ptx_type.name == "f16":
        return flush_subnormals_f16(value)
    return flush_subnormals(value) if flush and ptx_type.name == "f32" else value


def _parse(syntax: Instruction) -> tuple[Comparison, PtxType, Any]:
    types = [m for m in syntax.modifiers if m in TYPES]
    ptx_type = TYPES[types[-1]]
    if ptx_type.kind == "packed":
        raise Unsupported("comparison of packed types")
    compare = None
    for modifier in syntax.modifiers:
        compare = compare or _comparison(modifier, ptx_type.is_float)
    if compare is None:
        raise Unsupported("comparison operator")
    combine = next((_COMBINE[m] for m in syntax.modifiers if m in _COMBINE), None)
    flush = syntax.has("ftz")

    def evaluate(a: Any, b: Any) -> Any:
        return compare(_comparable(a, ptx_type, flush), _comparable(b, ptx_type, flush))

    return evaluate if ptx_type.is_float else compare, ptx_type, combine


@instruction("setp")
def setp(syntax: Instruction, bind: Binder) -> Execute:
    if syntax.has("f16x2") or syntax.has("bf16x2"):
        return _packed_setp(syntax, bind)
    compare, ptx_type, combine = _parse(syntax)
    pred = TYPES["pred"]
    target = syntax.operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    put, put_complement = bind.destination(first, pred), bind.destination(second, pred)
    get_a, get_b = bind.sources(syntax.operands[1:3], ptx_type, ptx_type)
    if combine is None and isinstance(second, Sink):
        return lambda wave: put(wave, compare(get_a(wave), get_b(wave)))
    third = bind.predicate(syntax.operands[3]) if combine is not None else None

    def execute(wave: Wave) -> None:
        result = compare(get_a(wave), get_b(wave))
        complement = ~result
        if combine is not None and third is not None:
            other = third(wave)
            result, complement = combine(result, other), combine(complement, other)
        put(wave, result)
        put_complement(wave, complement)

    return execute


def _packed_comparison(syntax: Instruction) -> tuple[Comparison, Callable[[Any, int], Any]]:
    """The comparison of a packed instruction, and a function to one half of a register as numbers."""
    is_f16, flush = syntax.modifiers[-1] == "f16x2", syntax.has("ftz")
    compare = next(c for c in (_comparison(m, True) for m in syntax.modifiers) if c is not None)

    def half(value: Any, index: int) -> Any:
        raw = (value >> np.uint32(16 * index)).astype(np.uint16)
        if not is_f16:
            return bf16_to_f32(raw)
        return flush_subnormals_f16(raw.view(np.float16)) if flush else raw.view(np.float16)

    return compare, half


def _packed_setp(syntax: Instruction, bind: Binder) -> Execute:
    """``setp.lt.f16x2 p|q, a, b``: p compares the low halves, q the high ones."""
    compare, half = _packed_comparison(syntax)
    b32 = TYPES["b32"]
    target = syntax.operands[0]
    assert isinstance(target, Pair) and len(syntax.operands) == 3
    setters = [bind.destination(operand, TYPES["pred"]) for operand in (target.first, target.second)]
    get_a, get_b = bind.sources(syntax.operands[1:3], b32, b32)

    def execute(wave: Wave) -> None:
        a, b = get_a(wave), get_b(wave)
        for index, put in enumerate(setters):
            put(wave, compare(half(a, index), half(b, index)))

    return execute


# What `set` writes for true: all ones for integers, 1.0 for floats, as raw bits.
_TRUE = {
    "f32": 0x3F800000,
    "u32": 0xFFFFFFFF,
    "s32": 0xFFFFFFFF,
    "f16": 0x3C00,
    "bf16": 0x3F80,
    "u16": 0xFFFF,
    "s16": 0xFFFF,
}


@instruction("set")
def set_(syntax: Instruction, bind: Binder) -> Execute:
    """Like setp, with the result as a number; of packed types, one per half."""
    names = [m for m in syntax.modifiers if m in TYPES]
    if names[-1] in ("f16x2", "bf16x2"):
        return _packed_set(syntax, bind, names[-2])
    compare, source_type, combine = _parse(syntax)
    result_type = TYPES[names[-2]]
    true, zero = (result_type.raw.type(bits) for bits in (_TRUE[result_type.name], 0))
    put = bind.destination(syntax.operands[0], result_type)
    get_a, get_b = bind.sources(syntax.operands[1:3], source_type, source_type)
    third = bind.predicate(syntax.operands[3]) if combine is not None else None

    def execute(wave: Wave) -> None:
        result = compare(get_a(wave), get_b(wave))
        if combine is not None and third is not None:
            result = combine(result, third(wave))
        put(wave, np.where(result, true, zero))

    return execute


def _packed_set(syntax: Instruction, bind: Binder, result: str) -> Execute:
    compare, half = _packed_comparison(syntax)
    true = np.uint32(_TRUE[result[:-2]] if result.endswith("x2") else 0xFFFF)
    b32 = TYPES["b32"]
    put = bind.destination(syntax.operands[0], b32)
    get_a, get_b = bind.sources(syntax.operands[1:3], b32, b32)

    def execute(wave: Wave) -> None:
        a, b = get_a(wave), get_b(wave)
        low, high = (np.where(compare(half(a, i), half(b, i)), true, np.uint32(0)) for i in (0, 1))
        put(wave, low | (high << np.uint32(16)))

    return execute


@instruction("testp")
def testp(syntax: Instruction, bind: Binder) -> Execute:
    """Properties of a float: finite, infinite, number, notanumber, normal, subnormal."""
    ptx_type = TYPES[syntax.modifiers[-1]]
    smallest = np.finfo(ptx_type.dtype).tiny
    tests: dict[str, Callable[[Any], Any]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= smallest) | (a == 0)),
        "subnormal": lambda a: (np.abs(a) < smallest) & (a != 0),
    }
    return bind.elementwise(syntax, tests[syntax.modifiers[0]], TYPES["pred"], ptx_type)
