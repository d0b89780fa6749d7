"""Registers of wgmma in flight: not to be touched by ordinary instructions before the wait, nor without a fence.

PTX ISA, "wgmma.fence" and "wgmma.mma_async": accumulators, and registers that hold A, must not be accessed from the
issue of a product to the wait for its group; and between an access by other instructions and a product on the same
registers there must be a wgmma.fence, except between products of the same shape on the same accumulators.

A `mov` from register to register, or to its two halves, is the compiler's renaming, which the assembler removes: it is
no access, and hands on whatever is to be said of the register.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .architecture import WARP_SIZE
from .errors import OtherParty

if TYPE_CHECKING:
    from .wave import Wave


class RegisterHazards:
    """Which of the registers that some wgmma of the program uses are in flight, for every warp of a wave."""

    def __init__(self, wave: Wave, slots: tuple[int, ...]) -> None:
        self._wave = wave
        self._row = {slot: row for row, slot in enumerate(slots)}
        self._known_rows: dict[frozenset[int] | tuple[int, ...], np.ndarray] = {}
        shape = (len(slots), wave.warps)
        self._group = np.zeros(shape, np.int64)  # commit group + 1 of the last product in flight; 0: none is
        self._owner = np.zeros(shape, np.int64)  # which accumulator tuple it belongs to; 0: it holds a part of A
        self._issued_at = np.zeros(shape, np.int64)
        self._touched_at = np.full(shape, -1)  # by an ordinary instruction since the last fence; -1: not at all
        self._is_renamed = np.zeros(shape, bool)  # in flight under another name than the product's
        self._is_fenced = np.zeros(wave.warps, bool)
        self._owners: dict[tuple[int, ...], int] = {}
        self._any_in_flight = False

    def _rows_of(self, slots: frozenset[int] | tuple[int, ...]) -> np.ndarray:
        """A column of row numbers, remembered: every instruction asks for the same ones each time."""
        rows = self._known_rows.get(slots)
        if rows is None:
            rows = self._known_rows[slots] = np.array([self._row[slot] for slot in slots], np.int64)[:, None]
        return rows

    def touch(self, slots: tuple[int, ...]) -> None:
        """An ordinary instruction of the active threads reads or writes these registers."""
        rows, warps = self._rows_of(slots), self._active_warps()
        if self._any_in_flight:
            busy = self._group[rows, warps] > 0
            if busy.any():
                detail = "a register of a wgmma that has not been waited for (wgmma.wait_group) is accessed"
                self._report(detail, warps, busy, self._issued_at[rows, warps])
        self._touched_at[rows, warps] = self._wave.pc

    def move(self, source: int | None, target: int) -> None:
        """A `mov` of the active threads; without a source, of a constant."""
        warps = self._active_warps()
        to = self._row[target]
        if source is None:
            # A constant that is about to be accumulated on: the compiler may place it after the fence.
            if self._any_in_flight and (self._group[to, warps] > 0).any():
                self.touch((target,))
            self._touched_at[to, warps] = -1
            return
        row = self._row[source]
        if self._any_in_flight:
            overwritten = (self._group[to, warps] > 0) & (self._group[row, warps] == 0)
            if overwritten.any():
                self.touch((target,))
        for state in (self._group, self._owner, self._issued_at, self._touched_at):
            state[to, warps] = state[row, warps]
        self._is_renamed[to, warps] = True

    def fence(self) -> None:
        warps = self._active_warps()
        self._is_fenced[warps] = True
        self._touched_at[:, warps] = -1

    def issue(self, accumulators: tuple[int, ...], fragments: frozenset[int]) -> None:
        """The active warps issue a product on these accumulators, with these registers of A."""
        warps = self._active_warps()
        if not self._is_fenced[warps].all():
            self._report("no wgmma.fence before the first wgmma", warps, ~self._is_fenced[warps][None])
        targets, sources = self._rows_of(accumulators), self._rows_of(fragments)
        owner = self._owners.setdefault(accumulators, len(self._owners) + 1)
        for rows in (targets, sources):
            touched = self._touched_at[rows, warps]
            if (touched >= 0).any():
                detail = "no wgmma.fence between an access to a register by another instruction and this wgmma"
                self._report(detail, warps, touched >= 0, touched)
        self._check_overlap(targets, warps, owner, "registers of another wgmma in flight are used as accumulators")
        self._check_overlap(sources, warps, 0, "accumulators of a wgmma in flight are used as A")
        group = self._wave.wgmma.commits[warps] + 1
        for rows, kind in ((targets, owner), (sources, 0)):
            self._group[rows, warps] = group
            self._owner[rows, warps] = kind
            self._issued_at[rows, warps] = self._wave.pc
            self._is_renamed[rows, warps] = False
        self._any_in_flight = True

    def _check_overlap(self, rows: np.ndarray, warps: np.ndarray, owner: int, detail: str) -> None:
        held = self._owner[rows, warps]
        clash = (self._group[rows, warps] > 0) & (held != owner)
        if owner:  # under another name, but accumulators all the same
            clash &= ~self._is_renamed[rows, warps] | (held == 0)
        if clash.any():
            self._report(detail, warps, clash, self._issued_at[rows, warps])

    def complete(self, completed: np.ndarray) -> None:
        """Per warp, all commit groups before this number are done."""
        self._group[self._group <= completed] = 0
        self._any_in_flight = bool(self._group.any())

    def _active_warps(self) -> np.ndarray:
        mask = self._wave.active_mask
        return np.flatnonzero(mask.reshape(-1, WARP_SIZE).any(axis=1))

    def _report(self, detail: str, warps: np.ndarray, bad: np.ndarray, other_pcs: np.ndarray | None = None) -> None:
        """A hazard of the warps for which any register is ``bad`` ([register, warp]), named for the first."""
        wave = self._wave
        row, column = (int(axis[0]) for axis in np.nonzero(bad))
        warp = int(warps[column])
        mask = wave.active_mask[warp * WARP_SIZE : (warp + 1) * WARP_SIZE]
        thread = warp * WARP_SIZE + int(np.flatnonzero(mask)[0])
        other = None
        if other_pcs is not None:
            item = wave.program.code[int(other_pcs[row, column])]
            other = OtherParty(
                warp=warp % wave.warps_per_block,
                lane=None,
                access="wgmma in flight" if item.opcode.startswith("wgmma.") else "access",
                ptx_line=item.ptx_line,
                source_line=item.source.line if item.source else None,
                source_file=item.source.file if item.source else None,
                instruction=item.text,
            )
        wave.hazard("wgmma", detail, thread, None, other, count=int(np.count_nonzero(bad.any(axis=0))))
