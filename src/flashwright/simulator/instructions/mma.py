"""mma.sync: warp-level matrix multiply-accumulate, D = A·B + C.

Fragments (PTX ISA, "Matrix Fragments for mma"): with g = lane/4, t = lane%4, and e elements per register, register r
of A holds row g + 8·(r%2), columns 4e·(r/2) + e·t + (0…e-1); register r of B holds rows 4e·r + e·t + (0…e-1) of column
g; C and D hold rows g and g + 8, columns 2t and 2t + 1. With 8 rows (m8n8) there is only row g.

Products are exact and their sum with C is taken in double precision, then rounded once to the accumulator's type.
Tensor cores align and truncate partial sums instead, so their last bits can differ. Products of f64 are added one by
one by fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..architecture import WARP_SIZE
from ..binding import Binder, Getter, Setter, elements_of
from ..numerics import F16, F32, F64, fma_f64
from ..ptx.syntax import Instruction
from ..ptx.types import TYPES, PtxType
from ..registry import Operation, Unsupported, instruction
from ..sync.convergence import warp_synchronous
from .matrix import full_warps
from .matrix_types import MATRIX_TYPES, MatrixType

if TYPE_CHECKING:
    from ..wave import Wave

_GROUPS, _QUAD = 8, 4  # a warp is 8 groups of 4 lanes
_U32 = np.dtype(np.uint32)

# Of each type of A: shapes (rows, depth), types that B may have, types of the accumulator.
_HALF_SHAPES = ((16, 8), (16, 16))
_FORMS: dict[str, tuple[tuple[tuple[int, int], ...], tuple[str, ...], tuple[str, ...]]] = {
    "f16": (_HALF_SHAPES, ("f16",), ("f32", "f16")),
    "bf16": (_HALF_SHAPES, ("bf16",), ("f32",)),
    "tf32": (((16, 4), (16, 8)), ("tf32",), ("f32",)),
    "f64": (((8, 4), (16, 4), (16, 8), (16, 16)), ("f64",), ("f64",)),
    **dict.fromkeys(("e4m3", "e5m2"), (((16, 16), (16, 32)), ("e4m3", "e5m2"), ("f32", "f16"))),
    **dict.fromkeys(("s8", "u8"), (((8, 16), (16, 16), (16, 32)), ("s8", "u8"), ("s32",))),
    **dict.fromkeys(("s4", "u4"), (((8, 32), (16, 32), (16, 64)), ("s4", "u4"), ("s32",))),
    "b1": (((8, 128), (16, 128), (16, 256)), ("b1",), ("s32",)),
}
_SHAPES = {
    f"m{rows}n8k{depth}": (rows, depth)
    for rows, depth in sorted({shape for shapes, _, _ in _FORMS.values() for shape in shapes})
}

# [row half, column parity, threads]: the products of all warps, in the accumulator's places.
Multiply = Callable[["Wave"], np.ndarray]
Finish = Callable[["Wave", np.ndarray], None]


@instruction("mma")
def mma(syntax: Instruction, bind: Binder) -> Operation:
    shape = next((_SHAPES[m] for m in syntax.modifiers if m in _SHAPES), None)
    names = [m for m in syntax.modifiers if m in MATRIX_TYPES or m in TYPES]
    if shape is None or not syntax.has("row") or not syntax.has("col") or syntax.modifiers[0] != "sync":
        raise Unsupported("this shape or layout of mma")
    if len(names) != 4 or names[1] not in _FORMS:
        raise Unsupported("these types of mma")
    d_type, a_name, b_name, c_type = names
    shapes, b_types, accumulators = _FORMS[a_name]
    if b_name not in b_types or d_type != c_type or d_type not in accumulators or shape not in shapes:
        raise Unsupported(f"mma of .{a_name} and .{b_name} in .{d_type} and .{c_type} of this shape")
    rows, depth = shape
    halves = rows // _GROUPS
    target, a, b, c = (elements_of(operand) for operand in syntax.operands)
    a_type, b_type = MATRIX_TYPES[a_name], MATRIX_TYPES[b_name]
    blocks = depth // (_QUAD * a_type.elements)
    if len(a) != halves * blocks or len(b) != blocks:
        raise Unsupported(f"{len(a)} registers of A and {len(b)} of B; {halves * blocks} and {blocks} are needed")
    accumulated = halves if d_type == "f16" else 2 * halves
    if not len(target) == len(c) == accumulated:
        raise Unsupported(f"{len(target)} registers of D and {len(c)} of C; {accumulated} are needed")
    fragments = _Fragments(bind, a, b, a_type, b_type, halves, blocks)
    flops = 2 * rows * 8 * depth
    if d_type == "f64":
        execute = _double_chain(bind, fragments, target, c, halves)
        return warp_synchronous(execute, tensor_flops=flops)
    multiply = fragments.bit_counts("xor" if syntax.has("xor") else "and") if a_name == "b1" else fragments.product
    if d_type == "f16":
        finish = _finish_f16(bind, target, c)
    elif d_type == "s32":
        finish = _finish_s32(bind, target, c, syntax.has("satfinite"))
    else:
        finish = _finish_f32(bind, target, c)

    def execute_product(wave: Wave) -> None:
        full_warps(wave)
        finish(wave, multiply(wave))

    return warp_synchronous(execute_product, tensor_flops=flops)


@cache
def _a_order(warps: int, halves: int, blocks: int, elements: int) -> np.ndarray:
    """Where in [register = block·halves + row half, warp, g, t, element] each element of [warp, rows, depth] is."""
    order = np.arange(warps * halves * WARP_SIZE * blocks * elements)
    order = order.reshape(blocks, halves, warps, _GROUPS, _QUAD, elements).transpose(2, 1, 3, 0, 4, 5)
    return np.ascontiguousarray(order).reshape(warps, halves * _GROUPS, -1)


@cache
def _b_order(warps: int, blocks: int, elements: int) -> np.ndarray:
    """Where in [register = block, warp, g, t, element] each element of [warp, 8 columns, depth] is."""
    order = np.arange(warps * WARP_SIZE * blocks * elements)
    order = order.reshape(blocks, warps, _GROUPS, _QUAD, elements).transpose(1, 2, 0, 3, 4)
    return np.ascontiguousarray(order).reshape(warps, 8, -1)


@cache
def _d_order(warps: int, halves: int) -> np.ndarray:
    """Where in [warp, rows, 8 columns] each element of [row half, column parity, thread] is."""
    order = np.arange(warps * halves * 64).reshape(warps, halves, WARP_SIZE, 2).transpose(1, 3, 0, 2)
    return np.ascontiguousarray(order).reshape(halves, 2, -1)


class _Fragments:
    """A and B of an instruction, in registers."""

    def __init__(
        self,
        bind: Binder,
        a: tuple[Any, ...],
        b: tuple[Any, ...],
        a_type: MatrixType,
        b_type: MatrixType,
        halves: int,
        blocks: int,
    ) -> None:
        register = TYPES["b64" if a_type.name == "f64" else "b32"]
        self._raw = register.raw
        self._a, self._b = ([bind.source(operand, register) for operand in operands] for operands in (a, b))
        self._a_type, self._b_type = a_type, b_type
        self._halves, self._blocks = halves, blocks

    def matrices(self, wave: Wave) -> tuple[np.ndarray, np.ndarray]:
        """A as [warp, rows, depth] and B as [warp, 8 columns, depth], of doubles."""
        warps, elements = wave.warps, self._a_type.elements
        left = self._a_type.numbers(self._stack(wave, self._a)).take(
            _a_order(warps, self._halves, self._blocks, elements)
        )
        right = self._b_type.numbers(self._stack(wave, self._b)).take(_b_order(warps, self._blocks, elements))
        return left.astype(F64), right.astype(F64)

    def _stack(self, wave: Wave, getters: list[Getter]) -> np.ndarray:
        registers = np.empty((len(getters), wave.threads), self._raw)
        for row, get in zip(registers, getters, strict=True):
            row[...] = get(wave)
        return registers

    def placed(self, wave: Wave, matrices: np.ndarray) -> np.ndarray:
        """[warp, rows, 8 columns] → [row half, column parity, threads]."""
        return matrices.take(_d_order(wave.warps, self._halves))

    def product(self, wave: Wave) -> np.ndarray:
        left, right = self.matrices(wave)
        return self.placed(wave, left @ right.transpose(0, 2, 1))

    def bit_counts(self, operation: str) -> Multiply:
        """The number of bits set in the AND or XOR of a row and a column."""

        def multiply(wave: Wave) -> np.ndarray:
            left, right = self.matrices(wave)
            both = left @ right.transpose(0, 2, 1)
            if operation == "xor":
                both = left.sum(axis=2)[:, :, None] + right.sum(axis=2)[:, None, :] - 2 * both
            return self.placed(wave, both)

        return multiply


def _accumulators(
    bind: Binder, target: tuple[Any, ...], c: tuple[Any, ...], ptx_type: PtxType
) -> tuple[list[Setter], list[Getter]]:
    return [bind.destination(operand, ptx_type) for operand in target], [bind.source(o, ptx_type) for o in c]


def _double_chain(
    bind: Binder, fragments: _Fragments, target: tuple[Any, ...], c: tuple[Any, ...], halves: int
) -> Callable[[Wave], None]:
    setters, getters = _accumulators(bind, target, c, TYPES["f64"])

    def execute(wave: Wave) -> None:
        full_warps(wave)
        left, right = fragments.matrices(wave)
        total = np.array([np.broadcast_to(get(wave), (wave.threads,)) for get in getters]).ravel()
        for k in range(left.shape[2]):
            shape = (*left.shape[:2], right.shape[1])
            factors = (np.broadcast_to(part, shape) for part in (left[:, :, None, k], right[:, None, :, k]))
            a, b = (fragments.placed(wave, part).ravel() for part in factors)
            total = fma_f64(a, b, total)
        _put_all(wave, setters, list(total.reshape(2 * halves, -1)))

    return execute


def _finish_f32(bind: Binder, target: tuple[Any, ...], c: tuple[Any, ...]) -> Finish:
    setters, getters = _accumulators(bind, target, c, TYPES["f32"])

    def finish(wave: Wave, product: np.ndarray) -> None:
        rows = product.reshape(len(getters), -1)
        _put_all(wave, setters, [(row + get(wave)).astype(F32) for row, get in zip(rows, getters, strict=True)])

    return finish


def _finish_f16(bind: Binder, target: tuple[Any, ...], c: tuple[Any, ...]) -> Finish:
    """Two accumulators per register: the columns 2t and 2t + 1 of a row."""
    setters, getters = _accumulators(bind, target, c, TYPES["b32"])

    def finish(wave: Wave, product: np.ndarray) -> None:
        sums = []
        for half, get in zip(product, getters, strict=True):
            accumulator = np.full(wave.threads, get(wave)).view(F16).reshape(-1, 2)
            sums.append((half.T + accumulator).astype(F16).view(_U32).ravel())
        _put_all(wave, setters, sums)

    return finish


def _finish_s32(bind: Binder, target: tuple[Any, ...], c: tuple[Any, ...], saturates: bool) -> Finish:
    setters, getters = _accumulators(bind, target, c, TYPES["s32"])
    limits = np.iinfo(np.int32)

    def finish(wave: Wave, product: np.ndarray) -> None:
        sums = []
        for row, get in zip(product.reshape(len(getters), -1), getters, strict=True):
            total = row.astype(np.int64) + get(wave)
            sums.append((np.clip(total, limits.min, limits.max) if saturates else total).astype(np.int32))
        _put_all(wave, setters, sums)

    return finish


def _put_all(wave: Wave, setters: list[Setter], values: list[np.ndarray]) -> None:
    """Only when all accumulators have been read: registers of C may be among those of D, in another order."""
    for put, value in zip(setters, values, strict=True):
        put(wave, value)
