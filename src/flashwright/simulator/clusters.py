"""Thread-block clusters: which blocks belong together, and addresses in each other's shared memory.

Blocks of a cluster are neighbours in a wave, in the order of their ranks. An address in the shared memory of another
block is the offset there, with the block's rank plus one above bit 24; an offset alone is in the thread's own block.
"""

from __future__ import annotations

import numpy as np

Dim3 = tuple[int, int, int]

MAX_CLUSTER_SIZE = 16
_RANK_SHIFT = 24
_OFFSET_MASK = (1 << _RANK_SHIFT) - 1


class Clusters:
    """The clusters of a wave."""

    def __init__(self, shape: Dim3, block_of_thread: np.ndarray) -> None:
        self.shape = shape
        self.size = shape[0] * shape[1] * shape[2]
        self.of_thread = block_of_thread // self.size
        self.rank_of_thread = block_of_thread % self.size
        self._block_of_thread = block_of_thread

    def address(self, addresses: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """``mapa``: the same places in the shared memory of the blocks of these ranks, for every thread."""
        upper = (
            (addresses >> addresses.dtype.type(32)) << addresses.dtype.type(32) if addresses.dtype.itemsize > 4 else 0
        )
        offsets = addresses & addresses.dtype.type(_OFFSET_MASK)
        marks = np.where(ranks == self.rank_of_thread, 0, ranks.astype(addresses.dtype) + 1).astype(addresses.dtype)
        return offsets | (marks << addresses.dtype.type(_RANK_SHIFT)) | upper

    def ranks(self, addresses: np.ndarray) -> np.ndarray:
        """``getctarank``: the ranks of the blocks that the addresses of all threads are in."""
        marks = (addresses.astype(np.int64) & 0xFFFFFFFF) >> _RANK_SHIFT
        return np.where(marks == 0, self.rank_of_thread, marks - 1)

    def has_remote(self, addresses: np.ndarray) -> bool:
        """Whether some of these shared addresses are in another block's memory."""
        return self.size > 1 and bool((addresses >> _RANK_SHIFT).any())

    def targets(self, threads: np.ndarray | slice, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(block of the wave, offset in its shared memory) of these threads' shared addresses."""
        marks = addresses >> _RANK_SHIFT
        first = self.of_thread[threads] * self.size
        own = self._block_of_thread[threads]
        return np.where(marks == 0, own, first + marks - 1), addresses & _OFFSET_MASK

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
        return (address & _OFFSET_MASK) | (rank + 1) << _RANK_SHIFT
