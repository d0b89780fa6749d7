"""Who holds what in the accumulator of `wgmma.m64nNk16`: the four warps' rows, and the lanes of one warp's."""

from __future__ import annotations

from collections.abc import Iterator

from flashwright.workbench.explain.fragments import LANES, M, N, accumulator_holder
from flashwright.workbench.explain.pictures.svg import picture, rect, text

CELL_WIDTH, CELL_HEIGHT = 25, 19
WARPS, ROWS = 4, 64
TILES_SHOWN = 2
SHOWN_LANE = 9
TOP, LEFT = 44, 12
OVERVIEW_WIDTH = 170
DETAIL_LEFT = LEFT + OVERVIEW_WIDTH + 60
DETAIL_HEIGHT = M * CELL_HEIGHT
WIDTH = DETAIL_LEFT + TILES_SHOWN * N * CELL_WIDTH + 12
HEIGHT = TOP + DETAIL_HEIGHT + 96


def accumulator_picture(columns: int, name: str) -> str:
    """Of an accumulator so many columns wide; the name says what it is in this kernel, e.g. S."""
    return picture(
        "accumulator",
        WIDTH,
        HEIGHT,
        f"The accumulator of wgmma m64n{columns}k16",
        f"A matrix of {ROWS} by {columns} elements. Each of {WARPS} warps holds {M} rows. In the first "
        f"{TILES_SHOWN * N} columns of warp 0's, each cell shows which of its {LANES} lanes holds the "
        f"element; its shade tells the register. The elements of lane {SHOWN_LANE} are framed. "
        f"A thread holds {columns // 2} registers.",
        [*_overview(columns, name), *_detail(), *_legend(columns)],
    )


def _overview(columns: int, name: str) -> Iterator[str]:
    yield text(f"{name}: {ROWS} × {columns}", LEFT, TOP - 10, "label strong")
    height = DETAIL_HEIGHT / WARPS
    for warp in range(WARPS):
        y = TOP + warp * height
        yield rect(LEFT, y, OVERVIEW_WIDTH, height - 2, f"fragment{' framed' if warp == 0 else ''}")
        yield text(f"warp {warp}: rows {warp * M}–{warp * M + M - 1}", LEFT + 10, y + height / 2 + 4, "bar-label")


def _detail() -> Iterator[str]:
    yield text(f"warp 0: columns 0–{TILES_SHOWN * N - 1}", DETAIL_LEFT, TOP - 10, "label strong")
    for row in range(M):
        for column in range(TILES_SHOWN * N):
            holder = accumulator_holder(row, column)
            x, y = DETAIL_LEFT + column * CELL_WIDTH, TOP + row * CELL_HEIGHT
            framed = " framed" if holder.lane == SHOWN_LANE else ""
            shade = f"register-{holder.register}"
            tooltip = f"row {row}, column {column}: lane {holder.lane}, d{holder.register}"
            yield rect(x, y, CELL_WIDTH - 1, CELL_HEIGHT - 1, f"fragment {shade}{framed}", tooltip)
            yield text(holder.lane, x + CELL_WIDTH / 2 - 0.5, y + 13.5, f"cell-number{framed}", "middle")


def _legend(columns: int) -> Iterator[str]:
    y = TOP + DETAIL_HEIGHT + 24
    yield text("number: lane (0–31); shade: register", LEFT, y, "label")
    registers = sorted({accumulator_holder(row, column).register for row in range(M) for column in range(2 * N)})
    for index, register in enumerate(registers):
        x = LEFT + index * 62
        yield rect(x, y + 12, CELL_WIDTH, CELL_HEIGHT, f"fragment register-{register}")
        yield text(f"d{register}", x + CELL_WIDTH + 6, y + 26, "label")
    yield text(
        f"and so on: four registers to every 8 columns, d0 to d{columns // 2 - 1} in each thread", LEFT, y + 56, "label"
    )
