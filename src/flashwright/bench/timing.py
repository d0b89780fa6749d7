"""Time on the GPU, apart from the time the host takes to ask for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

LAUNCHES_PER_GRAPH = 20
REPLAYS = 7


def gpu_time_ms(launch: Callable[[], Any], *, launches: int = LAUNCHES_PER_GRAPH, replays: int = REPLAYS) -> float:
    """Milliseconds of GPU time of one launch: the median over replays of a CUDA graph of many launches."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()  # compiles, loads and warms up outside the graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(launches):
                launch()
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / launches)
    return statistics.median(times)


def forward_flops(batch: int, heads: int, q_length: int, kv_length: int, d_head: int) -> int:
    """Floating-point operations of the two matrix products of a forward pass without a mask."""
    return 4 * batch * heads * q_length * kv_length * d_head
