"""What attention over many GPUs costs by each strategy, from measured speeds of kernels: a model, nothing is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashwright.choice.lookup import shipped_results
from flashwright.distributed.cost import Cost, Machine, Sizes, cost_of
from flashwright.distributed.layouts import holdings
from flashwright.distributed.links import Link, link_named
from flashwright.distributed.published import SOURCE, comparisons
from flashwright.distributed.strategies import ALL_TO_ALL, Strategy, named_strategy, strategies_for
from flashwright.distributed.visibility import Mask
from flashwright.hardware.models import gpu_named
from flashwright.problem.dtypes import DType
from flashwright.problem.shapes import MAX_D_HEAD
from flashwright.problem.window import Window

CAUSAL = Window(None, 0)
INSIDE = "nvlink"
"""What connects the GPUs of a machine."""
MEASURED_BACKWARD = {("NVIDIA H200", 64): 580e12, ("NVIDIA H200", 128): 607e12, ("NVIDIA H200", 256): 454e12}
"""FLOP/s of the backward of 8192 rows without a mask in bf16, by GPU and head dimension: `speeds` of
benchmarks/results/distributed_h200.json."""
MOST_GPUS = 1024
"""Every rank's messages to every other are counted, so that time grows with their square."""
MEMORY_BYTES_PER_S = {"NVIDIA H200": 4.8e12}


@dataclass(frozen=True)
class PlanProblem:
    """A call over all GPUs."""

    gpus: int
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    dtype: DType = DType.BF16
    window: Window = CAUSAL
    layout: str = "zigzag"
    gpus_per_machine: int = 8
    link: str = INSIDE
    """Between machines."""


@dataclass(frozen=True)
class Plan:
    problem: PlanProblem
    gpu: str
    machine: Machine
    costs: tuple[Cost, ...]
    """The fastest strategy first."""
    least_off: float
    most_off: float
    """How far the model is from published efficiencies, as fractions of one GPU's speed."""

    def to_dict(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "gpu": self.gpu,
            "problem": {
                "gpus": problem.gpus,
                "gpus_per_machine": problem.gpus_per_machine,
                "tokens": problem.tokens,
                "batch": problem.batch,
                "heads": problem.q_heads,
                "kv_heads": problem.kv_heads,
                "head_dim": problem.head_dim,
                "dtype": problem.dtype.name,
                "window": list(problem.window[:2]),
                "layout": problem.layout,
                "link": problem.link,
            },
            "forward_tflops": self.machine.forward_flops_per_s / 1e12,
            "backward_tflops": self.machine.backward_flops_per_s / 1e12,
            "strategies": [_cost_dict(cost) for cost in self.costs],
            "published": {
                "source": SOURCE,
                "figures": [
                    {
                        "gpu": each.figure.gpu.name,
                        "layout": each.figure.layout,
                        "operation": each.operation,
                        "published": each.published,
                        "modelled": each.modelled,
                    }
                    for each in comparisons()
                ],
            },
        }


def _cost_dict(cost: Cost) -> dict[str, Any]:
    passes = {
        name: {
            "sent_bytes": each.sent_bytes,
            "compute_ms": 1e3 * each.compute_s,
            "communication_ms": 1e3 * each.communication_s,
            "time_ms": 1e3 * each.time_s,
        }
        for name, each in (("forward", cost.forward), ("backward", cost.backward))
    }
    return {
        "strategy": str(cost.strategy),
        **passes,
        "efficiency": cost.efficiency,
        "memory_bytes": cost.memory_bytes,
    }


def plan(problem: PlanProblem, gpu: str, tflops: tuple[float, float] | None = None) -> Plan:
    """`tflops`: of the forward and the backward of one GPU, where they are not measured ones."""
    for name, value, most in (
        ("gpus", problem.gpus, MOST_GPUS),
        ("tokens", problem.tokens, None),
        ("d_head", problem.head_dim, MAX_D_HEAD),
        ("batch", problem.batch, None),
        ("gpus_per_machine", problem.gpus_per_machine, None),
    ):
        if value < 1 or (most is not None and value > most):
            raise ValueError(
                f"{name}: {value} is not allowed; allowed: 1 {'or more' if most is None else f'to {most}'}"
            )
    if tflops is not None and min(tflops) <= 0:
        raise ValueError(f"tflops: {tflops[0]:g}/{tflops[1]:g} is not allowed; allowed: more than 0")
    if min(problem.q_heads, problem.kv_heads) < 1 or problem.q_heads % problem.kv_heads:
        raise ValueError(
            f"heads: {problem.q_heads}/{problem.kv_heads} is not allowed; allowed: 1 or more, where heads of k and v "
            "divide those of q"
        )
    model = gpu_named(gpu)
    name = model.name or model.arch
    machine = machine_of(name, problem) if tflops is None else Machine(tflops[0] * 1e12, tflops[1] * 1e12)
    by_rank = holdings(problem.layout, problem.tokens, problem.gpus)
    mask = Mask(problem.window, (0, problem.tokens), (0, problem.tokens))
    sizes = Sizes(problem.batch, problem.q_heads, problem.kv_heads, problem.head_dim)
    costs = sorted(
        (
            cost_of(
                strategy, by_rank, by_rank, mask, sizes, machine, _link(problem.gpus, problem),
                _link(strategy.head_ranks, problem),
            )
            for strategy in planned_strategies(problem)
        ),
        key=lambda cost: cost.time_s,
    )  # fmt: skip
    off = [each.off for each in comparisons()]
    return Plan(problem, name, machine, tuple(costs), min(off), max(off))


def planned_strategies(problem: PlanProblem) -> list[Strategy]:
    """Each by itself, and heads shared inside of a machine with the sequence shared between groups of GPUs."""
    found = strategies_for((problem.gpus,), problem.q_heads, problem.kv_heads, same_lengths=True)
    for head_ranks in range(2, min(problem.gpus_per_machine, problem.q_heads) + 1):
        if problem.gpus % head_ranks == 0 and problem.gpus > head_ranks and problem.q_heads % head_ranks == 0:
            shape = (problem.gpus // head_ranks, head_ranks)
            found += [
                named_strategy((name, ALL_TO_ALL), shape, problem.kv_heads).strategy for name in ("ring", "all-gather")
            ]
    return found


def _link(gpus: int, problem: PlanProblem) -> Link:
    """Between so many GPUs in a row: what is inside of a machine, if it has all of them."""
    between_machines = gpus > problem.gpus_per_machine or not problem.link.startswith("ib")
    return link_named(problem.link if between_machines else INSIDE)


def machine_of(gpu: str, problem: PlanProblem) -> Machine:
    """By the results that ship with the package: those of long sequences without a mask, as most tiles are."""
    measured = [
        result
        for result in shipped_results()
        if result.gpu == gpu
        and result.problem.dtype == problem.dtype
        and not result.problem.causal
        and result.problem.d_head >= problem.head_dim
        and result.problem.operation == "forward"
    ]
    backward = {d: speed for (name, d), speed in MEASURED_BACKWARD.items() if name == gpu and d >= problem.head_dim}
    if not measured or not backward:
        raise ValueError(
            f"gpu: no speed of head_dim {problem.head_dim} in {problem.dtype.name} is measured on {gpu}; "
            "--tflops FORWARD/BACKWARD gives one"
        )
    d_head = min(result.problem.d_head for result in measured)
    longest = max((r for r in measured if r.problem.d_head == d_head), key=lambda r: r.problem.kv_length)
    return Machine(longest.tflops * 1e12, backward[min(backward)], MEMORY_BYTES_PER_S[gpu])
