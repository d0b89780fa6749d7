"""Errors against float64 beside FlashAttention-2's, on kinds of scores that are hard: a key that has much of a row's
weight is not among those in which a kernel looks for its first reference."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from flash_attention_2 import flash_attention_2

torch = pytest.importorskip("torch")

from simulated_cases import ROUNDING

from flashwright import DType, Window, parse_config, simulate_forward
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.reference import reference_forward, relative_error
from flashwright.workbench.bench.error_ratios import NORMAL_RMS_LIMIT, RMS_LIMIT
from flashwright.workbench.bench.scores import NORMAL, score_inputs

CONFIGS = {
    "ampere": "(BF16, 256, 128, 48, 8): "
    "async+eager+swizzled+load_0_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+lazy+ring_3",
    "hopper": "hopper (BF16, 256, 128, 64): stages_2+overlap+persistent+lazy+guess+first",
}
HEADS, ROWS, D_HEAD = 2, 128, 256


@cache
def problem(kind: str, keys: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """q, k and v; and attention in float64."""
    inputs = score_inputs(
        kind, batch=1, heads=HEADS, q_length=ROWS, kv_length=keys, d_head=D_HEAD, dtype=torch.bfloat16
    )
    arrays = tuple(x.float().numpy().astype(NUMPY_DTYPES[DType.BF16]) for x in inputs)
    return arrays, reference_forward(*arrays)[0]


def rms(output: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((output.astype(np.float64) - expected) ** 2)))


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("normal", 2048),
        ("normal-x2", 512),
        pytest.param("normal-x2", 2048, marks=pytest.mark.slow),
        pytest.param("normal-x4", 512, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", CONFIGS)
def test_errors_are_within_the_limits_beside_flash_attention_2(kind, keys, family):
    config = parse_config(CONFIGS[family])
    inputs, expected = problem(kind, keys)
    ours = rms(simulate_forward(config, *inputs, check_hazards=False).output, expected)
    limit = NORMAL_RMS_LIMIT if kind == NORMAL else RMS_LIMIT
    assert ours <= limit * rms(flash_attention_2(*inputs), expected)


def test_flash_attention_2_is_more_accurate_in_parts_of_the_keys():
    """Each has a maximum of its own, whose exponential is exactly one."""
    inputs, expected = problem("normal-x2", 512)
    whole, in_parts = (rms(flash_attention_2(*inputs, parts=parts), expected) for parts in (1, 8))
    assert in_parts < 0.97 * whole


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("parts", [1, 8])
def test_flash_attention_2_is_attention(causal, parts):
    (q, k, v), _ = problem("normal-x2", 512)
    expected, _ = reference_forward(q, k, v, window=Window(None, 0) if causal else Window())
    assert relative_error(flash_attention_2(q, k, v, causal=causal, parts=parts), expected) < ROUNDING[DType.BF16]
