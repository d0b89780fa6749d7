"""The page about one config, and the page about two: facts and pictures in the order a learner reads them."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from flashwright.explain.compare import ComparedSection, Comparison
from flashwright.explain.facts import ConfigFacts, Effects, Knob, Neighbour
from flashwright.explain.loop import InstructionMix
from flashwright.explain.markup import document, figure, note, number, numbers, paragraph, row, section, table
from flashwright.explain.pictures.banks import banks_picture
from flashwright.explain.pictures.fragments import fragments_picture
from flashwright.explain.pictures.registers import registers_picture
from flashwright.explain.pictures.shared_map import shared_map_picture
from flashwright.explain.pictures.timeline import timeline_picture
from flashwright.explain.report import (
    EFFECT_NAMES,
    Section,
    differences,
    is_better,
    sections,
    shown,
    shown_difference,
)


def config_page(facts: ConfigFacts) -> str:
    """All the facts and pictures of one config."""
    tables = {each.key: each for each in sections(facts)}
    parts = {
        "knobs": ("The config in words", _knobs(facts.knobs)),
        "timeline": ("Two steps of the loop", _timeline(facts)),
        "banks": ("Shared memory and its banks", _shared_memory(facts, tables["shared"])),
        "registers": ("Registers", _registers(facts, tables["registers"], tables["buffering"])),
        "occupancy": (f"Occupancy on {facts.arch}", _occupancy(facts, tables["occupancy"])),
        "loop": ("Instructions of the KV loop", _loop(facts)),
        "simulation": ("One KV step of one warp", _simulation(tables["simulation"])),
        "mma": ("Who holds what in an mma", _fragments(facts)),
        "shapes": ("Derived tile shapes", _facts_table(tables["shapes"])),
        "neighbours": ("One knob turned", _neighbours(facts)),
    }
    links = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, (title, _) in parts.items())
    return document(
        title=facts.config,
        header=f"""
<p class="family">Forward kernel of the {escape(facts.family)} family, compiled for {escape(facts.arch)}</p>
<h1><code>{escape(facts.config)}</code></h1>
{_verdict(facts)}
{_figures(facts)}
<nav aria-label="Contents"><ul>{links}</ul></nav>""",
        body="".join(section(key, title, html) for key, (title, html) in parts.items()),
        footer="Written by <code>flashwright explain</code>. Numbers come from the compiler, and from PTX executed on "
        "the simulated GPU; nothing here is a timing.",
    )


def comparison_page(comparison: Comparison) -> str:
    """Two configs side by side, with the differing rows marked."""
    first, second = comparison.facts
    timelines = "".join(
        f"<h3><code>{escape(facts.config)}</code></h3>{figure(timeline_picture(facts.timeline, f'timeline-{index}'))}"
        for index, facts in enumerate(comparison.facts)
        if facts.timeline is not None
    )
    parts = [section(each.key, each.title, _compared_table(each)) for each in comparison.sections]
    parts.insert(1, section("timeline", "Two steps of the loop", timelines))
    return document(
        title=f"{first.config} and {second.config}",
        header=f"""
<p class="family">Two forward kernels, compiled for {escape(first.arch)}; {comparison.differing} facts differ</p>
<h1><code>{escape(first.config)}</code><br>against<br><code>{escape(second.config)}</code></h1>""",
        body="".join(parts),
        footer="Written by <code>flashwright compare</code>. Rows that differ are marked ≠.",
    )


# --- Header ----------------------------------------------------------------------------------------------------


def _verdict(facts: ConfigFacts) -> str:
    if facts.verdict.kept:
        return '<p class="verdict">Kept by the autotuning filter: no rule rejects it.</p>'
    return f'<p class="verdict rejected">Rejected by the autotuning filter: {escape(facts.verdict.reason or "")}.</p>'


def _figures(facts: ConfigFacts) -> str:
    budget, resident, effects = facts.registers, facts.occupancy, facts.effects
    figures = [
        ("registers per thread", shown(budget.used), f"of {budget.limit}"),
        ("spilled to memory", shown(budget.spill_bytes), "bytes per thread"),
        ("shared memory", f"{facts.shared.total_bytes / 1024:g}", "KiB per block"),
        ("blocks per SM", shown(resident.blocks_per_sm), f"limited by {resident.limited_by}"),
        ("instructions", _or_unknown(effects.instructions_per_step), "per warp and KV step"),
        ("bank conflicts", _or_unknown(effects.bank_conflicts_per_step), "per warp and KV step"),
    ]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(unit)}</small></dd></div>"
        for name, value, unit in figures
    )
    return f'<dl class="figures">{items}</dl>'


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else shown(value)


# --- Sections --------------------------------------------------------------------------------------------------


def _facts_table(facts: Section) -> str:
    if not facts.rows:
        return paragraph(facts.remark)
    rows = (row(each.name, number(shown(each.value)) + note(each.note)) for each in facts.rows)
    return paragraph(facts.remark) + table(("fact", "#value", ""), rows)


def _knobs(knobs: tuple[Knob, ...]) -> str:
    rows = (row(knob.name, f"<td>{_chip(knob)}</td>{note(knob.meaning)}") for knob in knobs)
    return table(("knob", "value", "what it does"), rows, "facts knobs")


def _chip(knob: Knob) -> str:
    class_ = "chip on" if knob.is_on else "chip"
    return f'<span class="{class_}">{escape(knob.value)}</span>'


def _timeline(facts: ConfigFacts) -> str:
    timeline = facts.timeline
    if timeline is None:
        return paragraph(f"Not simulated: {facts.simulation_problem}.")
    return (
        paragraph(
            "The instructions that one warp really executed, in order, over two steps in the middle of the loop. "
            "A bar above says which block is on its way: framed while its copy is being started, plain until the wait "
            "that makes it arrive."
        )
        + paragraph(" ".join(_overlap(facts)))
        + figure(
            timeline_picture(timeline),
            "Each mark is a run of consecutive instructions of one kind; the numbers beside the lanes count them. "
            "Positions are counts of instructions, not time. They are PTX, in the order the compiler wrote it; the "
            "assembler keeps that order unless assembler_reorders is on.",
        )
    )


def _overlap(facts: ConfigFacts) -> Iterator[str]:
    """What the copies hide behind: the products and the softmax executed while they are under way."""
    timeline = facts.timeline
    assert timeline is not None
    for flight in timeline.flights:
        if flight.start < 0 or flight.end is None or flight.end > timeline.instructions:
            continue
        if not flight.asynchronous:
            yield f"{flight.block} passes through registers, and the warp waits for it."
            continue
        hidden = [phase.name for phase in timeline.phases if flight.issued <= phase.start and phase.end <= flight.end]
        behind = (
            f"behind {', '.join(hidden)}" if hidden else "with nothing to hide behind: the warp waits for it at once"
        )
        yield f"{flight.block} is under way for {flight.end - flight.issued} instructions, {behind}."


def _shared_memory(facts: ConfigFacts, regions: Section) -> str:
    html = figure(shared_map_picture(facts.shared)) + _facts_table(regions)
    if not facts.matrix_loads:
        return html
    own = facts.matrix_loads[0]
    panels = "".join(
        f"<div><h3>{'With' if load.swizzled else 'Without'} swizzle{' (this config)' if load is own else ''}</h3>"
        f"{banks_picture(load, f'banks-{index}')}</div>"
        for index, load in enumerate(sorted(facts.matrix_loads, key=lambda load: load.swizzled))
    )
    return f"""{html}
<h3>One <code>ldmatrix</code> on the banks</h3>
<p>Shared memory has 32 banks of 4 bytes; a row of {own.operand} is moved in vectors of 16 bytes, four banks each. An
<code>ldmatrix.x4</code> loads four 8×8 matrices, one after the other; lanes 0–7 give the addresses of the first one's
rows. Rows that lie in the same banks take turns. The addresses are those of the first <code>ldmatrix</code> of
{own.operand} that the warp executed.</p>
<figure><div class="panels">{panels}</div><figcaption>Colours and numbers name the banks of each vector. Filled circles:
lanes 0–7, the first matrix. Open circles: the other three.</figcaption></figure>"""


def _registers(facts: ConfigFacts, budget: Section, buffering: Section) -> str:
    return (
        paragraph("What a thread's operands need by arithmetic in each part of a step, and what the compiler used.")
        + figure(registers_picture(facts.registers))
        + _facts_table(budget)
        + "<h3>Double buffering</h3>"
        + _facts_table(buffering)
    )


def _occupancy(facts: ConfigFacts, limits: Section) -> str:
    blocks, limited_by = facts.occupancy.blocks_per_sm, facts.occupancy.limited_by
    if blocks == 0:
        return paragraph(f"No block of this kernel fits an SM of {facts.arch}: {limited_by}.") + _facts_table(limits)
    held = "1 block" if blocks == 1 else f"{blocks} blocks"
    return paragraph(
        f"An SM of {facts.arch} holds {held} of it at once; what runs out first: {limited_by}."
    ) + _facts_table(limits)


def _loop(facts: ConfigFacts) -> str:
    sass, problem = facts.loop.sass, facts.loop.sass_problem
    machine_code = paragraph(f"Not available: {problem}.") if sass is None else _mix_table(sass)
    return (
        paragraph("The body of the KV loop, found by its back edge, counted once as it stands in the code.")
        + f'<div class="columns"><div><h3>PTX</h3>{_mix_table(facts.loop.ptx)}</div>'
        + f"<div><h3>Machine code</h3>{machine_code}</div></div>"
    )


def _mix_table(mix: InstructionMix) -> str:
    most = max(mix.by_kind.values())
    rows = [row(kind, number(shown(count)) + _bar(count / most)) for kind, count in mix.by_kind.items()]
    rows.append(row("all", number(shown(mix.total)) + '<td class="bar"></td>', "this"))
    return table(("kind", "#count", ""), rows)


def _bar(share: float) -> str:
    return f'<td class="bar"><span class="share" style="--share:{share:.1%}"></span></td>'


def _simulation(counts: Section) -> str:
    return paragraph(
        "Counted while the PTX ran on the simulated GPU, in a step in the middle of the loop."
    ) + _facts_table(counts)


def _fragments(facts: ConfigFacts) -> str:
    count = sum(n for opcode, n in facts.loop.ptx.by_opcode.items() if opcode.startswith("mma"))
    return (
        f"<p>A step of the loop is {count} <code>mma.m16n8k16</code> per warp. Each multiplies 16 rows of Q with 8 "
        "rows of K, 16 columns deep; later, 16 rows of P with 8 columns of V. No lane holds a whole row: a row of S "
        "is spread over four lanes, which is why softmax needs shuffles between them.</p>"
        + figure(fragments_picture("Q (or P)", "Kᵀ (or V)", "S (or O)"), size="medium")
    )


# --- Neighbours and comparisons --------------------------------------------------------------------------------


def _neighbours(facts: ConfigFacts) -> str:
    if not facts.neighbours:
        return paragraph("Not asked for.")
    own = numbers(_or_unknown(getattr(facts.effects, name)) for name in EFFECT_NAMES)
    rows = [row("this config", own + note(""), "this"), *(_neighbour(facts.effects, each) for each in facts.neighbours)]
    return paragraph(
        "What each knob, turned alone, would change. The first row has this config's own figures; instructions and "
        "conflicts are per warp and KV step, and a step is as long as B_c."
    ) + table(["change", *(f"#Δ {name}" for name in EFFECT_NAMES.values()), "filter"], rows, "neighbours")


_JUDGEMENTS = {True: "better", False: "worse", None: ""}


def _neighbour(base: Effects, neighbour: Neighbour) -> str:
    if neighbour.effects is None:
        return row(neighbour.change, note(f"cannot be built: {neighbour.problem}", len(EFFECT_NAMES) + 1))
    cells = (
        number(shown_difference(value), _JUDGEMENTS[is_better(neighbour, name, value)])
        for name, value in differences(base, neighbour.effects).items()
    )
    return row(neighbour.change, "".join(cells) + note(neighbour.rejection or ""))


def _compared_table(compared: ComparedSection) -> str:
    if not compared.rows:
        return paragraph(compared.remark)
    rows = (
        row(each.name, numbers(map(shown, each.values)), "differs" if each.differs else "") for each in compared.rows
    )
    return paragraph(compared.remark) + table(("fact", "#first", "#second"), rows, "compared")
