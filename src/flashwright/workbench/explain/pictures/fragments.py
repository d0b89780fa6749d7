"""Who holds what in `mma.m16n8k16`: A, B and C by lane and register, placed as in a product on paper."""

from __future__ import annotations

from collections.abc import Iterator

from flashwright.workbench.explain.fragments import LANES, Holder, K, Layout, M, N, a_layout, b_layout, c_layout
from flashwright.workbench.explain.pictures.svg import picture, rect, text

CELL_WIDTH, CELL_HEIGHT = 25, 19
GAP, MARGIN_LEFT, MARGIN_TOP = 26, 34, 44
SHOWN_LANE = 9
A_LEFT, A_TOP = MARGIN_LEFT, MARGIN_TOP + K * CELL_HEIGHT + GAP
B_LEFT, B_TOP = MARGIN_LEFT + K * CELL_WIDTH + GAP, MARGIN_TOP
C_LEFT, C_TOP = B_LEFT, A_TOP
WIDTH, HEIGHT = C_LEFT + N * CELL_WIDTH + 12, C_TOP + M * CELL_HEIGHT + 12


def fragments_picture(a_name: str, b_name: str, c_name: str) -> str:
    """The names say what the operands are in this kernel, e.g. Q, Kᵀ and S."""
    parts = [
        *_grid(f"A = {a_name}", a_layout(), A_LEFT, A_TOP),
        *_grid(f"B = {b_name}", b_layout(), B_LEFT, B_TOP),
        *_grid(f"C = {c_name}", c_layout(), C_LEFT, C_TOP),
        *_legend(),
    ]
    return picture(
        "fragments",
        WIDTH,
        HEIGHT,
        "Fragments of mma m16n8k16",
        f"Three matrices, A of {M} by {K}, B of {K} by {N} and C of {M} by {N} elements. Each cell shows which of the "
        f"{LANES} lanes holds the element; its shade tells the register. The elements of lane {SHOWN_LANE} are framed.",
        parts,
    )


def _grid(title: str, layout: Layout, left: float, top: float) -> Iterator[str]:
    yield text(title, left, top - 8, "label strong")
    for row, holders in enumerate(layout):
        for column, holder in enumerate(holders):
            yield from _cell(holder, left + column * CELL_WIDTH, top + row * CELL_HEIGHT)


def _cell(holder: Holder, x: float, y: float) -> Iterator[str]:
    framed = " framed" if holder.lane == SHOWN_LANE else ""
    yield rect(x, y, CELL_WIDTH - 1, CELL_HEIGHT - 1, f"fragment register-{holder.register}{framed}")
    yield text(holder.lane, x + CELL_WIDTH / 2 - 0.5, y + 13.5, f"cell-number{framed}", "middle")


def _legend() -> Iterator[str]:
    x, y = MARGIN_LEFT, MARGIN_TOP + 2
    yield text("number: lane (0–31)", x, y, "label")
    yield text("shade: register", x, y + 24, "label")
    for register in range(4):
        left = x + register * 100
        yield rect(left, y + 38, CELL_WIDTH, CELL_HEIGHT, f"fragment register-{register}")
        yield text(_register_names(register), left + CELL_WIDTH + 6, y + 52, "label")
    yield rect(x, y + 76, CELL_WIDTH - 1, CELL_HEIGHT - 1, "fragment framed")
    yield text(f"all that lane {SHOWN_LANE} holds:", x + CELL_WIDTH + 6, y + 90, "label")
    yield text("8 elements of A, 4 of B, 4 of C", x + CELL_WIDTH + 6, y + 110, "label")
    yield text("A and B: two 16-bit elements to a register,", x, y + 148, "label")
    yield text("side by side in A, one above the other in B", x, y + 166, "label")
    yield text("C: one fp32 element to a register", x, y + 190, "label")


def _register_names(register: int) -> str:
    """As the PTX manual writes them; B has two registers only."""
    return f"a{register} {'b' + str(register) + ' ' if register < 2 else ''}c{register}"
