"""The Ampere kernel with one synchronisation of its ring broken: the simulated GPU names what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from mutations import WRONG, SourceMutation, expect_named_or_wrong
from samples import sampled

from flashwright import parse_kernel_name_into_config
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.reference import reference_forward, relative_error
from flashwright.runtime.simulated import ForwardSimulation, simulate_forward

OPTIONS = "async+eager+swizzled+load_2_2_2_tiles+opt_softmax+mma_sum+lazy"
RING, KERNEL = "pipeline/ring_of_copies.cuh", "forward/ampere.cuh"


def run_ring() -> ForwardSimulation:
    config = parse_kernel_name_into_config(f"(FP16, 64, 64, 32, 4): {OPTIONS}+ring_2")
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, 1, rows, 64)) for rows in (64, 256, 256))
    q, k, v = (x.astype(NUMPY_DTYPES[config.dtype]) for x in (q, k, v))
    done = simulate_forward(config, q, k, v, check_hazards="stop")
    assert relative_error(done.output, reference_forward(q, k, v)[0]) < 1e-3, WRONG
    return done


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
}


def test_the_kernel_itself_is_right():
    run_ring()


SLOW = (
    "copies do not arrive",
    "a stage is never released",
    "barriers are used before they are initialised",
)


@pytest.mark.parametrize("mutation", sampled(MUTATIONS, SLOW))
def test_a_missing_synchronisation_is_named(mutation, monkeypatch):
    expect_named_or_wrong(mutation, "flashwright.kernels.forward.ampere.source", monkeypatch)
