"""`flashwright check`: kernels of a user's own, for continuous integration: an exit code, and a report."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from flashwright.cli.kernel_options import (
    LAUNCH_PARAMETERS,
    ArgOption,
    BlockOption,
    ClusterOption,
    CompilerOption,
    DefineOption,
    GridOption,
    HazardsOption,
    IncludeOption,
    KernelOption,
    SeedOption,
    SetOption,
    SharedBytesOption,
    SpuriousWaitsOption,
    StepLimitOption,
    given_options,
    hazard_checks,
    launch_arguments,
)
from flashwright.cli.output import json_text, message_of
from flashwright.cli.progress import simulating
from flashwright.compiler.nvrtc import CompileError, CompilerMissing
from flashwright.simulation.source import CUDA_SUFFIXES, PTX_SUFFIX
from flashwright.simulator.errors import SimulationError
from flashwright.workbench.check.launches import CheckedLaunch, CheckReport, FileCheck
from flashwright.workbench.check.sarif import sarif_report
from flashwright.workbench.check.text import text_report

FOUND, NOT_CHECKED = 1, 2
"""Exit codes: something was found; the kernel could not be run."""
_OF_THE_REPORT = {"targets", "report_format", "output"}
_DIRECTIVE = re.compile(r"^\s*//\s*flashwright check:(.*)$", re.MULTILINE)


class ReportFormat(str, Enum):
    text = "text"
    json = "json"
    sarif = "sarif"


def check(
    ctx: typer.Context,
    targets: Annotated[list[str], typer.Argument(help="CUDA or PTX files.", metavar="FILE.cu|FILE.ptx…")],
    kernel: KernelOption = None,
    grid: GridOption = "1",
    block: BlockOption = "32",
    cluster: ClusterOption = None,
    shared_bytes: SharedBytesOption = 0,
    spurious_waits: SpuriousWaitsOption = False,
    arg: ArgOption = None,
    set_: SetOption = None,
    seed: SeedOption = 0,
    include: IncludeOption = None,
    define: DefineOption = None,
    nvrtc: CompilerOption = None,
    arch: Annotated[
        str | None,
        typer.Option(help="The simulated architecture.", show_default="of PTX its target; of CUDA sm_80"),
    ] = None,
    hazards: HazardsOption = None,
    step_limit: StepLimitOption = None,
    report_format: Annotated[ReportFormat, typer.Option("--format", help="Form of the report.")] = ReportFormat.text,
    output: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
) -> None:
    """Run kernels on the simulated GPU and report every fault: races, missing waits, bounds, uninitialised reads.

    The exit code is 0 if nothing was found but warnings, 1 otherwise, 2 if a kernel could not be run. Unless options
    say what to launch, every comment `// flashwright check: --grid 4 --block 128 --arg …` of a file is one launch.
    """
    if output is not None and not output.absolute().parent.is_dir():
        raise typer.BadParameter(
            f"there is no directory {output.parent} to write {output.name} to", param_hint="--output"
        )
    reports = [_checked_file(ctx, target) for target in targets]
    text = _formatted(reports, report_format)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n", "utf-8")
    if any(report.failure is not None for report in reports):
        raise typer.Exit(NOT_CHECKED)
    if not all(finding.is_warning for report in reports for finding in report.findings):
        raise typer.Exit(FOUND)


def _checked_file(ctx: typer.Context, target: str) -> CheckReport:
    """All launches of a file; what keeps one from being run is printed, and ends it."""
    launches: list[CheckedLaunch] = []
    try:
        if not target.endswith((*CUDA_SUFFIXES, PTX_SUFFIX)):
            raise ValueError(f"{target}: expected a file that ends in {', '.join((*CUDA_SUFFIXES, PTX_SUFFIX))}")
        file = FileCheck(target)
        for options in _launches(ctx, target):
            launches.append(_checked(file, options))
    except (ValueError, OSError, CompileError, CompilerMissing, SimulationError) as error:
        message = message_of(error)
        if target not in message:
            message = f"{target}: {message}"
        Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
        return CheckReport(target, launches, message)
    return CheckReport(target, launches)


def _launches(ctx: typer.Context, target: str) -> list[dict[str, Any]]:
    """The options of each launch: those of the command line, or those that the file has in comments."""
    lines = _DIRECTIVE.findall(Path(target).read_text("utf-8", "replace"))
    given = given_options(ctx).keys()
    if not lines or given & LAUNCH_PARAMETERS:
        return [ctx.params]
    launches = []
    for line in lines:
        try:
            comment = ctx.command.make_context("check", [target, *shlex.split(line)])
        except Exception as error:  # whatever the parser of the command line says of it
            message = getattr(error, "format_message", lambda error=error: str(error))()
            raise ValueError(f"{target}: // flashwright check:{line}: {message}") from error
        own = given_options(comment)
        for_all = {name: value for name, value in ctx.params.items() if name in given and name not in own}
        launches.append(comment.params | for_all)
    return launches


def _checked(file: FileCheck, options: dict[str, Any]) -> CheckedLaunch:
    known = {name: value for name, value in options.items() if name not in _OF_THE_REPORT and name != "hazards"}
    with simulating(keep_stdout=True) as progress:
        return file.launch(
            check_hazards=hazard_checks(f"collect,{options['hazards'] or 'collect'}"),
            progress=progress,
            **launch_arguments(**known),
        )


def _formatted(reports: Sequence[CheckReport], form: ReportFormat) -> str:
    if form is ReportFormat.text:
        return "\n\n".join(text_report(report) for report in reports)
    if form is ReportFormat.json:
        return json_text({"files": [report.to_dict() for report in reports]}, "check")
    return json.dumps(sarif_report(reports), indent=2, ensure_ascii=False)
