"""The Hopper kernel on the simulated GPU: right for every variant, with hazards checked and every wait bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashwright import (
    DType,
    HopperTileShapes,
    Window,
    get_hopper_configs,
    get_hopper_progression_configs,
    parse_hopper_config,
    run_forward,
)
from flashwright.hopper.config import D_HEADS
from flashwright.simulation import (
    SIMULATED_MULTIPROCESSORS,
    random_inputs,
    reference_forward,
    relative_error,
    simulate_forward,
)
from simulated_cases import ROUNDING, check, check_packed

ALL = "stages_2+overlap+ping_pong+persistent+lazy"
SMALL = parse_hopper_config(f"hopper (FP16, 64, 128, 32): {ALL}")
"""The fastest way to compute, with tiles that compile and simulate in a second."""
CAUSAL, CAUSAL_TOP_LEFT = Window(right=0), Window(right=0, bottom_right=False)

# config, (batch, q heads, kv heads, q rows, kv rows, head_dim), options
CASES = {
    "tails of both": (f"(FP16, 64, 128, 32): {ALL}", (1, 2, 2, 200, 77, 64), {}),
    "one row, one key": (f"(BF16, 64, 128, 32): {ALL}", (2, 2, 2, 1, 1, 64), {}),
    "one step in all": (f"(FP16, 64, 192, 64): {ALL}", (1, 1, 1, 200, 64, 64), {"scale": 0.3}),
    "causal, large tiles": (f"(BF16, 128, 128, 128): {ALL}", (1, 3, 3, 384, 384, 128), {"window": CAUSAL}),
    "causal, three consumers": (f"(FP16, 64, 192, 64): {ALL}", (1, 2, 2, 400, 400, 64), {"window": CAUSAL}),
    "causal, more keys than rows, grouped heads": (
        f"(BF16, 64, 128, 64): {ALL}",
        (1, 4, 2, 130, 300, 64),
        {"window": CAUSAL},
    ),
    "causal from the top left": (
        f"(FP16, 64, 128, 64): {ALL}",
        (1, 2, 1, 300, 200, 64),
        {"window": CAUSAL_TOP_LEFT},
    ),
    "causal, a tile without keys": (f"(FP16, 64, 128, 32): {ALL}", (2, 2, 1, 300, 100, 64), {"window": CAUSAL}),
    "causal, in sequence, one stage": (
        "(FP16, 64, 128, 32): stages_1",
        (1, 2, 2, 260, 260, 64),
        {"window": CAUSAL},
    ),
    "a window on both sides, capped, padded columns": (
        f"(FP16, 64, 128, 32): {ALL}",
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
    "nothing to look at": (f"(FP16, 64, 128, 32): {ALL}", (1, 2, 1, 130, 64, 64), {"window": Window(right=-100)}),
    "80 columns of 96": (f"(BF16, 96, 128, 32): {ALL}", (1, 2, 1, 140, 90, 80), {"window": CAUSAL}),
    "192 columns": (f"(FP16, 192, 128, 32): {ALL}", (1, 1, 1, 130, 90, 192), {"softcap": 20.0}),
    "multi-query, 248 columns of 256": (f"(BF16, 256, 128, 32): {ALL}", (1, 3, 1, 70, 100, 248), {"window": CAUSAL}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
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
def test_any_packed_sequences_are_computed_apart(lengths, window, spoilt):
    """Empty ones, shorter and longer than a block, more rows than keys; and one full of NaN and infinity."""
    check_packed(SMALL, lengths, {"window": window}, spoilt=[b for b in range(len(lengths)) if b == spoilt])


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (f"(BF16, 64, 192, 48): {ALL}", {"window": CAUSAL}),
        ("(FP16, 128, 128, 32): stages_1+ping_pong", {"softcap": 8.0}),
    ],
    ids=["three consumers", "in sequence, two panels"],
)
def test_what_lies_behind_a_packed_sequence_does_not_reach_it(config, options):
    lengths = [(50, 70), (30, 33), (200, 100), (10, 7)]
    config = parse_hopper_config(f"hopper {config}")
    check_packed(config, lengths, options, spoilt=(1, 3), head_dim=config.d_head - 8)


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
    """Every element of Q moves once, of K and V once per tile; O is stored once; nothing else is in shared memory."""
    q, k, v = random_inputs(SMALL, heads=3, rows=256)
    run = simulate_forward(SMALL, q, k, v).run
    tiles = 3 * 256 // SMALL.B_r
    assert run.grid == (SIMULATED_MULTIPROCESSORS, 1, 1)
    assert run.counters.bytes_global_to_shared == q.nbytes + 256 // SMALL.B_r * (k.nbytes + v.nbytes)
    assert run.counters.bytes_registers_to_global == q.nbytes
    assert run.counters.shared_accesses == 0
    assert run.counters.tensor_flops == 4 * tiles * SMALL.B_r * 256 * SMALL.d_head
    assert HopperTileShapes(SMALL).threads == 384


def test_blocks_beyond_the_window_are_not_visited():
    """By the 64 rows of a warpgroup on the right, by the rows of a tile on the left."""
    q, k, v = random_inputs(SMALL, heads=1, rows=256)

    def steps(window: Window) -> float:
        return simulate_forward(SMALL, q, k, v, window=window).run.counters.tensor_flops / (4 * 64 * 32 * 64)

    assert steps(Window()) == 8 + 8 + 8 + 8
    assert steps(CAUSAL) == 2 + 4 + 6 + 8
    assert steps(Window(left=0, right=0)) == 2 + 4 + 2 + 4
    assert steps(Window(left=1, right=0)) == 2 + 4 + 3 + 5


@pytest.mark.parametrize("reverse", [False, True], ids=["growing maxima", "shrinking maxima"])
def test_lazy_rescaling_is_exact_however_the_maxima_move(reverse):
    """Scores that grow by less and by more than the threshold from block to block, up to hundreds."""
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, 1, 256, 64)) for _ in range(3))
    growth = np.repeat([0.2, 1, 1.2, 3, 3.1, 10, 30, 31], 32)[:, None]
    k = k * (growth[::-1] if reverse else growth)
    q, k, v = (x.astype(np.float16) for x in (q, k, v))
    output, lse = reference_forward(q, k, v)
    found = simulate_forward(SMALL, q, k, v, return_lse=True)
    assert relative_error(found.output, output) < ROUNDING[DType.FP16]
    np.testing.assert_allclose(found.lse, lse, atol=2e-5, rtol=1e-6)


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
