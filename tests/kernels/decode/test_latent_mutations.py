"""The latent decode with one synchronisation broken: the simulated GPU names what is wrong with it."""

from __future__ import annotations

import pytest
from samples import sampled

pytest.importorskip("torch")

from decode_cases import decoded
from mutations import WRONG, SourceMutation, expect_named_or_wrong

CONFIG = "latent decode (BF16, 576, 64, 32): stages_2"


def checked(**problem: object) -> None:
    try:
        decoded(CONFIG, heads=(20, 1), **problem)
    except (AssertionError, RuntimeError) as error:
        raise AssertionError(WRONG) from error


def run_steps() -> None:
    checked(lengths=(100,), multiprocessors=1)


def run_items() -> None:
    """A thread block has several whole items."""
    checked(lengths=(60, 50), multiprocessors=1)


@pytest.mark.slow
@pytest.mark.parametrize("run", (run_steps, run_items))
def test_the_kernel_is_sound_before_it_is_mutated(run):
    run()


KERNEL = "decode/latent.cuh"
RACE, COPY, PRODUCT, FENCE, UNWRITTEN = {"race"}, {"async-copy"}, {"wgmma"}, {"proxy-fence"}, {"uninitialised-shared"}
DEADLOCK = {"deadlock"}

MUTATIONS = {
    "barriers are used before they are there": SourceMutation(
        KERNEL, {"__syncthreads(); // the barriers are there": ""}, run_steps, RACE
    ),
    "keys are scored before they have arrived": SourceMutation(
        KERNEL, {"K.wait_until_full(scored.lap); // @operand K": ""}, run_steps, COPY | RACE | UNWRITTEN
    ),
    "keys are overwritten while they are read": SourceMutation(
        KERNEL, {"slot.wait_until_empty(ring.lap); // @operand K": ""}, run_steps, COPY | RACE
    ),
    "scores read keys that threads have copied, without a fence": SourceMutation(
        KERNEL, {"fence_async_proxy();           // threads have copied what the product reads": ""}, run_steps, FENCE
    ),
    "scores read Q before all threads have copied it": SourceMutation(
        KERNEL,
        {"for Q, too.\n        named_barrier_sync(barriers::Q, consumer_threads);": ""},
        run_steps,
        COPY | RACE | UNWRITTEN | FENCE,
    ),
    "Q is read before it has arrived": SourceMutation(
        KERNEL, {"cp_async_wait_group<0>();\n        // All threads'": "// All threads'"}, run_steps, COPY
    ),
    "the copies of Q are no group": SourceMutation(KERNEL, {"cp_async_commit_group();": ""}, run_steps, COPY),
    "nobody hears of copies": SourceMutation(KERNEL, {"cp_async_mbarrier_arrive(slot.full);": ""}, run_steps, DEADLOCK),
    "columns that are scored only are never released": SourceMutation(
        KERNEL, {"shared.keys<parts::ScoredOnly>(scored.stage).release(); // @operand K": ""}, run_steps, DEADLOCK
    ),
    "values are never released": SourceMutation(
        KERNEL, {"shared.keys<Part>(place.stage).release(); // @operand V": ""}, run_steps, DEADLOCK
    ),
    "no fence before scores": SourceMutation(KERNEL, {"wgmma_fence();": ""}, run_steps, PRODUCT),
    "the products of scores are no group": SourceMutation(
        KERNEL, {"wgmma_commit_group();": ""}, run_steps, PRODUCT | RACE
    ),
    "the first scores are read before they are complete": SourceMutation(
        KERNEL, {"start_scores();\n        wgmma_wait_group<0>();": "start_scores();"}, run_steps, PRODUCT | RACE
    ),
    "the scorer does not say that it has stored P": SourceMutation(
        KERNEL, {"named_barrier_arrive(barriers::P_full, consumer_threads);": ""}, run_steps, DEADLOCK
    ),
    "the producers keep their registers": SourceMutation(
        KERNEL, {"give_registers_back<shape::producer_registers>();": ";"}, run_steps, DEADLOCK
    ),
    "P is read before it is stored": SourceMutation(
        KERNEL,
        {
            "named_barrier_sync(barriers::P_full, consumer_threads); // the scorer has stored P": "",
            "named_barrier_arrive(barriers::P_full, consumer_threads);": "",
        },
        run_steps,
        RACE | UNWRITTEN,
    ),
    "P is overwritten before it is read": SourceMutation(
        KERNEL,
        {
            "named_barrier_sync(barriers::P_empty, consumer_threads);        // the follower has read the last P": "",
            "named_barrier_arrive(barriers::P_empty, consumer_threads);": ";",
        },
        run_steps,
        RACE,
    ),
    "the follower does not say that it has read P": SourceMutation(
        KERNEL, {"named_barrier_arrive(barriers::P_empty, consumer_threads);": ";"}, run_steps, DEADLOCK
    ),
    "scores are read before they are complete": SourceMutation(
        KERNEL, {"wgmma_wait_group<1>();": ""}, run_steps, PRODUCT
    ),
    "results are read before they are complete": SourceMutation(
        KERNEL,
        {"wgmma_wait_group<0>();\n        pin_registers(O[0]);": "pin_registers(O[0]);"},
        run_steps,
        PRODUCT | RACE,
    ),
    "the columns that are scored only are released before they are scored": SourceMutation(
        KERNEL,
        {
            "shared.keys<parts::ScoredOnly>(scored.stage).release(); // @operand K": "",
            "issue_scores<parts::Scorers, false>();": "issue_scores<parts::Scorers, false>();\n"
            "        shared.keys<parts::ScoredOnly>(scored.stage).release();",
        },
        run_steps,
        COPY | RACE | PRODUCT,
    ),
    "the follower does not shrink what it has": SourceMutation(
        KERNEL, {"__any_sync(all_lanes, shrinks) != 0": "false"}, run_steps
    ),
}

FAST = ("P is overwritten before it is read",)


@pytest.mark.parametrize("mutation", sampled(MUTATIONS, slow=MUTATIONS.keys() - FAST))
def test_a_broken_synchronisation_is_named(mutation, monkeypatch):
    expect_named_or_wrong(mutation, "flashwright.kernels.decode.latent.source", monkeypatch)
