"""mma.sync: warp-level matrix multiply-accumulate, D = A·B + C.

Fragments (PTX ISA, "Matrix Fragments for mma"): with g = lane/4, t = lane%4, and e elements per 32-bit
register, register r of A holds row g + 8·(r%2), columns 4e·(r/2) + e·t + (0…e-1); register r of B holds rows
4e·r + e·t + (0…e-1) of column g; C and D hold rows g and g + 8, columns 2t and 2t + 1.

Products are exact and their sum with C is taken in double precision, then rounded once to the accumulator's
type. Tensor cores align and truncate partial sums instead, so their last bits can differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..architecture import WARP_SIZE
from ..binding import Binder, Getter, Setter, elements_of
from ..numerics import F16, F32, F64
from ..ptx.syntax import Instruction
from ..ptx.types import TYPES
from ..registry import Operation, Unsupported, instruction
from ..sync.convergence import warp_synchronous
from .matrix import full_warps

if TYPE_CHECKING:
    from ..wave import Wave

_GROUPS, _QUAD = 8, 4  # a warp is 8 groups of 4 lanes
_U32 = np.dtype(np.uint32)

# Registers of 32 bits as the numbers in them, in order.
Widen = Callable[[np.ndarray], np.ndarray]


def _widen_bf16(registers: np.ndarray) -> np.ndarray:
    return (registers.view(np.uint16).astype(_U32) << np.uint32(16)).view(F32)


def _widen_tf32(registers: np.ndarray) -> np.ndarray:
    return (registers & np.uint32(0xFFFFE000)).view(F32)


def _widen_view(dtype: np.dtype) -> Widen:
    return lambda registers: registers.view(dtype)


# Elements per register of each input type, and how they are widened.
_INPUTS: dict[str, tuple[int, Widen]] = {
    "f16": (2, _widen_view(F16)),
    "bf16": (2, _widen_bf16),
    "tf32": (1, _widen_tf32),
    "s8": (4, _widen_view(np.dtype(np.int8))),
    "u8": (4, _widen_view(np.dtype(np.uint8))),
}
_DEPTHS = {"f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8), "s8": (16, 32), "u8": (16, 32)}


@instruction("mma")
def mma(syntax: Instruction, bind: Binder) -> Operation:
    shape = next((re.fullmatch(r"m16n8k(\d+)", m) for m in syntax.modifiers if m.startswith("m16")), None)
    names = [m for m in syntax.modifiers if m in TYPES]
    if shape is None or not syntax.has("row") or not syntax.has("col") or syntax.has("sp"):
        raise Unsupported("this shape or layout of mma")
    d_type, a_type, b_type, c_type = names if len(names) == 4 else ("f32", *names[1:3], "f32")
    depth = int(shape.group(1))
    if len(names) != 4 or d_type != c_type or a_type not in _INPUTS or depth not in _DEPTHS[a_type]:
        raise Unsupported("these types of mma")
    is_integer = a_type in ("s8", "u8")
    if d_type not in (("s32",) if is_integer else ("f32",) if a_type != "f16" else ("f32", "f16")):
        raise Unsupported(f"accumulation in {d_type}")
    target, a, b, c = (elements_of(operand) for operand in syntax.operands)
    elements, _ = _INPUTS[a_type]
    blocks = depth // (_QUAD * elements)
    if len(a) != 2 * blocks or len(b) != blocks:
        raise Unsupported("number of registers of a fragment")
    multiply = _multiplier(bind, a, b, a_type, b_type, depth)
    if d_type == "f16":
        finish = _finish_f16(bind, target, c)
    elif d_type == "s32":
        finish = _finish_s32(bind, target, c, syntax.has("satfinite"))
    else:
        finish = _finish_f32(bind, target, c)

    def execute(wave: Wave) -> None:
        full_warps(wave)
        finish(wave, multiply(wave))

    return warp_synchronous(execute, tensor_flops=2 * 16 * 8 * depth)


def _getters(bind: Binder, operands: tuple[Any, ...]) -> list[Getter]:
    return [bind.source(operand, TYPES["b32"]) for operand in operands]


def _stack(wave: Wave, getters: list[Getter]) -> np.ndarray:
    registers = np.empty((len(getters), wave.threads), _U32)
    for row, get in zip(registers, getters, strict=True):
        row[...] = get(wave)
    return registers


@cache
def _a_order(warps: int, blocks: int, elements: int) -> np.ndarray:
    """Where in [register = block·2 + row half, warp, g, t, element] each element of [warp, 16 rows, depth] is."""
    order = np.arange(warps * 2 * WARP_SIZE * blocks * elements)
    order = order.reshape(blocks, 2, warps, _GROUPS, _QUAD, elements).transpose(2, 1, 3, 0, 4, 5)
    return np.ascontiguousarray(order).reshape(warps, 16, -1)


@cache
def _b_order(warps: int, blocks: int, elements: int) -> np.ndarray:
    """Where in [register = block, warp, g, t, element] each element of [warp, 8 columns, depth] is."""
    order = np.arange(warps * WARP_SIZE * blocks * elements)
    order = order.reshape(blocks, warps, _GROUPS, _QUAD, elements).transpose(1, 2, 0, 3, 4)
    return np.ascontiguousarray(order).reshape(warps, 8, -1)


@cache
def _d_order(warps: int) -> np.ndarray:
    """Where in [warp, 16 rows, 8 columns] each element of [row half, column parity, thread] is."""
    order = np.arange(warps * 128).reshape(warps, 2, WARP_SIZE, 2).transpose(1, 3, 0, 2)
    return np.ascontiguousarray(order).reshape(2, 2, -1)


def _multiplier(
    bind: Binder, a: tuple[Any, ...], b: tuple[Any, ...], a_type: str, b_type: str, depth: int
) -> Callable[[Wave], np.ndarray]:
    """A function to the products A·B of all warps, as [row half, column parity, threads] of doubles."""
    (elements, widen_a), (_, widen_b) = _INPUTS[a_type], _INPUTS[b_type]
    get_a, get_b = _getters(bind, a), _getters(bind, b)
    blocks = depth // (_QUAD * elements)

    def multiply(wave: Wave) -> np.ndarray:
        warps = wave.warps
        left = widen_a(_stack(wave, get_a)).take(_a_order(warps, blocks, elements)).astype(F64)
        right = widen_b(_stack(wave, get_b)).take(_b_order(warps, blocks, elements)).astype(F64)
        return (left @ right.transpose(0, 2, 1)).take(_d_order(warps))

    return multiply


Finish = Callable[["Wave", np.ndarray], None]


def _finish_f32(bind: Binder, target: tuple[Any, ...], c: tuple[Any, ...]) -> Finish:
    setters = [bind.destination(operand, TYPES["f32"]) for operand in target]
    getters = [bind.source(operand, TYPES["f32"]) for operand in c]

    def finish(wave: Wave, product: np.ndarray) -> None:
        sums = [(row + get(wave)).astype(F32) for row, get in zip(product.reshape(4, -1), getters, strict=True)]
        _put_all(wave, setters, sums)

    return finish


def _finish_f16(bind: Binder, target: tuple[Any, ...], c: tuple[Any, ...]) -> Finish:
    """Two accumulators per register: the columns 2t and 2t + 1 of a row."""
    setters = [bind.destination(operand, TYPES["b32"]) for operand in target]
    getters = [bind.source(operand, TYPES["b32"]) for operand in c]

    def finish(wave: Wave, product: np.ndarray) -> None:
        sums = []
        for half, get in zip(product, getters, strict=True):
            accumulator = np.full(wave.threads, get(wave)).view(F16).reshape(-1, 2)
            sums.append((half.T + accumulator).astype(F16).view(_U32).ravel())
        _put_all(wave, setters, sums)

    return finish


def _finish_s32(bind: Binder, target: tuple[Any, ...], c: tuple[Any, ...], saturates: bool) -> Finish:
    setters = [bind.destination(operand, TYPES["s32"]) for operand in target]
    getters = [bind.source(operand, TYPES["s32"]) for operand in c]
    limits = np.iinfo(np.int32)

    def finish(wave: Wave, product: np.ndarray) -> None:
        sums = []
        for row, get in zip(product.reshape(4, -1), getters, strict=True):
            total = row.astype(np.int64) + get(wave)
            sums.append((np.clip(total, limits.min, limits.max) if saturates else total).astype(np.int32))
        _put_all(wave, setters, sums)

    return finish


def _put_all(wave: Wave, setters: list[Setter], values: list[np.ndarray]) -> None:
    """Only when all accumulators have been read: registers of C may be among those of D, in another order."""
    for put, value in zip(setters, values, strict=True):
        put(wave, value)
