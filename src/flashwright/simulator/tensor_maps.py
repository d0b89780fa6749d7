"""Tensor maps as kernels receive them: 128 opaque bytes, here a mark and a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashwright.hardware.tensor_map import TENSOR_MAP_BYTES, TensorMap

from .memory.thread_memory import ConstantMemory
from .memory.windows import GLOBAL_BASE, SPACE_OF_WINDOW, WINDOW_BASE, WINDOW_BITS

if TYPE_CHECKING:
    from .wave import Wave

_MARK = b"tensor map of the simulator"
_ALIGNMENT = 64


class TensorMaps:
    """The tensor maps of a simulated GPU."""

    def __init__(self) -> None:
        self._maps: list[TensorMap] = []

    def encode(self, tensor_map: TensorMap) -> bytes:
        """Bytes to pass to a kernel, as a parameter or in a structure, in place of a `CUtensorMap`."""
        if tensor_map not in self._maps:
            self._maps.append(tensor_map)
        number = self._maps.index(tensor_map)
        return (_MARK + number.to_bytes(4, "little")).ljust(TENSOR_MAP_BYTES, b"\0")

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
        number = int.from_bytes(content[len(_MARK) : len(_MARK) + 4], "little")
        if not content.startswith(_MARK) or number >= len(self._maps):
            wave.fault_thread(
                "tensor-map", f"there is no tensor map in {space} memory at this address", thread, address
            )
        return self._maps[number]
