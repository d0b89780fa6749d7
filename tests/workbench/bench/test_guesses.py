"""The model of guesses beside the kernels: as many blocks are computed twice, and as many steps rescale O."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flashwright import parse_config, simulate_forward
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.workbench.bench.guesses import guesses, rescales

ROWS, KEYS, D_HEAD, B_C = 128, 320, 64, 32
FALLING = np.arange(1, KEYS // B_C + 1)[::-1]
"""Heights of blocks: rising from the last to the first, as they are visited."""
PEAKED = np.minimum(FALLING, FALLING[::-1])
"""Highest in the middle: rising behind a first block that leads."""
ORDERS = pytest.mark.parametrize(("first_leads", "rising"), [(False, FALLING), (True, PEAKED)], ids=["last", "first"])


def scores_of(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    found: np.ndarray = q[0, 0].astype(float) @ k[0, 0].astype(float).T * (math.log2(math.e) / math.sqrt(D_HEAD))
    return found


def inputs(dtype: DType, spread: float, heights: np.ndarray) -> tuple[np.ndarray, ...]:
    """Scores of a height in each block."""
    generator = np.random.default_rng(3)
    q = generator.standard_normal((1, 1, ROWS, D_HEAD)) * spread
    k, v = (generator.standard_normal((1, 1, KEYS, D_HEAD)) for _ in range(2))
    q[..., 0], k[..., 0] = 8, np.repeat(heights, B_C)
    return tuple(x.astype(NUMPY_DTYPES[dtype]) for x in (q, k, v))


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=str)
@pytest.mark.parametrize(
    ("spread", "slope", "first_leads"),
    [(1, 0, False), (10, 0, True), (40, 0, False), (1, 4, True), (1, 30, False), (1, 120, True)],
)
def test_as_many_blocks_are_computed_twice_as_the_model_says(dtype, spread, slope, first_leads):
    knobs = "stages_2+overlap+ping_pong+persistent+lazy+guess" + "+first" * first_leads
    config = parse_config(f"hopper ({dtype.name}, 64, 128, {B_C}): {knobs}")
    q, k, v = inputs(dtype, spread, slope * (PEAKED if first_leads else FALLING))
    block_flops = 2 * 64 * B_C * D_HEAD
    once = 2 * (ROWS // 64) * (KEYS // B_C)
    twice = simulate_forward(config, q, k, v).run.counters.tensor_flops / block_flops - once
    assert guesses(scores_of(q, k), dtype, B_C, first_leads=first_leads).overflowed == twice


@ORDERS
def test_steep_scores_overflow_once_and_are_searched_from_then_on(first_leads, rising):
    q, k, _ = inputs(DType.BF16, 1, 120 * rising)
    found = guesses(scores_of(q, k), DType.BF16, B_C, first_leads=first_leads)
    assert (found.overflowed, found.lifted) == (2, 0)
    assert found.with_care == found.steps - 2


@pytest.mark.parametrize("slope", [12, 120, -12, -120])
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=str)
def test_where_the_first_block_leads_scores_that_slope_one_way_are_guessed_right(dtype, slope):
    heights = float(slope) * (np.arange(KEYS) // B_C)
    found = guesses(np.tile(heights, (64, 1)), dtype, B_C, first_leads=True)
    assert found.steps > 0
    assert found.overflowed == found.lifted == found.with_care == 0


@ORDERS
def test_scores_that_rise_slowly_are_lifted_now_and_then(first_leads, rising):
    q, k, _ = inputs(DType.BF16, 1, 20 * rising if first_leads else 12 * rising)
    found = guesses(scores_of(q, k), DType.BF16, B_C, first_leads=first_leads)
    assert found.overflowed == found.with_care == 0
    assert 0 < found.lifted < found.steps
    assert found.corrected < found.steps


@pytest.mark.parametrize("first_leads", [False, True])
def test_a_key_that_dominates_in_a_rows_first_blocks_is_looked_for_once(first_leads):
    """By one of a row's four threads. The others learn of it, and take no far smaller ones of their own for keys that
    dominate. The simulated kernel executes no more than on scores without a peak."""
    config = parse_config(
        f"hopper (BF16, 64, 128, {B_C}): stages_2+overlap+persistent+lazy+guess{'+first' * first_leads}"
    )
    executed = []
    for height in (0, 60):
        q, k, v = inputs(DType.BF16, 4, np.zeros(KEYS // B_C))
        q[..., 1], k[..., 1], k[..., -1, 1] = 8, 0, height
        executed.append(simulate_forward(config, q, k, v).run.counters.executed)
        found = guesses(scores_of(q, k), DType.BF16, B_C, first_leads=first_leads, shares_dominance=True)
        assert (found.corrected == 0) == (height > 0)
    assert executed[1] < executed[0]


@pytest.mark.parametrize(
    ("dtype", "per_block", "rescaled"), [(DType.BF16, 12, 1), (DType.BF16, 45, 3), (DType.FP16, 5, 2)], ids=str
)
def test_lazy_softmax_rescales_when_scores_have_risen_by_what_its_dtype_holds(dtype, per_block, rescaled):
    """Of nine steps up: bf16 passes 40 above the reference, which then is 60 above the score; fp16 passes 15 again and
    again."""
    blocks = np.repeat(np.arange(10)[::-1] * float(per_block), B_C)
    found = rescales(np.tile(blocks, (64, 1)), dtype, B_C, warp_rows=32)
    assert (found.steps, found.rescaled) == (2 * 9, 2 * rescaled)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=str)
def test_as_many_steps_rescale_as_the_model_says(dtype):
    """Each takes the same number of instructions more, but for one or two where some rows stay as they are."""
    options = "async+eager+swizzled+load_2_2_2_tiles+opt_softmax+reversed+mma_sum+lazy"
    config = parse_config(f"({dtype.name}, 64, 64, {B_C}, 4): {options}")
    executed, rescaled = [], []
    for slope in (0, 4, 12, 40):
        q, k, v = inputs(dtype, 1, slope * FALLING)
        executed.append(simulate_forward(config, q, k, v).run.counters.executed)
        rescaled.append(rescales(scores_of(q, k), dtype, B_C, warp_rows=16).rescaled)
    assert rescaled[0] == 0 < rescaled[1] < rescaled[3]
    instructions = (executed[3] - executed[0]) / rescaled[3]
    assert [round((count - executed[0]) / instructions) for count in executed] == rescaled
