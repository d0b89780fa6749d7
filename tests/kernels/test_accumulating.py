"""Kernels that mix their results into fp32 sums, on the simulator: parts of a problem give what the whole gives."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from backward_cases import Problem, check_gradients, differentiate, simulated
from simulated_cases import Shape, random_problem

from flashwright import AttentionVariant, compile_kernel
from flashwright.kernels.family import Occasion
from flashwright.kernels.registry import families
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import LONG
from flashwright.problem.options import AttentionOptions
from flashwright.problem.reference import reference_forward, relative_error
from flashwright.problem.window import Window
from flashwright.runtime.simulated import BackwardSimulation, simulate_backward, simulate_forward

AMPERE = "(BF16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax"
HOPPER = "hopper (BF16, 64, 128, 64): stages_2+overlap+ping_pong+persistent+lazy+guess"
OTHERS = (
    f"{AMPERE}+stride_64",
    "(BF16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_0_tiles+buffer+opt_softmax+mma_sum+lazy",
    "hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy",
)
AMPERE_BACKWARD = "ampere backward (BF16, 64, 64, 64, 4): stages_1_1+swizzled"
HOPPER_BACKWARD = "hopper backward (BF16, 64, 128, 128, 2): stages_2_2+register_P+bulk_dQ+persistent+keys_ahead"
OTHER_BACKWARDS = (
    "ampere backward (BF16, 128, 64, 128, 8): stages_2_2+parts_2+swizzled",
    "hopper backward (BF16, 128, 64, 128, 2): stages_3_3+register_P+persistent+skips_masked",
)
ROUNDING_OF_P = 2e-3
"""What it explains of the relative error of an fp32 output."""


def slow(*values):
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


def nothing_yet(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Sums in the midst of larger ones, NaN where no key has come yet."""
    rows = (shape.batch, shape.q_heads + 1, shape.q_rows + 8)
    out, lse = np.full((*rows, shape.head_dim), np.nan, np.float32), np.full(rows, -np.inf, np.float32)
    return out[:, 1:, 8:], lse[:, 1:, 8:]


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [(AMPERE, 40), (HOPPER, 64), *slow((AMPERE, 64), (HOPPER, 40), (OTHERS[0], 64), (OTHERS[1], 128), (OTHERS[2], 96))],
)
def test_outputs_of_parts_of_the_keys_make_up_that_of_all(config, head_dim):
    shape = Shape(2, 2, 1, 150, 230, head_dim)
    q, k, v = random_problem(shape, DType.BF16)
    out, lse = nothing_yet(shape)
    for start, stop in pairwise((0, 70, 80, 230)):
        simulate_forward(config, q, k[:, :, start:stop], v[:, :, start:stop], sums=(out, lse))
    expected, expected_lse = reference_forward(q, k, v)
    assert relative_error(out, expected) < ROUNDING_OF_P
    np.testing.assert_allclose(lse, expected_lse, atol=4e-6, rtol=0)
    around, around_lse = out.base, lse.base
    assert np.isnan(around[:, 0]).all() and np.isnan(around[:, :, :8]).all()
    assert np.isinf(around_lse[:, 0]).all() and np.isinf(around_lse[:, :, :8]).all()


@pytest.mark.parametrize("config", [AMPERE, *slow(HOPPER, OTHERS[1], OTHERS[2])])
def test_rows_without_a_key_in_a_part_keep_what_they_have(config):
    """Row i attends to keys i - 90 … i - 40: most rows have keys in one or two of three parts, the first have none."""
    shape = Shape(1, 2, 2, 140, 140, 64)
    q, k, v = random_problem(shape, DType.BF16)
    out, lse = nothing_yet(shape)
    for start, stop in pairwise((0, 50, 100, 140)):
        # The keys of a part are numbered from its first.
        window = Window(90 + start, -40 - start, bottom_right=False)
        simulate_forward(config, q, k[:, :, start:stop], v[:, :, start:stop], window=window, sums=(out, lse))
    expected, expected_lse = reference_forward(q, k, v, window=Window(90, -40, bottom_right=False))
    assert relative_error(out, expected) < ROUNDING_OF_P
    assert not out[:, :, :40].any()
    np.testing.assert_allclose(lse, expected_lse, atol=4e-6, rtol=0)


@pytest.mark.parametrize("config", [AMPERE, *slow(HOPPER)])
def test_packed_parts_leave_the_rows_of_others_alone(config):
    """Sequences without keys, and rows behind the last, keep what they have."""
    shape = Shape(1, 2, 2, 130, 90, 64)
    q, k, v = random_problem(shape, DType.BF16)
    out, lse = nothing_yet(shape)
    simulate_forward(config, q, k[:, :, :20], v[:, :, :20], sums=(out, lse))
    before, lse_before = out.copy(), lse.copy()
    starts = np.array([0, 30, 50, 100], np.int32), np.array([0, 40, 40, 90], np.int32)
    simulate_forward(config, q, k, v, sums=(out, lse), starts=starts, max_lengths=(50, 50))
    for rows in (slice(30, 50), slice(100, 130)):
        np.testing.assert_array_equal(out[:, :, rows], before[:, :, rows])
        np.testing.assert_array_equal(lse[:, :, rows], lse_before[:, :, rows])
    for rows, keys in ((slice(0, 30), range(40)), (slice(50, 100), range(40, 90))):
        expected = reference_forward(
            q[:, :, rows], *(np.concatenate((x[:, :, :20], x[:, :, keys]), axis=2) for x in (k, v))
        )
        assert relative_error(out[:, :, rows], expected[0]) < ROUNDING_OF_P
        np.testing.assert_allclose(lse[:, :, rows], expected[1], atol=4e-6, rtol=0)


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        (HOPPER_BACKWARD, 40),
        *slow((AMPERE_BACKWARD, 64), (AMPERE_BACKWARD, 40)),
        *slow((HOPPER_BACKWARD.replace("bulk_dQ", "ordered") + "+finishes_dQ", 64)),
        *slow(*((each, 128) for each in OTHER_BACKWARDS)),
    ],
)
def test_gradients_of_parts_make_up_those_of_the_whole(config, head_dim):
    """Queries are the last 100 of 210 positions. Parts are added without a rounding between them."""
    problem = Problem.random(Shape(1, 2, 1, 100, 210, head_dim), DType.BF16, AttentionOptions(Window(None, 0)))
    truth = differentiate(problem)
    out, lse = truth.rounded(DType.BF16)
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (problem.q, problem.k, problem.v))
    for start, stop in pairwise((0, 130, 210)):
        at = (slice(None), slice(None), slice(start, stop))
        part = simulate_backward(
            config, problem.do, problem.q, problem.k[at], problem.v[at], out, lse,
            options=AttentionOptions(Window(None, 110 - start, bottom_right=False)), sums=(dq, dk[at], dv[at]),
        )  # fmt: skip
    check_gradients(problem, BackwardSimulation(dq, dk, dv, part.run, {}), truth)
    whole = simulated(config, problem, truth)
    for name, mine in (("dq", dq), ("dk", dk), ("dv", dv)):
        right = getattr(truth, name)
        assert relative_error(mine, right) < relative_error(getattr(whole, name), right)


@pytest.mark.parametrize("config", [AMPERE_BACKWARD, *slow(HOPPER_BACKWARD)])
def test_gradients_of_packed_parts_leave_the_rows_of_others_alone(config):
    """Rows before the first sequence and behind the last keep what they have."""
    problem = Problem.random(Shape(1, 1, 1, 60, 60, 64), DType.BF16)
    starts = np.array([10, 30, 50], np.int32)
    sums = tuple(np.full(x.shape, 7, np.float32) for x in (problem.q, problem.k, problem.v))
    truths = [differentiate(problem.part(slice(*each), slice(*each))) for each in pairwise(starts)]
    out, lse = np.zeros_like(problem.q), np.zeros(problem.q.shape[:3], np.float32)
    for (start, stop), truth in zip(pairwise(starts), truths, strict=True):
        out[:, :, start:stop], lse[:, :, start:stop] = truth.rounded(DType.BF16)
    simulate_backward(
        config, problem.do, problem.q, problem.k, problem.v, out, lse, starts=(starts, starts), max_lengths=(20, 20),
        sums=sums,
    )  # fmt: skip
    for name, total in zip(("dq", "dk", "dv"), sums, strict=True):
        assert np.all(total[:, :, :10] == 7) and np.all(total[:, :, 50:] == 7)
        for (start, stop), truth in zip(pairwise(starts), truths, strict=True):
            assert relative_error(total[:, :, start:stop] - 7, getattr(truth, name)) < 6e-3


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d_head", [64, 128, 256])
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_accumulating_spills_next_to_nothing(operation, d_head, causal):
    for family in families(operation):
        config = family.default_config(Occasion(DType.BF16, d_head, causal, LONG, LONG, None))
        plain, accumulating = (
            compile_kernel(
                config,
                family.oldest_arch,
                AttentionVariant(returns_lse=operation == "forward", masks_right=causal, accumulates=on),
            )
            for on in (False, True)
        )
        assert accumulating.spill_bytes <= plain.spill_bytes + 32
