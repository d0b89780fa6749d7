"""The register budget: what is alive in each part of a KV step, against the limit and the compiler's count; of one
config, or of two in pairs of bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashwright.kernels.explanation import RegisterPhase
from flashwright.workbench.explain.facts import RegisterBudget
from flashwright.workbench.explain.pictures.svg import line, picture, rect, text

LEFT, RIGHT, TOP = 96, 24, 40
WIDTH = 1160
BAR, GAP = 36, 14
COLOURS = 7
"""Of operands in the style sheet; more operands have them again."""
PAIR_HEADING, PAIR_GAP = 34, 4
TICK, NARROWEST_TICK = 32, 36
LETTER, MARGIN = 7.4, 4
"""About as wide as a letter is, and what a label leaves of its bar: to tell whether it fits."""


def registers_picture(budget: RegisterBudget, steps: str = "KV") -> str:
    most = max(budget.limit, budget.planned, budget.used)
    scale = (WIDTH - LEFT - RIGHT) / most
    colours = {operand.operand: index % COLOURS for index, operand in enumerate(budget.operands)}
    used_y = TOP + len(budget.phases) * (BAR + GAP)
    rows_bottom = used_y + (1 + len(budget.reallocations)) * (BAR + GAP)
    parts: list[str] = []
    for index, phase in enumerate(budget.phases):
        parts += _phase(phase, TOP + index * (BAR + GAP), scale, colours)
    # Where registers are handed over after the launch, the count at launch bounds no operand.
    compiler_top = used_y if budget.reallocations else TOP - 8
    parts += [
        *_compiler(budget, used_y, scale),
        *_reallocations(budget, used_y + BAR + GAP, scale),
        line(LEFT + budget.used * scale, compiler_top, LEFT + budget.used * scale, rows_bottom, "compiler-line"),
        line(LEFT + budget.limit * scale, TOP - 8, LEFT + budget.limit * scale, rows_bottom, "limit-line"),
        text(f"limit {budget.limit}", LEFT + budget.limit * scale, TOP - 14, "label limit", "end"),
        line(LEFT, rows_bottom, WIDTH - RIGHT, rows_bottom, "axis"),
    ]
    parts += _ticks(most, scale, rows_bottom)
    parts += _legend([f"{operand.operand}: {operand.registers}" for operand in budget.operands], rows_bottom + 52)
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


def _compiler(budget: RegisterBudget, y: float, scale: float) -> Iterator[str]:
    yield text("compiler", LEFT - 10, y + 15, "label strong", "end")
    yield text(f"{budget.used} used", LEFT - 10, y + 31, "label", "end")
    yield rect(LEFT, y, budget.used * scale, BAR, "compiler")
    yield _label_of_bar(_compiler_labels(budget), budget.used * scale, y)


def _reallocations(budget: RegisterBudget, top: float, scale: float) -> Iterator[str]:
    for index, each in enumerate(budget.reallocations):
        y = top + index * (BAR + GAP)
        width = each.registers * scale
        yield text(each.part, LEFT - 10, y + 15, "label strong", "end")
        yield text(f"{each.registers} kept", LEFT - 10, y + 31, "label", "end")
        yield rect(LEFT, y, width, BAR, "reallocated")
        yield _label_of_bar([each.meaning], width, y)


def _label_of_bar(labels: Sequence[str], width: float, y: float) -> str:
    """In a bar, or behind it: the first, or the longest that has room."""
    for label in labels:
        for x, room in ((LEFT + 8, width), (LEFT + width + 8, WIDTH - LEFT - width - 8)):
            if LETTER * len(label) < room:
                return text(label, x, y + 22, "bar-label")
    return ""


def _compiler_labels(budget: RegisterBudget) -> tuple[str, ...]:
    """From the longest to the shortest."""
    used, rest = f"{budget.used} used", budget.used - budget.planned
    if budget.reallocations and not budget.spill_bytes:
        return (f"{budget.used} for every thread at launch",)
    if budget.spill_bytes:
        return f"{used}, and {budget.spill_bytes:,} bytes spilled to memory", f"{budget.spill_bytes:,} bytes spilled"
    if rest >= 0:
        return f"{used}: {budget.planned} for operands, {rest} for addresses and temporaries", f"{rest} for addresses"
    fewer = f"{used}: {-rest} fewer than all operands at their peak"
    return f"{fewer}: not all need be alive at once", fewer, f"{-rest} fewer than operands"


def _phase(phase: RegisterPhase, y: float, scale: float, colours: dict[str, int]) -> Iterator[str]:
    yield text(phase.name, LEFT - 10, y + 15, "label strong", "end")
    yield text(f"{phase.total} alive", LEFT - 10, y + 31, "label", "end")
    x: float = LEFT
    for operand in phase.operands:
        width = operand.registers * scale
        tooltip = f"{operand.operand}: {operand.registers} registers ({operand.arithmetic})"
        yield rect(x, y, max(width - 1, 1), BAR, f"operand operand-{colours[operand.operand]}", tooltip)
        full = f"{operand.operand} {operand.registers}"
        first_word = operand.operand.split()[0].rstrip(",")
        labels = (full, f"{first_word} {operand.registers}", str(operand.registers))
        label = next((label for label in labels if len(label) * LETTER + MARGIN < width), "")
        if label:
            yield text(label, x + width / 2, y + 22, "bar-label", "middle")
        x += width


def _ticks(most: int, scale: float, y: float) -> Iterator[str]:
    """Every 32 registers, or as many more as keep the numbers apart."""
    step = TICK
    while step * scale < NARROWEST_TICK:
        step *= 2
    for tick in range(0, most + 1, step):
        x = LEFT + tick * scale
        yield line(x, y, x, y + 5, "axis")
        yield text(tick, x, y + 19, "label", "middle")
    yield text("32-bit registers per thread", LEFT, y + 38, "label")


def _legend(labels: Sequence[str], top: float) -> Iterator[str]:
    """By the order of the operands' colours."""
    for index, label in enumerate(labels):
        x, y = LEFT + index % 4 * 210, top + index // 4 * 24
        yield rect(x, y, 14, 14, f"operand operand-{index}")
        yield text(label, x + 20, y + 12, "label")


# --- Two configs -----------------------------------------------------------------------------------------------


def paired_registers_picture(budgets: tuple[RegisterBudget, RegisterBudget], labels: tuple[str, str]) -> str:
    """Two budgets on one scale: of each pair of bars, the upper is the first config's."""
    most = max(max(budget.limit, budget.planned, budget.used) for budget in budgets)
    scale = (WIDTH - LEFT - RIGHT) / most
    operands = list(dict.fromkeys(operand.operand for budget in budgets for operand in budget.operands))
    colours = {operand: index for index, operand in enumerate(operands)}
    phases = list(dict.fromkeys(phase.name for budget in budgets for phase in budget.phases))
    y = TOP + PAIR_HEADING
    parts = [
        text(f"upper bars: {labels[0]}", LEFT, 14, "label strong"),
        text(f"lower bars: {labels[1]}", LEFT, 30, "label strong"),
    ]
    for name in phases:
        for budget in budgets:
            phase = next((phase for phase in budget.phases if phase.name == name), None)
            if phase is not None:
                parts += _phase(phase, y, scale, colours)
            else:
                parts += [text(name, LEFT - 10, y + 15, "label strong", "end"), text("none", LEFT + 8, y + 22, "label")]
            y += BAR + PAIR_GAP
        y += GAP
    for budget in budgets:
        parts += _compiler(budget, y, scale)
        y += BAR + PAIR_GAP
    bottom = y + GAP
    for index, limit in enumerate(dict.fromkeys(budget.limit for budget in budgets)):
        x = LEFT + limit * scale
        parts.append(line(x, TOP + PAIR_HEADING - 8, x, bottom, "limit-line"))
        parts.append(text(f"limit {limit}", x, TOP + PAIR_HEADING - 14 - 16 * index, "label limit", "end"))
    parts.append(line(LEFT, bottom, WIDTH - RIGHT, bottom, "axis"))
    parts += _ticks(most, scale, bottom)
    parts += _legend(operands, bottom + 52)
    totals = "; ".join(
        f"{label}: {budget.used} of {budget.limit}" for label, budget in zip(labels, budgets, strict=True)
    )
    return picture(
        "register-pairs",
        WIDTH,
        bottom + 52 + 24 * -(-len(operands) // 4) + 4,
        "Register budgets by operand, in pairs",
        f"Registers of the operands alive in each part of a step, of both configs. The compiler used: {totals}.",
        parts,
    )
