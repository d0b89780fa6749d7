"""The `flashwright` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flashwright import ladder as ladder_module
from flashwright.compiler import CompileError
from flashwright.kernel_configs import DType, parse_kernel_name_into_config
from flashwright.runtime import GPUError
from flashwright.simulate_command import simulate_config, simulate_ptx
from flashwright.simulator import PtxSyntaxError, SimulationError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console()

FILE_COLUMNS = 200
"""Width of tables that do not go to a terminal."""
MIN_COLUMNS_FOR_CONFIGS = 150

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> None:
    """The entry point: what a user can cause is reported as one message, not as a traceback."""
    try:
        app()
    except (ValueError, OSError, CompileError, GPUError, SimulationError, PtxSyntaxError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", markup=True, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(130)


@app.callback()
def flashwright() -> None:
    """FlashAttention kernels you can read, configure, simulate, tune and use."""


@app.command()
def ladder(
    dtype: Annotated[str, typer.Option(help="FP16 or BF16.")] = "BF16",
    d_head: Annotated[int, typer.Option(help="Head dimension: 64 or 128.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """Compile, simulate and check every rung from the plainest kernel to the fastest; time them on a GPU."""
    results = ladder_module.climb(DType.parse(dtype), d_head)
    if as_json:
        print(json.dumps({"rungs": [result.to_dict() for result in results]}, indent=2, ensure_ascii=False))
    else:
        _print_ladder(results)
    wrong = [result.rung.number for result in results if not result.correct]
    if wrong:
        raise ValueError(f"rungs {wrong} do not agree with the float64 reference")


def _print_ladder(results: list[ladder_module.RungResult]) -> None:
    """One table; where a terminal is too narrow for the configs, they are listed below it."""
    wide = console if console.is_terminal else Console(width=FILE_COLUMNS)
    configs_fit = wide.width >= MIN_COLUMNS_FOR_CONFIGS
    wide.print(_ladder_table(results, with_configs=configs_fit))
    if not configs_fit:
        for result in results:
            wide.print(f"{result.rung.number:2} {result.rung.config}", highlight=False)


def _ladder_table(results: list[ladder_module.RungResult], *, with_configs: bool) -> Table:
    timed = any(result.gpu for result in results)
    table = Table(title="The ladder", caption=_ladder_caption(timed), padding=(0, 0 if not with_configs else 1))
    table.add_column("")
    table.add_column("change", overflow="fold", min_width=14)
    numbers = ["registers\nsm_80/90", "shared\nKiB", "blocks\nper SM", "instr. /\nKV step", "bank\nconflicts"]
    numbers += ["global\nsectors", "error"] + (["ms", "TFLOP/s", "× FA-2"] if timed else [])
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        per_arch = list(result.compiled.values())
        simulation = result.simulation
        config = f"\n[dim]{result.rung.config}[/]" if with_configs else ""
        row = [
            str(result.rung.number),
            result.rung.change + config,
            "/".join(f"{c.registers}{'!' if c.spill_bytes else ''}" for c in per_arch),
            f"{per_arch[0].shared_bytes / 1024:g}",
            "/".join(str(c.blocks_per_sm) for c in per_arch),
            f"{simulation.instructions_per_kv_step:,.0f}",
            f"{simulation.bank_conflicts:,}",
            f"{simulation.global_sectors:,}",
            f"{simulation.relative_error:.1e}{'' if result.correct else ' WRONG'}",
        ]
        if result.gpu:
            gpu = result.gpu
            row += [f"{gpu.time_ms:.3f}", f"{gpu.tflops:.0f}", f"{gpu.ratio_to_flash_attention_2:.3f}"]
        table.add_row(*row)
    return table


def _ladder_caption(timed: bool) -> str:
    rows, heads = ladder_module.SIMULATED_ROWS, ladder_module.SIMULATED_HEADS
    text = f"Simulated: {heads} heads, {rows} rows, checked against float64."
    if timed:
        shape = ladder_module.TIMED_SHAPE
        text += f" Timed: batch {shape['batch']}, {shape['heads']} heads, {shape['rows']} rows."
    return text


@app.command()
def simulate(
    target: Annotated[str, typer.Argument(help="A PTX file, or a config's short form.", metavar="FILE.ptx|CONFIG")],
    kernel: Annotated[str | None, typer.Option(help="PTX: the kernel to launch, if there are several.")] = None,
    grid: Annotated[str, typer.Option(help="PTX: thread blocks, as X or X,Y,Z.")] = "1",
    block: Annotated[str, typer.Option(help="PTX: threads per block, as X or X,Y,Z.")] = "32",
    shared_bytes: Annotated[int, typer.Option(help="PTX: dynamic shared memory.")] = 0,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="PTX: an argument, in order: TYPE:VALUE for a number (i32:7, f32:0.5), or zeros:TYPE:SIZE or "
            "random:TYPE:SIZE for a pointer to new memory (random:f32:1024)."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="CONFIG: rows of q, k and v.")] = 256,
    heads: Annotated[int, typer.Option(help="CONFIG: heads.")] = 2,
    arch: Annotated[str, typer.Option(help="The simulated architecture.")] = "sm_80",
    hazards: Annotated[bool, typer.Option(help="Check for races, missing waits and uninitialised reads.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Run a kernel on the simulated GPU and print what it did."""
    if target.endswith(".ptx"):
        text = Path(target).read_text("utf-8")
        result = simulate_ptx(text, kernel, grid, block, shared_bytes, arg or [], arch=arch, check_hazards=hazards)
    else:
        config = parse_kernel_name_into_config(target)
        result = simulate_config(config, rows=rows, heads=heads, arch=arch, check_hazards=hazards)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False))
    else:
        print(result.report())
