"""The Ampere kernel with one synchronisation of its rings or pairs broken: the simulated GPU names what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from mutations import WRONG, SourceMutation, expect_named_or_wrong
from samples import sampled

from flashwright import parse_kernel_name_into_config
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.reference import reference_forward, relative_error
from flashwright.runtime.simulated import ForwardSimulation, simulate_forward

OPTIONS = "async+eager+swizzled+load_2_2_2_tiles+opt_softmax+mma_sum+lazy"
RING, TEAM, KERNEL = "pipeline/ring_of_copies.cuh", "attention/team.cuh", "forward/ampere.cuh"


def run(options: str, heights: Sequence[int] = (0,)) -> ForwardSimulation:
    """Scores of each 16 keys are so many powers of 2 above the others."""
    config = parse_kernel_name_into_config(f"(FP16, 64, 64, 32, 4): {OPTIONS}+{options}")
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, 1, rows, 64)) for rows in (64, 256, 256))
    q[..., 0], k[..., 0] = 1, np.resize(np.repeat(heights, 16), 256) * np.log(2) * 8
    q, k, v = (x.astype(NUMPY_DTYPES[config.dtype]) for x in (q, k, v))
    done = simulate_forward(config, q, k, v, check_hazards="stop")
    assert relative_error(done.output, reference_forward(q, k, v)[0]) < 1e-3, WRONG
    return done


def run_ring() -> ForwardSimulation:
    return run("ring_2")


def run_pairs() -> ForwardSimulation:
    return run("paired+two_stages")


def run_pairs_with_a_ring() -> ForwardSimulation:
    return run("paired+ring_3")


def run_rising_pairs() -> ForwardSimulation:
    """In the third step the keys of one warp alone outgrow the references."""
    return run("paired+two_stages", (0, 0, 0, 0, 40, *[0] * 11))


MUTATIONS = {
    "a stage is read before its copies came": SourceMutation(
        RING,
        {"{ mbarrier_poll(full(step), lap(step) % 2); }": "{}"},
        run_ring,
        {"async-copy", "race"},
    ),
    "a stage is refilled while others read it": SourceMutation(
        RING,
        {"{ mbarrier_poll(empty(step), (lap(step) + 1) % 2); }": "{}"},
        run_ring,
        {"race", "async-copy", "mbarrier"},
    ),
    "copies do not arrive": SourceMutation(
        RING, {"{ cp_async_mbarrier_arrive(full(step)); }": "{}"}, run_ring, {"deadlock"}
    ),
    "a stage is never released": SourceMutation(RING, {"mbarrier_arrive(empty(step));": ";"}, run_ring, {"deadlock"}),
    "barriers are used before they are initialised": SourceMutation(
        KERNEL,
        {"            // After this barrier all threads may arrive at the ring's.\n            __syncthreads();\n": ""},
        run_ring,
        {"mbarrier", "race", "uninitialised"},
    ),
    "exponentials are received before they are sent": SourceMutation(
        TEAM,
        {"named_barrier_sync(own_barrier(1 - side), threads);": ""},
        run_pairs,
        {"race", "uninitialised", "deadlock"},
    ),
    "exponentials are not announced": SourceMutation(
        TEAM, {"named_barrier_arrive(own_barrier(side), threads);": ""}, run_pairs, {"deadlock"}
    ),
    "warps do not meet before they replace what they sent": SourceMutation(
        TEAM,
        {"return named_barrier_any(common_barrier(), threads, value);": "return __any_sync(all_lanes, value);"},
        run_pairs_with_a_ring,
        {"race"},
    ),
    "one warp of a pair moves its references alone": SourceMutation(
        TEAM,
        {"return named_barrier_any(common_barrier(), threads, value);": "return __any_sync(all_lanes, value);"},
        run_rising_pairs,
        {"deadlock"},
    ),
    "maxima are read before they are stored": SourceMutation(
        TEAM,
        {"sync(); // both have stored; neither stores again before both have come to the next `any`": ""},
        run_rising_pairs,
        {"race", "uninitialised"},
    ),
    "O is stored before the other warp's columns are there": SourceMutation(
        KERNEL, {"    team.sync(); // all columns of the rows are there\n": ""}, run_pairs, {"race"}
    ),
}


@pytest.mark.parametrize("run_right", [run_ring, run_pairs_with_a_ring, run_rising_pairs])
def test_the_kernel_itself_is_right(run_right):
    run_right()


SLOW = (
    "copies do not arrive",
    "a stage is never released",
    "exponentials are not announced",
    "barriers are used before they are initialised",
)


@pytest.mark.parametrize("mutation", sampled(MUTATIONS, SLOW))
def test_a_missing_synchronisation_is_named(mutation, monkeypatch):
    expect_named_or_wrong(mutation, "flashwright.kernels.forward.ampere.source", monkeypatch)
