"""What the kernel computes beyond the plain product, on the simulated GPU with hazards checked."""

from __future__ import annotations

import numpy as np
import pytest
from samples import sampled
from simulated_cases import UNOWNED_ROWS, check, check_packed, random

from flashwright import parse_kernel_name_into_config, run_forward
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.reference import reference_forward, relative_error
from flashwright.problem.window import FULL, Window
from flashwright.runtime.simulated import simulate_forward

WHOLE_Q = "async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"
TILED_Q = "async+eager+swizzled+load_2_2_2_tiles+opt_softmax+peeled+reversed+mma_sum"
SYNCHRONOUS = "swizzled+load_2_2_2_tiles"
TWO_STAGES = "async+eager+swizzled+load_2_2_2_tiles+opt_softmax+mma_sum+two_stages+lazy"
RING = "async+eager+swizzled+load_2_2_2_tiles+opt_softmax+mma_sum+lazy"
CAUSAL, CAUSAL_TOP_LEFT = Window(right=0), Window(right=0, bottom_right=False)

# config, (batch, q heads, kv heads, q rows, kv rows, head_dim), options
CASES = {
    "tails of both": (f"(BF16, 128, 64, 64, 4): {WHOLE_Q}", (1, 2, 2, 100, 77, 128), {}),
    "one row, one key": (f"(FP16, 128, 64, 64, 4): {WHOLE_Q}", (1, 1, 1, 1, 1, 128), {}),
    "causal, more keys than rows": (
        f"(BF16, 128, 64, 64, 4): {WHOLE_Q}",
        (1, 2, 1, 130, 200, 128),
        {"window": CAUSAL},
    ),
    "causal from the top left, grouped heads": (
        f"(FP16, 64, 128, 64, 4): {TILED_Q}",
        (2, 4, 2, 130, 200, 64),
        {"window": CAUSAL_TOP_LEFT},
    ),
    "causal, rows without keys": (f"(FP16, 64, 128, 64, 4): {TILED_Q}", (1, 2, 2, 200, 100, 64), {"window": CAUSAL}),
    "a window, capped, padded columns": (
        f"(FP16, 64, 128, 64, 4): {TILED_Q}",
        (1, 2, 2, 100, 300, 40),
        {"window": Window(left=30, right=10), "softcap": 3.0},
    ),
    "a causal window, synchronous copies, a scale": (
        f"(BF16, 96, 64, 32, 4): {SYNCHRONOUS}",
        (1, 2, 2, 65, 65, 72),
        {"window": Window(left=5, right=0), "scale": 0.3},
    ),
    "multi-query, 256 columns": (f"(BF16, 256, 64, 32, 4): {TILED_Q}", (1, 3, 1, 70, 40, 248), {"window": CAUSAL}),
    "8 warps, 160 columns": (f"(FP16, 160, 128, 32, 8): {WHOLE_Q}", (1, 1, 1, 140, 90, 160), {}),
    "two stages, causal, tails": (
        f"(BF16, 64, 128, 64, 4): {TWO_STAGES}",
        (1, 2, 1, 150, 170, 64),
        {"window": CAUSAL},
    ),
    "two stages, Q held, a window": (
        f"(FP16, 128, 64, 32, 4): {WHOLE_Q}+two_stages+lazy",
        (1, 1, 1, 64, 128, 128),
        {"window": Window(left=40, right=20)},
    ),
    "a ring of three stages, Q held, a window": (
        f"(FP16, 128, 64, 32, 4): {WHOLE_Q}+lazy+ring_3",
        (1, 1, 1, 64, 200, 128),
        {"window": Window(left=40, right=20)},
    ),
    "a ring of four stages, last block first": (
        f"(BF16, 64, 64, 32, 4): {RING}+reversed+ring_4",
        (1, 1, 1, 64, 300, 64),
        {},
    ),
    "a ring with more stages than blocks": (
        f"(BF16, 64, 64, 32, 4): {RING}+peeled+ring_5",
        (1, 1, 1, 64, 40, 64),
        {},
    ),
    "a ring at 256 columns, last block first": (
        f"(BF16, 256, 64, 32, 4): {RING}+reversed+ring_3",
        (1, 1, 1, 100, 130, 256),
        {},
    ),
    "32 columns": (f"(BF16, 32, 128, 128, 8): {TILED_Q}", (1, 1, 1, 130, 150, 24), {"softcap": 20.0}),
}


SLOW_CASES = (
    "a causal window, synchronous copies, a scale",
    "multi-query, 256 columns",
    "8 warps, 160 columns",
    "two stages, Q held, a window",
    "a ring of four stages, last block first",
    "a ring at 256 columns, last block first",
    "32 columns",
)


@pytest.mark.parametrize("case", sampled(CASES, SLOW_CASES))
def test_the_kernel_computes_every_variant(case):
    short_form, shape, options = case
    # With and without the log-sum-exp are two kernels: only the one without it adds rows on the tensor cores.
    check(parse_kernel_name_into_config(short_form), shape, options)


@pytest.mark.parametrize(("dtype", "tolerance"), [("FP16", 5e-4), ("BF16", 4e-3)])
@pytest.mark.parametrize("softmax", ["opt_softmax+lazy", "opt_softmax+mma_sum+lazy", "lazy"])
@pytest.mark.parametrize("reverse", [False, True], ids=["growing maxima", "shrinking maxima"])
def test_lazy_rescaling_is_exact_however_the_maxima_move(dtype, tolerance, softmax, reverse):
    """Scores that grow by less and by more than the threshold from block to block, up to hundreds."""
    config = parse_kernel_name_into_config(f"({dtype}, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+{softmax}")
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, 1, 256, 64)) for _ in range(3))
    growth = np.repeat([0.2, 1, 1.2, 3, 3.1, 10, 30, 31], 32)[:, None]
    k = k * (growth[::-1] if reverse else growth)
    q, k, v = (x.astype(NUMPY_DTYPES[config.dtype]) for x in (q, k, v))
    output, lse = reference_forward(q, k, v)
    for return_lse in (False, True):
        simulation = simulate_forward(config, q, k, v, return_lse=return_lse)
        assert relative_error(simulation.output, output) < tolerance
    np.testing.assert_allclose(simulation.lse, lse, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("values", [1.0, 2.0**-50, 2.0**60])
def test_scores_that_rise_steeply_are_exact_for_small_and_large_values(values):
    """Each block is 2^45 above the one before it: references rise 60 above their rows' scores, and are passed by up to
    40."""
    config = parse_kernel_name_into_config(
        "(BF16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax+mma_sum+lazy"
    )
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, 1, 256, 64)) for _ in range(3))
    q[..., 0], k[..., 0] = 1, np.arange(256) // 32 * 45 * np.log(2) * 8
    q, k, v = (x.astype(NUMPY_DTYPES[config.dtype]) for x in (q, k, v * values))
    simulated = simulate_forward(config, q, k, v).output
    assert relative_error(simulated.astype(float) / values, reference_forward(q, k, v)[0] / values) < 4e-3


def test_rows_that_attend_to_nothing_are_zero():
    config = parse_kernel_name_into_config(f"(BF16, 64, 64, 64, 4): {WHOLE_Q}")
    q = random(np.random.default_rng(0), 1, 1, 64, 64, dtype=config.dtype)
    out, lse = run_forward(config, q, q, q, window=Window(right=-100), return_lse=True, device="simulator")
    assert np.all(out == 0) and np.all(lse == -np.inf)


def test_blocks_beyond_the_window_are_not_visited():
    config = parse_kernel_name_into_config(f"(BF16, 64, 64, 64, 4): {WHOLE_Q}")
    q = random(np.random.default_rng(0), 1, 1, 256, 64, dtype=config.dtype)

    def products(window: Window) -> int:
        return simulate_forward(config, q, q, q, window=window).run.counters.tensor_flops

    step = 4 * 64 * 64 * 64
    assert products(FULL) == 16 * step
    assert products(CAUSAL) == 10 * step
    assert products(Window(left=0, right=0)) == 4 * step
    assert products(Window(left=1, right=0)) == 7 * step


@pytest.mark.parametrize("window", [FULL, CAUSAL, Window(left=3, right=5)], ids=["full", "causal", "window"])
def test_packed_sequences_are_computed_apart(window):
    """Shorter and longer than a block, with more rows than keys, without rows, and with a single key."""
    config = parse_kernel_name_into_config(f"(FP16, 64, 64, 64, 4): {WHOLE_Q}")
    lengths = [(5, 70), (100, 33), (0, 10), (64, 64), (130, 1)]
    check_packed(config, lengths, {"window": window}, heads=(4, 2))


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (f"(FP16, 64, 64, 64, 4): {WHOLE_Q}", 200),
        ("(FP16, 64, 16, 16, 1): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+mma_sum+lazy", 60),
    ],
    ids=["blocks of 64 rows", "blocks of 16 rows, one warp"],
)
def test_one_long_packed_sequence_among_many_short_ones(config, longest):
    lengths = [(1, 3)] * 20 + [(longest, longest)] + [(2, 2)] * 20
    check_packed(parse_kernel_name_into_config(config), lengths, {"window": CAUSAL}, heads=(1, 1))


@pytest.mark.parametrize("return_lse", [False, True], ids=["output", "output and lse"])
@pytest.mark.parametrize("case", UNOWNED_ROWS.values(), ids=list(UNOWNED_ROWS))
def test_rows_of_no_sequence_are_zero(case, return_lse):
    """Whatever was in memory there; and columns beyond the head dimension are left alone."""
    before, behind, lengths = case
    config = parse_kernel_name_into_config(f"(FP16, 64, 64, 64, 4): {WHOLE_Q}")
    check_packed(
        config, lengths, {}, heads=(3, 1), head_dim=56, rows_before=before, rows_behind=behind, return_lse=return_lse
    )


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ({"cu_seqlens_q": np.array([0, 64], np.int32)}, "cu_seqlens_k: missing"),
        ({name: np.array([0, 64]) for name in ("cu_seqlens_q", "cu_seqlens_k")}, "int64 is not allowed"),
        (
            {"cu_seqlens_q": np.array([0, 64], np.int32), "cu_seqlens_k": np.array([0, 8, 64], np.int32)},
            "cu_seqlens_k: 3 entries, but cu_seqlens_q has 2",
        ),
    ],
)
def test_malformed_starts_of_sequences_are_refused(starts, message):
    config = parse_kernel_name_into_config(f"(BF16, 64, 64, 64, 4): {WHOLE_Q}")
    q = np.zeros((1, 1, 64, 64), NUMPY_DTYPES[config.dtype])
    with pytest.raises(ValueError, match=message):
        run_forward(config, q, q, q, **starts, device="simulator")
