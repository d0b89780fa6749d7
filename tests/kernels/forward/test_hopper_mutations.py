"""The Hopper kernel with one synchronisation broken: the simulated GPU names what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mutations import (
    ANNOUNCEMENT,
    ARRIVE,
    OVERWRITTEN,
    SYNC,
    UNFINISHED,
    WRONG,
    Mutation,
    SourceMutation,
    announcing,
    expect_named,
    expect_named_or_wrong,
    no_release,
    no_wait,
)

from flashwright import HopperForwardKernelConfig, parse_hopper_config
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.reference import reference_forward, relative_error
from flashwright.runtime.simulated import ForwardSimulation, simulate_forward

CONFIG = parse_hopper_config("hopper (FP16, 64, 128, 32): stages_2+overlap+ping_pong+persistent+lazy+guess")


# --- The kernel, as it is and broken -----------------------------------------------------------------------------


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(NUMPY_DTYPES[CONFIG.dtype])


def run_several_tiles() -> ForwardSimulation:
    """More tiles for a thread block than slots of Q, more steps than stages, two of them without care: every barrier
    goes through several phases."""
    return run_right(random(1, 5, 256, 64), random(1, 5, 192, 64))


def run_overflowing() -> ForwardSimulation:
    """Few of a warpgroup's rows have scores that grow by much, so that few threads see exponentials overflow."""
    q, k = random(1, 1, 128, 64), random(1, 1, 256, 64)
    q[:, :, 3::64] *= 5
    return run_right(q, k * np.linspace(4, 1, 256, dtype=k.dtype)[:, None])


def run_rising() -> ForwardSimulation:
    """Scores that rise by a factor of 2^10 in the exponential from block to block: sums outgrow 2^6 in each step, and
    stay below 2^15."""
    q, k = random(1, 1, 128, 64), random(1, 1, 320, 64)
    blocks = np.arange(320)[::-1] / CONFIG.B_c
    log2_of_score = np.log2(np.e) / np.sqrt(64)
    q[..., 0], k[..., 0] = 16, 10 * blocks / (16 * log2_of_score)
    return run_right(q, k)


def run_ahead() -> ForwardSimulation:
    """More stages of K than slots of Q, and tiles of one step: only Q's own barriers hold the producer back."""
    return run_right(random(1, 5, 256, 64), random(1, 5, 32, 64), replace(CONFIG, kv_stages=3))


def run_with_spurious_waits() -> ForwardSimulation:
    """Every other wait says that its phase has not ended, whether it has or not."""
    return run_right(random(1, 1, 128, 64), random(1, 1, 192, 64), spurious_waits=True)


def run_right(
    q: np.ndarray, k: np.ndarray, config: HopperForwardKernelConfig = CONFIG, **options: Any
) -> ForwardSimulation:
    v = random(*k.shape)
    done = simulate_forward(config, q, k, v, check_hazards="stop", **options)
    error = relative_error(done.output, reference_forward(q, k, v)[0])
    assert error < 5e-4, f"{WRONG}: {error}"
    return done


def run_packed() -> ForwardSimulation:
    """A sequence that ends within a block; in the next one there is infinity."""
    q, k, v = random(1, 1, 80, 64), random(1, 1, 80, 64), random(1, 1, 80, 64)
    v[:, :, 40:] = np.inf
    starts = np.array([0, 40, 80], np.int32)
    done = simulate_forward(CONFIG, q, k, v, starts=(starts, starts), max_lengths=(40, 40), check_hazards="stop")
    first = (x[:, :, :40] for x in (q, k, v))
    assert relative_error(done.output[:, :, :40], reference_forward(*first)[0]) < 5e-4
    return done


RUNS: dict[str, Callable[[], ForwardSimulation]] = {
    "several tiles": run_several_tiles,
    "exponentials overflow": run_overflowing,
    "rising scores": run_rising,
    "ahead": run_ahead,
    "packed": run_packed,
    "spurious waits": run_with_spurious_waits,
}


@pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))
def test_the_kernel_is_sound_before_it_is_mutated(run):
    run()


def among_lanes(instruction: str) -> str:
    """A vote of one warp alone."""
    any_, passed = vote_operands(instruction)
    return f"vote.sync.any.pred {any_}, {passed}, 0xffffffff;"


def without_the_last_warp(instruction: str) -> str:
    """A vote that a warpgroup's last warp does not go to."""
    any_, passed = vote_operands(instruction)
    return f"""{{
        .reg .b32 warp;
        .reg .pred votes;
        mov.u32 warp, %tid.x;
        and.b32 warp, warp, 96;
        setp.ne.u32 votes, warp, 96;
        mov.pred {any_}, {passed};
        @votes {instruction}
    }}"""


def vote_operands(instruction: str) -> tuple[str, str]:
    found = re.search(r"bar\.red\.or\.pred\s+(\w+),.*?(\w+);", instruction)
    assert found is not None
    return found[1], found[2]


ISSUE_SCORES, ISSUE_OUTPUT = "issue_shared_shared<", "issue_registers_shared<"
CLEARED = "named_barrier_sync(barriers::V_cleared, consumer_threads);"
VOTE = "named_barrier_any(barriers::guess + warpgroup, warpgroup_threads, value)"
MUTATIONS = {
    "K is read before it has arrived": no_wait("K.wait_until_full(K_place.lap);", "async-copy"),
    "V is read before it has arrived": no_wait("V.wait_until_full(V_place.lap);", "async-copy"),
    "Q is read before it has arrived": no_wait("Q().wait_until_full(Q_place.lap);", "async-copy"),
    "K is overwritten while it is read": no_wait("slot.wait_until_empty(K_place.lap);", *OVERWRITTEN),
    "V is overwritten while it is read": no_wait("slot.wait_until_empty(V_place.lap);", *OVERWRITTEN),
    "Q is overwritten while it is read": replace(
        no_wait("slot.wait_until_empty(Q_place.lap);", *OVERWRITTEN), run=run_ahead
    ),
    "K is never released": no_release("shared.K(K_place.stage).release();"),
    "V is never released": no_release("shared.V(V_place.stage).release();"),
    "Q is never released": no_release("Q().release();"),
    "a tile is heard of before it is announced": no_wait(
        "slot.wait_until_full(place.lap);", "race", "uninitialised-shared"
    ),
    "an announcement is overwritten while it is read": no_wait("slot.wait_until_empty(place.lap);", "race"),
    "a tile is never announced": no_release("mbarrier_arrive(slot.full);"),
    "an announcement is never released": no_release("slot.release_by_lane();"),
    "a warp does not vote on whether exponentials overflowed": Mutation(
        VOTE, r"bar\.red", {"deadlock"}, change=without_the_last_warp
    ),
    "every warp decides alone whether exponentials overflowed": Mutation(
        VOTE, r"bar\.red", {"deadlock"}, change=among_lanes, run=run_overflowing
    ),
    "scores are used before they are there": Mutation("wgmma_wait_group<1>();", r"wgmma\.wait_group", UNFINISHED),
    "O is used before it is there": Mutation(
        "wgmma_wait_group<0>();", r"wgmma\.wait_group", UNFINISHED, "finish_output();"
    ),
    "the products of the scores are no group": Mutation(
        "wgmma_commit_group();", r"wgmma\.commit_group", UNFINISHED, ISSUE_SCORES
    ),
    "the products with P are no group": Mutation(
        "wgmma_commit_group();", r"wgmma\.commit_group", UNFINISHED, ISSUE_OUTPUT
    ),
    "no fence before the scores": Mutation("wgmma_fence();", r"wgmma\.fence", {"wgmma"}, ISSUE_SCORES),
    "no fence before the product with P": Mutation("wgmma_fence();", r"wgmma\.fence", {"wgmma"}, ISSUE_OUTPUT),
    "more bytes are announced than come": Mutation(
        ANNOUNCEMENT, r"mbarrier\.arrive\.expect_tx", {"deadlock"}, change=announcing(2**19)
    ),
    "fewer bytes are announced than come": Mutation(
        ANNOUNCEMENT, r"mbarrier\.arrive\.expect_tx", {"deadlock"}, change=announcing(16)
    ),
    "a turn is never passed on": Mutation("turns.pass();", ARRIVE, {"deadlock"}),
    "the producer keeps its registers": Mutation(
        "give_registers_back<shape::producer_registers>();", r"setmaxnreg", {"deadlock"}
    ),
    "barriers are used before they are there": Mutation("__syncthreads();", SYNC, {"mbarrier", "race"}),
    "barriers are not announced to the copy engine": Mutation(
        "mbarrier_init_fence();", r"fence\.mbarrier_init", {"mbarrier-fence"}
    ),
    "no proxy fence after rows of V are cleared": Mutation(
        "fence_async_proxy();", r"fence\.proxy", {"proxy-fence"}, run=run_packed
    ),
    "nobody waits until rows of V are cleared": Mutation(CLEARED, SYNC, {"race"}, run=run_packed),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=list(MUTATIONS))
def test_a_broken_synchronisation_is_named(mutation, monkeypatch):
    expect_named(mutation, run_several_tiles, monkeypatch)


# --- Broken source -----------------------------------------------------------------------------------------------

CONSUMER, SOFTMAX = "forward/hopper_consumer.cuh", "attention/guessing_softmax.cuh"
FINISH_SCORES = "finish_scores(step + 1 == work.keys.count);"


SOURCE_MUTATIONS = {
    "waits are taken to have succeeded": SourceMutation(
        "ptx/mbarrier.cuh",
        {"while (!mbarrier_try_wait(barrier, parity)) {\n    }": "mbarrier_try_wait(barrier, parity);"},
        run_with_spurious_waits,
        {"async-copy", "race", "uninitialised-shared"},
    ),
    "K is released before it is known that exponentials did not overflow": SourceMutation(
        CONSUMER,
        {
            "const auto sums = softmax": "shared.K(K_place.stage).release(); const auto sums = softmax",
            f"""if constexpr (!with_care)
            {FINISH_SCORES}""": """if constexpr (!with_care) {
            K_place.advance();
            if (step + 1 == work.keys.count)
                Q().release();
        }""",
        },
        run_overflowing,
        set(OVERWRITTEN),
    ),
    "scores that are computed again are used before they are there": SourceMutation(
        CONSUMER,
        {
            """wgmma_wait_group<0>();
                pin_registers(S[0]);
                scores(work).cap(S);""": "scores(work).cap(S);"
        },
        run_overflowing,
        UNFINISHED,
    ),
    "O is rescaled again while the product of the step before is being added": SourceMutation(
        CONSUMER,
        {
            """await_output();
            softmax.rescale(O); // @phase rescale O
            softmax.lift_references();""": "softmax.rescale(O);\n softmax.lift_references();"
        },
        run_rising,
        UNFINISHED,
    ),
    "exponentials that overflow are kept": SourceMutation(
        SOFTMAX,
        {"return sums.of[0].sum() >= overflowing || sums.of[1].sum() >= overflowing;": "return false;"},
        run_overflowing,
    ),
    "a reference is lifted, and O is not rescaled": SourceMutation(
        SOFTMAX, {"        rescales_O = true;\n": ""}, run_rising
    ),
    "a reference is raised with care, and O is not rescaled": SourceMutation(
        SOFTMAX, {"rescales_O |= (bool)__any_sync(all_lanes, any_raised);": ""}, run_overflowing
    ),
    "a lifted reference's factor reaches the sum and not O": SourceMutation(
        SOFTMAX, {"O_factor[half] *= factor;": ""}, run_rising
    ),
    "O is rescaled twice by one factor": SourceMutation(SOFTMAX, {"O_factor[half] = 1;": ""}, run_rising),
}


@pytest.mark.parametrize("mutation", SOURCE_MUTATIONS.values(), ids=list(SOURCE_MUTATIONS))
def test_broken_source_is_named_or_computes_something_else(mutation, monkeypatch):
    expect_named_or_wrong(mutation, "flashwright.kernels.forward.hopper.source", monkeypatch)
