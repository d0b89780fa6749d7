"""`flashwright bench`: attention() beside every other implementation that is installed, as tables and pictures."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashwright.cli.output import CAUSAL, D_HEAD, KEYS, ROWS, JsonOption, print_json, table_console
from flashwright.interruption import INTERRUPTED
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_named, family_names, family_of, parse_config
from flashwright.problem.dtypes import DType
from flashwright.problem.flops import DECODE, FORWARD, OPERATIONS, TRAIN, checked_operation
from flashwright.runtime.devices import GPUError, gpu_available
from flashwright.runtime.progress import progress_bar
from flashwright.workbench.bench.cache_cells import cache_cells, usual_cells
from flashwright.workbench.bench.figures import plot_files, save_figure
from flashwright.workbench.bench.gpu_machine import LAUNCHES, ROUNDS, GPUMachine, prepare_ours
from flashwright.workbench.bench.grid import CACHE_NAMES, D_HEADS, LENGTHS, MASKS, Cell, grid, length_text
from flashwright.workbench.bench.grid_plot import OPERATION_TITLES, grid_figure
from flashwright.workbench.bench.measure import Prepare, measure
from flashwright.workbench.bench.peers import PEERS, Peer, chosen_peers, external_peer, installed
from flashwright.workbench.bench.result_files import check_destination
from flashwright.workbench.bench.results import (
    OURS,
    BenchResult,
    CellResult,
    KindSummary,
    Worst,
    combined,
    is_ours,
    label_of,
    mean_ratio,
    ours_of,
    read_result,
    short_label_of,
    write_result,
)
from flashwright.workbench.bench.scores import KINDS, NORMAL, chosen_scores
from flashwright.workbench.bench.training import prepare_operation
from flashwright.workbench.environment import environment_record


def bench(
    operation: Annotated[
        str | None,
        typer.Option(
            help=f"What is timed: {', '.join(OPERATIONS)}. train is a forward and its backward, decode few rows on a "
            "cache.",
            show_default=FORWARD,
        ),
    ] = None,
    d_head: Annotated[
        list[int] | None,
        typer.Option(*D_HEAD, help="Head dimension; give it several times.", show_default="64, 128, 256"),
    ] = None,
    seqlen: Annotated[
        list[int] | None,
        typer.Option(
            *ROWS,
            help="Rows of q, k and v; give it several times. decode: of q.",
            show_default="512 to 16384; decode: 1",
        ),
    ] = None,
    causal: Annotated[bool | None, typer.Option(*CAUSAL, help="One mask only.", show_default="both")] = None,
    dtype: Annotated[str | None, typer.Option(help="FP16 or BF16.", show_default="BF16")] = None,
    keys: Annotated[
        list[int] | None,
        typer.Option(*KEYS, help="decode: keys of a sequence; give it several times.", show_default="8192"),
    ] = None,
    pages: Annotated[
        list[int] | None,
        typer.Option(help="decode: keys of a page, in shuffled order; several times.", show_default="contiguous"),
    ] = None,
    uneven: Annotated[bool, typer.Option("--uneven", help="decode: sequences of 1 to --keys keys, in pages.")] = False,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens in all: batch = tokens / rows.", show_default="16384")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Hidden size: heads = hidden / d_head.", show_default="2048")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences, instead of --tokens.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of Q, instead of --hidden.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of K and V, if fewer (GQA).")] = None,
    scores: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND,…",
            help=f"What scores look like; several times, or with commas: all, or of {', '.join(KINDS)}.",
            show_default=NORMAL,
        ),
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            help=f"attention() with this family; several times, or with commas: {', '.join(family_names())}.",
            show_default="what attention() chooses",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="A config's short form, instead of what attention() chooses; several times for several of one head "
            "dimension, beside it."
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(help=f"What to measure against; several times, or with commas: {', '.join(PEERS)}. Default: all."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="One more implementation: a function that takes (q, k, v, causal), tensors of (batch, heads, rows, "
            "head_dim), and returns the output; for other operations than the forward, one through which gradients "
            "flow. The module may lie in this directory. Several times for several.",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Turns of each; its time is the median of them.", show_default=str(ROUNDS))
    ] = None,
    replay_ms: Annotated[
        float | None,
        typer.Option(
            help="How long a turn lasts: as many launches as fill it. Short turns make large grids affordable; in long "
            "ones each implementation runs at the clock that its own power allows.",
            show_default=f"{LAUNCHES} launches",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the result to a .png or .svg file, or both into a directory.")
    ] = None,
    stored: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Show a stored result instead of measuring; needs no GPU. Several times for the parts of one grid, "
            "which --output then writes as one.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure attention() beside every other implementation that is installed, on this machine's GPU.

    What is timed is the function that users call, with the config that it chooses; with --operation backward, the
    gradients of one forward call over and over; with --operation train, both. FLOPs of a backward are 2.5 times, those
    of a training step 3.5 times those of the forward. With --operation decode, few rows attend to a cache: by default
    steps of generation and chunks of rows of usual sizes; speeds are bytes of keys and values, each read once. All
    implementations and all kinds of scores of one problem run in turns in random order.
    """
    arguments = {
        "operation": operation, "d_head": d_head, "seqlen": seqlen, "causal": causal, "dtype": dtype, "tokens": tokens,
        "hidden": hidden, "keys": keys, "pages": pages, "uneven": uneven or None,
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "scores": scores, "family": family,
        "config": config, "peers": peers, "peer": peer, "rounds": rounds,
        "replay_ms": replay_ms,
    }  # fmt: skip
    given = {name: value for name, value in arguments.items() if value is not None and value != []}
    pictures = plot_files(plot, "bench") if plot else []
    if output:
        check_destination(output)
    if stored:
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"--from shows a stored result as it is; {options} do not go with it")
        result = combined([read_result(path) for path in stored])
    else:
        result = _measured(given)
    if output:
        write_result(output, result)
    if pictures and result.cells:
        _save_figures(result, pictures)
    if as_json:
        print_json(result.to_dict(), "bench")
    else:
        _print_result(table_console(), result)
    if not stored:
        _check_measured(result)


def _check_measured(result: BenchResult) -> None:
    """The exit code of a run that was interrupted, or in which ours could not be measured at all."""
    if not result.complete:
        Console(stderr=True).print(f"interrupted; {len(result.cells)} cells were measured")
        raise typer.Exit(INTERRUPTED)
    if not result.ours():
        failures = result.cells[0].failures
        name = next(filter(is_ours, failures))
        raise GPUError(f"{name} could not be measured: {failures[name]}")


def _save_figures(result: BenchResult, files: list[Path]) -> None:
    """A figure for each kind of scores, whose name is part of the file's if there are several."""
    kinds = result.kinds()
    for kind in kinds:
        paths = files if len(kinds) == 1 else [file.with_stem(f"{file.stem}-{kind}") for file in files]
        save_figure(grid_figure(result.of_kind(kind)), paths)


# --- Measuring -----------------------------------------------------------------------------------------------------


def _measured(given: dict[str, Any]) -> BenchResult:
    operation = checked_operation(given.get("operation", FORWARD))
    configs = [_config(text, operation) for text in dict.fromkeys(given.get("config", ()))]
    cells = _cells(given, configs)
    families = _families(given, configs)
    peers, missing = installed(chosen_peers(_names(given.get("peers", ()))))
    peers += _own_peers(given.get("peer", ()))
    machine = GPUMachine(rounds=given.get("rounds", ROUNDS), replay_ms=given.get("replay_ms"))
    _require_gpu()
    with progress_bar("measuring", len(cells)) as advance:
        results, complete = measure(machine, cells, _implementations(configs, families, peers), advance=advance)
    return BenchResult(environment_record(), given, tuple(results), missing, complete)


def _config(text: str, operation: str) -> KernelConfig:
    """A config that the operation can be timed with: of a training step, that of the forward."""
    config: KernelConfig = parse_config(text)
    of = family_of(config).operation.name
    if of != (FORWARD if operation == TRAIN else operation):
        raise ValueError(f"config: {config} is of the operation {of}; --operation {operation} does not go with it")
    return config


def _names(texts: Iterable[str]) -> list[str]:
    """Names that are given several times, or with commas."""
    return [name.strip() for text in texts for name in text.split(",")]


def _families(given: dict[str, Any], configs: Sequence[KernelConfig]) -> list[str]:
    names = list(dict.fromkeys(_names(given.get("family", ()))))
    if names and configs:
        raise ValueError(
            f"--config names a kernel of the {family_of(configs[0]).name} family; --family does not go with it"
        )
    operation = given.get("operation", FORWARD)
    return [family_named(name, FORWARD if operation == TRAIN else operation).name for name in names]


def _own_peers(texts: Iterable[str]) -> list[Peer]:
    here = str(Path.cwd())
    if texts and here not in sys.path:
        sys.path.insert(0, here)
    return [external_peer(text) for text in dict.fromkeys(texts)]


def _cells(given: dict[str, Any], configs: Sequence[KernelConfig]) -> list[Cell]:
    config = configs[0] if configs else None
    dtype = DType.parse(given["dtype"]) if "dtype" in given else config.dtype if config else DType.BF16
    d_heads = given.get("d_head") or ([config.d_head] if config else D_HEADS)
    for each in configs:
        family_of(each).shapes(each)  # raises for a config of which there is no kernel
        if each.dtype != dtype:
            raise ValueError(f"config: {each} computes {each.dtype.name}, not {dtype.name}")
        if max(d_heads) > each.d_head:
            raise ValueError(f"config: {each} computes head dimensions up to {each.d_head}, not {max(d_heads)}")
    scores = chosen_scores(given.get("scores", [NORMAL]))
    if given.get("operation") == DECODE:
        return _cache_cells(given, config, dtype, scores)
    _refuse(given, OF_CACHES, f"--operation {DECODE}")
    return grid(
        dtype,
        d_heads,
        (given["causal"],) if "causal" in given else MASKS,
        given.get("seqlen") or LENGTHS,
        scores,
        given.get("operation", FORWARD),
        **{name: given.get(name) for name in ("tokens", "hidden", "batch", "heads", "kv_heads")},
    )


OF_CACHES, OF_GRIDS = ("keys", "pages", "uneven"), ("tokens", "hidden")
"""Options of decodes alone, and of what is no decode."""


def _refuse(given: dict[str, Any], names: Iterable[str], where: str) -> None:
    if found := [f"--{name}" for name in names if name in given]:
        raise ValueError(f"{', '.join(found)}: allowed with {where} alone")


def _cache_cells(given: dict[str, Any], config: KernelConfig | None, dtype: DType, scores: Sequence[str]) -> list[Cell]:
    """The usual ones if no size is given; those of a config's head dimension if it is."""
    _refuse(given, OF_GRIDS, "other operations")
    names = ("d_head", "seqlen", "keys", "pages", "uneven", "batch", "heads", "kv_heads")
    causal = given.get("causal")
    if not any(name in given for name in names):
        cells = usual_cells(dtype, scores, causal)
        return cells if config is None else [cell for cell in cells if cell.d_head <= config.d_head]
    several = {"d_head": "d_heads", "seqlen": "rows", "keys": "keys", "pages": "pages"}
    sizes: dict[str, Any] = {argument: given[name] for name, argument in several.items() if name in given}
    sizes |= {name: given.get(name) for name in ("batch", "heads", "kv_heads")}
    if config is not None:
        sizes.setdefault("d_heads", [config.d_head])
    return cache_cells(dtype, scores=scores, causal=causal, uneven="uneven" in given, **sizes)


def _implementations(
    configs: Sequence[KernelConfig], families: Sequence[str], peers: Sequence[Peer]
) -> dict[str, Prepare]:
    """Ours by families, or by one config; several configs stand beside what `attention()` chooses."""
    of_peers: dict[str, Prepare] = {peer.name: partial(prepare_operation, peer.prepare) for peer in peers}
    ours: dict[str, Prepare] = {ours_of(name): partial(prepare_ours, family=name) for name in families}
    if not families:
        alone = configs[0] if len(configs) == 1 else None
        ours = {OURS: partial(prepare_ours, config=alone)}
    if len(configs) > 1:
        ours |= {ours_of(str(config)): partial(prepare_ours, config=config) for config in configs}
    return ours | of_peers


def _require_gpu() -> None:
    if not gpu_available():
        raise GPUError(
            "bench measures on an NVIDIA GPU (compute capability 8.0 or later) with PyTorch, and there is none here "
            "(`flashwright doctor` says what is missing). Without one, `flashwright ladder` and `flashwright simulate` "
            "work, and `flashwright bench --from RESULT.json` shows a stored result."
        )


# --- Showing -------------------------------------------------------------------------------------------------------


def _print_result(console: Console, result: BenchResult) -> None:
    for kind in result.kinds():
        of_kind = result.of_kind(kind)
        if result.operation == DECODE:
            console.print(_cache_table(of_kind))
            continue
        for cells in of_kind.panels().values():
            console.print(_panel_table(cells, of_kind))
    if result.cells:
        console.print(_summary_table(result))
    if result.kinds() not in ([], [NORMAL]):
        for name in result.ours():
            console.print(_kinds_table(name, [summary for summary in result.summaries() if summary.name == name]))
    for line in _what_is_missing(result):
        console.print(line, highlight=False)
    if not result.complete:
        console.print("[bold yellow]incomplete:[/] the run was interrupted")


def _panel_table(cells: list[CellResult], result: BenchResult) -> Table:
    cell = cells[0].cell
    scores = "" if cell.scores == NORMAL else f", {cell.scores}"
    what = "" if cell.operation == FORWARD else f"{OPERATION_TITLES[cell.operation].capitalize()}, "
    problem = f"{what}{cell.dtype.name}, d_head {cell.d_head}, {cell.mask}{scores}"
    table = Table(title=f"{problem}: TFLOP/s, and {OURS} ÷ each")
    table.add_column("")
    for found in cells:
        table.add_column(length_text(found.cell.length), justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    measured = [n for n in result.implementations() if any(n in found.measurements for found in cells)]
    for name in measured:
        table.add_row(label_of(name), *(_number(found.tflops(name), ".0f") for found in cells), style=_style_of(name))
    ours = [name for name in measured if is_ours(name)]
    for mine in ours:
        table.add_section()
        for peer in (name for name in measured if not is_ours(name)):
            ratios = (_number(found.ratio(peer, mine), ".2f") for found in cells)
            label = f"÷ {label_of(peer)}" if len(ours) == 1 else f"{_family_in(mine)} ÷ {short_label_of(peer)}"
            table.add_row(label, *ratios, _number(mean_ratio(cells, peer, mine), ".3f"))
    return table


def _cache_table(result: BenchResult) -> Table:
    """A row for each cell: microseconds and TB/s of each implementation, and ratios to the peers."""
    first = result.cells[0].cell
    scores = "" if first.scores == NORMAL else f", {first.scores}"
    table = Table(
        title=f"Decode, {first.dtype.name}{scores}: µs and TB/s of keys and values read once, and {OURS} ÷ each",
        caption=CACHE_NAMES,
    )
    table.add_column("")
    names = result.implementations()
    for name in names:
        table.add_column(f"{short_label_of(name)}\nµs", justify="right")
        table.add_column("TB/s", justify="right", no_wrap=True)
    ratios = [(mine, peer) for mine in result.ours() for peer in result.peers()]
    for mine, peer in ratios:
        of = f"{_family_in(mine)} " if len(result.ours()) > 1 else ""
        table.add_column(f"{of}÷\n{short_label_of(peer)}", justify="right", no_wrap=True)
    for found in result.cells:
        columns = [str(found.cell)]
        for name in names:
            measured = found.measurements.get(name)
            time_us = None if measured is None else 1e3 * measured.gpu_ms
            columns += [_number(time_us, ".1f"), _number(found.speed(name), ".2f")]
        table.add_row(*columns, *(_number(found.ratio(peer, mine), ".2f") for mine, peer in ratios))
    return table


def _summary_table(result: BenchResult) -> Table:
    table = Table(title="All cells", caption=_caption(result))
    table.add_column("")
    ours = result.ours()
    headings = [f"mean of\n{_family_in(mine)} ÷" if len(ours) > 1 else "mean of\nours ÷" for mine in ours]
    unit = result.cells[0].cell.unit
    for heading in ("cells", *headings, f"best\n{unit}", "worst\nerror", "host\nµs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in result.implementations():
        found = [cell for cell in result.cells if name in cell.measurements]
        measurements = [cell.measurements[name] for cell in found]
        table.add_row(
            label_of(name),
            str(len(found)),
            *("" if is_ours(name) else _number(mean_ratio(found, name, mine), ".3f") for mine in ours),
            format(max(cell.speed(name) or 0.0 for cell in found), ".2f" if result.operation == DECODE else ".0f"),
            f"{max(m.relative_error for m in measurements):.1e}",
            f"{statistics.median(m.host_us for m in measurements):.0f}",
            style=_style_of(name),
        )
    return table


def _kinds_table(name: str, summaries: list[KindSummary]) -> Table:
    """What each kind of scores costs one of ours: beside the fastest peer of each cell, and beside normal scores."""
    table = Table(title=f"{name}, by what scores look like")
    table.add_column("scores")
    for heading in ("÷ best peer:\nmean", "worst", "at", "÷ normal:\nworst", "at"):
        table.add_column(heading, justify="left" if heading == "at" else "right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            summary.scores,
            _number(summary.mean_to_best, ".3f"),
            *_worst_cells(summary.worst_to_best),
            *_worst_cells(summary.worst_to_normal),
        )
    return table


def _worst_cells(worst: Worst | None) -> tuple[str, str]:
    if worst is None:
        return "–", ""
    return f"{worst.ratio:.2f}", str(worst.cell)


def _family_in(name: str) -> str:
    """`ampere` of `flashwright (ampere)`."""
    return name.removeprefix(f"{OURS} (").removesuffix(")")


def _caption(result: BenchResult) -> str:
    known = result.environment
    parts = [str(known.get("gpu") or "unknown GPU")]
    parts += [f"{title} {known[key]}" for key, title in _VERSIONS.items() if known.get(key)]
    return ", ".join([*parts, str(known.get("date", "")).partition("T")[0]]).rstrip(", ")


_VERSIONS = {"driver": "driver", "torch": "PyTorch", "nvrtc": "NVRTC", "flashwright": "flashwright"}


def _what_is_missing(result: BenchResult) -> list[str]:
    lines = [f"not measured: {label_of(name)}: {escape(why)}" for name, why in result.missing.items()]
    failures = Counter(failure for found in result.cells for failure in found.failures.items())
    for (name, why), count in failures.items():
        lines.append(f"not measured in {count} of {len(result.cells)} cells: {label_of(name)}: {escape(why)}")
    return lines


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _style_of(name: str) -> str | None:
    return "bold" if is_ours(name) else None
