"""atom and red: read-modify-write, applied in thread order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import numerics as num
from ..binding import Binder
from ..memory.bytes import WIDTH_DTYPES
from ..ptx.syntax import Instruction, Sink
from ..ptx.types import TYPES, PtxType
from ..registry import Unsupported, instruction
from .load_store import active_values, bind_location, locate

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]
Update = Callable[..., Any]

_OPERATIONS = ("add", "min", "max", "inc", "dec", "exch", "cas", "and", "or", "xor")


def _update(name: str, ptx_type: PtxType) -> Update:
    """(old, operands…) → new, on arrays of the instruction's type."""
    if ptx_type.kind in ("packed", "bf") or ptx_type.name == "f16":
        return _half_update(name, ptx_type)
    one: Any = ptx_type.dtype.type(1)
    minimum, maximum = (num.minimum, num.maximum) if ptx_type.is_float else (np.minimum, np.maximum)
    table: dict[str, Update] = {
        "add": np.add,
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
    name = next(m for m in syntax.modifiers if m in _OPERATIONS)
    ptx_type = TYPES[syntax.modifiers[-1]]
    if "v2" in syntax.modifiers or "v4" in syntax.modifiers or syntax.has("async"):
        raise Unsupported("vector or asynchronous atomics")
    returns = syntax.root == "atom"
    target = syntax.operands[0] if returns else Sink()
    address, *values = syntax.operands[1:] if returns else syntax.operands
    width = ptx_type.bytes
    space, get_address = bind_location(syntax, address, width, bind)
    put = bind.active_destination(target, ptx_type)
    getters = [bind.source(value, ptx_type) for value in values]
    update = _update(name, ptx_type)

    def execute(wave: Wave) -> None:
        addresses = get_address(wave)
        if wave.mask is not None:
            addresses = addresses[wave.lanes]
        operands = [active_values(wave, get(wave)) for get in getters]
        old = np.empty(addresses.size, WIDTH_DTYPES[width])
        for positions, view, index in locate(wave, space, addresses, width, "atomic"):
            old[positions] = _apply(view, index, [value[positions] for value in operands], update, ptx_type)
        put(wave, old)

    return execute


def _apply(view: np.ndarray, index: np.ndarray, operands: list[Any], update: Update, ptx_type: PtxType) -> np.ndarray:
    """Apply in thread order: each round takes the first remaining thread of every address."""
    old = np.empty(index.size, view.dtype)
    remaining = np.arange(index.size)
    while remaining.size:
        _, first = np.unique(index[remaining], return_index=True)
        chosen = remaining[first]
        before = view[index[chosen]]
        old[chosen] = before
        after = update(before.view(ptx_type.dtype), *(value[chosen] for value in operands))
        view[index[chosen]] = np.asarray(after).view(view.dtype)
        remaining = np.delete(remaining, first)
    return old
