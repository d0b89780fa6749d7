"""The model of guesses beside the kernels: as many blocks are computed twice, and as many steps rescale O."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flashwright import parse_config, simulate_forward
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.workbench.bench.guesses import guesses, rescales

ROWS, KEYS, D_HEAD, B_C = 128, 320, 64, 32


def scores_of(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    found: np.ndarray = q[0, 0].astype(float) @ k[0, 0].astype(float).T * (math.log2(math.e) / math.sqrt(D_HEAD))
    return found


def inputs(dtype: DType, spread: float, slope: float) -> tuple[np.ndarray, ...]:
    """Scores that fall by so much a block from the first key on: they rise in the order of visiting."""
    generator = np.random.default_rng(3)
    q = generator.standard_normal((1, 1, ROWS, D_HEAD)) * spread
    k, v = (generator.standard_normal((1, 1, KEYS, D_HEAD)) for _ in range(2))
    q[..., 0], k[..., 0] = 8, slope * (KEYS // B_C - np.arange(KEYS) // B_C)
    return tuple(x.astype(NUMPY_DTYPES[dtype]) for x in (q, k, v))


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=str)
@pytest.mark.parametrize(("spread", "slope"), [(1, 0), (10, 0), (40, 0), (1, 4), (1, 30), (1, 120)])
def test_as_many_blocks_are_computed_twice_as_the_model_says(dtype, spread, slope):
    config = parse_config(f"hopper ({dtype.name}, 64, 128, {B_C}): stages_2+overlap+ping_pong+persistent+lazy+guess")
    q, k, v = inputs(dtype, spread, slope)
    block_flops = 2 * 64 * B_C * D_HEAD
    once = 2 * (ROWS // 64) * (KEYS // B_C)
    twice = simulate_forward(config, q, k, v).run.counters.tensor_flops / block_flops - once
    assert guesses(scores_of(q, k), dtype, B_C).overflowed == twice


def test_steep_scores_overflow_once_and_are_searched_from_then_on():
    q, k, _ = inputs(DType.BF16, 1, 120)
    found = guesses(scores_of(q, k), DType.BF16, B_C)
    assert (found.overflowed, found.lifted) == (2, 0)
    assert found.with_care == found.steps - 2


def test_scores_that_rise_slowly_are_lifted_now_and_then():
    q, k, _ = inputs(DType.BF16, 1, 12)
    found = guesses(scores_of(q, k), DType.BF16, B_C)
    assert found.overflowed == found.with_care == 0
    assert 0 < found.lifted < found.steps
    assert found.corrected < found.steps


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
        q, k, v = inputs(dtype, 1, slope)
        executed.append(simulate_forward(config, q, k, v).run.counters.executed)
        rescaled.append(rescales(scores_of(q, k), dtype, B_C, warp_rows=16).rescaled)
    assert rescaled[0] == 0 < rescaled[1] < rescaled[3]
    instructions = (executed[3] - executed[0]) / rescaled[3]
    assert [round((count - executed[0]) / instructions) for count in executed] == rescaled
