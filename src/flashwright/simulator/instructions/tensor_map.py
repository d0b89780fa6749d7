"""tensormap: changing tensor maps in memory, and copying them from shared to global memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from flashwright.hardware.tensor_map import TENSOR_MAP_BYTES

from ..architecture import WARP_SIZE
from ..binding import Binder
from ..ptx.syntax import Immediate, Instruction
from ..ptx.types import TYPES
from ..registry import Operation, Unsupported, instruction
from ..sync.convergence import warp_synchronous
from ..tensor_maps import FIELDS, INDEXED_FIELDS, replaced
from .load_store import active_values, bind_location, locate
from .mbarrier import active_threads

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]

_CHUNK_BYTES = 16
_OFFSETS = range(0, TENSOR_MAP_BYTES, _CHUNK_BYTES)


def _read(wave: Wave, space: str | None, addresses: np.ndarray) -> np.ndarray:
    """[active thread, 128] bytes."""
    content = np.empty((addresses.size, TENSOR_MAP_BYTES), np.uint8)
    for offset in _OFFSETS:
        for positions, view, index in locate(wave, space, addresses + offset, _CHUNK_BYTES, "load"):
            chunks = np.ascontiguousarray(view[index]).view(np.uint8).reshape(-1, _CHUNK_BYTES)
            content[positions, offset : offset + _CHUNK_BYTES] = chunks
    return content


def _write(wave: Wave, space: str | None, addresses: np.ndarray, content: np.ndarray) -> None:
    for offset in _OFFSETS:
        data = np.ascontiguousarray(content[:, offset : offset + _CHUNK_BYTES]).view(np.dtype("V16")).ravel()
        for positions, view, index in locate(wave, space, addresses + offset, _CHUNK_BYTES, "store", data):
            view[index] = data[positions]


@instruction("tensormap.replace")
def replace(syntax: Instruction, bind: Binder) -> Execute:
    """``tensormap.replace.tile.field.space.b1024.type [address] {, index}, value``."""
    field = next((modifier for modifier in syntax.modifiers if modifier in FIELDS), None)
    if field is None or not syntax.has("tile"):
        raise Unsupported(f"this field or mode; there are .tile and {', '.join(f'.{name}' for name in FIELDS)}")
    address, *rest = syntax.operands
    number = 0
    if field in INDEXED_FIELDS:
        index = rest.pop(0)
        if not isinstance(index, Immediate):
            raise Unsupported(f"operand {index} as the index of .{field}; it must be a constant")
        number = int(index.value)
    (value,) = rest
    space, get_address = bind_location(syntax, address, _CHUNK_BYTES, bind)
    get_value = bind.source(value, TYPES["u64" if syntax.modifiers[-1] == "b64" else "u32"])

    def execute(wave: Wave) -> None:
        addresses = active_values(wave, get_address(wave))
        values = active_values(wave, np.asarray(get_value(wave)))
        content = _read(wave, space, addresses)
        for position, (row, new) in enumerate(zip(content, values, strict=True)):
            try:
                changed = replaced(row.tobytes(), field, number, int(new))
            except ValueError as problem:
                wave.fault("tensor-map", str(problem), position, int(addresses[position]))
            content[position] = np.frombuffer(changed, np.uint8)
        _write(wave, space, addresses, content)

    return execute


@instruction("tensormap.cp_fenceproxy")
def copy_and_fence(syntax: Instruction, bind: Binder) -> Operation:
    """``[global], [shared], 128``: a warp copies a tensor map together, so that one lane does it here."""
    target, source, size = syntax.operands
    if not isinstance(size, Immediate) or int(size.value) != TENSOR_MAP_BYTES:
        raise Unsupported(f"a copy of {size} bytes; a tensor map has {TENSOR_MAP_BYTES}")
    get_target, get_source = bind.address(target), bind.address(source)
    bind.shared_widths.add(_CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        warps = active_threads(wave) // WARP_SIZE
        leaders = np.unique(warps, return_index=True)[1]
        with wave.only(leaders):
            content = _read(wave, "shared", active_values(wave, get_source(wave)))
            _write(wave, "global", active_values(wave, get_target(wave)), content)

    return warp_synchronous(execute)


@instruction("fence.proxy.tensormap::generic")
def tensor_map_fence(syntax: Instruction, bind: Binder) -> Execute:
    """Changes are seen at once here."""
    return lambda wave: None
