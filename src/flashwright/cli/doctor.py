"""`flashwright doctor`: what this machine has of what flashwright needs, and what to do about the rest."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from flashwright.cli.output import JsonOption, print_json, table_console
from flashwright.workbench.doctor import Finding, Verdict, findings, works

MARKS = {Verdict.OK: "[green]✓[/]", Verdict.NOTE: "[yellow]![/]", Verdict.BROKEN: "[bold red]✗[/]"}


def doctor(as_json: JsonOption = False) -> None:
    """Say what was found of GPU, driver, compiler, PyTorch, cache and tuning database, and what to do."""
    found: list[Finding] = []
    console = table_console()
    for finding in findings():
        found.append(finding)
        if not as_json:  # each as it is found: some take seconds
            _print_finding(console, finding)
    healthy = works(found)
    if as_json:
        print_json({"works": healthy, "findings": [finding.to_dict() for finding in found]}, "doctor")
    else:
        console.print(_summary(found))
    if not healthy:
        raise typer.Exit(1)


def _print_finding(console: Console, finding: Finding) -> None:
    console.print(f"{MARKS[finding.verdict]} [bold]{finding.subject}[/]: {escape(finding.found)}", highlight=False)
    if finding.advice:
        console.print(Padding(f"→ {escape(finding.advice)}", (0, 0, 0, 2), expand=False), highlight=False)


def _summary(found: list[Finding]) -> str:
    broken = [finding.subject for finding in found if finding.verdict is Verdict.BROKEN]
    if broken:
        return f"[bold red]Broken:[/] {', '.join(broken)}."
    verdicts = {finding.subject: finding.verdict for finding in found}
    gpu_ready = all(verdicts.get(subject) is Verdict.OK for subject in ("GPU", "driver", "PyTorch"))
    if gpu_ready:
        return "Kernels run on this machine's GPU and on the simulator."
    return "Kernels run on the simulator here; not on a GPU."
