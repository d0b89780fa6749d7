"""Every tile of a persistent Hopper kernel is computed once, and no thread block has much more to do than others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_cases import ROUNDING

from flashwright import DType, Window, parse_hopper_config
from flashwright.kernels.forward.hopper import HOPPER_FORWARD
from flashwright.kernels.forward.hopper.schedule import (
    MAX_LISTED_BLOCKS,
    MAX_LISTED_TILES,
    NEVER,
    Schedule,
    balanced_schedule,
    schedule_in_rounds,
)
from flashwright.kernels.tensors import DeviceTensor
from flashwright.problem.options import AttentionOptions
from flashwright.problem.reference import random_inputs, reference_forward, relative_error
from flashwright.runtime.simulated import SIMULATED_MULTIPROCESSORS, simulate_forward

Tile = tuple[int, int, int]
"""Block of rows, head, batch."""


def tiles_of(schedule: Schedule, block: int, blocks: int, *, in_pairs: bool = True) -> Iterator[Tile]:
    """What thread block number `block` of so many computes: a second reading of pipeline/schedule.cuh, for a mask that
    makes the last rows the longest."""
    per_head = (schedule.q_blocks + 1) // 2 if in_pairs else schedule.q_blocks
    in_rounds = per_head * schedule.heads * schedule.batches

    def tile(index: int, from_start: bool) -> Tile:
        head, place = divmod(index, per_head)
        q_block = place if from_start else schedule.q_blocks - 1 - place
        return q_block, head % schedule.heads, head // schedule.heads

    round_ = 0
    while not (in_pairs and round_ == schedule.rounds):
        index = round_ * blocks + (block + round_) % blocks
        if index >= in_rounds:
            return
        yield tile(index, False)
        if in_pairs and index % per_head < schedule.q_blocks // 2:
            yield tile(index, True)
        round_ += 1
    for listed in schedule.listed_tiles[schedule.list_starts[block] : schedule.list_starts[block + 1]]:
        yield tile(round_ * blocks + listed // 2, listed % 2 == 1)


def all_tiles(schedule: Schedule) -> Counter[Tile]:
    return Counter(np.ndindex(schedule.q_blocks, schedule.heads, schedule.batches))


def computed(schedule: Schedule, blocks: int) -> Counter[Tile]:
    return Counter(tile for block in range(blocks) for tile in tiles_of(schedule, block, blocks))


def longest(schedule: Schedule, steps: tuple[int, ...], blocks: int) -> float:
    """What the busiest thread block has to do, in steps; a tile costs 0.7 beside its own."""
    return max(sum(steps[q_block] + 0.7 for q_block, _, _ in tiles_of(schedule, b, blocks)) for b in range(blocks))


def uses_lists(schedule: Schedule) -> bool:
    return schedule.rounds < NEVER


any_steps = st.lists(st.integers(0, 20), min_size=1, max_size=24).map(lambda growth: tuple(accumulate(growth)))
few_blocks, any_blocks = st.integers(1, 40), st.integers(1, MAX_LISTED_BLOCKS + 10)


# --- Every tile once ---------------------------------------------------------------------------------------------


@given(any_steps, st.integers(1, 6), st.integers(1, 3), any_blocks)
def test_every_tile_is_computed_once(steps, heads, batches, blocks):
    blocks = min(blocks, len(steps) * heads * batches)
    schedule = balanced_schedule(steps, heads, batches, blocks)
    assert (schedule.q_blocks, schedule.heads, schedule.batches) == (len(steps), heads, batches)
    assert computed(schedule, blocks) == all_tiles(schedule)


@given(st.integers(1, 24), st.integers(1, 6), st.integers(1, 3), any_blocks, st.booleans())
def test_every_tile_is_dealt_once_in_rounds(q_blocks, heads, batches, blocks, in_pairs):
    """Also tile by tile, as without a causal mask, and to thread blocks of one tile each."""
    schedule = schedule_in_rounds(q_blocks, heads, batches)
    for some in (blocks, q_blocks * heads * batches):
        dealt = Counter(tile for block in range(some) for tile in tiles_of(schedule, block, some, in_pairs=in_pairs))
        assert dealt == all_tiles(schedule)


# --- Lists -------------------------------------------------------------------------------------------------------


@given(any_steps, st.integers(1, 6), st.integers(1, 3), any_blocks)
def test_lists_follow_one_another_fit_and_hold_what_is_left_after_the_rounds(steps, heads, batches, blocks):
    """They begin when no full round of pairs remains, or one earlier."""
    blocks = min(blocks, len(steps) * heads * batches)
    schedule = balanced_schedule(steps, heads, batches, blocks)
    if not uses_lists(schedule):
        return
    starts = list(schedule.list_starts[: blocks + 1])
    assert starts[0] == 0 and starts == sorted(starts) and starts[-1] <= MAX_LISTED_TILES
    pairs_per_head = (len(steps) + 1) // 2
    full_rounds = pairs_per_head * heads * batches // blocks
    assert schedule.rounds in (full_rounds, full_rounds - 1)
    alone = [pair % pairs_per_head == len(steps) // 2 for pair in range(schedule.rounds * blocks)]
    assert starts[-1] == len(steps) * heads * batches - (2 * len(alone) - sum(alone))


@given(any_steps, st.integers(1, 6), st.integers(MAX_LISTED_BLOCKS + 1, 3 * MAX_LISTED_BLOCKS))
def test_a_gpu_with_more_multiprocessors_than_lists_goes_without(steps, heads, blocks):
    assert bytes(balanced_schedule(steps, heads, 1, blocks)) == bytes(schedule_in_rounds(len(steps), heads, 1))


# --- Balance -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 5), st.integers(0, 4), st.integers(1, 12), st.integers(1, 12), few_blocks)
def test_lists_never_make_the_longest_thread_block_longer_if_pairs_are_alike(first, slope, half, heads, blocks):
    """As they are with a causal mask and an even number of blocks of rows."""
    steps = tuple(first + slope * i for i in range(2 * half))
    blocks = min(blocks, len(steps) * heads)
    in_pairs = longest(schedule_in_rounds(len(steps), heads, 1), steps, blocks)
    balanced = balanced_schedule(steps, heads, 1, blocks)
    assert longest(balanced, steps, blocks) <= in_pairs
    if uses_lists(balanced):  # they cost something, too
        assert longest(balanced, steps, blocks) < 0.995 * in_pairs


@given(st.integers(1, 33), st.integers(1, 64))
def test_lists_never_make_the_longest_thread_block_of_an_h200_longer(q_blocks, heads):
    steps, blocks = tuple(range(1, q_blocks + 1)), min(132, q_blocks * heads)
    in_pairs = schedule_in_rounds(q_blocks, heads, 1)
    balanced = balanced_schedule(steps, heads, 1, blocks)
    assert longest(balanced, steps, blocks) <= longest(in_pairs, steps, blocks) + 1e-9


def test_lists_never_make_the_longest_thread_block_longer_if_one_of_a_head_is_alone():
    """Three blocks of rows are a pair and one alone: after some rounds, thread blocks have not had the same."""
    steps, heads, blocks = (2, 4, 6), 12, 5
    balanced = balanced_schedule(steps, heads, 1, blocks)
    assert uses_lists(balanced)
    assert longest(balanced, steps, blocks) <= longest(schedule_in_rounds(3, heads, 1), steps, blocks)


# --- The kernel --------------------------------------------------------------------------------------------------

CONFIG = parse_hopper_config("hopper (FP16, 64, 128, 32): stages_2+overlap+ping_pong+persistent+lazy+guess")
CAUSAL = Window(right=0)


def launched(rows: int, keys: int, heads: int, window: Window) -> Schedule:
    """What the simulated GPU is given."""
    q, k = (DeviceTensor(name, 1024, CONFIG.dtype, (1, heads, n, 64), (0, 64 * n, 64, 1)) for name, n in
            (("q", rows), ("k", keys)))  # fmt: skip
    options = AttentionOptions(window)
    launch = HOPPER_FORWARD.launch(CONFIG, q, k, k, q, multiprocessors=SIMULATED_MULTIPROCESSORS, options=options)
    assert isinstance(launch.schedule, Schedule)
    return launch.schedule


@pytest.mark.parametrize(
    ("rows", "keys", "window", "steps"),
    [
        (512, 512, CAUSAL, (4, 8, 12, 16)),
        (500, 500, CAUSAL, (4, 8, 12, 16)),
        (384, 484, CAUSAL, (8, 12, 16)),  # the first 128 rows attend to 228 keys
        (384, 284, CAUSAL, (1, 5, 9)),  # the first to 28
        (512, 256, Window(right=0, bottom_right=False), (4, 8, 8, 8)),
        (512, 512, Window(left=64, right=0), (4, 6, 6, 6)),
        (256, 64, CAUSAL, (0, 2)),
    ],
)
def test_a_launch_schedules_the_steps_that_the_kernel_takes(rows, keys, window, steps):
    expected = balanced_schedule(steps, 3, 1, min(3 * len(steps), SIMULATED_MULTIPROCESSORS))
    assert bytes(launched(rows, keys, 3, window)) == bytes(expected)


def test_tiles_from_lists_are_computed_like_others():
    """Six pairs for four thread blocks: one each, and of the tiles of the other two pairs one each."""
    heads, rows = 6, 2 * CONFIG.B_r
    schedule = launched(rows, rows, heads, CAUSAL)
    assert uses_lists(schedule)
    assert (schedule.rounds, *schedule.list_starts[:5]) == (1, 0, 1, 2, 3, 4)
    inputs = random_inputs(CONFIG, heads=heads, rows=rows)
    found = simulate_forward(CONFIG, *inputs, window=CAUSAL)
    assert found.run.grid == (SIMULATED_MULTIPROCESSORS, 1, 1)
    assert relative_error(found.output, reference_forward(*inputs, window=CAUSAL)[0]) < ROUNDING[DType.FP16]
