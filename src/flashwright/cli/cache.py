"""`flashwright cache`: what is kept on disk, how much of it, and its removal."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from flashwright.cli.output import JsonOption, print_json, table_console
from flashwright.compiler.program_cache import cache_directory
from flashwright.workbench.disk_cache import CachePart, clear, parts, programs

app = typer.Typer(help="Show or clear what is kept on disk: compiled programs, parsed modules, tuning results.")
Limit = Annotated[int, typer.Option(min=1, help="At most so many programs, the last written first.")]


@app.callback(invoke_without_command=True)
def size(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show where the cache is, and how much of what is in it."""
    if context.invoked_subcommand is not None:
        return
    found = parts()
    if as_json:
        document = {"directory": str(cache_directory()), "parts": [part.to_dict() for part in found]}
        print_json(document, "cache")
        return
    console = table_console()
    console.print(str(cache_directory()), highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("what")
    table.add_column("files", justify="right")
    table.add_column("MiB", justify="right")
    for part in found:
        table.add_row(part.kind, f"{part.files:,}", _mib(part.bytes))
    console.print(table)


@app.command("list")
def list_programs(limit: Limit = 50, as_json: JsonOption = False) -> None:
    """List compiled programs: config, architecture, registers, size, when they were written."""
    found = programs()
    if as_json:
        print_json({"programs": [program.to_dict() for program in found[:limit]], "count": len(found)}, "cache-list")
        return
    table = Table(title=f"{min(limit, len(found)):,} of {len(found):,} compiled programs", title_justify="left")
    table.add_column("kernel", overflow="fold")
    for name in ("arch", "registers", "KiB", "written (UTC)"):
        table.add_column(name, justify="right", no_wrap=True)
    for program in found[:limit]:
        registers = "?" if program.registers is None else str(program.registers)
        written = program.written.removesuffix("+00:00").replace("T", " ")
        table.add_row(program.kernel, program.arch, registers, f"{program.bytes / 1024:.0f}", written)
    table_console().print(table)


@app.command("clear")
def clear_cache(as_json: JsonOption = False) -> None:
    """Remove compiled programs and parsed modules; they are made again when needed. Tuning results stay.

    `flashwright tune clear` removes tuning results.
    """
    cleared = clear()
    if as_json:
        print_json({"cleared": [part.to_dict() for part in cleared]}, "cache-clear")
        return
    table_console().print(f"removed {_described(cleared)}; tuning results stay", highlight=False)


def _described(cleared: list[CachePart]) -> str:
    return " and ".join(f"{part.files:,} {part.kind} ({_mib(part.bytes)} MiB)" for part in cleared)


def _mib(size: int) -> str:
    return f"{size / 1024**2:.1f}"
