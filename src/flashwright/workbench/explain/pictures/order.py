"""Loads and products of a loop's body, as they stand in several forms of its code: two lanes for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashwright.workbench.explain.order import CodeMark, LoadOrder
from flashwright.workbench.explain.pictures.svg import counted_label, line, picture, tag, text
from flashwright.workbench.quantities import counted

WIDTH, LEFT, RIGHT = 1160, 150, 16
TITLE, LANE, MARK, GAP = 22, 22, 14, 12


def order_picture(rows: Sequence[tuple[str, LoadOrder]], name: str = "order", steps: str = "KV") -> str:
    scale = (WIDTH - LEFT - RIGHT) / max(order.instructions for _, order in rows)
    parts: list[str] = []
    y = 8.0
    for label, order in rows:
        title = f"{label}: {counted(len(order.runs), 'run')} in {counted(order.instructions, 'instruction')}"
        parts.append(text(title, LEFT, y + 14, "label strong"))
        y += TITLE
        for of_lane, is_load in (("load fragments", True), ("multiply", False)):
            marks = [mark for mark in order.marks if mark.is_load is is_load]
            parts += _lane(of_lane, marks, "load" if is_load else "mma", y, scale)
            y += LANE
        y += GAP
    parts.append(text("instructions of the loop's body, as listed", LEFT, y + 8, "label"))
    counts = "; ".join(f"{label}: {len(order.runs)}" for label, order in rows)
    return picture(
        name,
        WIDTH,
        y + 18,
        f"Loads and products of the {steps} loop, in the order of the code",
        f"Runs of loads and of products. How many there are: {counts}.",
        parts,
    )


def _lane(label: str, marks: Sequence[CodeMark], class_: str, y: float, scale: float) -> Iterator[str]:
    yield line(LEFT, y + MARK + 4, WIDTH - RIGHT, y + MARK + 4, "rule")
    yield from counted_label(label, sum(mark.length for mark in marks), LEFT - 10, y + 15)
    shapes = (f"M{LEFT + mark.start * scale:.1f} {y + 4:g}h{mark.length * scale:.1f}v{MARK}h-{mark.length * scale:.1f}z"
              for mark in marks)  # fmt: skip
    yield tag("path", d="".join(shapes), class_=f"mark mark-{class_}")
