"""The Ampere backward with one synchronisation broken: the simulated GPU names what is wrong with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
from backward_cases import Problem, check_backward
from mutations import SourceMutation, expect_named_or_wrong
from ordering import UNORDERED, expect_same_sums, not_acquired, not_released

from flashwright.kernels.registry import parse_config

CONFIG = parse_config("ampere backward (FP16, 32, 32, 32, 2): stages_2_1+swizzled")
ONE_STAGE = replace(CONFIG, Q_stages=1)
PAIRS = replace(ONE_STAGE, d_head=64, n_warps=4, parts=2)
"""Two warps share keys: each other's P goes through shared memory."""


def check_several_steps(config) -> None:
    check_backward(config, Problem.random((1, 1, 1, 120, 30, config.d_head), config.dtype))


def run_two_stages() -> None:
    check_several_steps(CONFIG)


def run_one_stage() -> None:
    check_several_steps(ONE_STAGE)


def run_pairs() -> None:
    check_several_steps(PAIRS)


def run_pairs_with_two_stages_of_Q() -> None:
    check_several_steps(replace(PAIRS, Q_stages=2))


def run_late() -> None:
    check_several_steps(replace(CONFIG, dO_stages=2, late_dQ=True))


def run_ordered() -> None:
    """Sound by test_ordered.py."""
    expect_same_sums(replace(CONFIG, ordered=True))


RUNS = (run_two_stages, run_one_stage, run_pairs, run_pairs_with_two_stages_of_Q, run_late)


@pytest.mark.parametrize("run", RUNS)
def test_the_kernel_is_sound_before_it_is_mutated(run):
    run()


KERNEL, SUMS = "backward/ampere.cuh", "backward/dq_sums.cuh"
WAIT = "    Copies::wait<0>(); // @operand Q\n"
BARRIER = "\n    __syncthreads();\n"
ARRIVED = "// overwritten."
WEIGHTS_WRITTEN = "// Q and dO: a late dQ needs the barrier for nothing else."
DS_BARRIER = """
    if (!cfg::late_dQ || cfg::parts > 1 || cfg::Q_stages == 1 || cfg::dO_stages == 1)
        __syncthreads();
"""
LAST_WRITTEN = "__syncthreads(); // dS of the last block is visible to all warps"
QUERIES_READ = "__syncthreads(); // every warp has finished with Q and dO"
MY_TURN = "__syncthreads(); // nobody adds before it is this block's turn"
RACE, COPY = {"race"}, {"async-copy"}

MUTATIONS = {
    "Q, dO, K and V are read before they have arrived": SourceMutation(KERNEL, {WAIT: ""}, run_two_stages, COPY),
    "what other threads copied is read before it has arrived": SourceMutation(
        KERNEL, {ARRIVED + BARRIER: ARRIVED + "\n"}, run_two_stages, COPY | RACE
    ),
    "what other threads copied is read before it has arrived, one stage": SourceMutation(
        KERNEL, {ARRIVED + BARRIER: ARRIVED + "\n"}, run_one_stage, COPY | RACE
    ),
    "dS is read before all have written it": SourceMutation(
        KERNEL, {WEIGHTS_WRITTEN + DS_BARRIER: WEIGHTS_WRITTEN + "\n"}, run_two_stages, COPY | RACE
    ),
    "P and dS are read before all have written them": SourceMutation(
        KERNEL, {WEIGHTS_WRITTEN + DS_BARRIER: WEIGHTS_WRITTEN + "\n"}, run_pairs, RACE
    ),
    "Q and dO are overwritten while they are read": SourceMutation(
        KERNEL, {WEIGHTS_WRITTEN + DS_BARRIER: WEIGHTS_WRITTEN + "\n"}, run_one_stage, COPY | RACE
    ),
    "Q and dO are overwritten while others of the pair read them": SourceMutation(
        KERNEL, {QUERIES_READ: ";"}, run_pairs, COPY | RACE
    ),
    "dO is overwritten while it is read": SourceMutation(
        KERNEL, {QUERIES_READ: ";"}, run_pairs_with_two_stages_of_Q, COPY | RACE
    ),
    "dS of the previous step is read before all have written it": SourceMutation(
        KERNEL, {ARRIVED + BARRIER: ARRIVED + "\n"}, run_late, COPY | RACE
    ),
    "dS of the last step is read before all have written it": SourceMutation(
        KERNEL, {LAST_WRITTEN: ""}, run_late, RACE
    ),
    "additions do not wait for their turn": SourceMutation(
        SUMS, {"load_acquire(counters + part) < passed_on": "false"}, run_ordered, UNORDERED
    ),
    "one thread waits for the turn, the others add": SourceMutation(KERNEL, {MY_TURN: ""}, run_ordered, UNORDERED),
    "a turn is passed on before all have added": SourceMutation(
        KERNEL, {"__syncthreads(); // all have added": ""}, run_ordered, UNORDERED
    ),
    "a turn is not acquired": not_acquired(run_ordered),
    "a turn is not released": not_released(run_ordered),
    "a turn is never passed on": SourceMutation(
        SUMS, {"store_release(counters + part, own + 1);": ";"}, run_ordered, {"deadlock", "barrier"}
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=list(MUTATIONS))
def test_broken_source_is_named_or_computes_something_else(mutation, monkeypatch):
    expect_named_or_wrong(mutation, "flashwright.kernels.backward.ampere.source", monkeypatch)
