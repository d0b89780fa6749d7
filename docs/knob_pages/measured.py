"""The tables of measurements outside of the knobs' pages: against other implementations, and of the ladders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from flashwright.problem.flops import BACKWARD
from flashwright.workbench.bench.best_peers import PEER_OF_FAMILY, Problem, leads
from flashwright.workbench.bench.grid import Cell, length_text
from flashwright.workbench.bench.result_files import read_document
from flashwright.workbench.bench.results import (
    OURS,
    BenchResult,
    CellResult,
    KindSummary,
    Worst,
    geometric_mean,
    label_of,
    mean_ratio,
    ours_of,
    read_result,
)
from flashwright.workbench.bench.scores import KINDS, NORMAL
from flashwright.workbench.ladder import Ladder

from .markdown import table

PEERS = ("sdpa-cudnn", "sdpa-fa2")


def bench_table(result: BenchResult) -> str:
    """Per head dimension, mask and length: TFLOP/s, and how many times as fast as each peer."""
    lengths = sorted({found.cell.length for found in result.cells})
    labels = " and ".join(label_of(peer) for peer in PEERS)
    rows = [
        [str(d_head), "causal" if causal else "full", *(_figures(found) for found in cells)]
        for (d_head, causal), cells in result.panels().items()
    ]
    header = ["d_head", "mask", *(length_text(length) for length in lengths)]
    return f"{table(header, rows, numbers_from=2)}\n\n{_conditions(result, labels)}"


def _figures(found: CellResult) -> str:
    tflops, ratios = found.tflops(OURS), [found.ratio(peer) for peer in PEERS]
    if tflops is None:
        return "-"
    return f"{tflops:.0f} ({' / '.join('-' if ratio is None else f'{ratio:.2f}' for ratio in ratios)})"


def _conditions(result: BenchResult, labels: str) -> str:
    first = result.cells[0].cell
    means = " and ".join(f"{mean_ratio(result.cells, peer):.2f}" for peer in PEERS)
    return (
        f"TFLOP/s in {first.dtype.name}, in brackets how many times as fast as {labels}: {means} in the geometric mean "
        f"of {len(result.cells)} cells, on standard normal q, k and v. {_machine(result.environment)}; GPU time, "
        f"medians, all in turns in one process; {first.batch * first.length:,} tokens of hidden size "
        f"{first.heads * first.d_head:,}."
    )


def _machine(environment: Mapping[str, Any]) -> str:
    versions = f"driver {environment['driver']}, PyTorch {environment['torch']}, NVRTC {environment['nvrtc']}"
    return f"{environment['gpu']}, {versions}, {str(environment['date'])[:10]}"


def kinds_table() -> str:
    """What each kind of scores is."""
    return table(["kind", "what its scores look like"], [[f"`{k.name}`", k.meaning] for k in KINDS.values()], 2)


def scores_table(result: BenchResult, best: Mapping[Problem, float]) -> str:
    """Per kind of scores: the speed of one family beside its peer, and beside its own on normal scores. `best` is what
    the fastest peers have over cuDNN."""
    (name,), (peer,) = result.ours(), result.peers()
    by_kind = {kind: found for _, kind, found in leads(result, best)}
    rows = []
    for summary in result.summaries():
        found = by_kind[summary.scores]
        row = [f"`{summary.scores}`", _mean_and_worst(summary, peer)]
        if name not in PEER_OF_FAMILY:
            mean, (smallest, where) = geometric_mean(each.ratio for each in found), found[0]
            row += [f"{mean:.2f}", f"{smallest:.2f} ({_place(where)})"]
        rows.append([*row, _worst(summary.worst_to_normal)])
    header = ["scores", f"÷ {label_of(peer)}, mean (worst)"]
    if name not in PEER_OF_FAMILY:
        header += ["÷ the fastest of four, mean", "worst cell"]
    text = table([*header, "÷ normal scores, worst cell"], rows, numbers_from=1)
    return f"{text}\n\n{len(by_kind[NORMAL])} cells a kind. {_machine(result.environment)}."


def _mean_and_worst(summary: KindSummary, peer: str) -> str:
    mean, worst = summary.means[peer], summary.worsts[peer]
    return "–" if mean is None or worst is None else f"{mean:.2f} ({worst.ratio:.2f})"


def _worst(worst: Worst | None) -> str:
    return "–" if worst is None else f"{worst.ratio:.2f} ({_place(worst.cell)})"


def _place(cell: Cell) -> str:
    return f"{cell.d_head}, {cell.mask}, {length_text(cell.length)}"


def ladder_table(ladder: Ladder) -> str:
    """Every rung with what the compiler and the simulator report of it, and its time where a GPU took it."""
    header = ["", "change", "registers", "shared KiB", "bank conflicts", "instructions per 1,000 scores"]
    timed = [rung for rung in ladder.rungs if rung.gpu is not None]
    peers = list(timed[0].gpu.ratios) if timed and timed[0].gpu else []
    if timed:
        header += ["TFLOP/s", *(f"× {label_of(peer)}" for peer in peers)]
    rows = list(_rungs(ladder, peers, with_times=bool(timed)))
    text = table(header, rows, numbers_from=2)
    spills = any(SPILLS in row[2] for row in rows)
    return f"{text}\n\n{SPILLS}: the kernel spills registers to memory." if spills else text


SPILLS = "!"


def _rungs(ladder: Ladder, peers: list[str], *, with_times: bool) -> Iterator[list[str]]:
    for result in ladder.rungs:
        compiled = list(result.compiled.values())[-1]
        gpu = result.gpu
        row = [
            str(result.rung.number),
            result.rung.change,
            f"{compiled.registers}{SPILLS if compiled.spill_bytes else ''}",
            f"{compiled.shared_bytes / 1024:.4g}",
            f"{result.simulation.bank_conflicts:,}",
            f"{result.instructions_per_thousand_scores:,.0f}",
        ]
        if with_times:
            row.append("-" if gpu is None else f"{gpu.tflops:.0f}")
            row += ["-" if gpu is None else f"{gpu.ratios[peer]:.3f}" for peer in peers]
        yield row


# --- The Ampere family against FlashAttention-2 --------------------------------------------------------------------


@dataclass(frozen=True)
class AmpereCell:
    """The Ampere family on one problem: TFLOP/s, and how many times as fast as FlashAttention-2."""

    dtype: str
    d_head: int
    causal: bool
    length: int
    tflops: float
    ratio: float


@dataclass(frozen=True)
class AmpereGrid:
    what: str
    """What was timed."""
    environment: Mapping[str, Any]
    cells: tuple[AmpereCell, ...]


def read_ampere_grid(path: Path) -> AmpereGrid:
    """A result of `flashwright bench --family ampere`, of the forward or of gradients; or one of the fastest of several
    configs in each cell."""
    document = read_document(path, holding="cells", made_by="flashwright bench --family ampere")
    names = [field.name for field in fields(AmpereCell)]
    if "format" not in document:
        cells = tuple(AmpereCell(*(cell[name] for name in names)) for cell in document["cells"])
        return AmpereGrid("the fastest of several configs in each cell", document["environment"], cells)
    result, ours = read_result(path).of_kind(NORMAL), ours_of("ampere")
    cells = tuple(_ampere_cell(found, ours) for found in result.cells)
    what = '`attention(family="ampere")`'
    if result.operation == BACKWARD:
        what = f"gradients of {what}"
    return AmpereGrid(what, result.environment, cells)


def _ampere_cell(found: CellResult, ours: str) -> AmpereCell:
    cell, tflops, ratio = found.cell, found.tflops(ours), found.ratio("sdpa-fa2", ours)
    if tflops is None or ratio is None:
        raise ValueError(f"d_head {cell.d_head}, {cell.mask}, {cell.length} rows: {ours} or sdpa-fa2 was not measured")
    return AmpereCell(cell.dtype.name, cell.d_head, cell.causal, cell.length, tflops, ratio)


def ampere_table(grid: AmpereGrid) -> str:
    """TFLOP/s, and the ratio to FlashAttention-2."""
    lengths = sorted({cell.length for cell in grid.cells})
    rows = [
        [str(d_head), "causal" if causal else "full", *(f"{cell.tflops:.0f} ({cell.ratio:.2f})" for cell in row)]
        for (d_head, causal), row in groupby(grid.cells, key=lambda cell: (cell.d_head, cell.causal))
    ]
    header = [grid.cells[0].dtype, "mask", *(length_text(length) for length in lengths)]
    smallest = min(grid.cells, key=lambda cell: cell.ratio)
    mean = geometric_mean(cell.ratio for cell in grid.cells)
    return (
        f"{table(header, rows, numbers_from=2)}\n\n"
        f"Timed: {grid.what}. {mean:.3f} in the geometric mean; the smallest is {smallest.ratio:.3f}, at d_head "
        f"{smallest.d_head}, {'causal' if smallest.causal else 'full'}, {smallest.length:,} rows. "
        f"{_machine(grid.environment)}."
    )
