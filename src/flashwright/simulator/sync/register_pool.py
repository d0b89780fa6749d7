"""setmaxnreg: warps give registers back to their block and take more from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..architecture import WARP_SIZE
from ..errors import ErrorKind

if TYPE_CHECKING:
    from ..wave import Wave


class RegisterPool:
    """Registers per thread of each warp, and what each block has free.

    Without knowing how many registers the kernel was compiled for, only the order of increases and decreases is
    checked.
    """

    deadlock_kind: ErrorKind = "deadlock"

    def __init__(self, wave: Wave, registers: int | None) -> None:
        self._wave = wave
        self._initial = registers
        self._current = np.full(wave.warps, registers or 0)
        self._free = np.zeros(wave.blocks, np.int64)
        self._waiting: list[tuple[int, np.ndarray, int]] = []

    def release(self, warps: np.ndarray, registers: int) -> None:
        if self._initial is None:
            return
        for warp in warps:
            current = int(self._current[warp])
            if registers > current:
                self._fault(warp, f"setmaxnreg.dec to {registers} registers, but the warp has {current}")
            self._free[self._block(warp)] += (current - registers) * WARP_SIZE
            self._current[warp] = registers
        self._look_again()

    def acquire(self, warps: np.ndarray, registers: int) -> bool:
        """Take registers for these warps of one block; False: they wait for others to give some back."""
        if self._initial is None:
            return True
        for warp in warps:
            if registers < int(self._current[warp]):
                self._fault(warp, f"setmaxnreg.inc to {registers} registers, but the warp has {self._current[warp]}")
        needed = sum(registers - int(self._current[warp]) for warp in warps) * WARP_SIZE
        block = self._block(warps[0])
        if needed > self._free[block]:
            return False
        self._free[block] -= needed
        self._current[warps] = registers
        return True

    def park(self, mask: np.ndarray, registers: int) -> None:
        self._waiting.append((self._wave.pc, mask, registers))

    def _look_again(self) -> None:
        waiting, self._waiting = self._waiting, []
        for pc, mask, _ in waiting:
            self._wave.scheduler.add(pc, mask)

    def _block(self, warp: int) -> int:
        return int(warp) // self._wave.warps_per_block

    def _fault(self, warp: int, detail: str) -> None:
        self._wave.fault_thread("registers", detail, int(warp) * WARP_SIZE)

    def on_exit(self) -> None:
        """Registers of warps that have exited stay with the block until it ends."""

    def waiting_threads(self) -> Iterator[tuple[int, np.ndarray, str]]:
        for pc, mask, registers in self._waiting:
            block = int(self._wave.block_of_thread[np.flatnonzero(mask)[0]])
            yield (
                pc,
                mask,
                f"setmaxnreg.inc to {registers} registers a thread: the block was launched with {self._initial} and "
                f"has {self._free[block]} free",
            )
