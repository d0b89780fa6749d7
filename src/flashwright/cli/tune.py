"""`flashwright tune`: the search for the fastest config; and its subcommands, which look after what was found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashwright.choice.choose import best_family
from flashwright.choice.currency import currency
from flashwright.choice.database import TuningDatabase
from flashwright.choice.lookup import shipped_results
from flashwright.choice.problem import STANDARD_LENGTHS, TuningProblem, problem_of, standard_problems
from flashwright.choice.results import TunedResult, TuningFileError, from_document, to_document
from flashwright.cli.output import CAUSAL, D_HEAD, KEYS, ROWS, JsonOption, print_json, table_console
from flashwright.hardware.architectures import GPUModel
from flashwright.interruption import INTERRUPTED
from flashwright.kernels.family import DEFAULT_SPACE, Occasion
from flashwright.kernels.registry import families, family_named, family_names
from flashwright.problem.dtypes import DType
from flashwright.problem.flops import BACKWARD, DECODE, FORWARD
from flashwright.problem.lengths import length_bucket
from flashwright.runtime.devices import GPUError
from flashwright.workbench.bench.result_files import check_destination, write_document
from flashwright.workbench.bench.scores import KINDS, chosen_scores
from flashwright.workbench.quantities import counted, kib
from flashwright.workbench.tuning.measure import TUNING_SCORES, this_machine
from flashwright.workbench.tuning.several_gpus import Device, search_on_all, visible_devices
from flashwright.workbench.tuning.space import considered_configs
from flashwright.workbench.tuning.tuner import TuningReport, tune

DEFAULT_D_HEAD = 128
GpuOption = Annotated[str | None, typer.Option(help="Only results of this GPU model, by its full name.")]

app = typer.Typer(add_completion=False, invoke_without_command=True, pretty_exceptions_enable=False)


@app.callback()
def tune_command(
    context: typer.Context,
    operation: Annotated[
        str,
        typer.Option(help="What the kernels compute: forward; backward, for gradients; decode, of rows on a cache."),
    ] = FORWARD,
    d_head: Annotated[
        int | None, typer.Option(*D_HEAD, help="Head dimension with a kernel of its own.", show_default="128")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="FP16 or BF16.", show_default="BF16")] = None,
    causal: Annotated[bool | None, typer.Option(*CAUSAL, help="Mask.", show_default="no-causal")] = None,
    seqlen: Annotated[int | None, typer.Option(*ROWS, help="Rows of queries.", show_default="4096; decode: 1")] = None,
    kv_seqlen: Annotated[
        int | None, typer.Option(*KEYS, help="Rows of keys.", show_default="as many; decode: 8192")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences.", show_default="16,384 rows in all; decode: 16")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads.", show_default="2,048 columns in all; decode: 32")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Decode: heads of keys.", show_default="a quarter of the heads")
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(help=f"Kernel family: {' or '.join(family_names())}.", show_default="what attention() uses here"),
    ] = None,
    scores: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND,…",
            help=f"What scores look like; several times, or with commas: all, or of {', '.join(KINDS)}.",
            show_default=", ".join(TUNING_SCORES),
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Every head dimension, dtype, mask and length (512, 2048, 8192; decode: 1, 8, 16), or those given; on "
            "every GPU of the machine, a process on each.",
        ),
    ] = False,
    space: Annotated[
        str,
        typer.Option(
            help="default: the combinations worth an everyday search; full: every combination of the documents' "
            "thirteen fields that their filter keeps, besides."
        ),
    ] = DEFAULT_SPACE,
    quick: Annotated[bool, typer.Option("--quick", help="Try only the promising part of the space.")] = False,
    limit: Annotated[int | None, typer.Option(help="Try at most so many configs, the promising first.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue where the same command was interrupted.")] = False,
    arch: Annotated[str, typer.Option(help="What to compile for where there is no GPU, or with --dry-run.")] = "sm_90",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what there is to time on --arch; needs no GPU.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest config for a problem on this GPU, for attention() and its gradients to use; with --dry-run, what
    there is to time.

    Every config that the rules keep is compiled; what spills is dropped, the rest checked against float64 and timed by
    successive halving on several kinds of scores: a config's time is the geometric mean over them. Results are kept
    per GPU model, head dimension, dtype, mask, and rows of queries and of keys: up to 16, 64, 1024, 4096, or
    more; of a decode, per rows of all heads that share one of keys: up to 16, 32, 64, 128, or more.
    """
    if context.invoked_subcommand is not None:
        return
    if not families(operation):
        raise ValueError(
            f"operation: {operation!r} has no kernels of its own; allowed: {FORWARD}, {BACKWARD}, {DECODE}"
        )
    kinds = chosen_scores(scores or TUNING_SCORES)
    machine, database = None if dry_run else this_machine(), TuningDatabase()
    if family is None:
        gpu = GPUModel.of_architecture("", arch) if machine is None else machine.gpu
        family = _family_in_use(gpu, seqlen or STANDARD_LENGTHS[-1], d_head or DEFAULT_D_HEAD, operation)
    family = family_named(family, operation).prefix
    if quick and space != DEFAULT_SPACE:
        raise ValueError(f"--quick: not with --space {space}; the promising part is one of the default space")
    considered_configs(family, space)  # refuses an unknown one before anything is compiled
    if everything:
        for name, value in {"keys": kv_seqlen, "batch": batch, "heads": heads, "kv-heads": kv_heads}.items():
            if value is not None:
                raise ValueError(f"--{name}: not with --all, which has sizes of its own")
        problems = list(standard_problems(dtype=dtype, d_head=d_head, causal=causal, length=seqlen, family=family))
    else:
        given = {"dtype": dtype, "d_head": d_head, "causal": causal, "q_length": seqlen, "kv_length": kv_seqlen}
        given |= {"batch": batch, "heads": heads, "kv_heads": kv_heads}
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        problems = [problem_of(family=family, **chosen)]

    if machine is None and not dry_run:
        raise GPUError(
            "tune measures on an NVIDIA GPU (compute capability 8.0 or later) with PyTorch, and there is none here "
            "(`flashwright doctor` says what is missing). --dry-run lists what there is to time, and needs no GPU."
        )
    devices = visible_devices() if everything and machine is not None else []
    if len(devices) > 1:
        options = _options_of_searches(kinds, space, quick, limit, resume)
        _search_on_all(problems, devices, options, as_json=as_json)
        return
    reports: list[TuningReport] = []
    try:
        for number, problem in enumerate(problems, start=1):
            report = tune(
                problem, machine, database, scores=kinds, arch=arch, space=space, quick=quick, limit=limit,
                resume=resume,
            )  # fmt: skip
            reports.append(report)
            if not as_json:
                _print_report(report, heading=f"{number}/{len(problems)} " if everything else "", brief=everything)
    except KeyboardInterrupt:
        hint = "" if machine is None else "; what was measured is kept: the same command with --resume goes on"
        Console(stderr=True).print(f"interrupted{hint}", highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json({"searches": [report.to_dict() for report in reports]}, "tune")


def _options_of_searches(scores: Sequence[str], space: str, quick: bool, limit: int | None, resume: bool) -> list[str]:
    """What the command was given for all of its searches."""
    options = ["--space", space]
    for kind in scores:
        options += ["--scores", kind]
    if limit is not None:
        options += ["--limit", str(limit)]
    return options + [flag for flag, given in (("--quick", quick), ("--resume", resume)) if given]


def _search_on_all(
    problems: Sequence[TuningProblem], devices: Sequence[Device], options: Sequence[str], *, as_json: bool
) -> None:
    """A process on each GPU; every search's result is in the database when it ends."""
    errors = Console(stderr=True)
    names = ", ".join(f"{device.visible} ({device.name})" for device in devices)
    errors.print(f"{counted(len(problems), 'problem')} on {len(devices)} GPUs: {names}", highlight=False)
    reports, failed = [], 0
    try:
        for outcome in search_on_all(problems, devices, options):
            where = f"GPU {outcome.device.visible}: {outcome.problem}"
            if outcome.report is None:
                failed += 1
                errors.print(f"[bold red]failed[/] {escape(where)}: {escape(outcome.error)}", highlight=False)
                continue
            reports.append(outcome.report)
            if not as_json:
                _print_outcome(where, outcome.report)
    except KeyboardInterrupt:
        errors.print("interrupted; what was measured is kept: the same command with --resume goes on")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json({"searches": reports}, "tune")
    if failed:
        raise typer.Exit(1)


def _print_outcome(where: str, report: dict[str, Any]) -> None:
    result = report["result"]
    found = "nothing is fit to be timed" if result is None else (
        f"{result['config']}\n  {result['time_ms']:.4f} ms, {result['tflops']:.0f} TFLOP/s, {report['seconds']:.0f} s"
    )  # fmt: skip
    table_console().print(f"[bold]{escape(where)}[/]\n  {escape(found)}", highlight=False)


def _family_in_use(gpu: GPUModel, length: int, d_head: int, operation: str) -> str:
    """What attention() uses on a GPU."""
    bucket = length_bucket(length)
    return best_family(Occasion(DType.BF16, d_head, False, bucket, bucket, gpu), operation).name


# --- The report of a search -------------------------------------------------------------------------------------


def _print_report(report: TuningReport, *, heading: str, brief: bool) -> None:
    console = table_console()
    console.print(f"[bold]{heading}{report.problem}[/], scores: {', '.join(report.scores)}", highlight=False)
    if not brief:
        console.print(_space_table(report))
    if report.candidates is not None:
        console.print(_compiled_line(report), highlight=False)
    for wrong in report.wrong:
        console.print(f"[bold red]wrong[/] (error {wrong.error:.1e}), never timed: {wrong.config}", highlight=False)
    if report.result is None:
        if not brief:
            console.print(_survivors_table(report))
        return
    if not brief:
        console.print(_timings_table(report))
    _print_winner(console, report)


def _space_table(report: TuningReport) -> Table:
    space = report.space
    table = Table(
        title=f"The {space.name} space: {space.enumerated:,} combinations",
        caption=f"{space.kept:,} kept, {len(space.configs):,} tried",
    )
    table.add_column("rule", no_wrap=True)
    table.add_column("removed", justify="right", no_wrap=True)
    table.add_column("because, for example")
    for removal in space.removals:
        table.add_row(removal.rule, f"{removal.count:,}", removal.example)
    return table


def _compiled_line(report: TuningReport) -> str:
    candidates = report.candidates
    assert candidates is not None
    text = f"Compiled for {report.arch}: {len(candidates.survivors)} to time, {len(candidates.spilling)} spill"
    if candidates.too_large:
        text += f", {len(candidates.too_large)} exceed the shared memory of a block"
    return text + "."


def _survivors_table(report: TuningReport) -> Table:
    assert report.candidates is not None
    table = Table(title=f"What there is to time on {report.arch}")
    table.add_column("config", overflow="fold")
    for name in ("registers", "shared\nKiB", "blocks\nper SM", "limited by"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in report.candidates.survivors:
        blocks = "?" if each.blocks_per_sm is None else str(each.blocks_per_sm)
        table.add_row(str(each.config), str(each.registers), kib(each.shared_bytes), blocks, each.limited_by or "?")
    return table


def _timings_table(report: TuningReport) -> Table:
    steps = " → ".join(str(len(stage.timings)) for stage in report.stages)
    table = Table(title="The last, measured in turns", caption=f"candidates: {steps}" if steps else None)
    table.add_column("config", overflow="fold")
    for name in ("ms", report.problem.unit, "× best"):
        table.add_column(name, justify="right", no_wrap=True)
    timings = report.final_timings
    for timing in timings:
        mark = " (in use so far)" if report.incumbents[:1] == (timing.config,) else ""
        relative = timings[0].time_ms / timing.time_ms
        speed = report.problem.speed(timing.time_ms)
        table.add_row(f"{timing.config}{mark}", f"{timing.time_ms:.4f}", speed, f"{relative:.3f}")
    return table


def _print_winner(console: Console, report: TuningReport) -> None:
    assert report.result is not None
    best = report.result.best
    gain = "" if report.speedup is None else f", {report.speedup:.3f} × the speed of what was in use"
    when = "finished before; " if report.candidates is None else f"{report.seconds:.0f} s; "
    console.print(
        f"[bold green]fastest[/] on {escape(str(report.gpu))}: {best.config}\n"
        f"{when}{best.time_ms:.4f} ms, {report.problem.speed(best.time_ms)} {report.problem.unit}{gain}",
        highlight=False,
    )
    if report.stored is not None and report.stored.config != best.config:
        console.print(f"kept instead, measured faster elsewhere: {report.stored.config}", highlight=False)


# --- Results -----------------------------------------------------------------------------------------------------


@app.command()
def show(
    gpu: GpuOption = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Those of the package, not your own.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List your results, or the package's: what attention() chooses from on GPUs that were tuned.

    The kernels of a result are current if the installed package compiles the same source for its config. Of your result
    and the package's, attention() takes the one whose kernels are current; if both or neither are, the later one.
    """
    database = TuningDatabase()
    if shipped:
        results = [result for result in shipped_results() if gpu in (None, result.gpu)]
    else:
        results = database.results(gpu)
    if as_json:
        document = to_document(results)
        for each, result in zip(document["results"], results, strict=True):
            each["kernels"] = currency(result).value
        print_json(document, "tune-show")
    elif results:
        _print_results(table_console(), results)
    else:
        where = "this package" if shipped else str(database.path)
        print(f"no results in {where}" + ("" if gpu is None else f" for {gpu}"))


RESULT_COLUMNS = "{:5} {:>6} {:6} {:>9} {:>9} {:>9} {:>7} {:10} {}"
RESULT_LINE = 80
"""Characters of a line of results at most. A result's config has a line of its own below, to be copied whole."""


def _print_results(console: Console, results: Sequence[TunedResult]) -> None:
    """By GPU and kinds of scores."""

    def group_of(result: TunedResult) -> tuple[str, tuple[str, ...]]:
        return result.gpu, result.scores

    for (gpu, scores), group in groupby(sorted(results, key=group_of), key=group_of):
        heading = fill(f"{gpu}, scores: {', '.join(scores)}", RESULT_LINE)
        console.print(f"[bold]{escape(gpu)}[/]{escape(heading.removeprefix(gpu))}", highlight=False)
        headings = ("dtype", "d_head", "mask", "queries", "keys", "ms", "TFLOP/s", "date", "kernels")
        console.print(RESULT_COLUMNS.format(*headings), style="bold", highlight=False)
        for result in group:
            kind = result.problem.kind
            values = (
                kind.dtype.name, kind.d_head, "causal" if kind.causal else "full", kind.q_bucket, kind.kv_bucket,
                f"{result.best.time_ms:.4f}", f"{result.tflops:.0f}", result.date[:10], currency(result).value,
            )  # fmt: skip
            console.print(RESULT_COLUMNS.format(*values), highlight=False)
            console.print(f"  {result.config}", style="dim", highlight=False, soft_wrap=True)


@app.command(name="export")
def export_results(
    file: Annotated[Path | None, typer.Argument(help="Where to write.", metavar="FILE.json")] = None,
    output: Annotated[Path | None, typer.Option(help="The same, as other commands write it.")] = None,
    gpu: GpuOption = None,
    dtype: Annotated[str | None, typer.Option(help="Only FP16 or BF16.")] = None,
) -> None:
    """Write your results to a file, to share them."""
    if (file is None) == (output is None):
        raise ValueError("give one file to write to: FILE.json, or --output FILE.json")
    file = file or output
    assert file is not None
    check_destination(file)
    results = TuningDatabase().results(gpu)
    if dtype is not None:
        results = [result for result in results if result.problem.dtype == DType.parse(dtype)]
    write_document(file, to_document(results))
    print(f"{counted(len(results), 'result')} written to {file}")


@app.command(name="import")
def import_results(
    file: Annotated[Path, typer.Argument(help="A file that export wrote.", metavar="FILE.json")],
) -> None:
    """Add the results in a file to yours: all of them, or none if the file is not sound."""
    try:
        results = from_document(json.loads(file.read_text("utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TuningFileError(f"{file} is not JSON: {error}") from error
    except TuningFileError as error:
        raise TuningFileError(f"{file}: {error}") from error
    stored = TuningDatabase().store(results) if results else []
    kept = sum(mine != theirs for mine, theirs in zip(stored, results, strict=True))
    why_kept = f"; kept, being faster or of the installed kernels: {kept} of yours" if kept else ""
    print(f"{counted(len(results) - kept, 'result')} imported{why_kept}")


@app.command()
def clear(
    gpu: GpuOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Forget your results and unfinished searches; those of the package remain."""
    database = TuningDatabase()
    if not yes:
        typer.confirm(f"Forget {counted(len(database.results(gpu)), 'result')} in {database.path}?", abort=True)
    print(f"{counted(database.clear(gpu), 'result')} forgotten")
