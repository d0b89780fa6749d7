"""The tables of measurements outside of the knobs' pages: against other implementations, and of the ladders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from flashwright.workbench.bench.grid_plot import length_text
from flashwright.workbench.bench.results import OURS, BenchResult, CellResult, label_of, mean_ratio
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
    environment, first = result.environment, result.cells[0].cell
    means = " and ".join(f"{mean_ratio(result.cells, peer):.2f}" for peer in PEERS)
    versions = f"driver {environment['driver']}, PyTorch {environment['torch']}, NVRTC {environment['nvrtc']}"
    return (
        f"TFLOP/s in {first.dtype.name}, in brackets how many times as fast as {labels}: {means} in the geometric mean "
        f"of {len(result.cells)} cells. {environment['gpu']}, {versions}, {str(environment['date'])[:10]}; GPU time, "
        f"medians, all in turns in one process; {first.batch * first.length:,} tokens of hidden size "
        f"{first.heads * first.d_head:,}."
    )


def ladder_table(ladder: Ladder) -> str:
    """Every rung with what the compiler and the simulator report of it, and its time."""
    header = ["", "change", "registers", "bank conflicts", "instructions per KV step", "TFLOP/s"]
    timed = [rung for rung in ladder.rungs if rung.gpu is not None]
    peers = list(timed[0].gpu.ratios) if timed and timed[0].gpu else []
    rows = list(_rungs(ladder, peers))
    return table([*header, *(f"× {label_of(peer)}" for peer in peers)], rows, numbers_from=2)


def _rungs(ladder: Ladder, peers: list[str]) -> Iterator[list[str]]:
    for result in ladder.rungs:
        compiled = list(result.compiled.values())[-1]
        gpu = result.gpu
        yield [
            str(result.rung.number),
            result.rung.change,
            f"{compiled.registers}{'!' if compiled.spill_bytes else ''}",
            f"{result.simulation.bank_conflicts:,}",
            f"{result.simulation.instructions_per_kv_step:,.0f}",
            "-" if gpu is None else f"{gpu.tflops:.0f}",
            *("-" if gpu is None else f"{gpu.ratios[peer]:.3f}" for peer in peers),
        ]


def ampere_table(document: Mapping[str, Any]) -> str:
    """What `benchmarks/ampere_grid.py` found: TFLOP/s of the best candidate, and its ratio to FlashAttention-2."""
    cells = document["cells"]
    lengths = sorted({cell["length"] for cell in cells})
    rows = [
        [str(d_head), "causal" if causal else "full", *(f"{cell['tflops']:.0f} ({cell['ratio']:.2f})" for cell in row)]
        for (d_head, causal), row in groupby(cells, key=lambda cell: (cell["d_head"], cell["causal"]))
    ]
    header = [cells[0]["dtype"], "mask", *(length_text(length) for length in lengths)]
    smallest = min(cells, key=lambda cell: cell["ratio"])
    environment = document["environment"]
    versions = f"driver {environment['driver']}, PyTorch {environment['torch']}, NVRTC {environment['nvrtc']}"
    return (
        f"{table(header, rows, numbers_from=2)}\n\n"
        f"{document['geometric_mean']:.3f} in the geometric mean; the smallest is {smallest['ratio']:.3f}, at d_head "
        f"{smallest['d_head']}, {'causal' if smallest['causal'] else 'full'}, {smallest['length']:,} rows. "
        f"{environment['gpu']}, {versions}, {str(environment['date'])[:10]}."
    )
