"""The page about one config: facts and pictures in the order a learner reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import escape
from itertools import pairwise

from flashwright.kernels.explanation import Knob, TimelineTexts
from flashwright.kernels.registry import parse_config
from flashwright.workbench.explain.code_panel import code_data, code_panel
from flashwright.workbench.explain.explanations import explanation_of
from flashwright.workbench.explain.facts import ConfigFacts, Effects, Neighbour, Phase, Timeline, UnbuiltFacts, Verdict
from flashwright.workbench.explain.instruction_pages import banks, product, product_title
from flashwright.workbench.explain.loop import InstructionMix
from flashwright.workbench.explain.markup import (
    JUDGEMENTS,
    Tile,
    breakable,
    document,
    figure,
    note,
    number,
    numbers,
    paragraph,
    row,
    section,
    short_form,
    table,
    tiles,
    wide_table,
)
from flashwright.workbench.explain.pictures.order import order_picture
from flashwright.workbench.explain.pictures.registers import registers_picture
from flashwright.workbench.explain.pictures.shared_map import shared_map_picture
from flashwright.workbench.explain.pictures.timeline import timeline_picture
from flashwright.workbench.explain.report import (
    EFFECT_NAMES,
    Section,
    differences,
    early_step,
    is_better,
    path_of_step,
    registers_had,
    sections,
    serialisation,
    shown,
    shown_difference,
    shown_or_unknown,
    unbuilt_sections,
)
from flashwright.workbench.quantities import counted, kib


def config_page(
    facts: ConfigFacts,
    knob_links: Mapping[str, str] | None = None,
    neighbour_links: Mapping[str, str] | None = None,
    neighbour_of: tuple[str, str] | None = None,
) -> str:
    """All the facts and pictures of one config. What its family does not explain has no section.

    `knob_links` lead from a knob to its page, `neighbour_links` from a change to that of the neighbour; `neighbour_of`
    is the short form and the page of the config that this one is a neighbour of.
    """
    config = parse_config(facts.config)
    own = explanation_of(config)
    tables = {each.key: each for each in sections(facts)}
    parts = {
        "knobs": ("The config in words", _knobs(facts.knobs, knob_links or {})),
        "timeline": ("Two steps of the loop", _timeline(facts, own.timeline)),
        "banks": (
            "Shared memory and its banks",
            _shared_memory(facts, tables["shared"]) + banks(facts, own.banks(config)),
        ),
        "registers": ("Registers", _registers(facts, tables["registers"], tables["buffering"])),
        "occupancy": (f"Occupancy on {facts.arch}", _occupancy(facts, tables["occupancy"])),
        "loop": (f"Instructions of the {facts.steps} loop", _loop(facts)),
        "code": ("From the source to machine code", code_panel(facts)),
        "order": (tables["order"].title, _facts_table(tables["order"]) if facts.orders else ""),
        "simulation": (f"One {facts.steps} step of one warp", _simulation(facts, tables["simulation"])),
        "run": (tables["run"].title, _run(facts, tables["run"])),
        "mma": (product_title(own.product), product(facts, config, own.product)),
        "shapes": ("Derived tile shapes", _facts_table(tables["shapes"])),
        "neighbours": ("One knob turned", _neighbours(facts, neighbour_links or {})),
    }
    parts = {key: (title, html) for key, (title, html) in parts.items() if html}
    links = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, (title, _) in parts.items())
    return document(
        title=facts.config,
        header=f"""{_way_back(neighbour_of)}
<p class="family">{_kind(facts)}, compiled for {escape(facts.target)}</p>
<h1>{short_form(facts.config)}</h1>
{_verdict(facts, tables["verdict"])}
{_warning(facts)}
{_figures(facts)}
<nav aria-label="Contents"><ul>{links}</ul></nav>""",
        body="".join(section(key, title, html) for key, (title, html) in parts.items()),
        footer="Written by <code>flashwright explain</code>. Numbers come from the compiler, and from PTX executed on "
        "the simulated GPU; what is called measured, from the result file that it names.",
        data=code_data(facts, dict(_named_timelines(facts, "timeline"))),
    )


def _way_back(neighbour_of: tuple[str, str] | None) -> str:
    if neighbour_of is None:
        return ""
    config, link = neighbour_of
    return f'<p class="family">One knob away from <a href="{escape(link)}">{short_form(config)}</a></p>'


def _kind(facts: ConfigFacts | UnbuiltFacts) -> str:
    return escape(f"{facts.operation.capitalize()} kernel of the {facts.family} family")


def unbuilt_page(facts: UnbuiltFacts) -> str:
    """What there is to say about a config that no kernel can be built from."""
    _, verdict = unbuilt_sections(facts)
    return document(
        title=facts.config,
        header=f"""
<p class="family">{_kind(facts)}; none can be built</p>
<h1>{short_form(facts.config)}</h1>
{_verdict_line(facts.verdict)}""",
        body=section(verdict.key, verdict.title, _facts_table(verdict))
        + section("knobs", "The config in words", _knobs(facts.knobs, {})),
        footer="Written by <code>flashwright explain</code>.",
    )


# --- Header ----------------------------------------------------------------------------------------------------


def _verdict(facts: ConfigFacts, verdict: Section) -> str:
    """What the filter says, and the facts to hold it against."""
    return _verdict_line(facts.verdict) + _facts_table(replace(verdict, rows=verdict.rows[1:]))


def _verdict_line(verdict: Verdict) -> str:
    if verdict.kept:
        return '<p class="verdict">Kept by the autotuning filter: no rule rejects it.</p>'
    return f'<p class="verdict rejected">Rejected by the autotuning filter: {breakable(verdict.reason or "")}.</p>'


def _warning(facts: ConfigFacts) -> str:
    """What no kernel should have."""
    return f'<p class="verdict rejected">{escape(serialisation(facts.loop))}</p>' if facts.loop.serialised else ""


def _figures(facts: ConfigFacts) -> str:
    budget, resident, effects = facts.registers, facts.occupancy, facts.effects
    figures = [
        ("registers per thread", shown(budget.used), registers_had(budget)),
        ("spilled to memory", shown(budget.spill_bytes), "bytes per thread"),
        ("shared memory", kib(facts.shared.total_bytes), "KiB per block"),
        ("blocks per SM", shown(resident.blocks_per_sm), f"limited by {resident.limited_by}"),
        (
            "instructions",
            shown_or_unknown(effects.instructions_per_thousand_scores),
            _per_scores(facts, effects.instructions_per_step),
        ),
        (
            "bank conflicts",
            shown_or_unknown(effects.conflicts_per_thousand_scores),
            _per_scores(facts, effects.bank_conflicts_per_step),
        ),
    ]
    return tiles(Tile(*each) for each in figures)


def _per_scores(facts: ConfigFacts, per_step: int | None) -> str:
    if per_step is None:
        return "not simulated"
    return f"per 1,000 scores; {shown(per_step)} per warp and {facts.steps} step"


# --- Sections --------------------------------------------------------------------------------------------------


def _facts_table(facts: Section) -> str:
    if not facts.rows:
        return paragraph(facts.remark)
    rows = (row(each.name, number(shown(each.value)) + note(each.note)) for each in facts.rows)
    return paragraph(facts.remark) + table(("fact", "#value", ""), rows)


def _knobs(knobs: tuple[Knob, ...], links: Mapping[str, str]) -> str:
    rows = (
        row(knob.name, f"<td>{_chip(knob)}</td>{note(knob.meaning)}", link=links.get(knob.name, "")) for knob in knobs
    )
    return table(("knob", "value", "what it does"), rows, "facts knobs")


def _chip(knob: Knob) -> str:
    class_ = "chip on" if knob.is_on else "chip"
    return f'<span class="{class_}">{escape(knob.value)}</span>'


def _not_simulated(facts: ConfigFacts) -> str:
    return paragraph(f"Not simulated: {facts.simulation_problem}.")


def _timeline(facts: ConfigFacts, texts: TimelineTexts) -> str:
    if not facts.timelines:
        return _not_simulated(facts)
    return (
        paragraph(texts.introduction)
        + paragraph(" ".join(_overlap(facts, texts)))
        + _timeline_figures(facts, "timeline", texts.caption)
        + _order_figure(facts, "order")
    )


def _timeline_figures(facts: ConfigFacts, name: str, caption: str = "") -> str:
    """One under the other; where there are several, each with its warp's name, and the caption under the last."""
    last = facts.timelines[-1]
    several = len(facts.timelines) > 1
    return "".join(
        (f"<h3>{escape(timeline.warp.capitalize())}</h3>" if several else "")
        + figure(timeline_picture(timeline, picture), caption if timeline is last else "")
        for picture, timeline in _named_timelines(facts, name)
    )


def _named_timelines(facts: ConfigFacts, name: str) -> list[tuple[str, Timeline]]:
    """Each with the name of its picture."""
    if len(facts.timelines) == 1:
        return [(name, facts.timelines[0])]
    return [(f"{name}-warp-{index}", timeline) for index, timeline in enumerate(facts.timelines)]


def _order_figure(facts: ConfigFacts, name: str) -> str:
    if not facts.orders:
        return ""
    machine_code = "" if len(facts.orders) > 1 else f" No machine code is shown: {facts.loop.sass_problem}."
    caption = (
        "Where loads and products stand in the loop's body, counted once as it stands in the code. The simulator "
        f"executes the PTX, a GPU the machine code.{machine_code}"
    )
    return figure(order_picture([(found.code, found.order) for found in facts.orders], name, facts.steps), caption)


def _overlap(facts: ConfigFacts, texts: TimelineTexts) -> Iterator[str]:
    """What copies or products hide behind: that which is executed while they are under way."""
    timeline = facts.timeline
    assert timeline is not None
    lengths: dict[tuple[str, str], list[int]] = {}
    for flight in timeline.flights:
        if flight.start < 0 or flight.end is None or flight.end > timeline.instructions:
            continue
        operand = flight.block.split()[0]
        if not flight.asynchronous:
            lengths[operand, "passes through registers, and the warp waits for it"] = []
            continue
        hidden = [part for phases in _by_name(timeline) if (part := _part_during(phases, flight.issued, flight.end))]
        behind = f"behind {', '.join(hidden)}" if hidden else f"with {texts.nothing_to_hide_behind}"
        of_operand = lengths.setdefault((operand, behind), [])
        if flight.end - flight.issued not in of_operand:
            of_operand.append(flight.end - flight.issued)
    for (operand, how), each in lengths.items():
        *others, last = each or [0]
        listed = f"{', '.join(map(str, others))} and {last}" if others else str(last)
        under_way = f"is under way for {listed} instruction{'s' * (last != 1 or bool(others))}, " if each else ""
        yield f"{operand} {under_way}{how}."


def _by_name(timeline: Timeline) -> Iterator[list[Phase]]:
    """The phases of each step, those of one name together."""
    for start, end in pairwise(timeline.step_starts):
        of_step = [phase for phase in timeline.phases if start <= phase.start < end]
        for name in dict.fromkeys(phase.name for phase in of_step):
            yield [phase for phase in of_step if phase.name == name]


def _part_during(phases: list[Phase], first: int, end: int) -> str:
    """What of phases of one name is executed between two instructions, in words; nothing if that is less than a tenth
    of them."""
    length = sum(phase.end - phase.start for phase in phases)
    during = sum(max(min(phase.end, end) - max(phase.start, first), 0) for phase in phases)
    if during == length:
        return phases[0].name
    return f"{during} of the {length} instructions of {phases[0].name}" if during * 10 >= length else ""


def _shared_memory(facts: ConfigFacts, regions: Section) -> str:
    picture = figure(shared_map_picture(facts.shared)) if facts.shared.regions else ""
    return picture + _facts_table(regions)


def _registers(facts: ConfigFacts, budget: Section, buffering: Section) -> str:
    needed = "What a thread's operands need by arithmetic in each part of a step, and what the compiler used."
    used = "What the compiler used."
    return (
        paragraph(needed if facts.registers.phases else used)
        + figure(registers_picture(facts.registers, facts.steps))
        + _facts_table(budget)
        + ("<h3>Double buffering</h3>" + _facts_table(buffering) if buffering.rows else "")
    )


def _occupancy(facts: ConfigFacts, limits: Section) -> str:
    blocks, limited_by = facts.occupancy.blocks_per_sm, facts.occupancy.limited_by
    if blocks == 0:
        return paragraph(f"No block of this kernel fits an SM of {facts.arch}: {limited_by}.") + _facts_table(limits)
    return paragraph(
        f"An SM of {facts.arch} holds {counted(blocks, 'block')} of it at once; what runs out first: {limited_by}."
    ) + _facts_table(limits)


def _loop(facts: ConfigFacts) -> str:
    sass, problem = facts.loop.sass, facts.loop.sass_problem
    machine_code = paragraph(f"Not available: {problem}.") if sass is None else _mix_table(sass)
    return (
        paragraph(
            f"The body of the {facts.steps} loop, found by its back edge: every instruction counted once, as it stands "
            f"in the code, whether a step executes it or not.{_executed_of(facts)}"
        )
        + paragraph(serialisation(facts.loop))
        + f'<div class="columns"><div><h3>PTX</h3>{_mix_table(facts.loop.ptx)}</div>'
        + f"<div><h3>Machine code</h3>{machine_code}</div></div>"
    )


def _executed_of(facts: ConfigFacts) -> str:
    """How many of the body's instructions a step executes, where that is another number."""
    body = facts.loop.ptx.total
    if facts.simulation is None or facts.simulation.step.instructions == body:
        return ""
    executed = facts.simulation.step.instructions
    return f" The body has {body:,} in PTX; a step executed {executed:,}: {path_of_step(body, executed)}."


def _mix_table(mix: InstructionMix) -> str:
    most = max(mix.by_kind.values())
    rows = [row(kind, number(shown(count)) + _bar(count / most)) for kind, count in mix.by_kind.items()]
    rows.append(row("all", number(shown(mix.total)) + '<td class="bar"></td>', "this"))
    return table(("kind", "#count", ""), rows)


def _bar(share: float) -> str:
    return f'<td class="bar"><span class="share" style="--share:{share:.1%}"></span></td>'


def _simulation(facts: ConfigFacts, counts: Section) -> str:
    if facts.simulation is None:
        return _not_simulated(facts)
    return paragraph(
        "Counted while the PTX ran on the simulated GPU, in a step in the middle of the loop."
    ) + _facts_table(counts)


def _run(facts: ConfigFacts, counts: Section) -> str:
    if facts.simulation is None:
        return ""
    blocks = facts.simulation.thread_blocks
    whose, their = ("One thread block", "its") if blocks == 1 else (f"{blocks} thread blocks", "their")
    return paragraph(
        f"{whose}, from the start of the kernel to its end: all {their} warps and all {their} {facts.steps} steps."
    ) + _facts_table(counts)


# --- Neighbours ------------------------------------------------------------------------------------------------


def _neighbours(facts: ConfigFacts, links: Mapping[str, str]) -> str:
    if not facts.neighbours:
        return paragraph("Not requested.")
    own = numbers(shown_or_unknown(getattr(facts.effects, name)) for name in EFFECT_NAMES)
    rows = [
        row("this config", own + note(""), "this"),
        *(_neighbour(facts.effects, each, links) for each in facts.neighbours),
    ]
    when = early_step(facts)
    return paragraph(
        "What each knob, turned alone, would change. The first row has this config's own figures. Counts per 1,000 "
        "scores, of one warp in the middle of the loop, compare between blocks of any size. "
        + (f"The step is {when}." if when else "")
    ) + wide_table(["change", *(f"#Δ {name}" for name in EFFECT_NAMES.values()), "filter"], rows, "neighbours")


def _neighbour(base: Effects, neighbour: Neighbour, links: Mapping[str, str]) -> str:
    if neighbour.effects is None:
        return row(neighbour.change, note(neighbour.verdict, len(EFFECT_NAMES) + 1))
    cells = (
        number(
            shown_difference(value),
            JUDGEMENTS[is_better(name, value, fewer_registers_are_better=neighbour.fewer_registers_are_better)],
        )
        for name, value in differences(base, neighbour.effects).items()
    )
    link = links.get(neighbour.change, "")
    return row(neighbour.change, "".join(cells) + note(neighbour.verdict), link=link)
