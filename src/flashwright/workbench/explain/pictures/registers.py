"""The register budget: what is alive in each part of a KV step, against the limit and the compiler's count."""

from __future__ import annotations

from collections.abc import Iterator

from flashwright.kernels.explanation import RegisterPhase
from flashwright.workbench.explain.facts import RegisterBudget
from flashwright.workbench.explain.pictures.svg import line, picture, rect, text

LEFT, RIGHT, TOP = 96, 24, 40
WIDTH = 1160
BAR, GAP = 36, 14
COLOURS = 7
"""Of operands in the style sheet; more operands have them again."""
LETTER = 7.4
"""About as wide as a letter is, to tell whether a label fits its bar."""


def registers_picture(budget: RegisterBudget, steps: str = "KV") -> str:
    most = max(budget.limit, budget.planned, budget.used)
    scale = (WIDTH - LEFT - RIGHT) / most
    colours = {operand.operand: index % COLOURS for index, operand in enumerate(budget.operands)}
    used_y = TOP + len(budget.phases) * (BAR + GAP)
    rows_bottom = used_y + (1 + len(budget.reallocations)) * (BAR + GAP)
    parts: list[str] = []
    for index, phase in enumerate(budget.phases):
        parts += _phase(phase, TOP + index * (BAR + GAP), scale, colours)
    parts += [
        text("compiler", LEFT - 10, used_y + 15, "label strong", "end"),
        text(f"{budget.used} used", LEFT - 10, used_y + 31, "label", "end"),
        rect(LEFT, used_y, budget.used * scale, BAR, "compiler"),
        text(_compiler_label(budget), LEFT + 8, used_y + 22, "bar-label"),
        *_reallocations(budget, used_y + BAR + GAP, scale),
        line(LEFT + budget.used * scale, TOP - 8, LEFT + budget.used * scale, rows_bottom, "compiler-line"),
        line(LEFT + budget.limit * scale, TOP - 8, LEFT + budget.limit * scale, rows_bottom, "limit-line"),
        text(f"limit {budget.limit}", LEFT + budget.limit * scale, TOP - 14, "label limit", "end"),
        line(LEFT, rows_bottom, WIDTH - RIGHT, rows_bottom, "axis"),
    ]
    for tick in range(0, most + 1, 32):
        x = LEFT + tick * scale
        parts += [
            line(x, rows_bottom, x, rows_bottom + 5, "axis"),
            text(tick, x, rows_bottom + 19, "label", "middle"),
        ]
    parts.append(text("32-bit registers per thread", LEFT, rows_bottom + 38, "label"))
    parts += _legend(budget, colours, rows_bottom + 52)
    phases = "; ".join(f"{phase.name} {phase.total}" for phase in budget.phases)
    return picture(
        "registers",
        WIDTH,
        rows_bottom + 52 + 24 * -(-len(colours) // 4) + 4,
        "Register budget by operand",
        f"Registers of the operands alive in each part of a {steps} step: {phases}. The compiler used {budget.used} of "
        f"{budget.limit} and spilled {budget.spill_bytes} bytes.",
        parts,
    )


def _reallocations(budget: RegisterBudget, top: float, scale: float) -> Iterator[str]:
    for index, each in enumerate(budget.reallocations):
        y = top + index * (BAR + GAP)
        width = each.registers * scale
        yield text(each.part, LEFT - 10, y + 15, "label strong", "end")
        yield text(f"{each.registers} kept", LEFT - 10, y + 31, "label", "end")
        yield rect(LEFT, y, width, BAR, "reallocated")
        fits = LETTER * len(each.meaning) < width
        yield text(each.meaning, LEFT + 8 if fits else LEFT + width + 8, y + 22, "bar-label")


def _compiler_label(budget: RegisterBudget) -> str:
    if budget.reallocations and not budget.spill_bytes:
        return f"{budget.used} for every thread at launch"
    rest = budget.used - budget.planned
    if budget.spill_bytes:
        return f"{budget.used} used, and {budget.spill_bytes} bytes spilled to memory"
    if rest >= 0:
        return f"{budget.used} used: {budget.planned} for operands, {rest} for addresses and temporaries"
    return f"{budget.used} used: {-rest} fewer than all operands at their peak: not all need be alive at once"


def _phase(phase: RegisterPhase, y: float, scale: float, colours: dict[str, int]) -> Iterator[str]:
    yield text(phase.name, LEFT - 10, y + 15, "label strong", "end")
    yield text(f"{phase.total} alive", LEFT - 10, y + 31, "label", "end")
    x: float = LEFT
    for operand in phase.operands:
        width = operand.registers * scale
        tooltip = f"{operand.operand}: {operand.registers} registers ({operand.arithmetic})"
        yield rect(x, y, max(width - 1, 1), BAR, f"operand operand-{colours[operand.operand]}", tooltip)
        full = f"{operand.operand} {operand.registers}"
        labels = (full, f"{operand.operand.split()[0]} {operand.registers}", str(operand.registers))
        label = next((label for label in labels if len(label) * LETTER < width), "")
        if label:
            yield text(label, x + width / 2, y + 22, "bar-label", "middle")
        x += width


def _legend(budget: RegisterBudget, colours: dict[str, int], top: float) -> Iterator[str]:
    for index, operand in enumerate(budget.operands):
        x, y = LEFT + index % 4 * 210, top + index // 4 * 24
        yield rect(x, y, 14, 14, f"operand operand-{colours[operand.operand]}")
        yield text(f"{operand.operand}: {operand.registers}", x + 20, y + 12, "label")
