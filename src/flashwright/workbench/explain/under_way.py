"""What is under way while a warp does other things: copies of blocks and groups of products, read from a trace.

Recognised by instructions: groups of `cp.async`, loads and stores through registers, bulk copies into the stages of a
ring, groups of `wgmma`. A kernel has those that it executes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

from flashwright.kernels.explanation import SharedMap, SharedRegion
from flashwright.simulator.trace import TraceEntry
from flashwright.workbench.explain.facts import Flight
from flashwright.workbench.explain.instruction_kinds import Kind, kind_of_ptx

Subject = Callable[[TraceEntry], str | None]
"""What an instruction is about: an operand, a product, a vote, a release."""
VOTE, RELEASE = "guess", "release"


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


def groups_left_pending(entry: TraceEntry) -> int | None:
    """How many of the latest groups a wait does not wait for; None if it is no wait."""
    if "cp.async.wait_all" in entry.opcode:
        return 0
    match = re.search(r"wait_group\S*\s+(\d+)", entry.text) if "wait_group" in entry.opcode else None
    return int(match[1]) if match else None


def is_bulk_copy(entry: TraceEntry) -> bool:
    return kind_of_ptx(entry.opcode) is Kind.COPY and entry.opcode.startswith("cp.async.bulk")


def is_asynchronous_product(entry: TraceEntry) -> bool:
    return entry.opcode.startswith("wgmma.mma")


# --- Copies of blocks that every thread takes part in ----------------------------------------------------------


@dataclass
class BlockCopy:
    """A block on its way, as far as the trace has been read."""

    region: SharedRegion
    start: int
    issued: int
    asynchronous: bool
    global_addresses: list[int] = field(default_factory=list)
    end: int | None = None
    instructions: list[int] = field(default_factory=list)
    """Indices of its loads and stores, where it passes through registers."""


def copies_by_groups(trace: list[TraceEntry], subject: Subject, shared: SharedMap) -> list[BlockCopy]:
    """One per block in a group of `cp.async`: from its first instruction to the wait that leaves the group not
    pending, or to that for the mbarrier which counts it."""
    copies: list[BlockCopy] = []
    pending: list[list[BlockCopy]] = []  # groups that are committed and not waited for, in order
    open_group: dict[str, BlockCopy] = {}
    stages: list[list[BlockCopy]] = []  # what each mbarrier counts, in order
    counted, waited_for = 0, -1  # copies in stages; the last stage that was waited for
    polled: int | None = None  # the line of the last wait, until something else is done
    for index, entry in enumerate(trace):
        if kind_of_ptx(entry.opcode) in (Kind.COPY, Kind.LOAD, Kind.MMA):
            polled = None
        if entry.opcode.startswith("cp.async.mbarrier.arrive"):
            stages.append(copies[counted:])
            counted = len(copies)
        elif entry.opcode.startswith("mbarrier") and kind_of_ptx(entry.opcode) is Kind.WAIT:
            waited_for += subject(entry) is not None and polled != entry.ptx_line
            polled = entry.ptx_line
            if subject(entry) is not None and 0 <= waited_for < len(stages):
                for copy in stages[waited_for]:
                    copy.end = index
        elif kind_of_ptx(entry.opcode) is Kind.COPY:
            region, source = places(entry, shared)
            if region is None or source is None or not region.is_block:
                continue
            copy = open_group.setdefault(region.name, BlockCopy(region, index, index, asynchronous=True))
            copy.issued = index
            copy.global_addresses.append(source)
        elif "cp.async.commit_group" in entry.opcode:
            copies += open_group.values()
            pending.append([*open_group.values()])
            open_group = {}
        elif entry.opcode.startswith("cp.async") and (still_pending := groups_left_pending(entry)) is not None:
            arrived = max(len(pending) - still_pending, 0)
            for copy in (each for group in pending[:arrived] for each in group):
                copy.end = index
            pending = pending[arrived:]
    return copies


def copies_through_registers(trace: list[TraceEntry], shared: SharedMap) -> list[BlockCopy]:
    """One per run of shared stores to a region whose values were loaded from global memory."""
    copies: list[BlockCopy] = []
    current: BlockCopy | None = None
    loaded: list[tuple[int, int]] = []  # (index, address) of loads whose values are still in registers
    for index, entry in enumerate(trace):
        kind = kind_of_ptx(entry.opcode)
        region, source = places(entry, shared)
        if kind is Kind.GLOBAL and source is not None and entry.opcode.startswith("ld"):
            loaded.append((index, source))
        elif kind is Kind.SHARED and loaded and region is not None and entry.opcode.startswith("st"):
            start, source = loaded.pop(0)
            if current is None or current.region != region:
                current = BlockCopy(region, start, index, asynchronous=False)
                copies.append(current)
            current.issued = current.end = index
            current.global_addresses.append(source)
            current.instructions += [start, index]
        elif kind is Kind.BARRIER:
            current = None
    return copies


def places(entry: TraceEntry, shared: SharedMap) -> tuple[SharedRegion | None, int | None]:
    """The region and the lowest global address that an instruction touches."""
    region, source = None, None
    for access in entry.accesses:
        lowest = min(access.address_of_lane.values())
        if access.space == "shared":
            region = shared.region_at(lowest)
        else:
            source = lowest
    return region, source


def numbered(copies: list[BlockCopy], block_bytes: int) -> list[Flight]:
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
    return flights


# --- Stages taken by bulk copies -------------------------------------------------------------------------------


def stages_taken(
    trace: list[TraceEntry], subject: Subject, operands: Collection[str], shared: SharedMap
) -> list[Flight]:
    """Every block of these operands that bulk copies bring: from the start of its copy until the producer finds its
    stage empty again. The regions of an operand are a ring, filled in their order."""
    # When the stage was found empty, and the first and the last instruction of the copy.
    copies: dict[str, list[tuple[int, int, int]]] = {operand: [] for operand in operands}
    found_empty: dict[str, int] = {}
    for index, entry in enumerate(trace):
        operand = subject(entry)
        if operand is None or operand not in copies:
            continue
        if kind_of_ptx(entry.opcode) is Kind.WAIT:
            found_empty[operand] = index
        elif is_bulk_copy(entry):
            of_operand, waited = copies[operand], found_empty.get(operand, index)
            if of_operand and of_operand[-1][0] == waited:
                of_operand[-1] = (*of_operand[-1][:2], index)
            else:
                of_operand.append((waited, index, index))
    flights = []
    for operand, of_operand in copies.items():
        ring = [region.name for region in shared.regions if region.operand == operand] or [operand]
        for step, (_, start, issued) in enumerate(of_operand):
            again = step + len(ring)
            end = of_operand[again][0] if again < len(of_operand) else None
            flights.append(Flight(f"{operand} of step {step}", ring[step % len(ring)], start, issued, end, True))
    return flights


# --- Asynchronous products -------------------------------------------------------------------------------------


def products_by_groups(trace: list[TraceEntry], subject: Subject) -> list[Flight]:
    """Every group of `wgmma`: from its first instruction over its commit to the wait that leaves it not pending."""
    flights: list[Flight] = []
    pending: list[tuple[str, str, int, int]] = []  # product, the group's name, first instruction, commit
    groups: dict[str, int] = {}
    start, product = 0, None
    guess_is_open = False  # from the vote until the release of what scores may be computed from again
    for index, entry in enumerate(trace):
        if is_asynchronous_product(entry):
            start = index if product is None else start
            product = subject(entry) or product or "product"  # lines of inlined code may be lost
        elif "wgmma.commit_group" in entry.opcode and product is not None:
            number = groups.get(product, 0)
            if guess_is_open:
                name = f"{product} of step {number - 1} again"
            else:
                name = f"{product} of step {number}"
                groups[product] = number + 1
            pending.append((product, name, start, index))
            product = None
        elif "wgmma" in entry.opcode and (still_pending := groups_left_pending(entry)) is not None:
            finished = max(len(pending) - still_pending, 0)
            for of_product, name, begun, committed in pending[:finished]:
                flights.append(Flight(name, of_product, begun, committed, index, True))
            pending = pending[finished:]
        elif subject(entry) in (VOTE, RELEASE):
            guess_is_open = subject(entry) == VOTE
    return flights
