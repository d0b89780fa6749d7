"""Two steps of one warp as they were executed: who does what when, and what is under way meanwhile.

One analysis for every kernel. What an instruction is about follows from the instruction, from the addresses it gave
to memory, and from the markers of the source lines that it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

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
        *numbered([*copies_by_groups(trace, reading.subject, shared), *through_registers], block_bytes),
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
        """The parts of a step: synchronous products, and what the source marks; one that others interrupt comes as
        often. A part that is left out, because a test found nothing to do, has no arithmetic."""
        parts = list(self._parts(step))
        for name, run in groupby(parts, key=itemgetter(0)):
            indices = [index for _, index in run]
            if any(kind_of_ptx(step[i].opcode) in (Kind.LOAD, Kind.MMA, Kind.FLOAT) for i in indices):
                yield Phase(name, indices[0] + offset, indices[-1] + 1 + offset)

    def _parts(self, step: list[TraceEntry]) -> Iterator[tuple[str, int]]:
        """The instructions of parts, by name and index."""
        loaded_for: str | None = None  # the product that the last load was for
        for index, entry in enumerate(step):
            kind, name = kind_of_ptx(entry.opcode), self.markers.value(entry.source, PHASE)
            if kind in (Kind.LOAD, Kind.MMA) and not is_asynchronous_product(entry):
                product = self.markers.value(entry.source, PRODUCT)
                if product is not None:
                    # Where the compiler inlines one function for several products, its lines may be another one's.
                    if kind is Kind.LOAD:
                        loaded_for = _READERS.get((self.subject(entry), ".trans" in entry.opcode), product)
                    product = loaded_for or product
                    name = self.products.get(product, product)
            if name is not None:
                yield name, index


_READERS: dict[tuple[str | None, bool], str] = {
    ("Q", False): "S",
    ("K", False): "S",
    ("V", True): "O",
    ("V", False): "dP",
    ("dO", False): "dP",
    ("P", False): "dV",
    ("dO", True): "dV",
    ("dS", False): "dK",
    ("Q", True): "dK",
    ("dS", True): "dQ",
    ("K", True): "dQ",
}
"""The product that loads an operand, as its rows lie in shared memory or transposed."""


def _use_of_barrier(entry: TraceEntry) -> str | None:
    """Barriers of all threads have no name. Those of some threads pass a turn; those in shared memory announce
    bytes that are to come, or release a stage."""
    if entry.opcode.startswith("mbarrier"):
        return ANNOUNCEMENT if "expect_tx" in entry.opcode else RELEASE
    return TURN if "," in entry.text else None
