"""What one warp executed, in order: its instructions, and the addresses that each gave to memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .architecture import WARP_SIZE
from .ptx.syntax import SourceLocation

if TYPE_CHECKING:
    from .program import BoundInstruction
    from .wave import Wave


@dataclass(frozen=True)
class MemoryAccess:
    """The addresses of one instruction: offsets in the block's window for `shared`, device addresses for `global`."""

    space: str
    width: int
    """Bytes per lane."""
    address_of_lane: dict[int, int]
    """Only the lanes that took part."""


@dataclass(frozen=True)
class TraceEntry:
    """One step of a traced warp."""

    ptx_line: int
    opcode: str
    source_line: int | None
    text: str = ""
    source: SourceLocation | None = None
    accesses: tuple[MemoryAccess, ...] = ()


class WarpTrace:
    """Collects the steps of one warp of a wave; program counters first, looked up when asked for."""

    def __init__(self, warp: int) -> None:
        self._first = warp * WARP_SIZE
        self._lanes = slice(self._first, self._first + WARP_SIZE)
        self._steps: list[tuple[int, list[MemoryAccess]]] = []

    def step(self, pc: int, group: np.ndarray) -> None:
        """The threads of ``group`` execute the instruction at ``pc``."""
        if group[self._lanes].any():
            self._steps.append((pc, []))

    def postpone(self, pc: int, group: np.ndarray) -> None:
        """The threads of ``group`` have come to the instruction at ``pc``, and will execute it later."""
        if group[self._lanes].any() and self._steps and self._steps[-1][0] == pc:
            self._steps.pop()

    def access(self, wave: Wave, space: str, addresses: np.ndarray, width: int) -> None:
        """The active threads of the wave give these addresses to memory."""
        threads = np.arange(wave.threads) if wave.lanes is None else wave.lanes
        ours = (threads >= self._first) & (threads < self._first + WARP_SIZE)
        if ours.any():
            lanes = (threads[ours] - self._first).tolist()
            addresses_by_lane = dict(zip(lanes, addresses[ours].tolist(), strict=True))
            self._steps[-1][1].append(MemoryAccess(space, width, addresses_by_lane))

    def entries(self, code: list[BoundInstruction]) -> list[TraceEntry]:
        """The steps, each with its instruction; those past the end of ``code`` are left out."""
        return [
            TraceEntry(
                item.ptx_line,
                item.opcode,
                item.source.line if item.source else None,
                item.text,
                item.source,
                tuple(accesses),
            )
            for pc, accesses in self._steps
            if pc < len(code)
            for item in (code[pc],)
        ]
