"""Two KV steps of one warp as they were executed: who does what when, and which copies are under way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from flashwright.explain.ampere import steps_before_loop
from flashwright.explain.execution import STEADY_ITERATION, Execution
from flashwright.explain.facts import Flight, Phase, SharedMap, SharedRegion, Span, Timeline
from flashwright.explain.instruction_kinds import Kind, kind_of_ptx
from flashwright.kernel_configs import FlashForwardKernelConfig
from flashwright.simulator.ptx.syntax import SourceLocation
from flashwright.simulator.trace import TraceEntry

STEPS_SHOWN = 2
ITERATIONS_NEEDED = STEADY_ITERATION + STEPS_SHOWN + 1
"""So that the last step shown is not the loop's last, which has no next block to copy."""
SOFTMAX_FILE, _PRODUCT_FILE = "softmax.cuh", "gemm.cuh"


def steps_shown(execution: Execution) -> tuple[tuple[int, int], ...]:
    return execution.iterations[STEADY_ITERATION : STEADY_ITERATION + STEPS_SHOWN]


def timeline_facts(config: FlashForwardKernelConfig, execution: Execution, shared: SharedMap) -> Timeline:
    shown = steps_shown(execution)
    first, end = shown[0][0], shown[-1][1]
    entries = execution.trace[first:end]
    block_bytes = config.B_c * execution.row_stride_bytes
    return Timeline(
        step_starts=(*(start - first for start, _ in shown), end - first),
        first_step=STEADY_ITERATION + steps_before_loop(config),
        spans=tuple(spans(_kind_and_operand(entry, shared) for entry in entries)),
        flights=tuple(flights_within(_flights(execution.trace, shared, block_bytes), first, end)),
        phases=tuple(
            phase for start, stop in shown for phase in _phases(execution.trace[start:stop], offset=start - first)
        ),
    )


# --- Spans -----------------------------------------------------------------------------------------------------


def spans(kinds_and_operands: Iterable[tuple[Kind, str | None]]) -> Iterator[Span]:
    """Runs of instructions of the same kind and operand."""
    current: Span | None = None
    for index, (kind, operand) in enumerate(kinds_and_operands):
        if current is not None and (current.kind, current.operand) == (kind.value, operand):
            current = replace(current, length=current.length + 1)
            continue
        if current is not None:
            yield current
        current = Span(index, 1, kind.value, operand)
    if current is not None:
        yield current


def _kind_and_operand(entry: TraceEntry, shared: SharedMap) -> tuple[Kind, str | None]:
    """In the loop, global loads and the shared stores that follow them are copies through registers."""
    region = None
    for access in entry.accesses:
        if access.space == "shared":
            region = shared.region_at(min(access.address_of_lane.values()))
    kind = kind_of_ptx(entry.opcode)
    if kind in (Kind.GLOBAL, Kind.SHARED):
        kind = Kind.COPY
    return kind, region.operand if region is not None and kind in (Kind.LOAD, Kind.COPY) else None


# --- Copies ----------------------------------------------------------------------------------------------------


@dataclass
class _Copy:
    """A block on its way, as far as the trace has been read."""

    region: SharedRegion
    start: int
    issued: int
    asynchronous: bool
    global_addresses: list[int] = field(default_factory=list)
    end: int | None = None


def _flights(trace: list[TraceEntry], shared: SharedMap, block_bytes: int) -> list[Flight]:
    """Every block's copy of the whole run, with the number of the block that it brings."""
    copies = [*_asynchronous_copies(trace, shared), *_copies_through_registers(trace, shared)]
    return _numbered(copies, block_bytes)


def _asynchronous_copies(trace: list[TraceEntry], shared: SharedMap) -> list[_Copy]:
    """One per group of `cp.async`: from its first instruction to the wait that leaves it not pending."""
    copies: list[_Copy] = []
    pending: list[_Copy] = []  # committed and not waited for, in order
    open_group: _Copy | None = None
    for index, entry in enumerate(trace):
        if kind_of_ptx(entry.opcode) is Kind.COPY:
            region, source = _places(entry, shared)
            if region is None or source is None:
                continue
            if open_group is None:
                open_group = _Copy(region, index, index, asynchronous=True)
            open_group.issued = index
            open_group.global_addresses.append(source)
        elif "commit_group" in entry.opcode and open_group is not None:
            copies.append(open_group)
            pending.append(open_group)
            open_group = None
        elif (still_pending := groups_left_pending(entry)) is not None:
            arrived = max(len(pending) - still_pending, 0)
            for copy in pending[:arrived]:
                copy.end = index
            pending = pending[arrived:]
    return copies


def _copies_through_registers(trace: list[TraceEntry], shared: SharedMap) -> list[_Copy]:
    """One per run of shared stores to a region whose values were loaded from global memory."""
    copies: list[_Copy] = []
    current: _Copy | None = None
    loaded: list[tuple[int, int]] = []  # (index, address) of loads whose values are still in registers
    for index, entry in enumerate(trace):
        kind = kind_of_ptx(entry.opcode)
        region, source = _places(entry, shared)
        if kind is Kind.GLOBAL and source is not None and entry.opcode.startswith("ld"):
            loaded.append((index, source))
        elif kind is Kind.SHARED and loaded and region is not None and entry.opcode.startswith("st"):
            start, source = loaded.pop(0)
            if current is None or current.region != region:
                current = _Copy(region, start, index, asynchronous=False)
                copies.append(current)
            current.issued = current.end = index
            current.global_addresses.append(source)
        elif kind is Kind.BARRIER:
            current = None
    return copies


def _places(entry: TraceEntry, shared: SharedMap) -> tuple[SharedRegion | None, int | None]:
    """The region and the lowest global address that an instruction touches."""
    region, source = None, None
    for access in entry.accesses:
        lowest = min(access.address_of_lane.values())
        if access.space == "shared":
            region = shared.region_at(lowest)
        else:
            source = lowest
    return region, source


def groups_left_pending(entry: TraceEntry) -> int | None:
    """How many of the latest groups a wait does not wait for; None if it is no wait."""
    if "cp.async.wait_all" in entry.opcode:
        return 0
    match = re.search(r"wait_group\S*\s+(\d+)", entry.text) if "wait_group" in entry.opcode else None
    return int(match[1]) if match else None


def _numbered(copies: list[_Copy], block_bytes: int) -> list[Flight]:
    """Blocks are numbered by where they lie in their tensor, from the lowest address that was copied."""
    lowest: dict[str, int] = {}
    for copy in copies:
        first = min(copy.global_addresses)
        lowest[copy.region.operand] = min(lowest.get(copy.region.operand, first), first)
    flights = []
    for copy in copies:
        operand = copy.region.operand
        number = (min(copy.global_addresses) - lowest[operand]) // block_bytes
        name = f"{operand} block {number}"
        flights.append(Flight(name, copy.region.name, copy.start, copy.issued, copy.end, copy.asynchronous))
    return sorted(flights, key=lambda flight: flight.start)


def flights_within(flights: list[Flight], first: int, end: int) -> Iterator[Flight]:
    """Those under way between two indices, which become the new origin and end."""
    for flight in flights:
        if flight.start < end and (flight.end is None or flight.end >= first):
            yield replace(
                flight,
                start=flight.start - first,
                issued=flight.issued - first,
                end=None if flight.end is None else flight.end - first,
            )


# --- Phases ----------------------------------------------------------------------------------------------------


def _phases(step: list[TraceEntry], offset: int) -> Iterator[Phase]:
    """The two products and the softmax between them, told apart by the file an instruction was inlined from."""
    softmax = [i for i, entry in enumerate(step) if comes_from(entry.source, SOFTMAX_FILE)]
    products = [
        i
        for i, entry in enumerate(step)
        if kind_of_ptx(entry.opcode) in (Kind.LOAD, Kind.MMA) and comes_from(entry.source, _PRODUCT_FILE)
    ]
    if not softmax:
        return
    for name, indices in (
        ("S = QKᵀ", [i for i in products if i < softmax[0]]),
        ("softmax", softmax),
        ("O += PV", [i for i in products if i > softmax[0]]),
    ):
        if indices:
            yield Phase(name, indices[0] + offset, indices[-1] + 1 + offset)


def comes_from(source: SourceLocation | None, file: str) -> bool:
    while source is not None:
        if source.file.endswith(file):
            return True
        source = source.inlined_at
    return False
