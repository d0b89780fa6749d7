"""Two KV steps of the Hopper kernel's warps as they were executed: the producer's copies, each consumer's products."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from flashwright.explain.execution import STEADY_ITERATION, Execution, TracedWarp
from flashwright.explain.facts import Flight, Phase, Timeline
from flashwright.explain.hopper import region_name, steps_before_loop
from flashwright.explain.instruction_kinds import Kind, kind_of_ptx
from flashwright.explain.timeline import (
    SOFTMAX_FILE,
    comes_from,
    flights_within,
    groups_left_pending,
    spans,
    steps_shown,
)
from flashwright.hopper.config import WARPS_PER_WARPGROUP, HopperForwardKernelConfig
from flashwright.kernel_source import device_headers
from flashwright.simulator.trace import TraceEntry

CONSUMER, PRODUCER = "consumer", "producer"
_PRODUCER_LOOP = (Kind.COPY,)

# How the kernel's source names the tile that an instruction is about.
_TILE = re.compile(
    r"\b(?P<full>[QKV])\.wait_until_full|wait_until_empty\((?P<empty>[QKV])_|fill<.*\bargs\.(?P<filled>[QKV])\b"
)


def hopper_warps(config: HopperForwardKernelConfig) -> tuple[TracedWarp, ...]:
    """The first warp of each consumer warpgroup, and the producer."""
    consumers = (
        TracedWarp(WARPS_PER_WARPGROUP * index, f"consumer warpgroup {index}", CONSUMER)
        for index in range(config.n_consumers)
    )
    return (*consumers, TracedWarp(config.n_warps, "producer", PRODUCER, _PRODUCER_LOOP))


def hopper_timeline(config: HopperForwardKernelConfig, execution: Execution) -> Timeline:
    shown = steps_shown(execution)
    first, end = shown[0][0], shown[-1][1]
    trace = execution.trace
    consumes = execution.warp.role == CONSUMER
    flights = _products(trace) if consumes else _stages_taken(trace, config)
    return Timeline(
        step_starts=(*(start - first for start, _ in shown), end - first),
        first_step=STEADY_ITERATION + steps_before_loop(config),
        spans=tuple(spans((kind_of_ptx(entry.opcode), _subject(entry)) for entry in trace[first:end])),
        flights=tuple(flights_within(flights, first, end)),
        phases=tuple(p for start, stop in shown for p in _phases(trace[start:stop], start - first) if consumes),
        warp=execution.warp.name,
        role=execution.warp.role,
    )


def _subject(entry: TraceEntry) -> str | None:
    """What an instruction is about: a product's accumulator, the tile of a copy or wait, turns, votes, releases."""
    kind = kind_of_ptx(entry.opcode)
    if kind is Kind.MMA:
        return "S" if entry.text.count("{") == 1 else "O"  # O's product has its other operand in registers too
    if kind in (Kind.COPY, Kind.WAIT):
        return _tile(entry)
    if kind is Kind.BARRIER:
        if entry.opcode.startswith("bar"):
            return "guess" if ".red" in entry.opcode else "turn"
        return "announce" if "expect_tx" in entry.opcode else "release"
    return None


def _tile(entry: TraceEntry) -> str | None:
    """The tile that the source names on the way to an instruction, from the innermost inlined line outwards."""
    source = entry.source
    while source is not None:
        lines = _source_lines(source.file.rsplit("/", 1)[-1])
        if source.line <= len(lines) and (match := _TILE.search(lines[source.line - 1])):
            return match["full"] or match["empty"] or match["filled"]
        source = source.inlined_at
    return None


@cache
def _source_lines(file: str) -> tuple[str, ...]:
    return next((tuple(text.splitlines()) for name, text in device_headers() if name == file), ())


def _products(trace: list[TraceEntry]) -> list[Flight]:
    """Every group of products: from its first instruction over its commit to the wait that leaves it not pending."""
    flights: list[Flight] = []
    pending: list[tuple[str, str, int, int]] = []  # accumulator, its name, first instruction, commit
    groups = {"S": 0, "O": 0}
    start, accumulator = None, None
    guess_is_open = False  # from the vote until K, which scores may be computed from again, is released
    for index, entry in enumerate(trace):
        if kind_of_ptx(entry.opcode) is Kind.MMA:
            start = index if start is None else start
            accumulator = _subject(entry)
        elif "commit_group" in entry.opcode and start is not None and accumulator is not None:
            if guess_is_open:
                name = f"{accumulator} of step {groups[accumulator] - 1} again"
            else:
                name = f"{accumulator} of step {groups[accumulator]}"
                groups[accumulator] += 1
            pending.append((accumulator, name, start, index))
            start = None
        elif (still_pending := groups_left_pending(entry)) is not None:
            finished = max(len(pending) - still_pending, 0)
            for operand, name, begun, committed in pending[:finished]:
                flights.append(Flight(name, operand, begun, committed, index, True))
            pending = pending[finished:]
        elif _subject(entry) in ("guess", "release"):
            guess_is_open = _subject(entry) == "guess"
    return sorted(flights, key=lambda flight: flight.start)


def _stages_taken(trace: list[TraceEntry], config: HopperForwardKernelConfig) -> list[Flight]:
    """Every K and V block: from the start of its copy until the producer finds its stage empty again."""
    copies: dict[str, list[tuple[int, int, int]]] = {"K": [], "V": []}  # when found empty, first and last instruction
    waited: dict[str, int] = {}
    for index, entry in enumerate(trace):
        kind, tile = kind_of_ptx(entry.opcode), _subject(entry)
        if tile not in copies:
            continue
        if kind is Kind.WAIT:
            waited[tile] = index
        elif kind is Kind.COPY:
            found = copies[tile]
            if found and found[-1][0] == waited[tile]:
                found[-1] = (*found[-1][:2], index)
            else:
                found.append((waited[tile], index, index))
    flights = []
    for tile, found in copies.items():
        for step, (_, start, issued) in enumerate(found):
            again = step + config.kv_stages
            end = found[again][0] if again < len(found) else None
            flights.append(Flight(f"{tile} of step {step}", region_name(config, tile, step), start, issued, end, True))
    return sorted(flights, key=lambda flight: flight.start)


def _phases(step: list[TraceEntry], offset: int) -> Iterator[Phase]:
    """Softmax, told by the file an instruction was inlined from; and, behind a wait, what it does to O."""
    softmax = [i for i, entry in enumerate(step) if comes_from(entry.source, SOFTMAX_FILE)]
    if not softmax:
        return
    waits = [i for i, entry in enumerate(step) if i > softmax[0] and groups_left_pending(entry) is not None]
    end = min(waits, default=len(step))
    before, behind = [i for i in softmax if i < end], [i for i in softmax if i > end]
    yield Phase("softmax", before[0] + offset, before[-1] + 1 + offset)
    if any(kind_of_ptx(step[i].opcode) is Kind.FLOAT for i in behind):
        yield Phase("rescale O", behind[0] + offset, behind[-1] + 1 + offset)
