"""`flashwright ladder`: the climb from the plainest kernel to the fastest, as a table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from flashwright.commands.output import JsonOption, print_json, table_console
from flashwright.kernel_configs import DType
from flashwright.ladder import SIMULATED_HEADS, SIMULATED_ROWS, TIMED_SHAPE, RungResult, climb

MIN_COLUMNS_FOR_CONFIGS = 150


def ladder(
    dtype: Annotated[str, typer.Option(help="FP16 or BF16.")] = "BF16",
    d_head: Annotated[int, typer.Option(help="Head dimension: 64 or 128.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """Compile, simulate and check every rung from the plainest kernel to the fastest; time them on a GPU."""
    results = climb(DType.parse(dtype), d_head)
    if as_json:
        print_json({"rungs": [result.to_dict() for result in results]})
    else:
        _print_ladder(results)
    wrong = [result.rung.number for result in results if not result.correct]
    if wrong:
        raise ValueError(f"rungs {wrong} do not agree with the float64 reference")


def _print_ladder(results: list[RungResult]) -> None:
    """One table; where a terminal is too narrow for the configs, they are listed below it."""
    wide = table_console()
    configs_fit = wide.width >= MIN_COLUMNS_FOR_CONFIGS
    wide.print(_ladder_table(results, with_configs=configs_fit))
    if not configs_fit:
        for result in results:
            wide.print(f"{result.rung.number:2} {result.rung.config}", highlight=False)


def _ladder_table(results: list[RungResult], *, with_configs: bool) -> Table:
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
    rows, heads = SIMULATED_ROWS, SIMULATED_HEADS
    text = f"Simulated: {heads} heads, {rows} rows, checked against float64."
    if timed:
        shape = TIMED_SHAPE
        text += f" Timed: batch {shape['batch']}, {shape['heads']} heads, {shape['rows']} rows."
    return text
