"""The model of guesses beside the kernel: as many blocks are computed twice."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flashwright import parse_config, simulate_forward
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.workbench.bench.guesses import guesses

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
