"""The simulated device: its memory, and modules loaded on it."""

from __future__ import annotations

import numpy as np

from .architecture import architecture
from .memory.global_memory import GlobalMemory
from .module import Module
from .ptx.source import PtxSource, read_ptx
from .tensor_maps import TensorMaps


class SimulatedGPU:
    """A GPU without a GPU. Addresses are plain integers, as with the CUDA driver.

    >>> gpu = SimulatedGPU("sm_80")
    >>> pointer = gpu.to_device(np.arange(4, dtype=np.float32))
    >>> gpu.to_host(pointer)
    array([0., 1., 2., 3.], dtype=float32)
    """

    def __init__(self, arch: str = "sm_80") -> None:
        self.architecture = architecture(arch)
        self.memory = GlobalMemory()
        self.tensor_maps = TensorMaps()
        self._arrays: dict[int, tuple[np.dtype, tuple[int, ...]]] = {}

    def to_device(self, array: np.ndarray) -> int:
        """Copy an array to new device memory; returns its address."""
        array = np.ascontiguousarray(array) if array.ndim else array
        address = self.allocate(array.nbytes)
        self.memory.write(address, array)
        self._arrays[address] = (array.dtype, array.shape)
        return address

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy an array into existing device memory, from ``address`` on; ValueError if it does not fit there."""
        allocation = self.memory.allocation_at(address)
        if allocation is None or allocation.freed or address >= max(allocation.end, allocation.address + 1):
            raise ValueError(f"{address:#x} is in no live allocation; addresses come from to_device and allocate")
        if address + array.nbytes > allocation.end:
            raise ValueError(
                f"{array.nbytes} bytes do not fit at {address:#x}: the allocation of {allocation.size} bytes at "
                f"{allocation.address:#x} has {allocation.end - address} from there on"
            )
        self.memory.write(address, array)
        if address == allocation.address and array.nbytes == allocation.size:
            self._arrays[address] = (array.dtype, array.shape)

    def to_host(self, address: int) -> np.ndarray:
        """The array at an address from `to_device`, with its dtype and shape (bytes after `allocate`)."""
        allocation = self.memory.allocation(address)
        dtype, shape = self._arrays.get(address, (np.dtype(np.uint8), (allocation.size,)))
        return np.frombuffer(self.memory.read(address, allocation.size), np.uint8).copy().view(dtype).reshape(shape)

    def allocate(self, nbytes: int) -> int:
        """New device memory with undefined content (NaN patterns); returns its address."""
        return self.memory.allocate(nbytes)

    def free(self, address: int) -> None:
        """Release memory; a kernel that still touches it is stopped with an error."""
        self.memory.free(address)
        self._arrays.pop(address, None)

    def load(self, ptx: PtxSource) -> Module:
        """Parse and bind a PTX module.

        A kernel with instructions that the simulator does not know is refused (`Module.refused`); a module in which
        no kernel can run is refused here.

        ``ptx`` is text, the bytes of it, or the path of a file.
        """
        return Module(self, read_ptx(ptx))
