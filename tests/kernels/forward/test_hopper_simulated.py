"""The Hopper kernel on the simulated GPU: right for every variant, with hazards checked and every wait bounded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import sampled
from simulated_cases import ROUNDING, UNOWNED_ROWS, check, check_packed

from flashwright import (
    DType,
    HopperTileShapes,
    Window,
    get_hopper_configs,
    get_hopper_progression_configs,
    parse_hopper_config,
    run_forward,
)
from flashwright.kernels.forward.hopper.config import D_HEADS
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.reference import random_inputs, reference_forward, relative_error
from flashwright.runtime.simulated import SIMULATED_MULTIPROCESSORS, ForwardSimulation, simulate_forward

ALL = "stages_2+overlap+ping_pong+persistent+lazy+guess"
FIRST = f"{ALL}+first"
SMALL = parse_hopper_config(f"hopper (FP16, 64, 128, 32): {ALL}")
"""The fastest way to compute, with tiles that compile and simulate in a second."""
LEADING = replace(SMALL, first_block_leads=True)
"""The same with the first block of keys first."""
ALIKE = 0.01
"""A scale that makes all scores nearly the same, so that no guess fails."""
CAUSAL, CAUSAL_TOP_LEFT = Window(right=0), Window(right=0, bottom_right=False)

# config, (batch, q heads, kv heads, q rows, kv rows, head_dim), options
CASES = {
    "tails of both": (f"(FP16, 64, 128, 32): {FIRST}", (1, 2, 2, 200, 77, 64), {}),
    "one row, one key": (f"(BF16, 64, 128, 32): {FIRST}", (2, 2, 2, 1, 1, 64), {}),
    "one step in all": (f"(FP16, 64, 192, 64): {ALL}", (1, 1, 1, 200, 64, 64), {"scale": 0.3}),
    "causal, large tiles": (f"(BF16, 128, 128, 128): {ALL}", (1, 3, 3, 384, 384, 128), {"window": CAUSAL}),
    "causal, three consumers": (f"(FP16, 64, 192, 64): {FIRST}", (1, 2, 2, 400, 400, 64), {"window": CAUSAL}),
    "causal, more keys than rows, grouped heads": (
        f"(BF16, 64, 128, 64): {FIRST}",
        (1, 4, 2, 130, 300, 64),
        {"window": CAUSAL},
    ),
    "causal from the top left": (
        f"(FP16, 64, 128, 64): {ALL}",
        (1, 2, 1, 300, 200, 64),
        {"window": CAUSAL_TOP_LEFT},
    ),
    "causal, a tile without keys": (f"(FP16, 64, 128, 32): {FIRST}", (2, 2, 1, 300, 100, 64), {"window": CAUSAL}),
    "causal, in sequence, one stage": (
        "(FP16, 64, 128, 32): stages_1",
        (1, 2, 2, 260, 260, 64),
        {"window": CAUSAL},
    ),
    "a window on both sides, capped, padded columns": (
        f"(FP16, 64, 128, 32): {FIRST}",
        (1, 2, 2, 150, 300, 40),
        {"window": Window(left=30, right=10), "softcap": 3.0},
    ),
    "a window from the top left, taking turns in sequence": (
        "(BF16, 64, 128, 32): stages_2+ping_pong+persistent",
        (1, 2, 2, 200, 150, 64),
        {"window": Window(left=20, right=40, bottom_right=False)},
    ),
    "a left edge alone, one consumer": (
        "(FP16, 64, 64, 32): stages_3+overlap+lazy",
        (1, 2, 2, 200, 230, 64),
        {"window": Window(left=50)},
    ),
    "a left edge that leaves the last rows nothing": (
        f"(FP16, 64, 128, 32): {ALL}",
        (1, 1, 1, 300, 60, 64),
        {"window": Window(left=5, bottom_right=False)},
    ),
    "the smallest blocks of keys": (f"(FP16, 64, 128, 16): {ALL}", (1, 1, 1, 200, 150, 64), {"window": CAUSAL}),
    "no key for any row": (f"(FP16, 64, 128, 32): {ALL}", (1, 2, 1, 130, 64, 64), {"window": Window(right=-100)}),
    "80 columns of 96": (f"(BF16, 96, 128, 32): {ALL}", (1, 2, 1, 140, 90, 80), {"window": CAUSAL}),
    "192 columns": (f"(FP16, 192, 128, 32): {ALL}", (1, 1, 1, 130, 90, 192), {"softcap": 20.0}),
    "multi-query, 248 columns of 256": (f"(BF16, 256, 128, 32): {FIRST}", (1, 3, 1, 70, 100, 248), {"window": CAUSAL}),
}


SLOW_CASES = (
    "one step in all",
    "causal, three consumers",
    "causal from the top left",
    "a window from the top left, taking turns in sequence",
    "a left edge that leaves the last rows nothing",
    "80 columns of 96",
    "192 columns",
    "the smallest blocks of keys",
)


@pytest.mark.parametrize("case", sampled(CASES, SLOW_CASES))
def test_the_kernel_computes_every_variant(case):
    text, shape, options = case
    check(parse_hopper_config(f"hopper {text}"), shape, options, with_lse=(True,))


def test_the_kernel_without_the_log_sum_exp_computes_the_same():
    inputs = random_inputs(SMALL, heads=1, rows=384)
    with_lse, without = (simulate_forward(SMALL, *inputs, return_lse=lse) for lse in (True, False))
    assert np.array_equal(with_lse.output.view(np.uint16), without.output.view(np.uint16))


# --- Packed sequences --------------------------------------------------------------------------------------------

windows = st.builds(
    Window, left=st.integers(-3, 130), right=st.integers(-3, 130), bottom_right=st.booleans()
)  # a packed kernel has both edges in its code whatever they are: one is compiled for all


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 140), st.integers(0, 100)), min_size=1, max_size=4), windows, st.integers(0, 9)
)
@example([(5, 70), (100, 33), (0, 10), (64, 64), (130, 1)], Window(left=300, right=300), 1)
@example([(0, 0), (40, 0), (128, 32), (1, 1)], Window(left=64, right=0), 9)
@example([(1, 3)] * 7 + [(400, 400)] + [(1, 3)] * 7, Window(left=64, right=0), 9)
def test_any_packed_sequences_are_computed_apart(lengths, window, spoilt):
    """Empty ones, shorter and longer than a block, more rows than keys, a long one among many short ones; and one full
    of NaN and infinity."""
    check_packed(SMALL, lengths, {"window": window}, spoilt=[b for b in range(len(lengths)) if b == spoilt])


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (f"(BF16, 64, 192, 64): {FIRST}", {"window": CAUSAL}),
        ("(FP16, 128, 128, 32): stages_1+ping_pong", {"softcap": 8.0}),
    ],
    ids=["three consumers", "in sequence, two panels"],
)
def test_what_lies_behind_a_packed_sequence_does_not_reach_it(config, options):
    lengths = [(50, 70), (30, 33), (200, 100), (10, 7)]
    config = parse_hopper_config(f"hopper {config}")
    check_packed(config, lengths, options, spoilt=(1, 3), head_dim=config.d_head - 8)


@pytest.mark.parametrize("return_lse", [False, True], ids=["output", "output and lse"])
@pytest.mark.parametrize("case", UNOWNED_ROWS.values(), ids=list(UNOWNED_ROWS))
def test_rows_of_no_sequence_are_zero(case, return_lse):
    before, behind, lengths = case
    check_packed(
        SMALL, lengths, {}, heads=(3, 1), head_dim=56, rows_before=before, rows_behind=behind, return_lse=return_lse
    )


# --- Tensors -----------------------------------------------------------------------------------------------------


def test_tensors_may_have_any_strides():
    """A row-major, a head-major and a padded tensor give the same result as contiguous ones."""
    q, k, v = (np.ascontiguousarray(x) for x in random_inputs(SMALL, batch=2, rows=100))
    expected = simulate_forward(SMALL, q, k, v).output
    rows_outermost = np.ascontiguousarray(q.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    padded = np.full((2, 2, 102, 80), np.nan, k.dtype)
    padded[:, :, 1:101, 8:72] = k
    found = simulate_forward(SMALL, rows_outermost, padded[:, :, 1:101, 8:72], v).output
    assert np.array_equal(found.view(np.uint16), expected.view(np.uint16))


def test_the_simulator_is_a_device_of_run_forward():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 128, 2, 64, dtype=torch.float16).transpose(1, 2) for _ in range(3))
    out, lse = run_forward(SMALL, q, k, v, scale=0.5, return_lse=True, device="simulator")
    expected, expected_lse = reference_forward(*(x.float().numpy() for x in (q, k, v)), scale=0.5)
    assert out.dtype == q.dtype and out.stride() == q.stride()
    assert relative_error(out.float().numpy(), expected) < ROUNDING[DType.FP16]
    np.testing.assert_allclose(lse.numpy(), expected_lse, atol=2e-5)


# --- What it does on the way -------------------------------------------------------------------------------------


def test_traffic_is_what_the_tile_shapes_say():
    """Every element of Q moves once, of K and V once per tile; O is stored once. Nothing but announcements of tiles
    passes through registers to shared memory: of every tile, and to every thread block that there are no more."""
    q, k, v = random_inputs(SMALL, heads=3, rows=256)
    run = simulate_forward(SMALL, q, k, v, scale=ALIKE).run
    tiles = 3 * 256 // SMALL.B_r
    assert run.grid == (SIMULATED_MULTIPROCESSORS, 1, 1)
    assert run.counters.bytes_global_to_shared == q.nbytes + 256 // SMALL.B_r * (k.nbytes + v.nbytes)
    assert run.counters.bytes_registers_to_global == q.nbytes
    announcements = tiles + SIMULATED_MULTIPROCESSORS
    consumer_warps, producers = 8, 1
    assert run.counters.shared_accesses == announcements * (1 + consumer_warps + producers)
    assert run.counters.bytes_registers_to_shared == announcements * 16
    assert run.counters.bytes_shared_to_registers == announcements * 16 * (32 * consumer_warps + producers)
    assert run.counters.tensor_flops == 4 * tiles * SMALL.B_r * 256 * SMALL.d_head
    assert HopperTileShapes(SMALL).threads == 384


def test_blocks_beyond_the_window_are_not_visited():
    """By the 64 rows of a warpgroup on the right, by the rows of a tile on the left."""
    q, k, v = random_inputs(SMALL, heads=1, rows=256)

    def steps(window: Window) -> float:
        run = simulate_forward(SMALL, q, k, v, window=window, scale=ALIKE).run
        return run.counters.tensor_flops / (4 * 64 * 32 * 64)

    assert steps(Window()) == 8 + 8 + 8 + 8
    assert steps(CAUSAL) == 2 + 4 + 6 + 8
    assert steps(Window(left=0, right=0)) == 2 + 4 + 2 + 4
    assert steps(Window(left=1, right=0)) == 2 + 4 + 3 + 5


@pytest.mark.parametrize(("leads", "first_block"), [(False, 64), (True, 128)], ids=["from the last", "first leads"])
def test_along_the_diagonal_half_a_block_is_computed_where_no_row_attends_to_more(leads, first_block):
    """Of blocks of 128 keys, by every other warpgroup of 64 rows: half the scores, but the whole of the product with V.
    A block that leads is whole."""
    config = replace(SMALL, B_c=128, first_block_leads=leads)
    inputs = random_inputs(config, heads=1, rows=256)
    found = simulate_forward(config, *inputs, window=CAUSAL)
    assert relative_error(found.output, reference_forward(*inputs, window=CAUSAL)[0]) < ROUNDING[DType.FP16]
    score_keys = first_block + 128 + (64 + 128) + 2 * 128
    output_keys = (1 + 1 + 2 + 2) * 128
    assert found.run.counters.tensor_flops == 2 * 64 * 64 * (score_keys + output_keys)


# --- Maxima ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=str)
@pytest.mark.parametrize(
    ("reverse", "steepness"),
    [(True, 1), (True, 100), (False, 1), (False, 100)],
    ids=["growing", "growing to where fp32 is infinite", "shrinking", "shrinking from where fp32 is infinite"],
)
def test_the_kernel_is_exact_however_the_maxima_move(dtype, reverse, steepness):
    """The last block is visited first. A warpgroup whose exponentials overflow computes one block again, and searches
    for maxima from then on."""
    config = replace(SMALL, dtype=dtype)
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, 1, 256, 64)) for _ in range(3))
    growth = np.repeat([0.2, 1, 1.2, 3, 3.1, 10, 30, 31], 32)[:, None] * steepness
    k = k * (growth[::-1] if reverse else growth)
    q, k, v = (x.astype(NUMPY_DTYPES[dtype]) for x in (q, k, v))
    output, lse = reference_forward(q, k, v)
    found = simulate_forward(config, q, k, v, return_lse=True)
    assert relative_error(found.output, output) < ROUNDING[dtype]
    np.testing.assert_allclose(found.lse, lse, atol=2e-5, rtol=1e-6)
    failed = failed_guesses(found, blocks=4 * 8) / 4
    assert failed <= 1 if reverse else failed == 0
    assert failed == 1 or not (reverse and steepness == 100)


@pytest.mark.parametrize("slope", [1, 20, 35], ids=["slowly", "faster", "as fast as bf16 bears"])
def test_scores_that_rise_in_the_order_of_visiting_are_computed_once(slope):
    """By powers of two, references follow them; where the rise ends they are exact again."""
    config = replace(SMALL, dtype=DType.BF16)
    q, k, v = (np.array(x) for x in random_inputs(config, heads=1, rows=256))
    q[..., 0], k[..., 0] = 8, np.maximum(8 - np.arange(256) // config.B_c, 2) * slope
    output, lse = reference_forward(q, k, v)
    found = simulate_forward(config, q, k, v, return_lse=True)
    assert relative_error(found.output, output) < ROUNDING[DType.BF16]
    np.testing.assert_allclose(found.lse, lse, atol=2e-5, rtol=1e-6)
    assert failed_guesses(found, blocks=4 * 8) == 0


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=str)
@pytest.mark.parametrize("knobs", ["lazy", "lazy+guess"])
def test_where_one_key_takes_all_its_value_is_the_output(dtype, knobs):
    """Bit by bit, wherever the key comes: its exponential is rounded, and so is what divides it."""
    config = parse_hopper_config(f"hopper ({dtype.name}, 64, 128, 32): stages_2+overlap+ping_pong+persistent+{knobs}")
    q, k, v = (np.array(x) for x in random_inputs(config, heads=1, rows=256))
    q *= q.dtype.type(300)
    scores = q[0, 0].astype(float) @ k[0, 0].astype(float).T / 8
    second, first = np.sort(scores, axis=1)[:, -2:].T
    alone = first - second > 30
    found = simulate_forward(config, q, k, v).output[0, 0]
    assert alone.sum() > 100
    assert np.array_equal(found[alone], v[0, 0, scores.argmax(axis=1)[alone]])


@pytest.mark.parametrize(
    ("dtype", "window", "way"),
    [(DType.FP16, Window(), -1), (DType.BF16, CAUSAL, -1), (DType.BF16, CAUSAL, 1)],
    ids=["falling", "falling, causal", "rising, causal"],
)
def test_where_the_first_block_leads_no_slope_overflows(dtype, window, way):
    """Nor does a guess fail by much: scores change by 180 powers of two from block to block."""
    config = replace(LEADING, dtype=dtype)
    q, k, v = (np.array(x) for x in random_inputs(config, heads=1, rows=256))
    q[..., 0], k[..., 0] = 32, way * (np.arange(256) // config.B_c) * 32
    found = simulate_forward(config, q, k, v, window=window)
    assert relative_error(found.output, reference_forward(q, k, v, window=window)[0]) < ROUNDING[dtype]
    assert failed_guesses(found, blocks=4 * 8 if window == Window() else 2 + 4 + 6 + 8) == 0


def failed_guesses(found: ForwardSimulation, blocks: int) -> float:
    """How often a warpgroup computed its scores once more than the blocks that it attends to need."""
    scores = 2 * 64 * SMALL.B_c * SMALL.d_head
    return found.run.counters.tensor_flops / scores - 2 * blocks


@pytest.mark.parametrize(
    ("score", "failures"),
    [(1, 0), (10, 0), (11, 1), (100, 1), (3000, 1)],
    ids=["no jump", "bearable", "too far", "infinite in fp32", "infinite by far"],
)
def test_one_score_too_large_makes_its_warpgroup_compute_one_block_again(score, failures):
    """A thread's 8 exponentials of a row are allowed a sum of 2^15, which fp16 can hold; all but one are about 1
    here."""
    q, k, v = (np.array(x) for x in random_inputs(SMALL, heads=1, rows=256))
    q *= q.dtype.type(0.02)
    q[..., 0] = k[..., 0] = 0
    q[0, 0, 77, 0], k[0, 0, 45, 0] = 4 * np.sqrt(score), 2 * np.sqrt(score)
    expected, lse = reference_forward(q, k, v)
    found = simulate_forward(SMALL, q, k, v, return_lse=True)
    assert relative_error(found.output, expected) < ROUNDING[DType.FP16]
    np.testing.assert_allclose(found.lse, lse, atol=2e-5, rtol=1e-6)
    assert failed_guesses(found, blocks=4 * 8) == failures


@pytest.mark.parametrize(
    ("keys", "window", "blocks"),
    [(128 + 31, CAUSAL, 3 + 5), (128, Window(left=63, right=31), 3 + 4)],
    ids=["causal, more keys than rows", "a window on both sides"],
)
def test_rows_that_have_seen_nothing_get_their_reference_in_their_first_block(keys, window, blocks):
    """The first row of each warpgroup attends to 32 keys, or to 96: its own begin with the first block without a mask,
    which is computed with care."""
    q, k, v = (
        np.array(x[:, :, :rows]) for x, rows in zip(random_inputs(SMALL, heads=1), (128, keys, keys), strict=True)
    )
    expected, lse = reference_forward(q, k, v, window=window)
    found = simulate_forward(SMALL, q, k, v, window=window, return_lse=True)
    assert relative_error(found.output, expected) < ROUNDING[DType.FP16]
    np.testing.assert_allclose(found.lse, lse, atol=2e-5, rtol=0)
    assert failed_guesses(found, blocks) == 0


def test_what_is_not_a_number_or_infinite_stays_so_with_and_without_guesses():
    q, k, v = (np.array(x) for x in random_inputs(SMALL, heads=1, rows=256))
    q[0, 0, 3, 5], q[0, 0, 70, 6], q[0, 0, 140, 7] = np.nan, np.inf, -np.inf
    k[0, 0, 40, 8], k[0, 0, 250, 9] = np.inf, -np.inf  # in blocks visited last but one, with a guess, and first
    v[0, 0, 100, 10], v[0, 0, 20, 11], v[0, 0, 30, 12] = np.nan, np.inf, -np.inf
    q[0, 0, 192:, 8:10] = 0.5  # of one sign: these rows have scores of both infinities
    guessed, sought = (
        simulate_forward(config, q, k, v, return_lse=True) for config in (SMALL, replace(SMALL, guesses_maxima=False))
    )
    np.testing.assert_allclose(guessed.output.astype(float), sought.output.astype(float), atol=1e-3)
    np.testing.assert_allclose(guessed.lse, sought.lse, atol=2e-5)
    assert np.isnan(guessed.output).any() and np.isinf(guessed.output).any() and np.isfinite(guessed.output).any()


# --- All of it, when there is time -------------------------------------------------------------------------------

LADDERS = [config for dtype in DType for d_head in D_HEADS for config in get_hopper_progression_configs(dtype, d_head)]
VARIANTS = {
    "full": {},
    "causal": {"window": CAUSAL},
    "top left": {"window": CAUSAL_TOP_LEFT},
    "window": {"window": Window(left=90, right=30)},
    "left": {"window": Window(left=100)},
    "capped": {"softcap": 5.0, "window": CAUSAL},
}


@pytest.mark.slow
@pytest.mark.parametrize("config", [*get_hopper_configs("BF16"), *LADDERS], ids=str)
def test_every_kernel_of_the_space_and_the_ladder_agrees_with_float64(config):
    check(config, (1, 2, 1, 300, 333, config.d_head), {"window": CAUSAL}, with_lse=(True,))


@pytest.mark.slow
@pytest.mark.parametrize("d_head", D_HEADS)
@pytest.mark.parametrize("knobs", ["stages_1", "stages_2+overlap+lazy", ALL])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=list(VARIANTS))
@pytest.mark.parametrize("lengths", [(1, 201), (129, 64), (256, 201)], ids=str)
def test_every_variant_of_every_head_dimension(d_head, knobs, options, lengths):
    config = parse_hopper_config(f"hopper (BF16, {d_head}, 128, 64): {knobs}")
    check(config, (2, 2, 1, *lengths, d_head), options, with_lse=(True,))
    check_packed(config, [lengths, (3, 5), lengths], options, head_dim=d_head - 8, spoilt=(1,))
