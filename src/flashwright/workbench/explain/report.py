"""The facts as tables of (name, value, note): one form for the terminal, the page and the comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashwright.kernels.explanation import Estimate, Knob
from flashwright.kernels.family import DEFAULT_SPACE, FULL_SPACE
from flashwright.workbench.explain.facts import (
    ConfigFacts,
    Effects,
    KVLoop,
    RegisterBudget,
    UnbuiltFacts,
    Verdict,
)
from flashwright.workbench.explain.loop import InstructionMix
from flashwright.workbench.explain.order import distances_text, runs_text
from flashwright.workbench.quantities import counted

Value = str | int | float


@dataclass(frozen=True)
class Row:
    name: str
    value: Value
    note: str = ""


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    rows: tuple[Row, ...]
    remark: str = ""


def sections(facts: ConfigFacts) -> tuple[Section, ...]:
    """All tables but that of the neighbours."""
    return (
        _knobs(facts.knobs),
        Section("verdict", "The autotuning filter", tuple(_verdict(facts))),
        Section("shapes", "Derived tile shapes", tuple(Row(s.name, s.value, s.meaning) for s in facts.shapes)),
        Section("registers", "Registers per thread", tuple(_registers(facts))),
        Section("shared", "Shared memory per thread block", tuple(_shared(facts))),
        Section("occupancy", f"Occupancy on {facts.arch}", tuple(_occupancy(facts))),
        Section(
            "buffering",
            "Double buffering in registers",
            tuple(
                Row(f"{b.operand} in {b.product}", "yes" if b.is_double_buffered else "no", b.reason)
                for b in facts.buffering
            ),
        ),
        Section("ptx", f"The {facts.steps} loop in PTX", tuple(_ptx(facts))),
        Section(
            "sass",
            f"The {facts.steps} loop in machine code",
            tuple(_machine_code(facts.loop)),
            facts.loop.sass_problem or "",
        ),
        Section(
            "order",
            f"Loads and products of the {facts.steps} loop, in order",
            tuple(_orders(facts)),
            _about_orders(facts),
        ),
        Section(
            "simulation",
            f"One {facts.steps} step of one warp, simulated",
            tuple(_step(facts)),
            facts.simulation_problem or "",
        ),
        Section("run", "The whole simulated run", tuple(_run(facts))),
    )


def unbuilt_sections(facts: UnbuiltFacts) -> tuple[Section, ...]:
    """The tables of a config that no kernel can be built from."""
    rows = (
        Row("filter", "rejected", facts.verdict.reason or ""),
        Row("kernel", "none", facts.problem),
        _search(facts.verdict),
    )
    return _knobs(facts.knobs), Section("verdict", "The autotuning filter", rows)


def _knobs(knobs: tuple[Knob, ...]) -> Section:
    return Section("knobs", "The config in words", tuple(Row(k.name, k.value, k.meaning) for k in knobs))


BESIDE_A_REJECTION = ESTIMATED, COMPILED = "estimated", "compiled"
"""Rows of the filter's table that repeat what others have, to hold a rejection against."""


def _verdict(facts: ConfigFacts) -> Iterator[Row]:
    """What the filter says; beside a rejection, the facts of this config."""
    verdict = facts.verdict
    if verdict.kept:
        yield Row("filter", "kept", "no rule of the filter rejects it")
    else:
        yield Row("filter", "rejected", verdict.reason or "")
        if facts.estimate is not None:
            yield Row(ESTIMATED, _resources(facts.estimate), f"before compiling: {_arithmetic(facts.estimate)}")
        spilled = f"{facts.effects.spill_bytes:,} bytes spilled"
        yield Row(COMPILED, _resources(facts.effects), f"{spilled}; for {facts.arch}")
    yield _search(verdict)
    for effect in verdict.measured:
        yield Row(
            f"measured, {effect.rows:,} rows",
            f"{effect.times_base:.2f} × {effect.base}",
            f"times the speed of {effect.base_config} ({effect.change}); {effect.gpu}, {effect.date}, {effect.file}",
        )


_SEARCHES = {
    DEFAULT_SPACE: "flashwright tune times it",
    FULL_SPACE: "flashwright tune --space full times it; the default space leaves it out",
}


def _search(verdict: Verdict) -> Row:
    """Which search times a config."""
    if verdict.space is None:
        why = "no search combines these knobs" if verdict.kept else "no search times what the filter rejects"
        return Row("search space", "none", why)
    command = _SEARCHES[verdict.space]
    return Row("search space", verdict.space, command if verdict.kept else f"{command}, in spite of the filter")


def _resources(of: Estimate | Effects) -> str:
    return f"{of.registers} registers, {of.blocks_per_sm} per SM"


def _arithmetic(estimate: Estimate) -> str:
    """How an estimate comes about."""
    wanted = f"{estimate.operands} registers of operands at the peak and {estimate.others} others"
    return f"{wanted}, of {estimate.limit}: it may spill" if estimate.excess else wanted


def _registers(facts: ConfigFacts) -> Iterator[Row]:
    budget = facts.registers
    for operand in budget.operands:
        yield Row(operand.operand, operand.registers, operand.arithmetic)
    for phase in budget.phases:
        yield Row(f"alive in {phase.name}", phase.total, ", ".join(o.operand for o in phase.operands))
    if budget.phases:
        yield Row("operands at the peak", budget.planned, "addresses, counters and temporaries come on top")
    if facts.estimate is not None:
        yield Row("estimated", facts.estimate.registers, f"before compiling: {_arithmetic(facts.estimate)}")
    yield Row("compiler's count", budget.used, registers_had(budget))
    for change in budget.reallocations:
        yield Row(f"{change.part} after launch", change.registers, change.meaning)
    yield Row("spilled bytes", budget.spill_bytes, "stored to local memory for want of registers")


def registers_had(budget: RegisterBudget) -> str:
    """What the compiler's count is to be held against."""
    if budget.reallocations:
        return "at launch; then " + ", ".join(f"{each.part} {each.registers}" for each in budget.reallocations)
    return f"of {budget.limit} a thread can have"


def _shared(facts: ConfigFacts) -> Iterator[Row]:
    for region in facts.shared.regions:
        size = f"{region.bytes:,} bytes"
        note = f"{size}; {region.note}" if region.note else size
        yield Row(region.name, f"{region.offset:#07x}–{region.end - 1:#07x}", note)
    yield Row("total bytes", facts.shared.total_bytes, f"of {facts.shared_limit_bytes:,} that a block may have")


def _occupancy(facts: ConfigFacts) -> Iterator[Row]:
    found = facts.occupancy
    yield Row("blocks per SM", found.blocks_per_sm, f"limited by {found.limited_by}")
    for resource, blocks in found.limits.items():
        yield Row(f"… by {resource}", blocks, "the limit" if resource == found.limited_by else "")
    yield Row("warps per SM", found.warps_per_sm, f"{found.fraction:.1%} of what the SM can hold")


def _mix(mix: InstructionMix) -> Iterator[Row]:
    for kind, count in mix.by_kind.items():
        yield Row(kind, count, f"{count / mix.total:.1%}")
    yield Row("all instructions", mix.total)


def _ptx(facts: ConfigFacts) -> Iterator[Row]:
    yield from _mix(facts.loop.ptx)
    if facts.simulation is not None:
        executed = facts.simulation.step.instructions
        yield Row("executed in a step", executed, path_of_step(facts.loop.ptx.total, executed))


def path_of_step(in_body: int, executed: int) -> str:
    """Why a step executes another number of instructions than the loop's body has."""
    if executed == in_body:
        return "every instruction of the body, once"
    if executed < in_body:
        return f"the other {in_body - executed:,} stand on branches that this step did not take"
    return "some of the body stands in a loop of its own, and is executed more than once"


def _machine_code(loop: KVLoop) -> Iterator[Row]:
    if loop.sass is not None:
        yield from _mix(loop.sass)
    if loop.serialised is not None:
        yield Row(
            "products serialised",
            "yes" if loop.serialised else "no",
            serialisation(loop),
        )


def serialisation(loop: KVLoop) -> str:
    """What became of asynchronous products; nothing where there are none."""
    if loop.serialised is None:
        return ""
    if loop.serialised:
        return (
            "The assembler has serialised the products: each waits for the one before, and they overlap with nothing."
        )
    return "The assembler has not serialised the products: they run on while the warp does other things."


MOST_PARTS_SHOWN = 8
"""Of an order in a table: machine code may have a hundred runs."""


def _orders(facts: ConfigFacts) -> Iterator[Row]:
    for found in facts.orders:
        runs, kept = len(found.order.runs), found.order.runs == facts.orders[0].order.runs
        order = "; the order of the PTX" if found.is_machine_code and kept else ""
        yield Row(
            f"{found.code}: runs",
            runs,
            f"{runs_text(found, MOST_PARTS_SHOWN)}{order}. Load to first use: {distances_text(found)}",
        )


def _about_orders(facts: ConfigFacts) -> str:
    """What is kept of the order in the source: said where the two can be compared."""
    by_code = {found.code: found.order.runs for found in facts.orders}
    if facts.arch not in by_code:
        return (facts.loop.sass_problem or "") if facts.orders else ""
    in_ptx, own = by_code["PTX"], by_code[facts.arch]
    if in_ptx == own:
        return f"The machine code for {facts.arch} has the order of the PTX."
    return (
        f"The assembler orders loads and products its own way: {len(own)} runs in the machine code for {facts.arch} "
        f"against {len(in_ptx)} in PTX. Medians of the distances, in brackets the least and the most."
    )


def _step(facts: ConfigFacts) -> Iterator[Row]:
    if facts.simulation is None:
        return
    step = facts.simulation.step
    note = "; ".join(part for part in ("executed by the warp", early_step(facts)) if part)
    yield Row("instructions", step.instructions, note)
    yield Row(
        "instructions per 1,000 scores",
        step.instructions_per_thousand_scores,
        f"the warp computes {step.scores:,} scores in a step; comparable between blocks of any size",
    )
    yield Row("barriers", step.barriers)
    yield Row("global sectors", step.global_sectors, "of 32 bytes")
    for traffic in step.shared:
        yield Row(
            f"{traffic.operation} {traffic.operand}: wavefronts",
            traffic.wavefronts,
            f"{traffic.accesses:,} access{'' if traffic.accesses == 1 else 'es'}, "
            f"{counted(traffic.wavefronts_ideal, 'wavefront')} without conflicts",
        )
    of_whom = "wavefronts beyond the ideal" if step.shared else "the warp itself reads and writes no shared memory"
    yield Row("bank conflicts", step.bank_conflicts, of_whom)


def early_step(facts: ConfigFacts) -> str:
    """What a later step may do less of than the counted one; nothing where there is no online softmax."""
    if facts.operation == "backward":
        return ""
    return "an early step, in which rows still find new maxima: later ones of lazy kernels may execute fewer"


def _run(facts: ConfigFacts) -> Iterator[Row]:
    """Of all warps, from the start of the kernel to its end."""
    simulation = facts.simulation
    if simulation is None:
        return
    several = simulation.thread_blocks > 1
    of_whom = f"of all {simulation.thread_blocks} thread blocks" if several else "of the whole thread block"
    for counter, note in _LAUNCH_COUNTERS.items():
        if simulation.counters[counter]:
            yield Row(counter.replace("_", " "), simulation.counters[counter], f"{note}; {of_whom}")
    yield Row(
        "relative error",
        float(f"{simulation.relative_error:.3g}"),
        f"of {simulation.q_rows} rows against {simulation.kv_rows} keys, to float64",
    )


_LAUNCH_COUNTERS = {
    "bytes_global_to_shared": "blocks of the tensors",
    "tensor_flops": "multiplications and additions of the tensor cores",
    "mbarrier_phases": "times that a tile became full or empty",
}


# --- Neighbours ------------------------------------------------------------------------------------------------

EFFECT_NAMES = {
    "registers": "registers",
    "spill_bytes": "spilled bytes",
    "shared_bytes": "shared bytes",
    "blocks_per_sm": "blocks per SM",
    "instructions_per_thousand_scores": "instructions per 1,000 scores",
    "conflicts_per_thousand_scores": "conflicts per 1,000 scores",
}
_MORE_IS_BETTER = {"blocks_per_sm"}


def differences(base: Effects, other: Effects) -> dict[str, float | None]:
    """How far another config's figures are from the base's; None where one of them is unknown."""
    pairs = {name: (getattr(base, name), getattr(other, name)) for name in EFFECT_NAMES}
    return {name: None if old is None or new is None else round(new - old, 1) for name, (old, new) in pairs.items()}


def is_better(name: str, difference: float | None, *, fewer_registers_are_better: bool = True) -> bool | None:
    """Whether a difference speaks for the other config; None if there is none, or if it says nothing."""
    if not difference or (name == "registers" and not fewer_registers_are_better):
        return None
    return (difference > 0) == (name in _MORE_IS_BETTER)


def shown(value: Value) -> str:
    """A value as people read it."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def shown_or_unknown(value: Value | None) -> str:
    return "?" if value is None else shown(value)


def shown_difference(difference: float | None) -> str:
    if difference is None:
        return "?"
    whole = int(difference) if difference == int(difference) else difference
    return f"{whole:+,}".replace("-", "−") if difference else "·"
