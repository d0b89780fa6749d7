"""The Hopper decode with one synchronisation broken: the simulated GPU names what is wrong with it."""

from __future__ import annotations

import pytest
from samples import sampled

pytest.importorskip("torch")

from decode_cases import decoded
from mutations import WRONG, SourceMutation, expect_named_or_wrong

CONFIG = "hopper decode (BF16, 64, 128, 32): stages_2"


def checked(**problem: object) -> None:
    try:
        decoded(CONFIG, **problem)
    except (AssertionError, RuntimeError) as error:
        raise AssertionError(WRONG) from error


def run_steps() -> None:
    checked(lengths=(200,), heads=(100, 1), multiprocessors=1)


def run_segments() -> None:
    """Items of several segments each, combined by several thread blocks; the second launch finds what the first has
    left."""
    checked(lengths=(200, 90), heads=(100, 1), multiprocessors=7, launches=2)


def run_items() -> None:
    """A thread block has several whole items."""
    checked(lengths=(60, 50), heads=(100, 1), multiprocessors=1)


@pytest.mark.parametrize(
    "run", (run_segments, *(pytest.param(run, marks=pytest.mark.slow) for run in (run_steps, run_items)))
)
def test_the_kernel_is_sound_before_it_is_mutated(run):
    run()


KERNEL, PARTS, COUNTERS = "decode/hopper.cuh", "decode/parts.cuh", "ptx/atomics.cuh"
RACE, COPY, PRODUCT, FENCE = {"race"}, {"async-copy"}, {"wgmma"}, {"proxy-fence"}
UNWRITTEN, BETWEEN_BLOCKS, DEADLOCK = {"uninitialised-shared"}, {"global-race"}, {"deadlock"}
VALUES_ARRIVED = "V.wait_until_full(V_place.lap); // @operand V"
ARRIVED = "cp_async_wait_group<0>();\n        "
ROWS_ARE_THERE = "// All threads' rows are there. The fence that follows the wait for K is for Q, too.\n        "
BARRIER = "named_barrier_sync(barriers::Q + warpgroup, warpgroup_threads);"
FENCED_LOOP = "wgmma_fence();\n#pragma unroll\n    for (int k = 0; k < depth_steps; ++k)"

MUTATIONS = {
    "barriers are used before they are there": SourceMutation(
        KERNEL, {"__syncthreads(); // the barriers are there": ";"}, run_steps, RACE
    ),
    "keys are read before they have arrived": SourceMutation(
        KERNEL, {"K.wait_until_full(K_place.lap); // @operand K": ""}, run_steps, COPY | RACE
    ),
    "values are read before they have arrived": SourceMutation(
        KERNEL, {"V.wait_until_full(V_place.lap); // @operand V": ""}, run_steps, COPY | RACE
    ),
    "keys are overwritten while they are read": SourceMutation(
        KERNEL, {"K.wait_until_empty(ring.lap); // @operand K": ""}, run_steps, COPY | RACE
    ),
    "values are overwritten while they are read": SourceMutation(
        KERNEL, {"V.wait_until_empty(ring.lap); // @operand V": ""}, run_steps, COPY | RACE
    ),
    "products read keys that threads have copied, without a fence": SourceMutation(
        KERNEL, {"fence_async_proxy();            // threads have copied what the product reads": ""}, run_steps, FENCE
    ),
    "products read Q before all threads have copied it": SourceMutation(
        KERNEL,
        {ROWS_ARE_THERE + BARRIER: ROWS_ARE_THERE},
        run_steps,
        COPY | RACE,
    ),
    "Q is read before it has arrived": SourceMutation(
        KERNEL, {ARRIVED + ROWS_ARE_THERE: ROWS_ARE_THERE}, run_steps, COPY
    ),
    "the copies of Q are no group": SourceMutation(KERNEL, {"cp_async_commit_group();": ""}, run_steps, COPY),
    "Q is overwritten while other warps read it": SourceMutation(
        KERNEL, {BARRIER + " // all warps have read Q": ""}, run_items, RACE
    ),
    "products read values that threads have copied, without a fence": SourceMutation(
        KERNEL,
        {VALUES_ARRIVED + "\n        fence_async_proxy();": VALUES_ARRIVED},
        run_steps,
        FENCE,
    ),
    "nobody hears of copies": SourceMutation(
        KERNEL, {f"cp_async_mbarrier_arrive({x}.full);": "" for x in "KV"}, run_steps, DEADLOCK
    ),
    "keys are never released": SourceMutation(
        KERNEL, {"shared.K(K_place.stage).release(); // @operand K": ""}, run_steps, DEADLOCK
    ),
    "values are never released": SourceMutation(
        KERNEL, {"shared.V(V_place.stage).release(); // @operand V": ""}, run_steps, DEADLOCK
    ),
    "no fence before scores": SourceMutation(KERNEL, {"wgmma_fence();": ""}, run_steps, PRODUCT),
    "no fence before results": SourceMutation(
        "tile/warpgroup_products.cuh", {FENCED_LOOP: FENCED_LOOP.removeprefix("wgmma_fence();")}, run_steps, PRODUCT
    ),
    "the products of scores are no group": SourceMutation(
        KERNEL, {"wgmma_commit_group();": ""}, run_steps, PRODUCT | RACE
    ),
    "the first scores are read before they are complete": SourceMutation(
        KERNEL, {"start_scores();\n        wgmma_wait_group<0>();": "start_scores();"}, run_steps, PRODUCT | RACE
    ),
    "the producers keep their registers": SourceMutation(
        KERNEL, {"give_registers_back<shape::producer_registers>();": ";"}, run_steps, DEADLOCK
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
    "a segment is counted before all threads have stored it": SourceMutation(
        PARTS, {"barrier(); // all threads have stored": ""}, run_segments, BETWEEN_BLOCKS
    ),
    "what is to be combined is not known yet": SourceMutation(
        PARTS, {"barrier(); // one thread knows what there is to do": ""}, run_segments, RACE | UNWRITTEN
    ),
    "the next chunk is written while some have not read which is theirs": SourceMutation(
        PARTS, {"barrier(); // all threads have read which": ""}, run_segments, RACE
    ),
    "the next chunk is read before it is known": SourceMutation(
        PARTS, {"barrier(); // the next is known": ""}, run_segments, RACE
    ),
    "a helper combines parts that it has not acquired": SourceMutation(
        COUNTERS, {"ld.acquire.gpu": "ld.relaxed.gpu"}, run_segments, BETWEEN_BLOCKS
    ),
    "progress with helpers is left as it is": SourceMutation(
        PARTS, {"store_relaxed(word, 0); // the last to leave": ";"}, run_segments
    ),
}


FAST = ("values are overwritten while they are read", "products read keys that threads have copied, without a fence")


@pytest.mark.parametrize("mutation", sampled(MUTATIONS, slow=MUTATIONS.keys() - FAST))
def test_a_broken_synchronisation_is_named(mutation, monkeypatch):
    expect_named_or_wrong(mutation, "flashwright.kernels.decode.hopper.source", monkeypatch)
