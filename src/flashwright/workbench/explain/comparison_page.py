"""The page about two configs: what differs, what speaks for which, and their pictures on common scales."""

from __future__ import annotations

from html import escape

from flashwright.workbench.explain.compare import ComparedEffect, Comparison
from flashwright.workbench.explain.facts import Timeline
from flashwright.workbench.explain.markup import (
    JUDGEMENTS,
    Tile,
    breakable,
    document,
    figure,
    heading_row,
    number,
    numbers,
    paragraph,
    row,
    section,
    short_form,
    table,
    tiles,
)
from flashwright.workbench.explain.pictures.order import order_picture
from flashwright.workbench.explain.pictures.registers import paired_registers_picture
from flashwright.workbench.explain.pictures.timeline import timeline_picture
from flashwright.workbench.explain.report import EFFECT_NAMES, shown, shown_difference, shown_or_unknown


def comparison_page(comparison: Comparison) -> str:
    """Two configs: figures that speak for one or the other, differing facts, pictures, and what is the same."""
    first, second = comparison.facts
    labels = comparison.labels
    parts = {
        "differing": ("What differs", _differing(comparison)),
        "registers": ("Registers", _registers(comparison)),
        "timeline": ("Two steps of the loop", _timelines(comparison)),
        "order": ("Loads and products of the loop, in order", _orders(comparison)),
        "same": ("What is the same", _same(comparison)),
    }
    parts = {key: (title, html) for key, (title, html) in parts.items() if html}
    links = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, (title, _) in parts.items())
    called = (
        ""
        if labels == (first.config, second.config)
        else f"<p>Below, they are called <b>{breakable(labels[0])}</b> and <b>{breakable(labels[1])}</b>.</p>"
    )
    return document(
        title=f"{first.config} and {second.config}",
        header=f"""
<p class="family">{_kinds(comparison)}, compiled for {escape(first.target)}</p>
<h1>{short_form(first.config)}<br>against<br>{short_form(second.config)}</h1>
{called}
{_tiles(comparison)}
<nav aria-label="Contents"><ul>{links}</ul></nav>""",
        body="".join(section(key, title, html) for key, (title, html) in parts.items()),
        footer="Written by <code>flashwright compare</code>. Numbers come from the compiler, and from PTX executed on "
        "the simulated GPU; what is called measured, from the result file that it names.",
    )


def _kinds(comparison: Comparison) -> str:
    first, second = (facts.operation for facts in comparison.facts)
    return escape(f"Two {first} kernels" if first == second else f"A {first} and a {second} kernel")


# --- Tiles -----------------------------------------------------------------------------------------------------


def _tiles(comparison: Comparison) -> str:
    labels = comparison.labels
    for_second, for_first = comparison.effects_judged(True), comparison.effects_judged(False)
    return tiles(
        [
            Tile("facts that differ", shown(comparison.differing), f"of {comparison.facts_compared:,}"),
            _judged_tile(f"better in {labels[1]}", for_second, JUDGEMENTS[True]),
            _judged_tile(f"worse in {labels[1]}", for_first, JUDGEMENTS[False]),
        ]
    ) + tiles(_effect_tile(effect) for effect in comparison.effects)


def _judged_tile(name: str, effects: tuple[str, ...], judgement: str) -> Tile:
    return Tile(name, shown(len(effects)), ", ".join(effects), judgement if effects else "")


def _effect_tile(effect: ComparedEffect) -> Tile:
    old, new = map(shown_or_unknown, effect.values)
    judgement = JUDGEMENTS[effect.second_is_better]
    if effect.difference == 0:
        return Tile(EFFECT_NAMES[effect.name], new, "in both")
    if effect.difference is None:
        return Tile(EFFECT_NAMES[effect.name], f"{old} → {new}", "not simulated")
    difference = shown_difference(effect.difference)
    note = f"{difference}, {judgement}" if judgement else difference
    return Tile(EFFECT_NAMES[effect.name], f"{old} → {new}", note, judgement)


# --- Tables ----------------------------------------------------------------------------------------------------


def _differing(comparison: Comparison) -> str:
    if not comparison.differing:
        return paragraph("Nothing.")
    rows = [
        html
        for each in comparison.sections
        if each.differing
        for html in (
            heading_row(each.title, 3),
            *(row(other.name, numbers(map(shown, other.values)), "differs") for other in each.differing),
        )
    ]
    return table(("fact", *(f"#{label}" for label in comparison.labels)), rows, "compared")


def _same(comparison: Comparison) -> str:
    rows = [
        html
        for each in comparison.sections
        if each.same
        for html in (
            heading_row(each.title, 2),
            *(row(same.name, number(shown(same.values[0]))) for same in each.same),
        )
    ]
    return table(("fact", "#both"), rows, "compared") if rows else ""


# --- Pictures --------------------------------------------------------------------------------------------------


def _registers(comparison: Comparison) -> str:
    first, second = comparison.facts
    return paragraph(
        "What a thread's operands need by arithmetic in each part of a step, and what the compiler used."
    ) + figure(paired_registers_picture((first.registers, second.registers), comparison.labels))


def _timelines(comparison: Comparison) -> str:
    """One warp of each role, the two configs' one under the other on one scale."""
    of_role: dict[str, list[tuple[str, Timeline]]] = {}
    for index in (0, 1):
        facts, label = comparison.facts[index], comparison.labels[index]
        counted = facts.timeline
        for role in dict.fromkeys(timeline.role for timeline in facts.timelines):
            timeline = next(each for each in facts.timelines if each.role == role)
            # What the counted warps do is compared, whatever their families call them.
            of_role.setdefault("" if timeline is counted else role, []).append((label, timeline))
    html = ""
    for number_of_role, timelines in enumerate(of_role.values()):
        across = max(timeline.instructions for _, timeline in timelines)
        for index, (label, timeline) in enumerate(timelines):
            name = f"timeline-{number_of_role}-{index}"
            warp = "" if timeline.warp == "one warp" else f", {timeline.warp}"
            html += f"<h3>{breakable(label)}{escape(warp)}</h3>"
            html += figure(timeline_picture(timeline, name, instructions_across=across))
    not_simulated = "".join(
        paragraph(f"{label} was not simulated: {facts.simulation_problem}.")
        for label, facts in zip(comparison.labels, comparison.facts, strict=True)
        if not facts.timelines
    )
    if not html:
        return not_simulated
    return (
        not_simulated
        + paragraph(
            "The PTX that a warp executed on the simulated GPU, in order, over two steps in the middle of the loop. "
            "Pictures of the same kind of warp are on one scale: as many instructions, as long a line."
        )
        + html
    )


def _orders(comparison: Comparison) -> str:
    rows = [
        (f"{label}: {found.code}", found.order)
        for label, facts in zip(comparison.labels, comparison.facts, strict=True)
        for found in facts.orders
    ]
    if not rows:
        return ""
    return figure(
        order_picture(rows, "order"),
        "Where loads and products stand in the loop's body, counted once as it stands in the code.",
    )
