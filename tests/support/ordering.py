"""The thread blocks of a backward in several orders, and what they leave in the memory that they work in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
from backward_cases import Problem, check_gradients, differentiate, simulated
from mutations import WRONG, SourceMutation

from flashwright.kernels.backward.launch import TURN_BYTES, Scratch
from flashwright.kernels.launch import Sizes
from flashwright.kernels.registry import family_of
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import FULL, Window
from flashwright.runtime.simulated import BackwardSimulation
from flashwright.simulator.findings import HazardChecks, reactions_to_all
from flashwright.simulator.gpu import SimulatedGPU

STEP_LIMIT, QUANTUM = 20_000, 100
"""Backward jumps before a wait for a turn counts as endless, and before others get to run."""
IN_TURN: HazardChecks = {**reactions_to_all("stop"), "unordered-sum": "stop"}
"""Additions to one place that nothing orders are a hazard, too."""
UNORDERED = {"unordered-sum"}


def not_acquired(run: Callable[[], Any]) -> SourceMutation:
    """The wait for a turn says nothing about what others did before they passed it on."""
    return SourceMutation("ptx/reduce.cuh", {"ld.acquire.gpu": "ld.relaxed.gpu"}, run, UNORDERED)


def not_released(run: Callable[[], Any]) -> SourceMutation:
    """A turn is passed on without what was done in it."""
    return SourceMutation("ptx/reduce.cuh", {"st.release.gpu": "st.relaxed.gpu"}, run, UNORDERED)


class InOrder(NamedTuple):
    found: BackwardSimulation
    sums: np.ndarray
    """Of dQ, in fp32: they show the order in which blocks of keys added to them."""
    turns: np.ndarray
    """Of each head's blocks of queries, the first counter; those that nobody wrote are NaN."""


class RememberingGPU(SimulatedGPU):
    """Knows the last array that was copied to it: in a backward of dense tensors, the scratch memory."""

    last: int

    def to_device(self, array: np.ndarray) -> int:
        self.last = super().to_device(array)
        return self.last


def three_blocks(config: Any, window: Window = FULL, heads: tuple[int, int] = (1, 1)) -> Problem:
    """Of keys. Without a window all of them reach a block of rows in the same step; under a causal mask those of later
    keys come first, whatever the order of launch."""
    length = 3 * config.B_c - 10
    return Problem.random((1, *heads, length, length, config.d_head), config.dtype, AttentionOptions(window))


def run_in_order(config: Any, problem: Problem, *, reverse: bool = False, blocks_per_wave: int = 64) -> InOrder:
    """With thread blocks launched in the kernel's order or in the reverse of it, so many side by side."""
    gpus: list[RememberingGPU] = []

    def new_gpu(arch: str) -> RememberingGPU:
        gpus.append(RememberingGPU(arch))
        return gpus[-1]

    with impatient() as patch:
        set_launch_order(config, reverse, patch)
        patch.setattr("flashwright.simulator.gpu.SimulatedGPU", new_gpu)
        patch.setattr("flashwright.simulator.module._blocks_per_wave", lambda *args: blocks_per_wave)
        checks = IN_TURN if config.ordered else "stop"
        found = simulated(config, problem, step_limit=STEP_LIMIT, check_hazards=checks)
    (batches, q_heads, rows, _), (_, kv_heads, keys, _) = problem.q.shape, problem.k.shape
    scratch = Scratch.of(config, Sizes(batches, q_heads, kv_heads, rows, keys))
    memory = gpus[0].to_host(gpus[0].last).view(np.uint8)
    blocks = batches * q_heads * scratch.padded_rows // config.B_r
    sums = memory[scratch.dQ_sums :][: blocks * config.B_r * config.d_head * 4]
    counters = memory[scratch.turns :][: blocks * TURN_BYTES].view(np.int32).reshape(q_heads, -1, TURN_BYTES // 4)
    return InOrder(found, sums.view(np.float32), counters[:, :, 0])


@contextmanager
def impatient() -> Iterator[pytest.MonkeyPatch]:
    """Waits for a turn are interrupted soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashwright.simulator.wave._FAIRNESS_QUANTUM", QUANTUM)
        yield patch


def set_launch_order(config: Any, reverse: bool, patch: pytest.MonkeyPatch) -> None:
    source = import_module(f"flashwright.kernels.backward.{family_of(config).name}.source")
    headers = dict(source.device_headers())
    name = "attention/key_tile.cuh"
    orders = {
        "kv_group = group % groups;": "kv_group = groups - 1 - group % groups;",
        "kv_group = ordered ? groups - 1 - turn : turn;": "kv_group = ordered ? turn : groups - 1 - turn;",
    }
    for order, other in orders.items():
        assert order in headers[name], "blocks of keys are dealt in another way; has the kernel changed?"
        if reverse:
            headers[name] = headers[name].replace(order, other)
    patch.setattr(source, "device_headers", lambda: tuple(headers.items()))


def expect_same_sums(config: Any) -> None:
    """Raises `AssertionError` unless the sums are the same in all orders, and right."""
    problem = three_blocks(config)
    first = run_in_order(config, problem)
    check_gradients(problem, first.found, differentiate(problem))
    other = run_in_order(config, problem, reverse=True)
    same = np.array_equal(first.sums.view(np.uint32), other.sums.view(np.uint32))
    assert same, f"{WRONG}: the sums of dQ depend on the order of thread blocks"
