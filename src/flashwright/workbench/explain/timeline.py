"""Two steps of one warp as they were executed: who does what when, and what is under way meanwhile.

One analysis for every kernel. What an instruction is about follows from the instruction, from the addresses it gave
to memory, and from the markers of the source lines that it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from flashwright.kernels.explanation import SharedMap
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of
from flashwright.problem.variant import PLAIN, AttentionVariant
from flashwright.simulator.trace import TraceEntry
from flashwright.workbench.explain.execution import STEADY_ITERATION, Execution
from flashwright.workbench.explain.explanations import explanation_of
from flashwright.workbench.explain.facts import Phase, Span, Timeline
from flashwright.workbench.explain.instruction_kinds import Kind, kind_of_ptx
from flashwright.workbench.explain.markers import OPERAND, PHASE, PRODUCT, Markers
from flashwright.workbench.explain.under_way import (
    RELEASE,
    VOTE,
    copies_by_groups,
    copies_through_registers,
    flights_within,
    is_asynchronous_product,
    is_bulk_copy,
    numbered,
    places,
    products_by_groups,
    stages_taken,
)

STEPS_SHOWN = 2
ITERATIONS_NEEDED = STEADY_ITERATION + STEPS_SHOWN + 1
"""So that the last step shown is not the loop's last, which has no next block to copy."""
TURN, ANNOUNCEMENT = "turn", "announce"


def timeline_of(
    config: KernelConfig, execution: Execution, shared: SharedMap, variant: AttentionVariant = PLAIN
) -> Timeline:
    """What the traced warp of a config's kernel executed."""
    shown = execution.iterations[execution.steady : execution.steady + STEPS_SHOWN]
    first, end = shown[0][0], shown[-1][1]
    trace = execution.trace
    family = family_of(config)
    reading = Reading(shared, Markers(family.source(config, variant)), explanation_of(config).products)
    block_bytes = family.operation.steps.step_rows(config) * execution.row_stride_bytes
    through_registers = copies_through_registers(trace, shared)
    copied_in_steps = {
        operand for entry in trace[first:end] if is_bulk_copy(entry) and (operand := reading.subject(entry))
    }
    flights = [
        *numbered([*copies_by_groups(trace, shared), *through_registers], block_bytes),
        *stages_taken(trace, reading.subject, sorted(copied_in_steps), shared),
        *products_by_groups(trace, reading.subject),
    ]
    copying = {index for copy in through_registers for index in copy.instructions}
    return Timeline(
        step_starts=(*(start - first for start, _ in shown), end - first),
        first_step=execution.steady + execution.steps_before_loop,
        spans=tuple(spans(reading.kind_and_subject(trace[i], i in copying) for i in range(first, end))),
        flights=tuple(flights_within(sorted(flights, key=lambda flight: flight.start), first, end)),
        phases=tuple(
            phase for start, stop in shown for phase in reading.phases(trace[start:stop], offset=start - first)
        ),
        warp=execution.warp.name,
        role=execution.warp.role,
        steps=family.operation.steps.name,
        ptx_lines=tuple(entry.ptx_line for entry in trace[first:end]),
    )


def spans(kinds_and_subjects: Iterable[tuple[Kind, str | None]]) -> Iterator[Span]:
    """Runs of instructions of the same kind and subject."""
    current: Span | None = None
    for index, (kind, subject) in enumerate(kinds_and_subjects):
        if current is not None and (current.kind, current.operand) == (kind.value, subject):
            current = replace(current, length=current.length + 1)
            continue
        if current is not None:
            yield current
        current = Span(index, 1, kind.value, subject)
    if current is not None:
        yield current


@dataclass(frozen=True)
class Reading:
    """How instructions of one kernel are read: by where its blocks lie, and by the markers of its source."""

    shared: SharedMap
    markers: Markers
    products: Mapping[str, str]

    def kind_and_subject(self, entry: TraceEntry, is_copying: bool) -> tuple[Kind, str | None]:
        """Global loads and the shared stores that follow them are copies, through registers."""
        subject = self.subject(entry)
        if not is_copying:
            return kind_of_ptx(entry.opcode), subject
        region, _ = places(entry, self.shared)
        return Kind.COPY, region.operand if region is not None else None

    def subject(self, entry: TraceEntry) -> str | None:
        """The operand of a load, copy or wait, an asynchronous product's result, or what a barrier is for."""
        kind = kind_of_ptx(entry.opcode)
        if kind is Kind.BARRIER:
            return _use_of_barrier(entry)
        if kind is Kind.VOTE:
            return VOTE
        if is_asynchronous_product(entry):
            return self.markers.value(entry.source, PRODUCT)
        if is_bulk_copy(entry) or entry.opcode.startswith("mbarrier"):
            return self.markers.value(entry.source, OPERAND)
        if kind in (Kind.LOAD, Kind.COPY):
            region, _ = places(entry, self.shared)
            return region.operand if region is not None else None
        return None

    def phases(self, step: list[TraceEntry], offset: int) -> Iterator[Phase]:
        """The parts of a step: synchronous products, and what the source marks. A part that is left out, because a
        test found nothing to do, has no arithmetic."""
        for name, indices in sorted(self._parts(step).items(), key=lambda part: part[1][0]):
            if any(kind_of_ptx(step[i].opcode) in (Kind.LOAD, Kind.MMA, Kind.FLOAT) for i in indices):
                yield Phase(name, indices[0] + offset, indices[-1] + 1 + offset)

    def _parts(self, step: list[TraceEntry]) -> dict[str, list[int]]:
        parts: dict[str, list[int]] = {}
        for index, entry in enumerate(step):
            name = self._part(entry)
            if name is not None:
                parts.setdefault(name, []).append(index)
        return parts

    def _part(self, entry: TraceEntry) -> str | None:
        if kind_of_ptx(entry.opcode) in (Kind.LOAD, Kind.MMA) and not is_asynchronous_product(entry):
            product = self.markers.value(entry.source, PRODUCT)
            if product is not None:
                return self.products.get(product, product)
        return self.markers.value(entry.source, PHASE)


def _use_of_barrier(entry: TraceEntry) -> str | None:
    """Barriers of all threads have no name. Those of some threads pass a turn; those in shared memory announce
    bytes that are to come, or release a stage."""
    if entry.opcode.startswith("mbarrier"):
        return ANNOUNCEMENT if "expect_tx" in entry.opcode else RELEASE
    return TURN if "," in entry.text else None
