"""The Ampere decode with one synchronisation broken: the simulated GPU names what is wrong with it."""

from __future__ import annotations

import pytest
from samples import every_other

pytest.importorskip("torch")

from decode_cases import decoded
from mutations import WRONG, SourceMutation, expect_named_or_wrong

OWN_KEYS = "ampere decode (BF16, 64, 16, 16, 4): rows_1+stages_2+blocks_1+swizzled"
SHARED_KEYS = "ampere decode (FP16, 64, 32, 16, 4): rows_2+stages_3+blocks_1+swizzled"

ROOM_FOR_RESULTS = "ampere decode (FP16, 64, 32, 32, 4): rows_2+stages_2+blocks_1+swizzled"


def checked(config: str, **problem: object) -> None:
    try:
        decoded(config, **problem)
    except (AssertionError, RuntimeError) as error:
        raise AssertionError(WRONG) from error


def run_own_keys() -> None:
    """Several steps, one segment."""
    checked(OWN_KEYS, lengths=(200,), heads=(2, 1), multiprocessors=1)


def run_shared_keys() -> None:
    checked(SHARED_KEYS, lengths=(200,), heads=(20, 1), multiprocessors=1)


def run_segments() -> None:
    """An item of three segments, the last in a thread block that has another item too; the second launch finds what the
    first has left."""
    checked(OWN_KEYS, lengths=(300, 90), capacity=300, heads=(12, 1), multiprocessors=3, launches=2)


def run_items() -> None:
    """A thread block has several whole items."""
    checked(OWN_KEYS, lengths=(60, 50, 200), heads=(2, 1), multiprocessors=1)


def run_room_for_results() -> None:
    """A stage has room for the rows of O."""
    checked(ROOM_FOR_RESULTS, lengths=(200,), heads=(20, 1), multiprocessors=1)


RUNS = (run_room_for_results, run_own_keys, run_shared_keys, run_segments, run_items)


@pytest.mark.parametrize("run", RUNS)
def test_the_kernel_is_sound_before_it_is_mutated(run):
    run()


KERNEL, ITEMS, PARTS, COUNTERS = "decode/ampere.cuh", "decode/items.cuh", "decode/parts.cuh", "ptx/atomics.cuh"
RACE, COPY, BETWEEN_BLOCKS = {"race"}, {"async-copy"}, {"global-race"}
UNWRITTEN = {"uninitialised-shared"}
FREE = "wait_for_others(begins); // the stage of the step before is free"
ARRIVED = "wait_for_others(begins); // what others copied has arrived too"
OTHER_LANES_READ = "if constexpr (cfg::row_warps == 1)\n                __syncwarp();\n            else\n"

MUTATIONS = {
    "keys are read before they have arrived": SourceMutation(
        KERNEL, {"cp_async_wait_group<cfg::stages - 1>();": ";"}, run_own_keys, COPY
    ),
    "what other lanes copied is read before it has arrived": SourceMutation(
        KERNEL, {ARRIVED: "if (begins) __syncthreads();"}, run_own_keys, COPY | RACE
    ),
    "what other warps copied is read before it has arrived": SourceMutation(
        KERNEL, {ARRIVED: "if (begins) __syncthreads();"}, run_shared_keys, COPY | RACE
    ),
    "Q is read before all have copied it": SourceMutation(
        KERNEL, {ARRIVED: "if (!begins) __syncthreads(); else __syncwarp();"}, run_own_keys, COPY | RACE
    ),
    "a stage is filled while other lanes read it": SourceMutation(
        KERNEL, {FREE: "if (begins) __syncthreads();"}, run_own_keys, COPY | RACE
    ),
    "a stage is filled while other warps read it": SourceMutation(
        KERNEL, {FREE: "if (begins) __syncthreads(); else __syncwarp();"}, run_shared_keys, COPY | RACE
    ),
    "a stage is filled while the results in it are read": SourceMutation(
        KERNEL, {FREE: "if (!begins) __syncthreads(); else __syncwarp();"}, run_items, COPY | RACE
    ),
    "results are written over a stage that other warps read": SourceMutation(
        KERNEL, {"__syncthreads(); // nobody reads the last stage any more": ";"}, run_room_for_results, COPY | RACE
    ),
    "results are written over a stage that other lanes read": SourceMutation(
        KERNEL, {OTHER_LANES_READ: "if constexpr (cfg::row_warps != 1)\n"}, run_own_keys, RACE
    ),
    "copies are no group": SourceMutation(KERNEL, {"cp_async_commit_group();": ""}, run_own_keys, COPY),
    "results are combined before all are there": SourceMutation(
        KERNEL, {"__syncthreads(); // all warps' results are there": ""}, run_own_keys, RACE | UNWRITTEN
    ),
    "sums of warps are read before they are there": SourceMutation(
        ITEMS, {"__syncthreads(); // the warps' sums are there": ""}, run_segments, RACE | UNWRITTEN
    ),
    "a start is read before it is found": SourceMutation(
        ITEMS, {"__syncthreads(); // the one thread that found it has written it": ""}, run_segments, RACE | UNWRITTEN
    ),
    "whoever is last does not know it yet": SourceMutation(
        PARTS, {"barrier(); // one thread knows what there is to do": ""}, run_segments, RACE | UNWRITTEN
    ),
    "a segment is counted before all threads have stored it": SourceMutation(
        PARTS, {"barrier(); // all threads have stored": ""}, run_segments, BETWEEN_BLOCKS
    ),
    "segments are counted without release and acquire": SourceMutation(
        COUNTERS, {"atom.acq_rel.gpu": "atom.relaxed.gpu"}, run_segments, BETWEEN_BLOCKS
    ),
    "segments are counted without acquire": SourceMutation(
        COUNTERS, {"atom.acq_rel.gpu": "atom.release.gpu"}, run_segments, BETWEEN_BLOCKS
    ),
    "segments are counted without release": SourceMutation(
        COUNTERS, {"atom.acq_rel.gpu": "atom.acquire.gpu"}, run_segments, BETWEEN_BLOCKS
    ),
    "segments are released to the own thread block": SourceMutation(
        COUNTERS, {"atom.acq_rel.gpu": "atom.acq_rel.cta"}, run_segments, BETWEEN_BLOCKS
    ),
    "progress is left as it is": SourceMutation(
        PARTS, {"store_relaxed(word, 0); // whoever is last has no help": ";"}, run_segments
    ),
}


@pytest.mark.parametrize("mutation", every_other(MUTATIONS))
def test_a_broken_synchronisation_is_named(mutation, monkeypatch):
    expect_named_or_wrong(mutation, "flashwright.kernels.decode.ampere.source", monkeypatch)
