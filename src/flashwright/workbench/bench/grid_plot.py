"""The benchmark as a picture: TFLOP/s over the length, one panel per head dimension and mask."""

from __future__ import annotations

from typing import Any

from flashwright.problem.flops import BACKWARD, DECODE, FORWARD, TRAIN
from flashwright.workbench.bench.figures import OURS_COLOUR, PEER_COLOURS, new_figure, style
from flashwright.workbench.bench.grid import CACHE_NAMES, length_text
from flashwright.workbench.bench.peers import PEERS
from flashwright.workbench.bench.results import BenchResult, CellResult, is_ours, label_of
from flashwright.workbench.bench.scores import NORMAL

MARKERS = "osD^vP*X"
OURS_LINES = ("-", "--", ":")
"""One of ours each."""
OPERATION_TITLES = {FORWARD: "forward", BACKWARD: "backward", TRAIN: "forward and backward", DECODE: "decode"}


def grid_figure(result: BenchResult) -> Any:
    """Of a result of one kind of scores."""
    panels = result.panels()
    if not panels:
        raise ValueError("there is no measured cell to plot")
    if result.operation == DECODE:
        return _cache_figure(result)
    d_heads = sorted({d_head for d_head, _ in panels})
    masks = sorted({causal for _, causal in panels})
    with style():
        figure = new_figure(1.2 + 4.4 * len(masks), 1.3 + 2.6 * len(d_heads))
        axes = figure.subplots(len(d_heads), len(masks), squeeze=False, sharey=True)
        for row, d_head in enumerate(d_heads):
            for column, causal in enumerate(masks):
                cells = panels.get((d_head, causal))
                if cells is None:
                    axes[row][column].set_axis_off()
                    continue
                _draw_panel(axes[row][column], cells, result)
                if column == 0:
                    axes[row][column].set_ylabel("TFLOP/s")
                if row == len(d_heads) - 1:
                    axes[row][column].set_xlabel("sequence length (rows of Q = rows of K and V)")
        figure.suptitle(_title(result))
        by_label = {
            label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _cache_figure(result: BenchResult) -> Any:
    """Bars of TB/s, a group for each cell."""
    names = result.implementations()
    with style():
        figure = new_figure(9, 1.6 + 0.16 * len(result.cells) * (len(names) + 1))
        axis = figure.subplots()
        height = 0.8 / len(names)
        for place, name in enumerate(names):
            speeds = [found.speed(name) or 0.0 for found in result.cells]
            ours = is_ours(name)
            position = result.ours().index(name) if ours else _peer_position(name, result)
            axis.barh(
                [row + (place - (len(names) - 1) / 2) * height for row in range(len(speeds))],
                speeds,
                height=0.92 * height,
                color=OURS_COLOUR if ours else PEER_COLOURS[position % len(PEER_COLOURS)],
                alpha=1 - 0.3 * position if ours else 1,
                label=label_of(name),
            )
        axis.set_yticks(range(len(result.cells)), [str(found.cell) for found in result.cells])
        axis.invert_yaxis()
        axis.grid(False, axis="y")
        axis.set_xlabel(f"TB/s of keys and values read once\n{CACHE_NAMES}")
        figure.suptitle(_title(result))
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_panel(axis: Any, cells: list[CellResult], result: BenchResult) -> None:
    lengths = [found.cell.length for found in cells]
    for name in result.implementations():
        values = [found.tflops(name) for found in cells]
        if not any(values):
            continue
        ours = is_ours(name)
        position = result.ours().index(name) if ours else _peer_position(name, result)
        axis.plot(
            range(len(lengths)),
            [float("nan") if value is None else value for value in values],
            marker=MARKERS[0] if ours else MARKERS[1 + position % (len(MARKERS) - 1)],
            markersize=5 if ours else 4,
            linewidth=2.4 if ours else 1.3,
            linestyle=OURS_LINES[position % len(OURS_LINES)] if ours else "-",
            color=OURS_COLOUR if ours else PEER_COLOURS[position % len(PEER_COLOURS)],
            zorder=4 if ours else 3,
            label=label_of(name),
        )
    axis.set_xticks(range(len(lengths)), [length_text(length) for length in lengths])
    axis.set_ylim(0, 1.05 * _highest(result))  # panels share it, and all must fit
    axis.set_title(f"d_head {cells[0].cell.d_head}, {cells[0].cell.mask}", fontsize=10)


def _peer_position(name: str, result: BenchResult) -> int:
    """A known peer has the same colour in every picture; others follow."""
    order = [*PEERS, *(peer for peer in result.peers() if peer not in PEERS)]
    return order.index(name)


def _highest(result: BenchResult) -> float:
    values = [found.tflops(name) for found in result.cells for name in result.implementations()]
    return max((value for value in values if value), default=1)


def _title(result: BenchResult) -> str:
    cell = result.cells[0].cell
    parts = [f"Attention {OPERATION_TITLES[cell.operation]}, {cell.dtype.name}"]
    if gpu := result.environment.get("gpu"):
        parts.append(str(gpu))
    if cell.scores != NORMAL:
        parts.append(f"scores: {cell.scores}")
    parts.append("GPU time")
    if not result.complete:
        parts.append("incomplete")
    return ", ".join(parts)
