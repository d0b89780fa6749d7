"""`flashwright compare`: the facts about two configs side by side, with the differences marked."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
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
from flashwright.cli.explain import ArchOption, ConfigArgument, HtmlOption
from flashwright.cli.output import JsonOption, print_json, table_console
from flashwright.kernels.family import OLDEST, KernelConfig
from flashwright.kernels.registry import family_of, parse_config, tile_shapes
from flashwright.workbench.bench.result_files import check_destination, write_atomically
from flashwright.workbench.explain.compare import ComparedSection, Comparison, compare_facts
from flashwright.workbench.explain.comparison_page import comparison_page
from flashwright.workbench.explain.gather import explain_config
from flashwright.workbench.explain.report import shown
from flashwright.workbench.quantities import counted


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
    """Report how two configs differ in all that `explain` knows: which facts, and which of them speak for which."""
    if html is not None:
        check_destination(html)
    sample = sample_of(causal, window, softcap, heads, kv_heads, keys)
    configs = (parse_config(first), parse_config(second))
    for config in configs:
        tile_shapes(config)
    target = _common_target(configs, arch)
    comparison = compare_facts(*(explain_config(config, target, turning=(), sample=sample) for config in configs))
    if differing:
        comparison = comparison.only_differing()
    if html is not None:
        write_atomically(html, comparison_page(comparison).encode())
    if as_json:
        print_json(comparison.to_dict(), "compare")
    elif html is not None:
        table_console().print(f"wrote {html}", highlight=False, soft_wrap=True)
    else:
        _print_comparison(comparison)


def _common_target(configs: tuple[KernelConfig, KernelConfig], arch: str) -> str:
    """One architecture for both: the oldest that both run on, unless another is requested."""
    targets = {family_of(config).target_for(config, arch) for config in configs}
    return max(targets, key=lambda target: (int(target.removeprefix("sm_").removesuffix("a")), target))


def _print_comparison(comparison: Comparison) -> None:
    console, labels = table_console(), comparison.labels
    for label, facts in zip(labels, comparison.facts, strict=True):
        console.print(f"[bold]{escape(label)}[/]  {escape(facts.config)}", highlight=False, soft_wrap=True)
    arch = comparison.facts[0].target
    differ = "differs" if comparison.differing == 1 else "differ"
    console.print(f"{counted(comparison.differing, 'fact')} {differ} on {arch}", highlight=False)
    for judgement, is_better in (("better", True), ("worse", False)):
        if names := comparison.effects_judged(is_better):
            console.print(f"{judgement} in {escape(labels[1])}: {', '.join(names)}", highlight=False, soft_wrap=True)
    for section in comparison.sections:
        if section.rows:
            console.print(_table(section, labels))
        if section.remark:
            console.print(f"{section.title}: {section.remark}", highlight=False, soft_wrap=True)


def _table(section: ComparedSection, labels: tuple[str, str]) -> Table:
    table = Table(title=section.title, title_justify="left", pad_edge=False)
    table.add_column("")
    table.add_column("fact")
    for label in labels:
        table.add_column(escape(label), justify="right", overflow="fold")
    for row in (*section.differing, *section.same):
        style = "bold" if row.differs else "dim"
        table.add_row("≠" if row.differs else "", row.name, *map(shown, row.values), style=style)
    return table
