"""The `flashwright` command."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

from flashwright.commands.bench import bench
from flashwright.commands.compare import compare
from flashwright.commands.doctor import doctor
from flashwright.commands.explain import explain
from flashwright.commands.ladder import ladder
from flashwright.commands.simulate import simulate
from flashwright.commands.tune import app as tune_app
from flashwright.compiler import CompileError, CompilerMissing
from flashwright.gpu import GPUError
from flashwright.simulator import PtxSyntaxError, SimulationError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
COMMANDS = (bench, compare, doctor, explain, ladder, simulate)
for command in COMMANDS:
    app.command()(command)
app.add_typer(tune_app, name="tune")


@app.callback()
def flashwright() -> None:
    """FlashAttention kernels you can read, configure, simulate, tune and use."""


def main() -> None:
    """The entry point: what a user can cause is reported as one message, not as a traceback."""
    try:
        app()
    except (ValueError, OSError, CompileError, CompilerMissing, GPUError, SimulationError, PtxSyntaxError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(130)
