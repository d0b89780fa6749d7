"""Which lane holds which element of `mma.m16n8k16`'s operands, and in which of its registers.

PTX ISA, "Matrix Fragments for mma.m16n8k16": a warp is 8 groups of 4 lanes; a register holds two 16-bit elements
of A or B, or one fp32 element of C.
"""

from __future__ import annotations

from dataclasses import dataclass

M, N, K = 16, 8, 16
LANES = 32


@dataclass(frozen=True)
class Holder:
    lane: int
    register: int
    half: int = 0
    """Which of the two 16-bit elements of the register."""


Layout = tuple[tuple[Holder, ...], ...]
"""Indexed by row, then column."""


def a_layout() -> Layout:
    """A, 16 × 16: four registers, one for each 8 × 8 quarter, down the rows first."""
    return tuple(tuple(_a_holder(row, column) for column in range(K)) for row in range(M))


def b_layout() -> Layout:
    """B, 16 × 8: two registers, one for each 8 × 8 half; a register holds two neighbours of a column."""
    return tuple(tuple(_b_holder(row, column) for column in range(N)) for row in range(K))


def c_layout() -> Layout:
    """C, 16 × 8: four fp32 registers, two for each half of the rows."""
    return tuple(tuple(_c_holder(row, column) for column in range(N)) for row in range(M))


def _a_holder(row: int, column: int) -> Holder:
    return Holder(row % 8 * 4 + column % 8 // 2, row // 8 + 2 * (column // 8), column % 2)


def _b_holder(row: int, column: int) -> Holder:
    return Holder(column * 4 + row % 8 // 2, row // 8, row % 2)


def _c_holder(row: int, column: int) -> Holder:
    return Holder(row % 8 * 4 + column // 2, row // 8 * 2 + column % 2)


def accumulator_holder(row: int, column: int) -> Holder:
    """Of one warp's 16 rows of `wgmma`'s accumulator (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"):
    tiles of 8 columns, one after the other, each as C above."""
    tile = _c_holder(row, column % N)
    return Holder(tile.lane, column // N * 4 + tile.register)
