"""Tensor maps as kernels receive them: 128 bytes, opaque to the kernel, here a mark and the fields of a `TensorMap`.

Kernels may change fields in shared or global memory (``tensormap.replace``), also of 128 zeros. So the bytes may hold
what is no valid tensor map for a while; they are checked when a copy uses them.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from flashwright.hardware.tensor_map import MAX_RANK, TENSOR_MAP_BYTES, Fill, Swizzle, TensorMap

from .memory.thread_memory import ConstantMemory
from .memory.windows import GLOBAL_BASE, SPACE_OF_WINDOW, WINDOW_BASE, WINDOW_BITS

if TYPE_CHECKING:
    from .wave import Wave

_MARK = b"flashwright map\0"
_ALIGNMENT = 64
# Mark, address, element type, rank - 1, swizzle, fill, global dimensions, strides, box, element strides.
_LAYOUT = struct.Struct(f"<{len(_MARK)}sQ4B{MAX_RANK}Q{MAX_RANK - 1}Q{MAX_RANK}I{MAX_RANK}B")
_ZEROS = bytes(TENSOR_MAP_BYTES)
# PTX ISA, "tensormap.replace": values of .elemtype (8 is .f32.ftz), .swizzle_mode and .fill_mode.
_ELEMENT_TYPES: dict[int, np.dtype] = {
    number: np.dtype(name)
    for number, name in enumerate(("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32"))
} | {9: np.dtype(np.float64), 10: np.dtype(ml_dtypes.bfloat16)}
_SWIZZLES = (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128)
_FILLS = (Fill.ZERO, Fill.NAN)
# Where a field is in the unpacked bytes, and its first value's limit (exclusive).
_SCALARS = {
    "global_address": (1, 1 << 64),
    "elemtype": (2, 13),
    "rank": (3, MAX_RANK),
    "swizzle_mode": (4, len(_SWIZZLES)),
    "fill_mode": (5, len(_FILLS)),
}
_ARRAYS = {
    "global_dim": (6, MAX_RANK, 1 << 33),
    "global_stride": (6 + MAX_RANK, MAX_RANK - 1, 1 << 64),
    "box_dim": (5 + 2 * MAX_RANK, MAX_RANK, 1 << 32),
    "element_stride": (5 + 3 * MAX_RANK, MAX_RANK, 1 << 8),
}
# Fields that have one value only here.
_FIXED = {"interleave_layout": 0, "swizzle_atomicity": 0}
FIELDS = (*_SCALARS, *_ARRAYS, *_FIXED)
INDEXED_FIELDS = tuple(_ARRAYS)


def replaced(content: bytes, field: str, index: int, value: int) -> bytes:
    """The bytes of a tensor map with a field (its ``index``-th value) changed; ValueError says what cannot be."""
    if content != _ZEROS and not content.startswith(_MARK):
        raise ValueError("there is no tensor map at this address, and no 128 zeros to make one of")
    if field in _FIXED:
        if value != _FIXED[field]:
            raise ValueError(f"{field} {value} is not modelled; only {_FIXED[field]} is")
        return content
    unpacked = list(_LAYOUT.unpack(content[: _LAYOUT.size]))
    unpacked[0] = _MARK
    if field in _ARRAYS:
        first, count, limit = _ARRAYS[field]
        if not 0 <= index < count:
            raise ValueError(f"{field} has no number {index}; allowed: 0 to {count - 1}")
    else:
        (first, limit), index = _SCALARS[field], 0
    if not 0 <= value < limit:
        raise ValueError(f"{field} {value}; allowed: 0 to {limit - 1}")
    unpacked[first + index] = value
    return _LAYOUT.pack(*unpacked).ljust(TENSOR_MAP_BYTES, b"\0")


@lru_cache(maxsize=256)
def decoded(content: bytes) -> TensorMap | None:
    """The tensor map in these bytes, None if they hold none; ValueError says which of its fields is not allowed."""
    if not content.startswith(_MARK):
        return None
    _, address, element, rank, swizzle, fill, *arrays = _LAYOUT.unpack(content[: _LAYOUT.size])
    if element not in _ELEMENT_TYPES:
        raise ValueError(f"tensor map: elemtype {element} is not modelled")
    shape, arrays = arrays[: rank + 1], arrays[MAX_RANK:]
    strides, arrays = arrays[:rank], arrays[MAX_RANK - 1 :]
    box, arrays = arrays[: rank + 1], arrays[MAX_RANK:]
    return TensorMap(
        address,
        _ELEMENT_TYPES[element],
        tuple(shape),
        tuple(strides),
        tuple(box),
        tuple(arrays[: rank + 1]),
        _SWIZZLES[swizzle],
        _FILLS[fill],
    )


class TensorMaps:
    """Tensor maps of a simulated GPU."""

    def encode(self, tensor_map: TensorMap) -> bytes:
        """Bytes to pass to a kernel, as a parameter or in a structure, in place of a `CUtensorMap`."""
        element = next(number for number, dtype in _ELEMENT_TYPES.items() if dtype == tensor_map.dtype)
        missing = MAX_RANK - tensor_map.rank
        packed = _LAYOUT.pack(
            _MARK,
            tensor_map.address,
            element,
            tensor_map.rank - 1,
            _SWIZZLES.index(tensor_map.swizzle),
            _FILLS.index(tensor_map.fill),
            *tensor_map.shape,
            *(0,) * missing,
            *tensor_map.strides,
            *(0,) * missing,
            *tensor_map.box,
            *(0,) * missing,
            *tensor_map.element_strides,
            *(0,) * missing,
        )
        return packed.ljust(TENSOR_MAP_BYTES, b"\0")

    def at(self, wave: Wave, thread: int, address: int) -> TensorMap:
        """The tensor map that a thread means by a generic address."""
        space = SPACE_OF_WINDOW.get(address >> WINDOW_BITS, "global")
        offset = address - WINDOW_BASE[space]
        if address % _ALIGNMENT:
            wave.fault_thread("misaligned", f"a tensor map must be aligned to {_ALIGNMENT} bytes", thread, address)
        if space == "global":
            allocation = wave.global_memory.allocation_at(address)
            content = b"" if allocation is None else wave.global_memory.bytes[address - GLOBAL_BASE :][:128].tobytes()
        elif space in ("param", "const"):
            bank = wave.spaces[space]
            assert isinstance(bank, ConstantMemory)
            content = bank.store.bytes[offset : offset + TENSOR_MAP_BYTES].tobytes()
        else:
            content = b""
        try:
            found = decoded(content)
        except ValueError as problem:
            wave.fault_thread("tensor-map", str(problem), thread, address)
        if found is None:
            wave.fault_thread(
                "tensor-map", f"there is no tensor map in {space} memory at this address", thread, address
            )
        return found
