"""atom and red: read-modify-write, applied in thread order; vectors element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import numerics as num
from ..binding import Binder, elements_of
from ..memory_order import ordered
from ..ptx.syntax import Instruction, Sink
from ..ptx.types import TYPES, PtxType
from ..registry import Unsupported, instruction
from .load_store import active_values, bind_location, locate

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]
Update = Callable[..., Any]

_ARITHMETIC = ("add", "min", "max")
_VECTORS = ("v2", "v4", "v8")
OPERATIONS = (*_ARITHMETIC, "inc", "dec", "exch", "cas", "and", "or", "xor")


def update_of(name: str, ptx_type: PtxType, flushes: bool = False) -> Update:
    """(old, operands…) → new, on arrays of the instruction's type.

    ``flushes``: sums of f32 flush subnormal numbers. PTX ISA, "atom": those of threads in global memory do, in shared
    memory they do not. Those of bulk copies do not in either, as an H200 shows.
    """
    if ptx_type.is_float and name not in _ARITHMETIC:
        raise Unsupported(f".{name} of .{ptx_type.name}; of floating-point types there are {', '.join(_ARITHMETIC)}")
    if ptx_type.kind in ("packed", "bf") or ptx_type.name == "f16":
        return _half_update(name, ptx_type)
    one: Any = ptx_type.dtype.type(1)
    minimum, maximum = (num.minimum, num.maximum) if ptx_type.is_float else (np.minimum, np.maximum)
    table: dict[str, Update] = {
        "add": _flushing_sum if ptx_type.name == "f32" and flushes else np.add,
        "min": minimum,
        "max": maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda old, new: new,
        "inc": lambda old, bound: np.where(old >= bound, old.dtype.type(0), old + one),
        "dec": lambda old, bound: np.where((old == 0) | (old > bound), bound, old - one),
        "cas": lambda old, expected, new: np.where(old == expected, new, old),
    }
    return table[name]


def _flushing_sum(old: Any, value: Any) -> Any:
    return num.flush_subnormals(num.flush_subnormals(old) + num.flush_subnormals(value))


def _half_update(name: str, ptx_type: PtxType) -> Update:
    operations: dict[str, Update] = {"add": np.add, "min": num.minimum, "max": num.maximum}
    operation = operations[name]
    is_bf16 = ptx_type.name.startswith("bf16")
    u16 = np.dtype(np.uint16)

    def update(old: Any, value: Any) -> Any:
        parts = [np.ascontiguousarray(x).view(u16) for x in (old, value)]
        if is_bf16:
            result = num.f32_to_bf16(operation(*(num.bf16_to_f32(x) for x in parts)))
        else:
            wide = operation(*(x.view(num.F16).astype(num.F32) for x in parts))
            result = num.f32_to_f16(wide).view(u16)
        return result.view(old.dtype)

    return update


@instruction("atom", "red")
def atomic(syntax: Instruction, bind: Binder) -> Execute:
    """``d, [address], b {, c} {, cache policy}``; d, b and c may be vectors. ``red`` has no d."""
    name = next((m for m in syntax.modifiers if m in OPERATIONS), None)
    if name is None or syntax.has("async"):
        raise Unsupported("asynchronous reductions" if syntax.has("async") else "this operation")
    ptx_type = TYPES[syntax.modifiers[-1]]
    operands = list(syntax.operands)
    if any(modifier.endswith("cache_hint") for modifier in syntax.modifiers):
        operands.pop()
    targets = elements_of(operands.pop(0)) if syntax.root == "atom" else None
    address, *values = operands
    count = next((int(m[1:]) for m in syntax.modifiers if m in _VECTORS), 1)
    columns = [elements_of(value) for value in values]
    if len(values) != (2 if name == "cas" else 1):
        raise Unsupported(f"{len(values)} values; .{name} needs {2 if name == 'cas' else 1}")
    for elements in [*columns, *([] if targets is None else [targets])]:
        if len(elements) != count:
            raise Unsupported(f"{len(elements)} elements in an operand; {count} are needed")
    width = ptx_type.bytes * count
    space, get_address = bind_location(syntax, address, width, bind)
    setters = [bind.active_destination(target, ptx_type) for target in targets or (Sink(),) * count]
    getters = [[bind.source(value, ptx_type) for value in elements] for elements in columns]
    update, update_global = (update_of(name, ptx_type, flushes) for flushes in (False, True))

    def execute(wave: Wave) -> None:
        addresses = get_address(wave)
        if wave.mask is not None:
            addresses = addresses[wave.lanes]
        operands = [[active_values(wave, get(wave)) for get in elements] for elements in getters]
        old = np.empty((count, addresses.size), ptx_type.raw)
        for positions, view, index in locate(wave, space, addresses, width, "atomic"):
            items = view.view(ptx_type.raw)
            change = update_global if view is wave.global_memory.views[width] else update
            for element in range(count):
                chosen = [elements[element][positions] for elements in operands]
                old[element, positions] = _apply(items, index * count + element, chosen, change, ptx_type)
        for put, values in zip(setters, old, strict=True):
            put(wave, values)

    return ordered(syntax, execute)


def _apply(items: np.ndarray, index: np.ndarray, operands: list[Any], update: Update, ptx_type: PtxType) -> np.ndarray:
    """Apply in thread order: round r takes the r-th thread of every address."""
    old = np.empty(index.size, items.dtype)
    for chosen in _rounds(index):
        places = index[chosen]
        before = items[places]
        old[chosen] = before
        items[places] = np.asarray(update(before.view(ptx_type.dtype), *(v[chosen] for v in operands))).view(
            items.dtype
        )
    return old


def _rounds(index: np.ndarray) -> list[np.ndarray]:
    """Positions in ``index`` such that no round has an address twice, and earlier positions come in earlier rounds."""
    order = np.argsort(index, kind="stable")
    starts = np.flatnonzero(np.diff(index[order], prepend=index[order[0]] - 1))
    lengths = np.diff(starts, append=index.size)
    rank = np.arange(index.size) - np.repeat(starts, lengths)
    if lengths.max() == 1:
        return [order]
    by_rank = order[np.argsort(rank, kind="stable")]
    return np.split(by_rank, np.cumsum(np.bincount(rank))[:-1])
