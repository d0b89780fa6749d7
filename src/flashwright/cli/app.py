"""The `flashwright` command."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

from flashwright.cli.bench import bench
from flashwright.cli.cache import app as cache_app
from flashwright.cli.check import check
from flashwright.cli.compare import compare
from flashwright.cli.doctor import doctor
from flashwright.cli.explain import explain
from flashwright.cli.ladder import ladder
from flashwright.cli.simulate import simulate
from flashwright.cli.tune import app as tune_app
from flashwright.cli.warm_up import warm_up
from flashwright.cli.which import which
from flashwright.compiler.nvrtc import CompileError, CompilerMissing
from flashwright.runtime.devices import GPUError
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.ptx.lexer import PtxSyntaxError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
COMMANDS = (bench, check, compare, doctor, explain, ladder, simulate, warm_up, which)
for command in COMMANDS:
    app.command()(command)
app.add_typer(tune_app, name="tune")
app.add_typer(cache_app, name="cache")


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
