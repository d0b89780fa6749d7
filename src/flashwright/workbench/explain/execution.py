"""One thread block of a kernel on the simulated GPU, and what one of its warps executed, step by step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from flashwright.compiler.kernel import Kernel
from flashwright.kernels.cache_use import WHOLE, CacheUse
from flashwright.kernels.explanation import SharedMap, TracedWarp
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.simulation.config import simulate_config_on
from flashwright.simulator.access_patterns import global_cost, shared_cost
from flashwright.simulator.run import Run
from flashwright.simulator.trace import MemoryAccess, TraceEntry
from flashwright.workbench.explain.explanations import counted_warp, explanation_of
from flashwright.workbench.explain.facts import SharedTraffic, Simulation, StepCounts
from flashwright.workbench.explain.instruction_kinds import Kind, kind_of_ptx
from flashwright.workbench.explain.loop import Loop, ptx_loop
from flashwright.workbench.explain.tile_to_follow import TooFewSteps, tile_to_follow
from flashwright.workbench.quantities import counted
from flashwright.workbench.sample import PLAIN_SAMPLE, Sample

STEADY_ITERATION = 1
"""The loop's second iteration: its copies and products are those of all that follow. Softmax may still rescale."""


@dataclass(frozen=True)
class Execution:
    """A traced run. Iterations are (first, end) indices into the trace, one per pass through the warp's loop."""

    warp: TracedWarp
    run: Run
    trace: list[TraceEntry]
    iterations: tuple[tuple[int, int], ...]
    q_rows: int
    kv_rows: int
    row_stride_bytes: int
    relative_error: float
    steady: int = STEADY_ITERATION
    """The iteration whose instructions are counted; no edge of a mask cuts its block."""
    steps_before_loop: int = 0
    thread_blocks: int = 1
    """Those of the grid that have anything to do."""


def execute(
    kernel: Kernel[Any], iterations: int, warp: TracedWarp | None = None, sample: Sample = PLAIN_SAMPLE
) -> Execution:
    """Runs a warp's loop that many times, and the steps that a mask cuts besides, on random inputs of one tile; by
    default, the loop of the warp whose instructions are counted.

    Raises `TooFewSteps` if the sample's window or keys leave fewer."""
    config = kernel.config
    warp = warp or counted_warp(config)
    operation = family_of(config).operation
    tile = tile_to_follow(config, sample, warp, iterations)
    steady = STEADY_ITERATION
    if warp.has_masked_steps:
        steady = max(steady, tile.cut_first - warp.steps_before_loop)
    q, k, v = _inputs(config, tile.q_rows, tile.kv_rows, sample)
    options = sample.options._replace(window=tile.window)
    use: dict[str, Any] = {"use": CacheUse(split_units=WHOLE)} if operation.reads_cache else {}
    if tile.blocks > 1:
        use["multiprocessors"] = tile.blocks  # each thread block has a tile
    simulation = simulate_config_on(
        config, (q, k, v), options=options, arch=kernel.arch, check_hazards=False,
        trace_warp=(tile.block, warp.number), **operation.one_tile, **use,
    )  # fmt: skip
    trace = simulation.run.trace
    assert trace is not None
    trace = _in_dynamic_memory(trace, simulation.run.dynamic_shared_offset)
    kinds, executed = [Kind[name] for name in warp.loop_kinds], {entry.ptx_line for entry in trace}
    passes = _iterations(trace, ptx_loop(kernel.ptx, kernel.name, kinds, executed))
    if len(passes) < steady + 2:  # the counted step is not the loop's last
        steps = counted(len(passes), "step")
        raise TooFewSteps(f"the loop has {steps} with {tile.kv_rows:,} keys; counts need {steady + 2}")
    return Execution(
        warp=warp,
        run=simulation.run,
        trace=trace,
        iterations=passes,
        q_rows=tile.q_rows,
        kv_rows=tile.kv_rows,
        row_stride_bytes=k.strides[2],
        relative_error=simulation.relative_error,
        steady=steady,
        steps_before_loop=warp.steps_before_loop
        if warp.has_masked_steps
        else max(warp.steps_before_loop, tile.cut_first),
        thread_blocks=_working_blocks(config, simulation.run, sample),
    )


def _working_blocks(config: KernelConfig, run: Run, sample: Sample) -> int:
    """Of a run on one tile of each head of k."""
    blocks = math.prod(run.grid)
    return min(blocks, sample.head_counts(1)[1]) if family_of(config).operation.reads_cache else blocks


def _in_dynamic_memory(trace: list[TraceEntry], offset: int) -> list[TraceEntry]:
    """The same with addresses of shared memory that count from the beginning of its dynamic part, as families do."""

    def moved(access: MemoryAccess) -> MemoryAccess:
        if access.space != "shared":
            return access
        return replace(access, address_of_lane={lane: at - offset for lane, at in access.address_of_lane.items()})

    if not offset:
        return trace
    return [replace(entry, accesses=tuple(map(moved, entry.accesses))) for entry in trace]


def _inputs(config: KernelConfig, q_rows: int, kv_rows: int, sample: Sample) -> list[np.ndarray]:
    """Standard normal q, k, v whose rows are as far apart as the config requires."""
    generator = np.random.default_rng(0)
    stride = explanation_of(config).row_stride(config)
    heads, kv_heads = sample.head_counts(1)
    return [
        generator.standard_normal((1, n, rows, stride)).astype(NUMPY_DTYPES[config.dtype])[..., : config.d_head]
        for n, rows in ((heads, q_rows), (kv_heads, kv_rows), (kv_heads, kv_rows))
    ]


def _iterations(trace: list[TraceEntry], loop: Loop) -> tuple[tuple[int, int], ...]:
    in_loop = {line.line for line in loop.body}
    starts = [index for index, entry in enumerate(trace) if entry.ptx_line == loop.header.line]
    end = max(index for index, entry in enumerate(trace) if entry.ptx_line in in_loop) + 1
    return tuple(zip(starts, [*starts[1:], end], strict=True))


# --- Counts ----------------------------------------------------------------------------------------------------


def simulation_facts(config: KernelConfig, execution: Execution, shared: SharedMap) -> Simulation:
    counters = execution.run.counters
    totals = {name: value for name, value in asdict(counters).items() if isinstance(value, int)}
    return Simulation(
        q_rows=execution.q_rows,
        kv_rows=execution.kv_rows,
        relative_error=execution.relative_error,
        counters={**totals, "bank_conflicts": counters.bank_conflicts},
        thread_blocks=execution.thread_blocks,
        step=step_counts(config, execution, shared),
    )


def step_counts(config: KernelConfig, execution: Execution, shared: SharedMap) -> StepCounts:
    """What the traced warp did in one steady iteration of the loop."""
    first, end = execution.iterations[execution.steady]
    entries = execution.trace[first:end]
    accesses: Counter[tuple[str, str]] = Counter()
    wavefronts: Counter[tuple[str, str]] = Counter()
    ideal: Counter[tuple[str, str]] = Counter()
    sectors = 0
    for entry in entries:
        for access in entry.accesses:
            if access.space == "global":
                sectors += global_cost(by_lane(access), access.width).sectors
                continue
            region = shared.region_at(min(access.address_of_lane.values()))
            key = (_operation(entry), region.operand if region else "?")
            cost = shared_cost(by_lane(access), access.width)
            accesses[key] += cost.requests
            wavefronts[key] += cost.wavefronts
            ideal[key] += cost.ideal
    return StepCounts(
        instructions=len(entries),
        scores=explanation_of(config).work_per_step(config),
        barriers=sum(kind_of_ptx(entry.opcode) in (Kind.BARRIER, Kind.VOTE) for entry in entries),
        global_sectors=sectors,
        shared=tuple(SharedTraffic(*key, accesses[key], wavefronts[key], ideal[key]) for key in sorted(accesses)),
    )


def _operation(entry: TraceEntry) -> str:
    """`ldmatrix`, `cp.async` or `st.shared`: the opcode without its types."""
    kind = kind_of_ptx(entry.opcode)
    if kind is Kind.LOAD:
        return "ldmatrix"
    return ".".join(entry.opcode.split(".")[:2])


def by_lane(access: MemoryAccess) -> np.ndarray:
    """The addresses of one warp's access as the simulator's cost functions take them: -1 for absent lanes."""
    addresses = np.full((1, 32), -1, np.int64)
    for lane, address in access.address_of_lane.items():
        addresses[0, lane] = address
    return addresses
