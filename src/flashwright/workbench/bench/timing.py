"""GPU time and host time of calls, each measured apart from the other."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

LAUNCHES_PER_GRAPH = 10
ROUNDS = 9
REPLAY_MS = 5.0
"""How long a replay lasts when its number of launches is chosen by time: long beside an event's resolution."""
MOST_LAUNCHES = 50

Name = TypeVar("Name")


def gpu_times_ms(
    candidates: Mapping[Name, Callable[[], Any]], *, launches: int | None = LAUNCHES_PER_GRAPH, rounds: int = ROUNDS
) -> dict[Name, float]:
    """Milliseconds of GPU time of one launch of each candidate.

    Each is captured in a CUDA graph of many launches (None: as many as fill `REPLAY_MS`). The graphs are replayed in
    turns, in another random order in each round, so that a clock that drifts drifts for all and no candidate always
    follows the same one. Each candidate's time is its median over the rounds.
    """
    import torch

    stream = torch.cuda.Stream()
    captured = {name: capture(call, stream, launches) for name, call in candidates.items()}
    return replay_times_ms(captured, stream, rounds=rounds)


@dataclass(frozen=True)
class CapturedCall:
    """A CUDA graph of several launches of the same call."""

    graph: Any
    launches: int


def capture(
    call: Callable[[], Any],
    stream: Any,
    launches: int | None = LAUNCHES_PER_GRAPH,
    *,
    replay_ms: float = REPLAY_MS,
) -> CapturedCall:
    """A call as a graph of launches on a stream (None: as many as fill `replay_ms`); what it compiles and loads on
    first use happens outside."""
    import torch

    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        if launches is None:
            launches = launches_for(_one_call_ms(call, stream), replay_ms=replay_ms)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(launches):
                call()
    return CapturedCall(graph, launches)


def launches_for(call_ms: float, *, replay_ms: float = REPLAY_MS, most: int = MOST_LAUNCHES) -> int:
    """How many launches of one call fill a replay."""
    return max(1, min(most, round(replay_ms / call_ms))) if call_ms > 0 else most


def replay_times_ms(captured: Mapping[Name, CapturedCall], stream: Any, *, rounds: int = ROUNDS) -> dict[Name, float]:
    """The median milliseconds of one launch of each, replayed in random turns after a round to warm up."""
    import torch

    times: dict[Name, list[float]] = {name: [] for name in captured}
    turns = list(captured.items())
    with torch.cuda.stream(stream):
        for warm in (False,) + (True,) * rounds:
            random.shuffle(turns)
            for name, call in turns:
                replay_ms = _event_ms(call.graph.replay, stream)
                if warm:
                    times[name].append(replay_ms / call.launches)
    return {name: statistics.median(values) for name, values in times.items()}


def _one_call_ms(call: Callable[[], Any], stream: Any) -> float:
    return min(_event_ms(call, stream) for _ in range(2))


def _event_ms(queue: Callable[[], Any], stream: Any) -> float:
    """GPU milliseconds of what a function queues on a stream."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    queue()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end)


def host_us(call: Callable[[], Any], calls: int, repeats: int, *, warm_up: int | None = None) -> float:
    """Microseconds that the host spends on one asynchronous call: the median over repeats of the mean over calls."""
    import torch

    for _ in range(3 * calls if warm_up is None else warm_up):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def forward_flops(batch: int, heads: int, q_length: int, kv_length: int, d_head: int) -> int:
    """Floating-point operations of the two matrix products of a forward pass without a mask."""
    return 4 * batch * heads * q_length * kv_length * d_head
