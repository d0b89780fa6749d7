"""The ladder as a picture: what each rung reaches, or, where no GPU timed it, what the simulator counted."""

from __future__ import annotations

import textwrap
from typing import Any

from flashwright.workbench.bench.figures import OURS_COLOUR, PEER_COLOURS, QUIET, new_figure, style
from flashwright.workbench.bench.results import label_of, short_label_of
from flashwright.workbench.ladder import Ladder

LABEL_COLUMNS = 40


def ladder_figure(ladder: Ladder) -> Any:
    if not ladder.rungs:
        raise ValueError("there is no rung to plot")
    with style():
        return _timed_figure(ladder) if ladder.timed else _simulated_figure(ladder)


def _timed_figure(ladder: Ladder) -> Any:
    figure = new_figure(9.5, 1.5 + 0.42 * len(ladder.rungs))
    axis = figure.subplots()
    peer = ladder.peers[0]
    percents = [100 * timed.ratios[peer] for timed in ladder.timings]
    _bars(axis, ladder, percents, OURS_COLOUR)
    axis.set_xlim(0, 1.03 * max(100, *percents))
    for points, heading, texts in (
        (26, f"% of\n{short_label_of(peer)}", [f"{percent:.0f}" for percent in percents]),
        (72, ladder.unit, [ladder.speed(timed) for timed in ladder.timings]),
        (120, "× rung\nbefore", ["" if gain is None else f"{gain:.2f}" for gain in ladder.gains]),
    ):
        _column_beside(axis, points, heading, texts)
    axis.axvline(100, color=QUIET, linestyle="--", linewidth=1, zorder=3)
    axis.set_xlabel(f"speed in GPU time, % of {label_of(peer)} (dashed)")
    axis.set_title(_title(ladder), pad=26)
    return figure


def _column_beside(axis: Any, points: int, heading: str, texts: list[str]) -> None:
    """Texts to the right of the bars, one per bar, under a heading."""
    for row, text in ((-0.75, heading), *enumerate(texts)):
        axis.annotate(
            text,
            (1, row),
            xycoords=axis.get_yaxis_transform(),
            xytext=(points, 0),
            textcoords="offset points",
            ha="center",
            va="bottom" if text == heading else "center",
            annotation_clip=False,
        )


def _simulated_figure(ladder: Ladder) -> Any:
    figure = new_figure(11, 1.5 + 0.42 * len(ladder.rungs))
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, values, colour, label in (
        (
            left,
            [result.instructions_per_thousand_scores for result in ladder.rungs],
            PEER_COLOURS[0],
            "instructions per 1,000 scores",
        ),
        (
            right,
            [result.simulation.bank_conflicts for result in ladder.rungs],
            OURS_COLOUR,
            "shared-memory bank conflicts",
        ),
    ):
        bars = _bars(axis, ladder, values, colour)
        axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=4, fontsize=8)
        axis.set_xlim(0, 1.2 * max(1, *values))
        axis.set_xlabel(f"{label} (simulated)")
    figure.suptitle(_title(ladder))
    return figure


def _bars(axis: Any, ladder: Ladder, values: list[Any], colour: str) -> Any:
    positions = range(len(ladder.rungs))
    bars = axis.barh(positions, values, color=colour, height=0.68)
    axis.set_yticks(
        positions,
        [textwrap.fill(f"{r.rung.number}  {r.rung.change}", LABEL_COLUMNS) for r in ladder.rungs],
    )
    axis.set_ylim(len(ladder.rungs) - 0.4, -0.6)  # the first rung on top
    axis.grid(False, axis="y")
    return bars


def _title(ladder: Ladder) -> str:
    config = ladder.rungs[0].rung.config
    parts = [f"{ladder.title}: {config.dtype.name}, d_head {config.d_head}"]
    if ladder.timed:
        parts.append(str(ladder.environment.get("gpu") or "GPU"))
    return ", ".join(parts)
