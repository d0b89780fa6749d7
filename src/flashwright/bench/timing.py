"""Time on the GPU, apart from the time the host takes to ask for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

LAUNCHES_PER_GRAPH = 10
ROUNDS = 9

Name = TypeVar("Name")


def gpu_times_ms(
    candidates: Mapping[Name, Callable[[], Any]], *, launches: int = LAUNCHES_PER_GRAPH, rounds: int = ROUNDS
) -> dict[Name, float]:
    """Milliseconds of GPU time of one launch of each candidate.

    Each is captured in a CUDA graph of many launches. The graphs are replayed in turns, so that a clock that drifts
    drifts for all, and each candidate's time is its median over the rounds.
    """
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphs = {name: _capture(launch, launches, stream) for name, launch in candidates.items()}
        times: dict[Name, list[float]] = {name: [] for name in candidates}
        for warm in (False,) + (True,) * rounds:
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(stream)
                graph.replay()
                end.record(stream)
                end.synchronize()
                if warm:
                    times[name].append(start.elapsed_time(end) / launches)
    return {name: statistics.median(values) for name, values in times.items()}


def _capture(launch: Callable[[], Any], launches: int, stream: Any) -> Any:
    import torch

    launch()  # compiles, loads and warms up outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            launch()
    return graph


def forward_flops(batch: int, heads: int, q_length: int, kv_length: int, d_head: int) -> int:
    """Floating-point operations of the two matrix products of a forward pass without a mask."""
    return 4 * batch * heads * q_length * kv_length * d_head
