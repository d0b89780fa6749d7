"""`flashwright bench`: attention() beside every other implementation that is installed, as tables and pictures."""

from __future__ import annotations

import statistics
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashwright.cli.output import JsonOption, print_json, table_console
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of, parse_config
from flashwright.problem.dtypes import DType
from flashwright.runtime.devices import GPUError, gpu_available
from flashwright.runtime.progress import progress_bar
from flashwright.workbench.bench.figures import plot_files, save_figure
from flashwright.workbench.bench.gpu_machine import GPUMachine, prepare_ours
from flashwright.workbench.bench.grid import D_HEADS, LENGTHS, MASKS, Cell, grid
from flashwright.workbench.bench.grid_plot import grid_figure, length_text
from flashwright.workbench.bench.measure import Prepare, measure
from flashwright.workbench.bench.peers import PEERS, Peer, chosen_peers, installed
from flashwright.workbench.bench.result_files import check_destination
from flashwright.workbench.bench.results import (
    OURS,
    BenchResult,
    CellResult,
    label_of,
    mean_ratio,
    read_result,
    write_result,
)
from flashwright.workbench.environment import environment_record

INTERRUPTED = 130
"""The exit code of what Ctrl-C ended."""


def bench(
    d_head: Annotated[
        list[int] | None, typer.Option(help="Head dimension; give it several times.", show_default="64, 128, 256")
    ] = None,
    seqlen: Annotated[
        list[int] | None, typer.Option(help="Sequence length; give it several times.", show_default="512 to 16384")
    ] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="One mask only.", show_default="both")] = None,
    dtype: Annotated[str | None, typer.Option(help="FP16 or BF16.", show_default="BF16")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens in all: batch = tokens / seqlen.", show_default="16384")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Hidden size: heads = hidden / d_head.", show_default="2048")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences, instead of --tokens.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of Q, instead of --hidden.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of K and V, if fewer (GQA).")] = None,
    config: Annotated[
        str | None, typer.Option(help="A config's short form, instead of what attention() chooses.")
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(help=f"What to measure against; several times, or with commas: {', '.join(PEERS)}. Default: all."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the result to a .png or .svg file, or both into a directory.")
    ] = None,
    stored: Annotated[
        Path | None, typer.Option("--from", help="Show a stored result instead of measuring; needs no GPU.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure attention() beside every other implementation that is installed, on this machine's GPU."""
    arguments = {
        "d_head": d_head, "seqlen": seqlen, "causal": causal, "dtype": dtype, "tokens": tokens, "hidden": hidden,
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "config": config, "peers": peers,
    }  # fmt: skip
    given = {name: value for name, value in arguments.items() if value is not None and value != []}
    pictures = plot_files(plot, "bench") if plot else []
    if output:
        check_destination(output)
    if stored:
        if given or output:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in (*given, *(["output"] if output else [])))
            raise ValueError(f"--from shows a stored result as it is; {options} do not go with it")
        result = read_result(stored)
    else:
        result = _measured(given)
    if output:
        write_result(output, result)
    if pictures and result.cells:
        save_figure(grid_figure(result), pictures)
    if as_json:
        print_json(result.to_dict())
    else:
        _print_result(table_console(), result)
    if not stored:
        _check_measured(result)


def _check_measured(result: BenchResult) -> None:
    """The exit code of a run that was interrupted, or in which ours could not be measured at all."""
    if not result.complete:
        Console(stderr=True).print(f"interrupted; {len(result.cells)} cells were measured")
        raise typer.Exit(INTERRUPTED)
    if not any(OURS in found.measurements for found in result.cells):
        raise GPUError(f"{OURS} could not be measured: {result.cells[0].failures[OURS]}")


# --- Measuring -----------------------------------------------------------------------------------------------------


def _measured(given: dict[str, Any]) -> BenchResult:
    chosen = parse_config(given["config"]) if "config" in given else None
    cells = _cells(given, chosen)
    names = [name.strip() for text in given.get("peers", ()) for name in text.split(",")]
    peers, missing = installed(chosen_peers(names))
    _require_gpu()
    machine = GPUMachine()
    with progress_bar("measuring", len(cells)) as advance:
        peak = machine.peak_tflops(cells[0].dtype)
        results, complete = measure(machine, cells, _implementations(chosen, peers), advance=advance)
    return BenchResult(environment_record(), given, peak, tuple(results), missing, complete)


def _cells(given: dict[str, Any], config: KernelConfig | None) -> list[Cell]:
    dtype = DType.parse(given["dtype"]) if "dtype" in given else config.dtype if config else DType.BF16
    d_heads = given.get("d_head") or ([config.d_head] if config else D_HEADS)
    if config:
        family_of(config).shapes(config)  # raises for a config of which there is no kernel
        if config.dtype != dtype:
            raise ValueError(f"config: {config} computes {config.dtype.name}, not {dtype.name}")
        if max(d_heads) > config.d_head:
            raise ValueError(f"config: {config} computes head dimensions up to {config.d_head}, not {max(d_heads)}")
    return grid(
        dtype,
        d_heads,
        (given["causal"],) if "causal" in given else MASKS,
        given.get("seqlen") or LENGTHS,
        **{name: given.get(name) for name in ("tokens", "hidden", "batch", "heads", "kv_heads")},
    )


def _implementations(config: KernelConfig | None, peers: list[Peer]) -> dict[str, Prepare]:
    return {OURS: partial(prepare_ours, config), **{peer.name: peer.prepare for peer in peers}}


def _require_gpu() -> None:
    if not gpu_available():
        raise GPUError(
            "bench measures on an NVIDIA GPU (compute capability 8.0 or later) with PyTorch, and there is none here "
            "(`flashwright doctor` says what is missing). Without one, `flashwright ladder` and `flashwright simulate` "
            "work, and `flashwright bench --from RESULT.json` shows a stored result."
        )


# --- Showing -------------------------------------------------------------------------------------------------------


def _print_result(console: Console, result: BenchResult) -> None:
    for cells in result.panels().values():
        console.print(_panel_table(cells, result))
    if result.cells:
        console.print(_summary_table(result))
    for line in _what_is_missing(result):
        console.print(line, highlight=False)
    if not result.complete:
        console.print("[bold yellow]incomplete:[/] the run was interrupted")


def _panel_table(cells: list[CellResult], result: BenchResult) -> Table:
    cell = cells[0].cell
    table = Table(title=f"{cell.dtype.name}, d_head {cell.d_head}, {cell.mask}: TFLOP/s, and {OURS} ÷ each")
    table.add_column("", no_wrap=True)
    for found in cells:
        table.add_column(length_text(found.cell.length), justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    measured = [n for n in result.implementations() if any(n in found.measurements for found in cells)]
    for name in measured:
        table.add_row(label_of(name), *(_number(found.tflops(name), ".0f") for found in cells), style=_style_of(name))
    table.add_section()
    for peer in (name for name in measured if name != OURS):
        ratios = (_number(found.ratio(peer), ".2f") for found in cells)
        table.add_row(f"÷ {label_of(peer)}", *ratios, _number(mean_ratio(cells, peer), ".3f"))
    if result.peak_tflops and OURS in measured:
        percents = [_percent_of_peak(found, result.peak_tflops) for found in cells]
        table.add_section()
        table.add_row("% of matrix-product peak", *(_number(percent, ".0f") for percent in percents))
    return table


def _summary_table(result: BenchResult) -> Table:
    table = Table(title="All cells", caption=_caption(result))
    table.add_column("", no_wrap=True)
    for heading in ("cells", "mean of\nours ÷", "best\nTFLOP/s", "% of\npeak", "worst\nerror", "host\nµs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in result.implementations():
        found = [cell for cell in result.cells if name in cell.measurements]
        measurements = [cell.measurements[name] for cell in found]
        best = max(cell.cell.tflops(cell.measurements[name].gpu_ms) for cell in found)
        percent = 100 * best / result.peak_tflops if result.peak_tflops else None
        table.add_row(
            label_of(name),
            str(len(found)),
            "" if name == OURS else _number(mean_ratio(found, name), ".3f"),
            f"{best:.0f}",
            _number(percent, ".0f"),
            f"{max(m.relative_error for m in measurements):.1e}",
            f"{statistics.median(m.host_us for m in measurements):.0f}",
            style=_style_of(name),
        )
    return table


def _caption(result: BenchResult) -> str:
    known = result.environment
    parts = [str(known.get("gpu") or "unknown GPU")]
    parts += [f"{title} {known[key]}" for key, title in _VERSIONS.items() if known.get(key)]
    if result.peak_tflops:
        parts.append(f"matrix-product peak {result.peak_tflops:.0f} TFLOP/s")
    return ", ".join([*parts, str(known.get("date", "")).partition("T")[0]]).rstrip(", ")


_VERSIONS = {"driver": "driver", "torch": "PyTorch", "nvrtc": "NVRTC", "flashwright": "flashwright"}


def _what_is_missing(result: BenchResult) -> list[str]:
    lines = [f"not measured: {label_of(name)}: {escape(why)}" for name, why in result.missing.items()]
    failures = Counter(failure for found in result.cells for failure in found.failures.items())
    for (name, why), count in failures.items():
        lines.append(f"not measured in {count} of {len(result.cells)} cells: {label_of(name)}: {escape(why)}")
    return lines


def _percent_of_peak(found: CellResult, peak_tflops: float) -> float | None:
    tflops = found.tflops(OURS)
    return None if tflops is None else 100 * tflops / peak_tflops


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _style_of(name: str) -> str | None:
    return "bold" if name == OURS else None
