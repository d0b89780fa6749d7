"""Thread-block clusters: which blocks belong together, and addresses in each other's shared memory.

Blocks of a cluster are neighbours in a wave, in the order of their ranks. A shared address is an offset in a block's
memory with the block's rank in bits 24 to 31, as on an H200: also a variable's address in the own block. So an address
whose upper bits were masked away is one in the block of rank 0.
"""

from __future__ import annotations

import numpy as np

Dim3 = tuple[int, int, int]

MAX_CLUSTER_SIZE = 16
_RANK_SHIFT = 24
_OFFSET_MASK = (1 << _RANK_SHIFT) - 1
_RANK_MASK = 0xFF


class Clusters:
    """The clusters of a wave."""

    def __init__(self, shape: Dim3, block_of_thread: np.ndarray) -> None:
        self.shape = shape
        self.size = shape[0] * shape[1] * shape[2]
        self.of_thread = block_of_thread // self.size
        self.rank_of_thread = block_of_thread % self.size
        self.first_address = self.rank_of_thread << _RANK_SHIFT
        """Where the shared memory of each thread's block begins."""
        self._block_of_thread = block_of_thread

    def address(self, addresses: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """``mapa``: the same places in the shared memory of the blocks of these ranks, for every thread."""
        shift, mask = (addresses.dtype.type(value) for value in (_RANK_SHIFT, _RANK_MASK << _RANK_SHIFT))
        return (addresses & ~mask) | (ranks.astype(addresses.dtype) << shift)

    def ranks(self, addresses: np.ndarray) -> np.ndarray:
        """``getctarank``: the ranks of the blocks that shared or generic addresses are in."""
        return addresses.astype(np.int64) >> _RANK_SHIFT & _RANK_MASK

    def offsets(self, addresses: np.ndarray) -> np.ndarray:
        """Shared addresses as offsets in the memory of their blocks."""
        return addresses if self.size == 1 else addresses & _OFFSET_MASK

    def are_remote(self, threads: np.ndarray | slice, addresses: np.ndarray) -> np.ndarray:
        """Which of these threads' shared addresses are in another block's memory."""
        return addresses >> _RANK_SHIFT != self.rank_of_thread[threads]

    def targets(self, threads: np.ndarray | slice, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(block of the wave, offset in its shared memory) of these threads' shared addresses."""
        return self.of_thread[threads] * self.size + (addresses >> _RANK_SHIFT), addresses & _OFFSET_MASK

    def target(self, thread: int, address: int) -> tuple[int, int]:
        """The same of one thread's address."""
        if self.size == 1:
            return int(self._block_of_thread[thread]), address
        blocks, offsets = self.targets(np.array([thread]), np.array([address]))
        return int(blocks[0]), int(offsets[0])

    def holds(self, thread: int, block: int) -> bool:
        """Whether a block is one of the thread's cluster."""
        return block // self.size == self.of_thread[thread]

    def in_rank(self, rank: int, address: int) -> int:
        """The address of the same place in the block of this rank."""
        return (address & _OFFSET_MASK) | rank << _RANK_SHIFT
