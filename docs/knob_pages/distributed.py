"""The page about many GPUs: who holds, sends and computes what as pictures, and what was measured as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from flashwright.distributed.layouts import Documents, Holdings, Layout, holdings
from flashwright.distributed.published import comparisons
from flashwright.distributed.rounds import RING, rounds_of
from flashwright.distributed.visibility import Mask, pieces
from flashwright.problem.reference import seen_keys
from flashwright.problem.window import Window
from flashwright.workbench.explain.pictures.svg import line, picture, rect, text

from .blocks import Renderer
from .markdown import table
from .pictures import Draw, standalone

RANKS, LENGTH = 4, 64
DOCUMENTS = (0, 24, 40, 64)
LAYOUTS: dict[str, Layout] = {
    "contiguous": "contiguous",
    "zigzag": "zigzag",
    "Documents": Documents(DOCUMENTS),
}
WIDTH = 860
CAUSAL = Mask(Window(None, 0), (0, LENGTH), (0, LENGTH))
NOT_MEASURED = (
    "Not measured yet: `PYTHONPATH=src python benchmarks/distributed.py --output "
    "benchmarks/results/distributed_h200.json` on a GPU."
)


def distributed_pictures() -> dict[str, Draw]:
    drawn = {
        "layouts": _layouts,
        "ring-contiguous": partial(_ring, "contiguous"),
        "ring-zigzag": partial(_ring, "zigzag"),
        "heads": _heads,
    }
    return {f"{name}.svg": partial(_standalone_of, draw) for name, draw in drawn.items()}


def _standalone_of(draw: Draw) -> str:
    return standalone(draw())


def _colour(rank: int) -> str:
    return f"operand-{(0, 1, 2, 3)[rank % 4]}"


def _layouts() -> str:
    """A bar for each layout, its chunks in the colours of their ranks."""
    left, bar, gap = 120, 34, 24
    scale = (WIDTH - left - 20) / LENGTH
    parts = [
        part
        for rank in range(RANKS)
        for part in (
            rect(left + 110 * rank, 12, 16, 16, _colour(rank)),
            text(f"rank {rank}", left + 22 + 110 * rank, 25),
        )
    ]
    for row, (name, layout) in enumerate(LAYOUTS.items()):
        y = 48 + row * (bar + gap)
        parts.append(text(name, left - 12, y + 22, "strong", "end"))
        starts = layout.starts if isinstance(layout, Documents) else (0, LENGTH)
        for rank, chunks in enumerate(holdings(layout, LENGTH, RANKS)):
            for piece in pieces(chunks, starts):
                x, width = left + piece.start * scale, piece.length * scale
                last = piece.start + piece.length - 1
                parts.append(rect(x, y, width - 1.5, bar, _colour(rank), f"{piece.start} … {last}: rank {rank}"))
                parts.append(text(rank, x + width / 2, y + 22, "", "middle"))
        if isinstance(layout, Documents):
            parts += [
                line(left + start * scale - 0.75, y - 6, left + start * scale - 0.75, y + bar + 6, "axis")
                for start in layout.starts
            ]
    height = 48 + len(LAYOUTS) * (bar + gap)
    description = (
        "Contiguous: one part for each rank, in order. Zigzag: an early chunk and a late one for each rank. Documents: "
        "every packed sequence dealt in zigzag."
    )
    return picture("layouts", WIDTH, height, f"Who holds what of {LENGTH} rows, {RANKS} ranks", description, parts)


def _ring(layout: str) -> str:
    """A row for each rank, a column for each round: whose keys arrive, and which scores are computed of them."""
    by_rank = holdings(layout, LENGTH, RANKS)
    left, top, cell, gap = 90, 66, 130, 46
    parts = [
        text(
            f"round {step}" + ("" if step else ": own keys"),
            left + step * (cell + gap) + cell / 2,
            26,
            "strong",
            "middle",
        )
        for step in range(RANKS)
    ]
    for rank in range(RANKS):
        y = top + rank * (cell + gap)
        parts.append(text(f"rank {rank}", left - 16, y + cell / 2, "strong", "end"))
        for step in range(RANKS):
            source = (rank - step) % RANKS
            parts += _cell(by_rank, rank, source, left + step * (cell + gap), y, cell)
    work = [sum(each.scores for each in rounds_of(RING, rank, by_rank, by_rank, CAUSAL, 1)) for rank in range(RANKS)]
    share = [value / sum(work) for value in work]
    for rank in range(RANKS):
        y = top + rank * (cell + gap)
        x = left + RANKS * (cell + gap)
        parts.append(text(f"{share[rank]:.0%} of", x, y + cell / 2 - 6))
        parts.append(text("all scores", x, y + cell / 2 + 12))
    height = top + RANKS * (cell + gap)
    width = left + RANKS * (cell + gap) + 90
    description = (
        f"Rows are a rank's queries, columns the keys of the rank that they come from, in its colour above. "
        f"Filled: what is computed under a causal mask. Keys in outline are not sent. "
        f"Shares of the work: {', '.join(f'{x:.0%}' for x in share)}."
    )
    return picture(f"ring-{layout}", width, height, f"A ring of {RANKS} ranks, {layout} shards", description, parts)


def _cell(by_rank: Holdings, rank: int, source: int, x: float, y: float, size: float) -> Iterator[str]:
    rows = [position for chunk in by_rank[rank] for position in range(*chunk)]
    keys = [position for chunk in by_rank[source] for position in range(*chunk)]
    seen = seen_keys(LENGTH, LENGTH, CAUSAL.window)
    unit = size / len(rows)
    sends = any(seen[row, key] for row in rows for key in keys)
    if rank != source:
        label = f"from rank {source}" if sends else "nothing is sent"
        yield text(label, x + size / 2, y - 18, "label", "middle")
    for index, key in enumerate(keys):
        shown = any(seen[row, key] for row in rows)
        yield rect(x + index * unit, y - 11, unit - 0.5, 7, _colour(source) if shown else "reallocated", f"key {key}")
    yield rect(x, y, size, size, "fragment")
    for index, row in enumerate(rows):
        runs = _runs([bool(seen[row, key]) for key in keys])
        for first, last in runs:
            yield rect(x + first * unit, y + index * unit, (last - first) * unit, unit, _colour(rank))


def _runs(flags: list[bool]) -> list[tuple[int, int]]:
    found, first = [], None
    for index, flag in enumerate([*flags, False]):
        if flag and first is None:
            first = index
        elif not flag and first is not None:
            found.append((first, index))
            first = None
    return found


def _heads() -> str:
    """Rows × heads before and after an exchange of heads."""
    left, top, size, gap = 70, 60, 250, 190
    parts = [
        text("each rank: some rows of all heads", left + size / 2, 26, "strong", "middle"),
        text("each rank: all rows of some heads", left + size + gap + size / 2, 26, "strong", "middle"),
        text("all-to-all", left + size + gap / 2, top + size / 2 - 10, "strong", "middle"),
        line(left + size + 30, top + size / 2, left + size + gap - 30, top + size / 2, "axis"),
        line(left + size + gap - 38, top + size / 2 - 5, left + size + gap - 30, top + size / 2, "axis"),
        line(left + size + gap - 38, top + size / 2 + 5, left + size + gap - 30, top + size / 2, "axis"),
        text("rows", left - 12, top + size / 2, "label", "end"),
        text("heads", left + size / 2, top + size + 20, "label", "middle"),
        text("heads", left + size + gap + size / 2, top + size + 20, "label", "middle"),
    ]
    unit = size / LENGTH
    for rank, chunks in enumerate(holdings("zigzag", LENGTH, RANKS)):
        for chunk in chunks:
            y = top + chunk.start * unit
            parts.append(rect(left, y, size, chunk.length * unit - 1, _colour(rank)))
            parts.append(text(rank, left + size / 2, y + chunk.length * unit / 2 + 5, "", "middle"))
        x = left + size + gap + rank * size / RANKS
        parts.append(rect(x, top, size / RANKS - 1, size, _colour(rank)))
        parts.append(text(rank, x + size / RANKS / 2, top + size / 2, "", "middle"))
    description = (
        "Before: zigzag shards of the rows, all heads. After: all rows, by position, of a quarter of the heads."
    )
    return picture("heads", left + 2 * size + gap + 30, top + size + 40, "An exchange of heads", description, parts)


# --- Tables --------------------------------------------------------------------------------------------------------


def read_distributed(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def distributed_renderers(measured: dict[str, Any] | None) -> dict[str, Renderer]:
    return {
        "rank-errors": lambda _: NOT_MEASURED if measured is None else _errors(measured),
        "overlap": lambda _: NOT_MEASURED if measured is None else _overlap(measured),
        "published": lambda _: _published(),
    }


def _errors(measured: dict[str, Any]) -> str:
    names = ("out", "dq", "dk", "dv")
    rows = [
        [each["merging"], str(each["ranks"]), *(f"{each[name]:.2e}" for name in names)] for each in measured["errors"]
    ]
    return table(["merged in", "ranks", "O", "dQ", "dK", "dV"], rows, 1) + _where(measured)


def _overlap(measured: dict[str, Any]) -> str:
    rows = [
        [each["operation"], each["how"], f"{each['time_ms']:.2f}", f"{each['tflops']:.0f}"]
        for each in measured["overlap"]
    ]
    return table(["", "rounds", "ms", "TFLOP/s"], rows, 2) + _where(measured)


def _where(measured: dict[str, Any]) -> str:
    environment = measured["environment"]
    return f"\n\n{environment['gpu']}, driver {environment['driver']}, {environment['date'][:10]}."


def _published() -> str:
    rows = [
        [
            each.figure.gpu.name, each.figure.layout, each.operation, f"{each.published:.1%}", f"{each.modelled:.1%}",
            f"{100 * each.off:+.1f}",
        ]
        for each in comparisons()
    ]  # fmt: skip
    return table(["GPUs", "layout", "passes", "published", "modelled", "points off"], rows, 3)
