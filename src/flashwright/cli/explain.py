"""`flashwright explain`: all the facts about one config, as tables, JSON or one HTML page."""

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
from flashwright.cli.output import JsonOption, print_json, table_console
from flashwright.hardware.architectures import ARCHITECTURES
from flashwright.kernels.family import OLDEST
from flashwright.kernels.registry import family_of, is_judged_by_filter, parse_config, tile_shapes
from flashwright.workbench.bench.result_files import check_destination, write_atomically
from flashwright.workbench.explain.facts import ConfigFacts, Neighbour, UnbuiltFacts
from flashwright.workbench.explain.gather import explain_config, unbuilt_facts
from flashwright.workbench.explain.knob_pages import knob_links, knob_pages
from flashwright.workbench.explain.linked_pages import INDEX, write_linked_pages
from flashwright.workbench.explain.page import config_page, unbuilt_page
from flashwright.workbench.explain.report import (
    EFFECT_NAMES,
    Section,
    differences,
    is_better,
    sections,
    shown,
    shown_difference,
    shown_or_unknown,
    unbuilt_sections,
)
from flashwright.workbench.quantities import counted

ConfigArgument = Annotated[str, typer.Argument(help="A config's short form, or a kernel's C++ name.", metavar="CONFIG")]
ArchOption = Annotated[
    str,
    typer.Option(
        help=f"The GPU architecture to compile for: {', '.join(ARCHITECTURES)}, or the oldest that it runs on."
    ),
]
HtmlOption = Annotated[Path | None, typer.Option(help="Write one self-contained HTML page with pictures.")]
MIN_COLUMNS_FOR_VERDICTS = 140
_SHORT_NAMES = {
    "registers": "regs",
    "spill_bytes": "spill",
    "shared_bytes": "shared",
    "blocks_per_sm": "blocks",
    "instructions_per_thousand_scores": "instr.",
    "conflicts_per_thousand_scores": "confl.",
}
_COLOURS = {True: "green", False: "red", None: "default"}


def explain(
    config: ConfigArgument,
    arch: ArchOption = OLDEST,
    html: HtmlOption = None,
    pages: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Write that page, and one of every neighbour, which it links to."),
    ] = None,
    neighbours: Annotated[bool, typer.Option(help="Also compile and simulate every config one knob away.")] = True,
    causal: CausalOption = False,
    window: WindowOption = None,
    softcap: SoftcapOption = 0.0,
    heads: SampleHeadsOption = None,
    kv_heads: SampleKvHeadsOption = None,
    keys: SampleKeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Report all there is to know about a config: registers, shared memory, occupancy, instructions, conflicts.

    The kernel is that of a full mask unless options say otherwise. A mask's kernel is examined in steps that no edge
    of the mask cuts. Of a config that the filter rejects and no kernel can be built from: its knobs, and the rule.
    """
    for option, excluded in (("--html", html is not None), ("--no-neighbours", not neighbours), ("--json", as_json)):
        if pages is not None and excluded:
            raise ValueError(f"--pages: not together with {option}")
    if html is not None:
        check_destination(html)
    if pages is not None:
        _prepare_directory(pages)
    sample = sample_of(causal, window, softcap, heads, kv_heads, keys)
    parsed = parse_config(config)
    family_of(parsed).target(arch)  # raises for what the family does not run on
    facts: ConfigFacts | UnbuiltFacts
    try:
        tile_shapes(parsed)
    except ValueError as problem:
        if not is_judged_by_filter(parsed):
            raise
        facts = unbuilt_facts(parsed, str(problem))
    else:
        facts = explain_config(parsed, arch, turning=None if neighbours else (), sample=sample)
    if html is not None:
        links = knob_links(parsed, html.parent)
        page = config_page(facts, links) if isinstance(facts, ConfigFacts) else unbuilt_page(facts)
        write_atomically(html, page.encode())
    if pages is not None:
        if isinstance(facts, UnbuiltFacts):
            raise ValueError(f"--pages: there is no kernel to turn knobs of: {facts.problem}")
        written = write_linked_pages(facts, pages)
        of_neighbours = counted(len(written) - 1, "page")
        table_console().print(f"wrote {written[0]} and {of_neighbours} of neighbours", highlight=False, soft_wrap=True)
    elif as_json:
        print_json(facts.to_dict(), "explain")
    elif html is not None:
        table_console().print(f"wrote {html}", highlight=False, soft_wrap=True)
    elif isinstance(facts, ConfigFacts):
        _print_facts(facts)
    else:
        _print_unbuilt(facts)


def _prepare_directory(path: Path) -> None:
    """An existing directory, or a new one in an existing one."""
    if not path.exists():
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--pages: there is no directory {path.absolute().parent} to make {path.name} in")
        path.mkdir()
    elif not path.is_dir():
        raise ValueError(f"--pages: {path} is a file; give the name of a directory")
    check_destination(path / INDEX)


def _print_facts(facts: ConfigFacts) -> None:
    console = table_console()
    console.print(f"[bold]{facts.config}[/]  {facts.family} family, {facts.target}", highlight=False, soft_wrap=True)
    for section in sections(facts):
        _print_section(console, section)
    if facts.neighbours:
        _print_neighbours(console, facts)
    if pages := knob_pages(parse_config(facts.config)):
        folder = next(iter(pages.values())).parent
        console.print(f"A page on each knob: {folder}", highlight=False, soft_wrap=True)


def _print_unbuilt(facts: UnbuiltFacts) -> None:
    console = table_console()
    console.print(f"[bold]{facts.config}[/]  {facts.family} family, no kernel", highlight=False, soft_wrap=True)
    for section in unbuilt_sections(facts):
        _print_section(console, section)


def _print_section(console: Console, section: Section) -> None:
    if section.rows:
        table = Table(title=section.title, title_justify="left", show_header=False, pad_edge=False)
        table.add_column("fact", no_wrap=True)
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("note", style="dim", overflow="fold")
        for row in section.rows:
            table.add_row(row.name, shown(row.value), row.note)
        console.print(table)
    if section.remark:
        console.print(f"{section.title}: {section.remark}", highlight=False, soft_wrap=True)


def _print_neighbours(console: Console, facts: ConfigFacts) -> None:
    """One table; where a terminal is too narrow for the verdicts, they are listed below it."""
    verdicts_fit = console.width >= MIN_COLUMNS_FOR_VERDICTS
    console.print(_neighbours_table(facts, with_verdicts=verdicts_fit))
    if not verdicts_fit:
        for neighbour in facts.neighbours:
            if neighbour.verdict:
                console.print(f"{neighbour.change}: {neighbour.verdict}", style="dim", highlight=False)


def _neighbours_table(facts: ConfigFacts, *, with_verdicts: bool) -> Table:
    table = Table(
        title="One knob turned: what would change",
        title_justify="left",
        caption=f"Δ of {', '.join(EFFECT_NAMES.values())}.",
        caption_justify="left",
        padding=(0, 1 if with_verdicts else 0),
    )
    table.add_column("change", no_wrap=True)
    for name in EFFECT_NAMES:
        table.add_column(_SHORT_NAMES[name], justify="right", no_wrap=True)
    if with_verdicts:
        table.add_column("verdict", style="dim", overflow="fold")
    own = (shown_or_unknown(getattr(facts.effects, name)) for name in EFFECT_NAMES)
    table.add_row("this config", *own, style="bold")
    for neighbour in facts.neighbours:
        verdict = [neighbour.verdict] if with_verdicts else []
        table.add_row(neighbour.change, *_differences(facts, neighbour), *verdict)
    return table


def _differences(facts: ConfigFacts, neighbour: Neighbour) -> list[str]:
    if neighbour.effects is None:
        return [""] * len(EFFECT_NAMES)
    fewer_are_better = neighbour.fewer_registers_are_better
    return [
        f"[{_COLOURS[is_better(name, value, fewer_registers_are_better=fewer_are_better)]}]{shown_difference(value)}[/]"
        for name, value in differences(facts.effects, neighbour.effects).items()
    ]
