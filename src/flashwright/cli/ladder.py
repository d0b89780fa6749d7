"""`flashwright ladder`: the climb from the plainest kernel to the fastest, as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flashwright.cli.attention_options import (
    CausalOption,
    SampleHeadsOption,
    SampleKeysOption,
    SampleKvHeadsOption,
    SoftcapOption,
    WindowOption,
    sample_of,
)
from flashwright.cli.output import D_HEAD, JsonOption, print_json, table_console
from flashwright.kernels.ladder import RungProblem
from flashwright.problem.dtypes import DType
from flashwright.problem.flops import FORWARD
from flashwright.workbench.bench.figures import plot_files, save_figure
from flashwright.workbench.bench.result_files import check_destination
from flashwright.workbench.bench.results import label_of, short_label_of
from flashwright.workbench.ladder import (
    Ladder,
    climb,
    climbable_families,
    climbable_operations,
    read_ladder,
    write_ladder,
)
from flashwright.workbench.ladder_plot import ladder_figure
from flashwright.workbench.quantities import kib
from flashwright.workbench.sample import PLAIN_SAMPLE

MIN_COLUMNS_FOR_CONFIGS = 150
SPILLS = "!"
"""Marks the registers of a kernel that spills."""
STATIC_COLUMNS = (
    "shared\nKiB",
    "blocks\nper SM",
    "instr. /\n1,000\nscores",
    "bank\nconflicts",
    "global\nsectors",
    "error",
)


def ladder(
    operation: Annotated[
        str | None,
        typer.Option(help=f"What the kernels compute: {' or '.join(climbable_operations())}.", show_default=FORWARD),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(help=f"Kernel family: {' or '.join(climbable_families())}.", show_default=climbable_families()[0]),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="FP16 or BF16.", show_default="BF16")] = None,
    d_head: Annotated[
        int | None,
        typer.Option(*D_HEAD, help="Head dimension, of those that the family has a kernel for.", show_default="128"),
    ] = None,
    causal: CausalOption = False,
    window: WindowOption = None,
    softcap: SoftcapOption = 0.0,
    heads: SampleHeadsOption = None,
    kv_heads: SampleKvHeadsOption = None,
    keys: SampleKeysOption = None,
    output: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the ladder to a .png or .svg file, or both into a directory.")
    ] = None,
    stored: Annotated[
        Path | None, typer.Option("--from", help="Show a stored result instead of climbing; needs no GPU.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile, simulate and check every rung from the plainest kernel to the fastest; time them on a GPU.

    On a GPU, rungs are timed under a full or a causal mask; with other options they are simulated alone.
    """
    sample = sample_of(causal, window, softcap, heads, kv_heads, keys)
    pictures = plot_files(plot, "ladder") if plot else []
    if output:
        check_destination(output)
    if stored:
        if sample != PLAIN_SAMPLE or any(option is not None for option in (operation, family, dtype, d_head, output)):
            raise ValueError("--from shows a stored result as it is; options of a climb and --output do not go with it")
        result = read_ladder(stored)
    else:
        result = climb(
            DType.parse(dtype or "BF16"), d_head, family=family, operation=operation or FORWARD, sample=sample
        )
    if output:
        write_ladder(output, result)
    if pictures:
        save_figure(ladder_figure(result), pictures)
    if as_json:
        print_json(result.to_dict(), "ladder")
    else:
        _print_ladder(table_console(), result)
    if result.wrong:
        raise ValueError(f"rungs {result.wrong} do not agree with the float64 reference")


def _print_ladder(console: Console, ladder: Ladder) -> None:
    """One table where it fits. On a narrow terminal the times have a table of their own, and configs a list."""
    if console.width >= MIN_COLUMNS_FOR_CONFIGS:
        console.print(_ladder_table(ladder, with_static=True, with_times=ladder.timed, with_configs=True))
        return
    console.print(_ladder_table(ladder, with_static=True, with_times=False, with_configs=False))
    if ladder.timed:
        console.print(_ladder_table(ladder, with_static=False, with_times=True, with_configs=False))
    for result in ladder.rungs:
        console.print(f"{result.rung.number:2} {result.rung.config}", highlight=False, soft_wrap=True)


def _ladder_table(ladder: Ladder, *, with_static: bool, with_times: bool, with_configs: bool) -> Table:
    title = ladder.title if with_static else f"{ladder.title}, timed"
    caption = _ladder_caption(ladder, simulated=with_static, timed=with_times)
    table = Table(title=title, caption=caption, padding=(0, 1 if with_configs or not with_static else 0))
    table.add_column("")
    table.add_column("change", overflow="fold", min_width=14)
    for name in (*(_static_columns(ladder) if with_static else ()), *(_timed_columns(ladder) if with_times else ())):
        table.add_column(name, justify="right", no_wrap=True)
    static, timed = _static_facts(ladder), _timed_facts(ladder) if with_times else []
    for i, result in enumerate(ladder.rungs):
        config = f"\n[dim]{result.rung.config}[/]" if with_configs else ""
        facts = (static[i] if with_static else []) + (timed[i] if with_times else [])
        table.add_row(str(result.rung.number), result.rung.change + config, *facts)
    return table


def _static_columns(ladder: Ladder) -> list[str]:
    first, *others = ladder.rungs[0].compiled
    return ["/".join([f"registers\n{first}", *(arch.removeprefix("sm_") for arch in others)]), *STATIC_COLUMNS]


def _timed_columns(ladder: Ladder) -> list[str]:
    return ["ms", ladder.unit, *(f"% of\n{short_label_of(peer)}" for peer in ladder.peers), "× rung\nbefore"]


def _static_facts(ladder: Ladder) -> list[list[str]]:
    rows = []
    for result in ladder.rungs:
        per_arch = list(result.compiled.values())
        simulation = result.simulation
        rows.append(
            [
                "/".join(f"{c.registers}{SPILLS if c.spill_bytes else ''}" for c in per_arch),
                kib(per_arch[0].shared_bytes),
                "/".join(str(c.blocks_per_sm) for c in per_arch),
                f"{result.instructions_per_thousand_scores:,.0f}",
                f"{simulation.bank_conflicts:,}",
                f"{simulation.global_sectors:,}",
                f"{simulation.relative_error:.1e}{'' if result.correct else ' WRONG'}",
            ]
        )
    return rows


def _timed_facts(ladder: Ladder) -> list[list[str]]:
    return [
        [
            f"{timed.time_ms:.3f}",
            ladder.speed(timed),
            *(f"{100 * timed.ratios[peer]:.1f}" for peer in ladder.peers),
            "" if gain is None else f"{gain:.2f}",
        ]
        for timed, gain in zip(ladder.timings, ladder.gains, strict=True)
    ]


def _ladder_caption(ladder: Ladder, *, simulated: bool, timed: bool) -> str:
    texts = []
    if simulated:
        texts.append(f"Simulated: {_sizes(ladder.simulated_problem)}, checked against float64.")
        if any(compiled.spill_bytes for result in ladder.rungs for compiled in result.compiled.values()):
            texts.append(f"{SPILLS}: the kernel spills registers to memory.")
    if timed:
        gpu = ladder.environment.get("gpu") or "a GPU"
        texts.append(
            f"Timed on {gpu}: batch {ladder.timed_problem.batch}, {_sizes(ladder.timed_problem)}, "
            f"beside {' and '.join(label_of(peer) for peer in ladder.peers)}."
        )
    return " ".join(texts)


def _sizes(problem: RungProblem) -> str:
    heads = f"{problem.heads} heads" + (
        "" if problem.kv_heads == problem.heads else f" on {problem.kv_heads} of K and V"
    )
    rows = f"{problem.rows} rows" if problem.rows > 1 else "1 row"
    return f"{heads}, {rows}" + ("" if problem.keys == problem.rows else f", {problem.keys} keys")
