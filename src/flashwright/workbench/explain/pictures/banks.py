"""A tile in shared memory, coloured by bank, and the 8×8 matrices that one instruction reads of it."""

from __future__ import annotations

from collections.abc import Iterator

from flashwright.workbench.explain.facts import LaneAccess, MatrixLoad
from flashwright.workbench.explain.pictures.svg import line, picture, rect, tag, text
from flashwright.workbench.quantities import counted

CELL_WIDTH, CELL_HEIGHT = 58, 23
LEFT, TOP = 58, 46
GROUPS = 8
"""Groups of four banks: the 16-byte vectors of a bank line."""
LANES_PER_MATRIX = 8
STACK_HEIGHT = 21
WIDTH = LEFT + GROUPS * CELL_WIDTH + 14


def banks_picture(load: MatrixLoad, name: str) -> str:
    """Above, the block by row and column; below, what the rows of the first 8×8 matrix request of the banks."""
    first = first_matrix(load)
    whose = "their rows" if load.readers == "lanes" else "these 16 bytes"
    instruction = load.instruction.split(".")[0]
    reader = f"executed {instruction}" if load.readers == "lanes" else "first core matrix"
    tile_bottom = TOP + len(load.bank_groups) * CELL_HEIGHT
    stack_top = tile_bottom + 58
    tallest = max(len(lanes_in_group(first, group)) for group in range(GROUPS))
    stack_bottom = stack_top + LANES_PER_MATRIX * STACK_HEIGHT
    parts = [
        *_tile(load),
        *_lanes(load),
        text(f"{load.readers} 0–7, by the banks {whose} of {load.operand} lie in", LEFT, stack_top - 14, "label"),
        *_stacks(first, stack_bottom),
        text(
            f"{counted(tallest, 'wavefront')} for this matrix, {load.wavefronts} for all four",
            LEFT,
            stack_bottom + 40,
            "label strong",
        ),
    ]
    layout = "with" if load.swizzled else "without"
    return picture(
        name,
        WIDTH,
        stack_bottom + 52,
        f"Shared memory of {load.operand} {layout} swizzle, and one {instruction}",
        f"A tile of {len(load.bank_groups)} rows by {len(load.bank_groups[0])} vectors of 16 bytes; each cell names "
        f"its four banks. {load.readers.capitalize()} 0 to 7 of the {reader} touch {len(groups_hit(first))} of 8 "
        f"groups of banks, so that the instruction takes {load.wavefronts} wavefronts where {load.wavefronts_ideal} "
        "are the least.",
        parts,
    )


def first_matrix(load: MatrixLoad) -> tuple[LaneAccess, ...]:
    """The lanes that give the rows of the first of the instruction's 8×8 matrices."""
    return tuple(access for access in load.lanes if access.lane < LANES_PER_MATRIX)


def groups_hit(lanes: tuple[LaneAccess, ...]) -> set[int]:
    return {access.bank_group for access in lanes}


def lanes_in_group(lanes: tuple[LaneAccess, ...], group: int) -> list[int]:
    return [access.lane for access in lanes if access.bank_group == group]


def _bank_range(group: int) -> str:
    return f"{4 * group}–{4 * group + 3}"


def _tile(load: MatrixLoad) -> Iterator[str]:
    yield text("16-byte vector of the row (8 columns each)", LEFT, 16, "label")
    for vector in range(len(load.bank_groups[0])):
        yield text(vector, LEFT + (vector + 0.5) * CELL_WIDTH, TOP - 8, "label", "middle")
    for row, groups in enumerate(load.bank_groups):
        y = TOP + row * CELL_HEIGHT
        yield text(f"row {row}", LEFT - 6, y + 15, "label", "end")
        for vector, group in enumerate(groups):
            x = LEFT + vector * CELL_WIDTH
            yield rect(x, y, CELL_WIDTH - 1, CELL_HEIGHT - 1, f"bank bank-{group}")
            yield text(_bank_range(group), x + 3, y + 15, "bank-name")


def _lanes(load: MatrixLoad) -> Iterator[str]:
    rows, vectors = len(load.bank_groups), len(load.bank_groups[0])
    for access in load.lanes:
        if access.row < rows and access.vector < vectors:
            x = LEFT + (access.vector + 1) * CELL_WIDTH - 11.5
            yield _lane(access.lane, x, TOP + (access.row + 0.5) * CELL_HEIGHT - 0.5)


def _lane(lane: int, x: float, y: float) -> str:
    in_first = lane < LANES_PER_MATRIX
    return tag("circle", cx=x, cy=y, r=8.5, class_="lane first" if in_first else "lane") + text(
        lane, x, y + 3.5, "lane-number first" if in_first else "lane-number", "middle"
    )


def _stacks(first: tuple[LaneAccess, ...], bottom: float) -> Iterator[str]:
    yield line(LEFT, bottom, LEFT + GROUPS * CELL_WIDTH, bottom, "axis")
    for group in range(GROUPS):
        x = LEFT + group * CELL_WIDTH
        yield rect(x, bottom + 2, CELL_WIDTH - 1, 18, f"bank bank-{group}")
        yield text(_bank_range(group), x + CELL_WIDTH / 2, bottom + 15, "bank-name", "middle")
        for level, lane in enumerate(lanes_in_group(first, group)):
            yield _lane(lane, x + CELL_WIDTH / 2, bottom - (level + 0.5) * STACK_HEIGHT)
