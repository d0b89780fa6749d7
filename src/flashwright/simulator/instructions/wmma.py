"""wmma: matrices of a warp in fragments whose layout PTX leaves open.

Here lane l holds the elements l·n … l·n + n-1 of the matrix, row after row, n being a 32nd of them. Fragments of A and
B of f16 have eight registers whatever their size: what fits more than once is there more than once. Sums are taken as
`mma` takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..architecture import WARP_SIZE
from ..binding import Binder, Getter, Setter, elements_of
from ..memory.bytes import WIDTH_DTYPES
from ..numerics import F64, fma_f64
from ..ptx.syntax import Instruction
from ..ptx.types import TYPES, PtxType
from ..registry import Operation, Unsupported, instruction
from ..sync.convergence import warp_synchronous
from .load_store import active_values, bind_location, locate
from .matrix import full_warps
from .matrix_types import MATRIX_TYPES

if TYPE_CHECKING:
    from ..wave import Wave

# (m, n, k) of each shape, and the types of A and B that have it.
_SHAPES: dict[str, tuple[tuple[int, int, int], tuple[str, ...]]] = {
    **{f"m{m}n{n}k16": ((m, n, 16), ("f16", "bf16", "s8", "u8")) for m, n in ((16, 16), (8, 32), (32, 8))},
    "m16n16k8": ((16, 16, 8), ("tf32",)),
    "m8n8k4": ((8, 8, 4), ("f64",)),
}
_ACCUMULATORS: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "s32": np.dtype(np.int32),
    "f64": F64,
}
_F16_ELEMENTS = 16  # of a thread, in a fragment of A or B
# Types of A, and those of the accumulator that go with them.
_SUMS = {"f16": ("f32", "f16"), "bf16": ("f32",), "tf32": ("f32",), "s8": ("s32",), "u8": ("s32",), "f64": ("f64",)}


@dataclass(frozen=True)
class _Fragment:
    """A rows×columns matrix in the registers of a warp."""

    rows: int
    columns: int
    bits: int
    copies: int

    @property
    def elements(self) -> int:
        """Elements of a thread."""
        return self.rows * self.columns // WARP_SIZE

    @property
    def register(self) -> PtxType:
        return TYPES["b64" if self.bits == 64 else "b32"]

    @property
    def registers(self) -> int:
        return self.elements * self.bits // self.register.bits * self.copies

    def check(self, operands: tuple[Any, ...]) -> None:
        if len(operands) != self.registers:
            raise Unsupported(f"{len(operands)} registers of a fragment; {self.registers} are needed")

    def words(self, wave: Wave, getters: list[Getter]) -> np.ndarray:
        """[warp, lane, register] of all warps, each element once."""
        kept = getters[: self.elements * self.bits // self.register.bits]
        stacked = np.stack([np.broadcast_to(get(wave), (wave.threads,)) for get in kept], axis=1)
        return np.ascontiguousarray(stacked.astype(self.register.raw)).reshape(wave.warps, WARP_SIZE, -1)


def _shape(syntax: Instruction) -> tuple[tuple[int, int, int], tuple[str, ...]]:
    found = next((_SHAPES[m] for m in syntax.modifiers if m in _SHAPES), None)
    if found is None:
        raise Unsupported(f"this shape; there are {', '.join(_SHAPES)}")
    return found


def _fragment(syntax: Instruction, part: str, name: str) -> _Fragment:
    """The fragment of A (``a``), B (``b``) or an accumulator (``c`` or ``d``)."""
    (m, n, k), types = _shape(syntax)
    known = types if part in "ab" else tuple(sorted({total for item in types for total in _SUMS[item]}))
    if name not in known:
        raise Unsupported(f".{name} for {part.upper()} of this shape; there are {', '.join(known)}")
    rows, columns = {"a": (m, k), "b": (k, n)}.get(part, (m, n))
    bits = MATRIX_TYPES[name].bits if part in "ab" else _ACCUMULATORS[name].itemsize * 8
    copies = _F16_ELEMENTS * WARP_SIZE // (rows * columns) if part in "ab" and name == "f16" else 1
    return _Fragment(rows, columns, bits, copies)


def _places(syntax: Instruction, fragment: _Fragment, stride: Any, bind: Binder) -> Callable[[Wave], np.ndarray]:
    """[active thread, element]: offsets in bytes of the elements that a thread holds."""
    is_row = syntax.has("row")
    number = np.arange(WARP_SIZE * fragment.elements).reshape(WARP_SIZE, -1)
    row, column = number // fragment.columns, number % fragment.columns
    major, minor = (row, column) if is_row else (column, row)
    fixed = fragment.columns if is_row else fragment.rows
    get_stride = None if stride is None else bind.source(stride, TYPES["u32"])

    def places(wave: Wave) -> np.ndarray:
        lanes = wave.lane if wave.lanes is None else wave.lane[wave.lanes]
        strides: Any = fixed
        if get_stride is not None:
            strides = active_values(wave, np.asarray(get_stride(wave))).astype(np.int64)[:, None]
        return (major[lanes] * strides + minor[lanes]) * (fragment.bits // 8)

    return places


@instruction("wmma.load")
def load(syntax: Instruction, bind: Binder) -> Operation:
    """``wmma.load.a.sync.aligned.row.shape.space.type {registers}, [address] {, stride}``."""
    part, name = syntax.modifiers[1], syntax.modifiers[-1]
    fragment = _fragment(syntax, part, name)
    targets = elements_of(syntax.operands[0])
    fragment.check(targets)
    width = fragment.bits // 8
    space, get_address = bind_location(syntax, syntax.operands[1], width, bind)
    get_places = _places(syntax, fragment, syntax.operands[2] if len(syntax.operands) > 2 else None, bind)
    setters: list[Setter] = [bind.active_destination(target, fragment.register) for target in targets]

    def execute(wave: Wave) -> None:
        full_warps(wave)
        base = active_values(wave, get_address(wave))
        places = get_places(wave)
        data = np.empty(places.shape, WIDTH_DTYPES[width])
        for element in range(fragment.elements):
            for positions, view, index in locate(wave, space, base + places[:, element], width, "load"):
                data[positions, element] = view[index]
        words = data.view(fragment.register.raw)
        for number, put in enumerate(setters):
            put(wave, np.ascontiguousarray(words[:, number % words.shape[1]]))

    return warp_synchronous(execute)


@instruction("wmma.store")
def store(syntax: Instruction, bind: Binder) -> Operation:
    """``wmma.store.d.sync.aligned.row.shape.space.type [address], {registers} {, stride}``."""
    fragment = _fragment(syntax, "d", syntax.modifiers[-1])
    sources = elements_of(syntax.operands[1])
    fragment.check(sources)
    width = fragment.bits // 8
    space, get_address = bind_location(syntax, syntax.operands[0], width, bind)
    get_places = _places(syntax, fragment, syntax.operands[2] if len(syntax.operands) > 2 else None, bind)
    getters = [bind.source(source, fragment.register) for source in sources]

    def execute(wave: Wave) -> None:
        full_warps(wave)
        base = active_values(wave, get_address(wave))
        places = get_places(wave)
        words = np.stack([active_values(wave, np.asarray(get(wave))) for get in getters], axis=1)
        data = np.ascontiguousarray(words).view(WIDTH_DTYPES[width])
        for element in range(fragment.elements):
            column = np.ascontiguousarray(data[:, element])
            for positions, view, index in locate(wave, space, base + places[:, element], width, "store", column):
                view[index] = column[positions]

    return warp_synchronous(execute)


@instruction("wmma.mma")
def multiply(syntax: Instruction, bind: Binder) -> Operation:
    """``wmma.mma.sync.aligned.row.col.shape.d.c`` of f16, or with all four types."""
    names = [m for m in syntax.modifiers if m in MATRIX_TYPES or m in _ACCUMULATORS]
    if len(names) == 2:
        names = [names[0], "f16", "f16", names[1]]
    d_name, a_name, b_name, c_name = names
    if {d_name, c_name} - set(_SUMS.get(a_name, ())) or a_name != b_name:
        raise Unsupported(f"wmma of .{a_name} and .{b_name} in .{d_name} and .{c_name}")
    parts = [_fragment(syntax, part, name) for part, name in zip("dabc", (d_name, a_name, b_name, c_name), strict=True)]
    operands = [elements_of(operand) for operand in syntax.operands]
    for fragment, elements in zip(parts, operands, strict=True):
        fragment.check(elements)
    d, a, b, c = parts
    setters = [bind.destination(operand, d.register) for operand in operands[0]]
    getters = [
        [bind.source(operand, fragment.register) for operand in elements]
        for fragment, elements in zip(parts[1:], operands[1:], strict=True)
    ]
    element, total_type, result_type = MATRIX_TYPES[a_name], _ACCUMULATORS[c_name], _ACCUMULATORS[d_name]
    saturates = syntax.has("satfinite")

    def execute(wave: Wave) -> None:
        full_warps(wave)
        left, right = (
            element.numbers(fragment.words(wave, get)).reshape(wave.warps, fragment.rows, fragment.columns).astype(F64)
            for fragment, get in ((a, getters[0]), (b, getters[1]))
        )
        before: Any = c.words(wave, getters[2])
        total: Any = before.view(total_type).reshape(wave.warps, c.rows, c.columns).astype(F64)
        if element.name == "f64":
            for k in range(a.columns):
                row, column = np.broadcast_arrays(left[:, :, k, None], right[:, k, None, :])
                total = fma_f64(row.ravel(), column.ravel(), total.ravel()).reshape(total.shape)
        else:
            total = left @ right + total
        if element.is_integer:
            limits = np.iinfo(np.int32)
            total = np.clip(total, limits.min, limits.max) if saturates else total.astype(np.int64)
        words = np.ascontiguousarray(total.astype(result_type).reshape(wave.threads, -1)).view(d.register.raw)
        for number, put in enumerate(setters):
            put(wave, np.ascontiguousarray(words[:, number]))

    return warp_synchronous(execute, tensor_flops=2 * d.rows * d.columns * a.columns)
