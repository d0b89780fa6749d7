"""The `flashwright` command."""

from __future__ import annotations

import sys
from shutil import get_terminal_size
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from flashwright.cli.bench import bench
from flashwright.cli.cache import app as cache_app
from flashwright.cli.check import check
from flashwright.cli.compare import compare
from flashwright.cli.doctor import doctor
from flashwright.cli.explain import explain
from flashwright.cli.ladder import ladder
from flashwright.cli.output import message_of
from flashwright.cli.plan import plan_command
from flashwright.cli.simulate import simulate
from flashwright.cli.tune import app as tune_app
from flashwright.cli.warm_up import warm_up
from flashwright.cli.which import which
from flashwright.compiler.nvrtc import CompileError, CompilerMissing
from flashwright.interruption import INTERRUPTED, leave_to_command
from flashwright.runtime.devices import GPUError
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.ptx.lexer import PtxSyntaxError
from flashwright.version import __version__


class _Commands(TyperGroup):
    """Reports an interruption that a command does not report itself; typer would end it without a word. Help without
    frames has the whole first paragraph on each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, (each.help or "").split("\n\n")[0]) for name, each in commands.items() if each])

    def invoke(self, ctx: Any) -> Any:
        try:
            leave_to_command()
            return super().invoke(ctx)
        except KeyboardInterrupt:
            Console(stderr=True).print("interrupted")
            raise typer.Exit(INTERRUPTED) from None


NARROW = 100
"""Columns below which the framed help has no room for names of options, and shortens them."""
app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if get_terminal_size().columns < NARROW else "rich",
    epilog="Start with `flashwright doctor`: what this machine has. No GPU is needed but for bench and tune.",
)
COMMANDS = (bench, check, compare, doctor, explain, ladder, simulate, warm_up, which)
for command in COMMANDS:
    app.command()(command)
app.command("plan")(plan_command)
app.add_typer(tune_app, name="tune", cls=_Commands)
app.add_typer(cache_app, name="cache", cls=_Commands)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"flashwright {__version__}")
        raise typer.Exit


@app.callback()
def flashwright(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """FlashAttention kernels you can read, configure, simulate, tune and use, with or without a GPU."""


def main() -> None:
    """The entry point: what a user can cause is reported as one message, not as a traceback."""
    try:
        app()
    except (ValueError, OSError, CompileError, CompilerMissing, GPUError, SimulationError, PtxSyntaxError) as error:
        _fail(message_of(error))
    except MemoryError as error:
        _fail(f"not enough memory{f': {error}' if str(error) else ''}")
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(INTERRUPTED)


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(1)
