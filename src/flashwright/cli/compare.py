"""`flashwright compare`: the facts about two configs side by side, with the differences marked."""

from __future__ import annotations

from typing import Annotated

import typer
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
from flashwright.cli.explain import ArchOption, ConfigArgument, HtmlOption, check_html_place
from flashwright.cli.output import JsonOption, print_json, table_console
from flashwright.kernels.family import OLDEST, KernelConfig
from flashwright.kernels.registry import family_of, parse_config, tile_shapes
from flashwright.workbench.explain.compare import ComparedSection, Comparison, compare_facts
from flashwright.workbench.explain.gather import explain_config
from flashwright.workbench.explain.page import comparison_page
from flashwright.workbench.explain.report import shown


def compare(
    first: ConfigArgument,
    second: ConfigArgument,
    arch: ArchOption = OLDEST,
    html: HtmlOption = None,
    differing: Annotated[bool, typer.Option("--differing", help="Show only the facts that differ.")] = False,
    causal: CausalOption = False,
    window: WindowOption = None,
    softcap: SoftcapOption = 0.0,
    heads: SampleHeadsOption = None,
    kv_heads: SampleKvHeadsOption = None,
    keys: SampleKeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Report how two configs differ in all that `explain` knows."""
    check_html_place(html)
    sample = sample_of(causal, window, softcap, heads, kv_heads, keys)
    configs = (parse_config(first), parse_config(second))
    for config in configs:
        tile_shapes(config)
    target = _common_target(configs, arch)
    comparison = compare_facts(*(explain_config(config, target, turning=(), sample=sample) for config in configs))
    if html is not None:
        html.write_text(comparison_page(comparison), "utf-8")
    if as_json:
        print_json(comparison.to_dict(), "compare")
    elif html is not None:
        table_console().print(f"wrote {html}", highlight=False, soft_wrap=True)
    else:
        _print_comparison(comparison, only_differing=differing)


def _common_target(configs: tuple[KernelConfig, KernelConfig], arch: str) -> str:
    """One architecture for both: the oldest that both run on, unless another is requested."""
    return max(family_of(config).target(arch) for config in configs)


def _print_comparison(comparison: Comparison, *, only_differing: bool) -> None:
    console = table_console()
    for name, facts in zip(("first", "second"), comparison.facts, strict=True):
        console.print(f"[bold]{name}[/]  {facts.config}", highlight=False, soft_wrap=True)
    console.print(f"{comparison.differing} facts differ on {comparison.facts[0].target}", highlight=False)
    for section in comparison.sections:
        table = _table(section, only_differing)
        if table.row_count:
            console.print(table)
        if section.remark:
            console.print(f"{section.title}: {section.remark}", highlight=False, soft_wrap=True)


def _table(section: ComparedSection, only_differing: bool) -> Table:
    table = Table(title=section.title, title_justify="left", pad_edge=False)
    table.add_column("")
    table.add_column("fact")
    table.add_column("first", justify="right")
    table.add_column("second", justify="right")
    for row in section.rows:
        if row.differs or not only_differing:
            style = "bold" if row.differs else "dim"
            table.add_row("≠" if row.differs else "", row.name, *map(shown, row.values), style=style)
    return table
