"""The Hopper backward with one synchronisation broken: the simulated GPU names what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from samples import every_other, sampled

pytest.importorskip("torch")
from backward_cases import Problem, check_backward, check_packed_backward
from mutations import (
    ANNOUNCEMENT,
    OVERWRITTEN,
    SYNC,
    UNFINISHED,
    Mutation,
    SourceMutation,
    announcing,
    expect_named,
    expect_named_or_wrong,
    no_release,
    no_wait,
)
from ordering import UNORDERED, expect_same_sums, not_acquired, not_released

from flashwright.kernels.registry import parse_config
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window

CONFIG = parse_config("hopper backward (FP16, 64, 64, 64, 1): stages_2_1+register_P")
SHARED_P = parse_config("hopper backward (FP16, 128, 64, 64, 2): stages_2_2")
TWO_GROUPS = replace(CONFIG, B_r=128, B_c=128, n_consumers=2, dO_stages=2)
BULK = replace(CONFIG, bulk_dQ=True)
PERSISTENT = replace(CONFIG, persistent=True)
SKIPPING = parse_config("hopper backward (FP16, 128, 64, 128, 2): stages_2_1+register_P+skips_masked")
PAIRED = parse_config("hopper backward (FP16, 128, 64, 64, 1): stages_2_1+paired")


@cache
def problem(rows: int, keys: int, head_dim: int = 64) -> Problem:
    return Problem.random((1, 1, 1, rows, keys, head_dim), DType.FP16)


def run_several_steps() -> None:
    """More steps than stages, so that every barrier goes through several phases."""
    check_backward(CONFIG, problem(256, 64))


def run_shared_P() -> None:
    check_backward(SHARED_P, problem(256, 64, 128))


def run_two_groups() -> None:
    check_backward(TWO_GROUPS, problem(384, 128))


def run_bulk() -> None:
    check_backward(BULK, problem(256, 64))


def run_pair() -> None:
    """Of thread blocks, each with several blocks of dQ to add to."""
    check_backward(PAIRED, problem(384, 128, 128))


def run_persistent_pair() -> None:
    """Of thread blocks that take three blocks of keys each, of a step."""
    check_backward(replace(PAIRED, persistent=True), problem(64, 384, 128), multiprocessors=2)


def run_persistent() -> None:
    """One thread block with three blocks of keys, of two steps each."""
    check_backward(PERSISTENT, problem(128, 192), multiprocessors=1)


def run_keys_ahead() -> None:
    """One thread block with four blocks of keys, of a step each."""
    check_backward(replace(PERSISTENT, keys_ahead=True), problem(64, 256), multiprocessors=1)


def run_persistent_bulk() -> None:
    """One thread block with four blocks of keys, of a step each, whose dQ the copy engine adds."""
    check_backward(replace(PERSISTENT, keys_ahead=True, bulk_dQ=True), problem(64, 256), multiprocessors=1)


def run_persistent_ordered() -> None:
    """The same in order: one thread waits for turns, another passes them on."""
    check_backward(replace(PERSISTENT, keys_ahead=True, ordered=True), problem(64, 256), multiprocessors=1)


def run_finishing() -> None:
    """Two thread blocks with two blocks of keys each; the last to add to a block of dQ rounds it."""
    check_backward(replace(PERSISTENT, ordered=True, finishes_dQ=True), problem(64, 256), multiprocessors=2)


def run_finishing_out_of_order() -> None:
    check_backward(replace(PERSISTENT, finishes_dQ=True), problem(128, 256), multiprocessors=4)


def run_finishing_pairs() -> None:
    """Two pairs with three tiles each, which take turns out of order."""
    check_backward(replace(PAIRED, persistent=True, finishes_dQ=True), problem(128, 768, 128), multiprocessors=4)


def run_skipping() -> None:
    """The second warpgroup leaves out the first step of each of two tiles."""
    causal = AttentionOptions(Window(right=0))
    check_backward(SKIPPING, replace(problem(256, 256, 128), options=causal))


def run_packed() -> None:
    """Sequences that end within a block of rows and of keys; in the next ones there are infinity and NaN."""
    check_packed_backward(CONFIG, [(40, 50), (40, 50)], spoilt=(1,), heads=(1, 1))


def run_skipping_ahead() -> None:
    """The same in one thread block: one warpgroup may begin the second tile while the other is in the first."""
    causal = AttentionOptions(Window(right=0))
    config = replace(SKIPPING, dO_stages=2, persistent=True, keys_ahead=True)
    check_backward(config, replace(problem(256, 256, 128), options=causal), multiprocessors=1)


def run_one_stage() -> None:
    """Of Q."""
    check_backward(replace(CONFIG, Q_stages=1), problem(256, 64))


def run_ordered() -> None:
    """Sound by test_ordered.py."""
    expect_same_sums(replace(CONFIG, ordered=True))


def run_ordered_bulk() -> None:
    """The copy engine adds, and the thread that has it do so waits for turns."""
    expect_same_sums(replace(BULK, ordered=True))


RUNS = (
    run_several_steps,
    run_shared_P,
    run_two_groups,
    run_bulk,
    run_pair,
    run_persistent_pair,
    run_persistent,
    run_keys_ahead,
    run_persistent_bulk,
    run_persistent_ordered,
    run_finishing,
    run_skipping,
    run_packed,
    run_one_stage,
    *(pytest.param(run, marks=pytest.mark.slow) for run in (run_skipping_ahead, run_ordered_bulk)),
)


@pytest.mark.parametrize("run", RUNS)
def test_the_kernel_is_sound_before_it_is_mutated(run):
    run()


def wgmma_fence_before(product: str) -> Mutation:
    return Mutation("wgmma_fence();", r"wgmma\.fence", {"wgmma"}, product)


def no_group_of(product: str, run=None) -> Mutation:
    return Mutation("wgmma_commit_group();", r"wgmma\.commit_group", UNFINISHED, product, run=run)


def no_wgmma_wait(line: str, by_way_of: str = "", run=None) -> Mutation:
    return Mutation(line, r"wgmma\.wait_group", UNFINISHED, by_way_of, run=run)


def ordered(mutation: Mutation) -> Mutation:
    return replace(mutation, run=run_ordered)


def by(run, mutation: Mutation) -> Mutation:
    return replace(mutation, run=run)


def alone(line: str, *kinds: str, by_way_of: str = "", run=None) -> Mutation:
    """One lane speaks for others that it has not met."""
    return Mutation(line, r"bar\.warp", set(kinds), by_way_of, run=run)


def in_skip(mutation: Mutation, run=run_skipping) -> Mutation:
    return replace(mutation, by_way_of="skip(step);", run=run)


FOR_ALL = "__syncwarp(); // the first lane speaks for all"
WEIGHTS_ARE_WRITTEN = "shared.weights(step).wait_until_full("
WEIGHTS_ARE_READ = "shared.weights(step).wait_until_empty("
TILE_IS_ANNOUNCED = "slot.wait_until_full(TilePlace::after(index).lap);"
TILES_READ_TOO_SOON = ("race", "uninitialised-shared", "async-copy")
RELEASED_HERE, RELEASED_IN_PAIR = (
    "mbarrier_arrive(slot.empty);",
    "mbarrier_arrive_remote(address_in_block(slot.empty, 0));",
)
ANNOUNCER = "who copies"
"""Knows what it has announced itself."""
TILE_READERS = (
    ("who computes", "compute_announced_tiles(", run_persistent, RELEASED_HERE),
    (ANNOUNCER, "produce(", run_persistent, RELEASED_HERE),
    ("who has the copy engine add", "add_blocks_of_dQ(", run_persistent_bulk, RELEASED_HERE),
    ("who waits for turns", "wait_for_turns(", run_persistent_ordered, RELEASED_HERE),
    ("who passes turns on", "pass_turns(", run_persistent_ordered, RELEASED_HERE),
    ("who computes in a pair", "compute_announced_tiles(", run_persistent_pair, RELEASED_IN_PAIR),
    ("who copies in a pair", "produce(", run_persistent_pair, RELEASED_IN_PAIR),
    ("who sends weights", "send_weights(", run_persistent_pair, RELEASED_IN_PAIR),
)
MUTATIONS = {
    "K is read before it has arrived": no_wait("K(group).wait_until_full(keys_place().lap);", "async-copy"),
    "V is read before it has arrived": no_wait("V(group).wait_until_full(keys_place().lap);", "async-copy"),
    "Q is read before it has arrived": no_wait("Q.wait_until_full(place.lap);", "async-copy"),
    "dO is read before it has arrived": no_wait("dO.wait_until_full(place.lap);", "async-copy"),
    "Q is overwritten while it is read": no_wait("slot.wait_until_empty(Q_place.lap);", *OVERWRITTEN),
    "dO is overwritten while it is read": no_wait("slot.wait_until_empty(dO_place.lap);", *OVERWRITTEN),
    "Q is never released": no_release("Q(step).release_by_lane();"),
    "dO is never released": no_release("dO(step).release_by_lane();"),
    "S is used before it is there": no_wgmma_wait("wgmma_wait_group<dQ_between ? 2 : 1>();"),
    "dP is used before it is there": no_wgmma_wait("wgmma_wait_group<0>();", "differentiate_scores<"),
    "dK is used before it is there": no_wgmma_wait("wgmma_wait_group<0>();", "this->step<false>(step);"),
    "dQ is used before it is there": no_wgmma_wait("wgmma_wait_group<2>();"),
    "dV is used before it is there": no_wgmma_wait("wgmma_wait_group<1>();", "this->step<false>(step);"),
    "dQ of the last step is used before it is there": no_wgmma_wait("wgmma_wait_group<0>();", "finish_dQ(end - 1);"),
    "with P in shared memory dQ is used before it is there": no_wgmma_wait("wgmma_wait_group<2>();", run=run_shared_P),
    "the products of S are no group": no_group_of("// @product S"),
    "the products of dP are no group": no_group_of("// @product dP"),
    "the products of dV are no group": no_group_of("// @product dV"),
    "the products of dK are no group": no_group_of("start_dK("),
    "the products of dQ are no group": no_group_of("start_dQ(step);"),
    "the products of dV with P in shared memory are no group": no_group_of("start_dV(", run_shared_P),
    "no fence before S": wgmma_fence_before("// @product S"),
    "no fence before dV": wgmma_fence_before("// @product dV"),
    "dS is multiplied before the other warpgroup has written it": by(
        run_two_groups, no_wait(WEIGHTS_ARE_WRITTEN, "race")
    ),
    "P is multiplied before all warps have written it": by(run_shared_P, no_wait(WEIGHTS_ARE_WRITTEN, "race")),
    "dS is overwritten while the other warpgroup multiplies it": by(
        run_two_groups, no_wait(WEIGHTS_ARE_READ, *OVERWRITTEN)
    ),
    "nobody says that dS is written": no_release("mbarrier_arrive(shared.weights(step).full);"),
    "nobody says that dS has been read": no_release("mbarrier_arrive(shared.weights(step).empty);"),
    "no proxy fence after dS is written": Mutation("fence_async_proxy();", r"fence\.proxy", {"proxy-fence"}),
    "dQ is overwritten while the copy engine adds it": by(
        run_bulk, no_wait("slot.wait_until_empty(TurnPlace::after(step).lap);", *OVERWRITTEN)
    ),
    "dQ is added before it is there": by(
        run_bulk, no_wait("slot.wait_until_full(place.lap);", "race", "uninitialised-shared")
    ),
    "dQ is released before the copy engine has read it": Mutation(
        "bulk_wait_until_read<cfg::n_consumers - 1 - part>();",
        r"cp\.async\.bulk\.wait_group",
        set(OVERWRITTEN),
        run=run_bulk,
    ),
    "no proxy fence after dQ is written": Mutation(
        "fence_async_proxy();", r"fence\.proxy", {"proxy-fence"}, "add_dQ(", run=run_bulk
    ),
    "nobody says that dQ is written": by(run_bulk, no_release("mbarrier_arrive(slot.full);")),
    "nobody says that dQ has been read": by(run_bulk, no_release("mbarrier_arrive(shared.dQ(part).empty);")),
    "dS of the other thread block is multiplied before it has arrived": by(
        run_pair, no_wait("shared.received_slot(step).wait_until_full(", "race", "async-copy")
    ),
    "K of the other thread block is multiplied before it has arrived": by(
        run_pair, no_wait("shared.other_K(group).wait_until_full(keys_place().lap);", "async-copy")
    ),
    "dS is sent before it is written": by(
        run_pair,
        replace(no_wait(WEIGHTS_ARE_WRITTEN, "race", "uninitialised-shared"), by_way_of="send_weights("),
    ),
    "the other thread block is not told that its dS has been read": by(
        run_pair, no_release("mbarrier_arrive_remote(address_in_block(shared.weights(step).empty")
    ),
    "keys of a pair are overwritten while those of the tile before are multiplied": by(
        run_persistent_pair, no_wait("slot.wait_until_empty(lap);", *OVERWRITTEN)
    ),
    "nobody expects dS of the other thread block": by(run_pair, no_release("mbarrier_arrive_expecting(received.full")),
    "keys are overwritten while those of the tile before are multiplied": by(
        run_persistent, no_wait("slot.wait_until_empty(lap);", *OVERWRITTEN)
    ),
    "keys are never released": by(run_persistent, no_release("K(group).release();")),
    "values are never released": by(run_persistent, no_release("V(group).release();")),
    "the tile after the next is announced in the place of this one": by(
        run_keys_ahead, no_wait("slot.wait_until_empty(TilePlace::after(index).lap);", "race", "mbarrier", "async-copy")
    ),
    "the tile after the next is announced to a pair in the place of this one": by(
        run_persistent_pair, no_wait("slot.wait_until_empty(TilePlace::after(index).lap);", "race", "mbarrier")
    ),
    "no tile is announced": by(
        run_persistent, replace(no_release("mbarrier_arrive(slot.full);"), by_way_of="announce(")
    ),
    "no tile is announced to the first thread block of a pair": by(
        run_persistent_pair, replace(no_release("mbarrier_arrive(slot.full);"), by_way_of="announce(")
    ),
    "no tile is announced to the second thread block of a pair": by(
        run_persistent_pair, no_release("mbarrier_arrive_expecting_remote(full, bytes);")
    ),
    "the second thread block of a pair is not sent its tile": Mutation(
        "store_to_block_16B(", r"st\.async", {"deadlock"}, run=run_persistent_pair
    ),
    **{
        f"{who} does not say that it has left a tile": by(run, replace(no_release(line), by_way_of=by_way_of))
        for who, by_way_of, run, line in TILE_READERS
    },
    **{
        f"{who} reads a tile before it is announced": by(
            run, replace(no_wait(TILE_IS_ANNOUNCED, *TILES_READ_TOO_SOON), by_way_of=by_way_of)
        )
        for who, by_way_of, run, _ in TILE_READERS
        if who != ANNOUNCER
    },
    "more bytes are announced than come": Mutation(
        ANNOUNCEMENT, r"mbarrier\.arrive\.expect_tx", {"deadlock"}, change=announcing(2**19)
    ),
    "fewer bytes are announced than come": Mutation(
        ANNOUNCEMENT, r"mbarrier\.arrive\.expect_tx", {"deadlock"}, change=announcing(16)
    ),
    "the producer keeps its registers": Mutation(
        "give_registers_back<shape::producer_registers>();", r"setmaxnreg", {"deadlock"}, run=run_two_groups
    ),
    "barriers are used before they are there": Mutation("__syncthreads();", SYNC, {"mbarrier", "race"}),
    "barriers are not announced to the copy engine": Mutation(
        "mbarrier_init_fence();", r"fence\.mbarrier_init", {"mbarrier-fence"}
    ),
    "no proxy fence after rows of others are cleared": Mutation(
        "fence_async_proxy();", r"fence\.proxy", {"proxy-fence"}, "clear_", run=run_packed
    ),
    "nobody waits until rows of others are cleared": Mutation(
        "named_barrier_sync(barriers::consumers, consumer_threads);", SYNC, {"race"}, "clear_", run=run_packed
    ),
    "the second thread block of a pair reads a turn before it is sent": by(
        run_finishing_pairs,
        replace(no_wait("slot.wait_until_full(lap);", *TILES_READ_TOO_SOON), by_way_of="take_turn("),
    ),
    "the turn after the next is sent in the place of this one": by(
        run_finishing_pairs,
        replace(no_wait("slot.wait_until_empty(lap);", "race", "mbarrier", "deadlock"), by_way_of="take_turn("),
    ),
    "the second thread block of a pair does not say that it has read a turn": by(
        run_finishing_pairs, replace(no_release(RELEASED_IN_PAIR), by_way_of="take_turn(")
    ),
    "the second thread block of a pair is not sent its turn": by(
        run_finishing_pairs,
        replace(no_release("mbarrier_arrive_expecting_remote(full, bytes);"), by_way_of="take_turn("),
    ),
    "consumers add before it is their turn": ordered(no_wait("shared.turn(step).wait_until_full(", *UNORDERED)),
    "a turn is passed on before all have added": ordered(
        no_wait("mbarrier_wait(shared.turn(turns).empty,", *UNORDERED, "deadlock")
    ),
    "consumers are told of a turn while the one before the last is kept": ordered(
        no_wait("shared.passed_turn(turns).wait_until_empty(", *UNORDERED, "mbarrier", "deadlock")
    ),
    "consumers are not told of their turn": ordered(no_release("mbarrier_arrive(slot.full);")),
    "nobody says that a turn has been passed on": ordered(
        no_release("mbarrier_arrive(shared.passed_turn(turns).empty);")
    ),
    "consumers do not say that they have added": ordered(no_release("shared.turn(step).release_by_lane();")),
    "a turn is never passed on": ordered(Mutation("turn.pass<cfg::ordered>();", r"st\.release", {"deadlock"})),
    "one lane says that all have written dS": alone(FOR_ALL, "race", by_way_of="hand_over_weights("),
    "one lane says that all have written dQ": alone(FOR_ALL, "race", by_way_of="add_dQ(", run=run_bulk),
    "additions of the copy engine are no group": Mutation(
        "bulk_commit_group();", r"cp\.async\.bulk\.commit_group", set(OVERWRITTEN), run=run_bulk
    ),
    "a turn is passed on before the copy engine has added": Mutation(
        "bulk_wait_until_added();", r"cp\.async\.bulk\.wait_group", UNORDERED, run=run_ordered_bulk
    ),
    "a turn of the copy engine is never passed on": Mutation(
        "turn.pass();", r"st\.release", {"deadlock"}, run=run_ordered_bulk
    ),
    "nobody expects K of the other thread block": by(
        run_pair, no_release("mbarrier_arrive_expecting(slot.full, shape::other_K_bytes);")
    ),
    "in a pair S is used before it is there": no_wgmma_wait("wgmma_wait_group<dQ_between ? 2 : 1>();", run=run_pair),
    "the products of dK with dS in shared memory are no group": no_group_of("start_dK(", run_shared_P),
    "zeros are written over dS that the other warpgroup multiplies": in_skip(
        no_wait(WEIGHTS_ARE_READ, *OVERWRITTEN), run_skipping_ahead
    ),
    "who skips a step does not say that dS is written": in_skip(
        no_release("mbarrier_arrive(shared.weights(step).full);")
    ),
    "who skips a step does not release dO": in_skip(no_release("dO(step).release_by_lane();")),
    "who skips a step does not release Q": in_skip(no_release("Q(step).release_by_lane();")),
}


@pytest.mark.parametrize("mutation", every_other(MUTATIONS))
def test_a_broken_synchronisation_is_named(mutation, monkeypatch):
    expect_named(mutation, run_several_steps, monkeypatch)


# --- Broken source -----------------------------------------------------------------------------------------------

KERNEL, CONSUMER, RING = "backward/hopper.cuh", "backward/hopper_consumer.cuh", "pipeline/ring.cuh"
SHARED, SUMS = "backward/hopper_shared.cuh", "backward/dq_sums.cuh"
HANDED_ON = {"global-race"}
TURN_HAS_NOT_COME = "load_acquire(counters + part) < passed_on"
BEGUN = "if constexpr (cfg::paired)\n        cluster_sync();\n    else\n"


LANES_MEET = "__syncwarp(); // lanes that have rows to store and lanes that have none arrive together\n            "


def by_one_lane(file: str, before: str, release: str, run: Callable[[], Any], *, meeting: str = "") -> SourceMutation:
    """The first lane arrives for all others, which it has not met."""
    one_lane = f"if (lane_index() == 0) for (int lane = 0; lane < warp_threads; ++lane) {release}"
    return SourceMutation(file, {before + meeting + release: before + one_lane}, run, {"race"})


SOURCE_MUTATIONS = {
    "barriers of a pair are used before they are there": SourceMutation(
        KERNEL, {BEGUN: "if constexpr (!cfg::paired)\n"}, run_pair, {"mbarrier", "race"}
    ),
    "a thread block sends to another that may not have begun": SourceMutation(KERNEL, {BEGUN: ""}, run_pair, {"race"}),
    "a thread block ends while the other accesses its memory": SourceMutation(
        CONSUMER, {"if constexpr (cfg::paired)\n            cluster_sync();": ""}, run_pair, {"race"}
    ),
    "one lane says that all have read a note": by_one_lane(
        RING, "void release_by_lane() const { ", "mbarrier_arrive(empty);", run_one_stage
    ),
    "one lane says that all have read a tile": by_one_lane(
        CONSUMER, "step += steps;\n            ", "TileNote::release(slot);", run_keys_ahead, meeting=LANES_MEET
    ),
    "P is multiplied before the other warpgroup has written it": SourceMutation(
        CONSUMER,
        {"shared.weights(step).wait_until_full(WeightsPlace::after(step).lap);\n        start_dV": "start_dV"},
        run_shared_P,
        {"race"},
    ),
    "a turn of the copy engine is not waited for": SourceMutation(
        SUMS, {TURN_HAS_NOT_COME: "false"}, run_ordered_bulk, UNORDERED
    ),
    "dS has one stage": SourceMutation(
        SHARED,
        {"(step % shape::weight_stages * shape::key_groups + group)": "group"},
        run_several_steps,
        {"race", "wgmma"},
    ),
    "P has one stage": SourceMutation(
        SHARED,
        {"shape::P_offset + weights(step, group)": "shape::P_offset + weights(0, group)"},
        run_shared_P,
        {"race", "wgmma"},
    ),
    "a step's note is overwritten before dQ is added": SourceMutation(
        SHARED, {"step % (2 * cfg::Q_stages)": "step % cfg::Q_stages"}, run_several_steps, {"race"}
    ),
    "a turn is not waited for": SourceMutation(SUMS, {TURN_HAS_NOT_COME: "false"}, run_ordered, UNORDERED),
    "dQ is finished before it is this block's turn": SourceMutation(
        SUMS, {TURN_HAS_NOT_COME: "false"}, run_finishing, HANDED_ON
    ),
    "dQ is finished before all others have added": SourceMutation(
        SUMS, {"is_last() ? last : min(own, 1)": "min(own, 1)"}, run_finishing_out_of_order, HANDED_ON
    ),
    "sums are added to before the first has written them": SourceMutation(
        SUMS, {"is_last() ? last : min(own, 1)": "is_last() ? last : 0"}, run_finishing_out_of_order, HANDED_ON
    ),
    "turns out of order are not released": SourceMutation(
        "ptx/reduce.cuh", {"red.release.gpu": "red.relaxed.gpu"}, run_finishing_out_of_order, HANDED_ON
    ),
    "sums of others are not acquired before dQ is finished": replace(not_acquired(run_finishing), kinds=HANDED_ON),
    "sums are not released to who finishes dQ": replace(not_released(run_finishing), kinds=HANDED_ON),
    "a turn is not acquired": not_acquired(run_ordered),
    "a turn is not released": not_released(run_ordered),
}


SLOW = (
    "barriers of a pair are used before they are there",
    "a thread block sends to another that may not have begun",
    "P is multiplied before the other warpgroup has written it",
    "a turn of the copy engine is not waited for",
)


@pytest.mark.parametrize("mutation", sampled(SOURCE_MUTATIONS, SLOW))
def test_broken_source_is_named_or_computes_something_else(mutation, monkeypatch):
    expect_named_or_wrong(mutation, "flashwright.kernels.backward.hopper.source", monkeypatch)
