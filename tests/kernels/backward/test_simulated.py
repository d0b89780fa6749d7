"""The backward kernels on the simulated GPU: right for every variant of both families, hazards checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from samples import sampled

pytest.importorskip("torch")
from backward_cases import (
    Problem,
    check_backward,
    check_packed_backward,
    rows_outermost,
    simulated,
    with_gaps,
)
from simulated_cases import UNOWNED_ROWS

from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import KernelFamily, Occasion
from flashwright.kernels.registry import families, parse_config
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import LONG, LONGEST, MEDIUM
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window
from flashwright.runtime.simulated import BackwardSimulation

AMPERE = "ampere backward (FP16, 64, 64, 64, 4): stages_2_1+swizzled"
AMPERE_IN_PAIRS = "ampere backward (BF16, 64, 64, 64, 8): stages_1_1+parts_2+swizzled"
"""Pairs of warps share keys: each other's P goes through shared memory."""
AMPERE_WIDE_PAIRS = "ampere backward (BF16, 128, 64, 64, 8): stages_1_1+parts_2+swizzled"
"""Each of a pair has a whole panel of columns."""
HOPPER = "hopper backward (FP16, 64, 64, 64, 1): stages_2_1+register_P"
HOPPER_PAIR = "hopper backward (BF16, 128, 64, 64, 2): stages_2_2"
"""Two warpgroups share keys: P goes through shared memory."""
HOPPER_CLUSTER = "hopper backward (FP16, 128, 64, 64, 1): stages_2_1+paired"
"""Two thread blocks add half of the columns of dQ each."""
HOPPER_PAIRS = HOPPER_CLUSTER + "+persistent"
HOPPER_PERSISTENT = "hopper backward (FP16, 64, 64, 64, 1): stages_2_2+register_P+persistent"
FINISHING = HOPPER_PERSISTENT.replace("+pers", "+ordered+pers") + "+finishes_dQ"
FAMILIES = pytest.mark.parametrize("config", [AMPERE, HOPPER], ids=["ampere", "hopper"])
CAUSAL, CAUSAL_TOP_LEFT = Window(right=0), Window(right=0, bottom_right=False)

# config, (batch, q heads, kv heads, q rows, kv rows, head_dim), options, whether the log-sum-exp has gradients
CASES = {
    "tails of both": (AMPERE, (1, 2, 2, 100, 150, 64), AttentionOptions(), False),
    "causal, more rows than keys, grouped heads": (
        AMPERE_IN_PAIRS,
        (2, 4, 2, 150, 100, 64),
        AttentionOptions(CAUSAL),
        True,
    ),
    "causal from the top left, 40 columns of 64": (
        AMPERE,
        (1, 2, 1, 70, 200, 40),
        AttentionOptions(CAUSAL_TOP_LEFT),
        False,
    ),
    "a window on both sides, capped, 104 columns of 128": (
        "ampere backward (BF16, 128, 64, 64, 4): stages_1_1+parts_2+swizzled",
        (1, 1, 1, 100, 150, 104),
        AttentionOptions(Window(left=30, right=40), softcap=2.0),
        True,
    ),
    "causal, grouped heads, dQ late": (
        "ampere backward (BF16, 64, 32, 64, 8): stages_2_2+parts_2+swizzled+late_dQ",
        (1, 4, 2, 100, 130, 64),
        AttentionOptions(CAUSAL),
        False,
    ),
    "8 columns of 32": (
        "ampere backward (FP16, 32, 128, 128, 4): stages_2_2+slices_4+swizzled",
        (1, 3, 1, 130, 129, 8),
        AttentionOptions(Window(left=70), scale=0.5),
        False,
    ),
    "200 columns of 256, one row": (
        "ampere backward (BF16, 256, 64, 32, 4): stages_2_1+parts_4+swizzled",
        (2, 2, 1, 1, 65, 200),
        AttentionOptions(),
        True,
    ),
    "no key for any row": (AMPERE, (1, 1, 1, 70, 40, 64), AttentionOptions(Window(right=-100)), True),
    "more rows than threads": (
        "ampere backward (BF16, 32, 128, 16, 1): stages_1_1+swizzled",
        (1, 1, 1, 150, 20, 32),
        AttentionOptions(),
        True,
    ),
    "one row, one key, not swizzled": (
        "ampere backward (FP16, 64, 16, 16, 1): stages_1_1",
        (1, 1, 1, 1, 1, 64),
        AttentionOptions(),
        False,
    ),
    "a left edge that leaves the last rows nothing": (
        AMPERE,
        (1, 1, 1, 200, 60, 64),
        AttentionOptions(Window(left=5, bottom_right=False)),
        False,
    ),
    "tails of both, one stage of dO": (HOPPER, (1, 2, 2, 100, 150, 64), AttentionOptions(), False),
    "causal, more rows than keys, a pair of warpgroups, grouped heads": (
        HOPPER_PAIR,
        (2, 4, 2, 150, 100, 128),
        AttentionOptions(CAUSAL),
        True,
    ),
    "causal from the top left, 8 columns": (
        HOPPER,
        (1, 2, 1, 70, 200, 8),
        AttentionOptions(CAUSAL_TOP_LEFT),
        False,
    ),
    "a window on both sides, capped, two groups of keys": (
        "hopper backward (BF16, 64, 128, 128, 2): stages_2_2+register_P",
        (1, 1, 1, 130, 140, 40),
        AttentionOptions(Window(left=30, right=40), softcap=2.0),
        True,
    ),
    "104 columns of 128, a left edge": (
        "hopper backward (FP16, 128, 64, 128, 2): stages_2_1+register_P",
        (1, 1, 1, 65, 150, 104),
        AttentionOptions(Window(left=70), scale=0.3),
        False,
    ),
    "200 columns of 256": (
        "hopper backward (BF16, 256, 64, 64, 2): stages_2_2",
        (1, 2, 1, 66, 65, 200),
        AttentionOptions(),
        True,
    ),
    "a block of dQ from two thread blocks": (
        HOPPER_CLUSTER,
        (2, 4, 2, 150, 100, 128),
        AttentionOptions(CAUSAL),
        True,
    ),
    "one block of queries for two thread blocks, the second without keys": (
        HOPPER_CLUSTER,
        (1, 1, 1, 60, 50, 96),
        AttentionOptions(softcap=2.0),
        False,
    ),
    "200 columns of 256, shared by two thread blocks": (
        "hopper backward (BF16, 256, 64, 64, 2): stages_2_1+paired",
        (1, 1, 1, 130, 140, 200),
        AttentionOptions(Window(left=70)),
        True,
    ),
    "dQ added by the copy engine": (
        "hopper backward (BF16, 64, 128, 128, 2): stages_3_2+register_P+bulk_dQ",
        (1, 1, 1, 260, 140, 40),
        AttentionOptions(),
        False,
    ),
    "no key for any row, by wgmma": (HOPPER, (1, 1, 1, 70, 40, 64), AttentionOptions(Window(right=-100)), True),
    "one row, one key, by wgmma": (HOPPER, (1, 1, 1, 1, 1, 64), AttentionOptions(), False),
}


SLOW_CASES = (
    "200 columns of 256",
    "200 columns of 256, one row",
    "200 columns of 256, shared by two thread blocks",
    "104 columns of 128, a left edge",
    "8 columns of 32",
    "more rows than threads",
    "a left edge that leaves the last rows nothing",
)


@pytest.mark.parametrize("case", sampled(CASES, SLOW_CASES))
def test_gradients_of_every_variant(case):
    text, shape, options, with_dlse = case
    config = parse_config(text)
    found = check_backward(config, Problem.random(shape, config.dtype, options, with_dlse=with_dlse))
    for run in (found.run, *found.companions.values()):
        assert run.findings == []


PERSISTENT = {
    "more blocks of keys than thread blocks, grouped heads": (HOPPER_PERSISTENT, (2, 4, 2, 100, 130), CAUSAL),
    "keys that no row attends to": (HOPPER_PERSISTENT + "+keys_ahead", (1, 1, 1, 70, 400), CAUSAL_TOP_LEFT),
    "dQ added by the copy engine, keys ahead": (
        "hopper backward (BF16, 64, 128, 128, 2): stages_2_2+register_P+bulk_dQ+persistent+keys_ahead",
        (1, 2, 1, 130, 390),
        Window(),
    ),
    "dQ added in order": (
        HOPPER_PERSISTENT.replace("+pers", "+ordered+pers") + "+keys_ahead",
        (1, 1, 1, 70, 200),
        CAUSAL,
    ),
    "two warpgroups, two blocks of keys ahead": (
        "hopper backward (BF16, 128, 64, 128, 2): stages_2_2+register_P+persistent+keys_ahead",
        (1, 1, 1, 65, 600),
        Window(left=500),
    ),
    "three stages of 128 queries": (
        "hopper backward (BF16, 64, 128, 128, 2): stages_3_2+register_P",
        (1, 1, 1, 400, 150),
        CAUSAL,
    ),
    "three stages of Q and two of dO, tile after tile": (
        "hopper backward (BF16, 128, 64, 128, 2): stages_3_2+register_P+persistent",
        (1, 2, 1, 250, 260),
        Window(),
    ),
    "first steps left out": (
        "hopper backward (BF16, 128, 64, 128, 2): stages_3_3+register_P+persistent+skips_masked",
        (1, 2, 1, 130, 260),
        CAUSAL,
    ),
    "two warpgroups share keys, grouped heads": (
        "hopper backward (BF16, 256, 64, 64, 2): stages_2_2+persistent",
        (1, 2, 1, 65, 200),
        Window(left=90, right=30),
    ),
    "dQ finished in any order": (HOPPER_PERSISTENT + "+keys_ahead+finishes_dQ", (2, 2, 2, 100, 130), CAUSAL),
    "dQ finished in any order, grouped heads, a left edge": (
        HOPPER_PERSISTENT + "+finishes_dQ",
        (1, 4, 2, 150, 170),
        Window(left=50),
    ),
    "dQ finished in any order by pairs of thread blocks": (HOPPER_PAIRS + "+finishes_dQ", (1, 2, 2, 130, 300), CAUSAL),
    "dQ finished in any order by pairs of one tile each": (
        HOPPER_CLUSTER + "+finishes_dQ",
        (1, 2, 1, 130, 300),
        Window(),
    ),
    "dQ finished by the last block of keys": (FINISHING + "+keys_ahead", (2, 2, 2, 100, 130), CAUSAL),
    "dQ of grouped heads finished, a left edge": (FINISHING + "+keys_ahead", (1, 4, 2, 150, 170), Window(left=50)),
    "dQ finished, first rows without keys": (FINISHING, (1, 1, 1, 260, 100), CAUSAL),
    "dQ finished, last rows without keys": (FINISHING, (1, 1, 1, 260, 70), Window(left=5, bottom_right=False)),
    "dQ finished, a window that neither edge of a block meets": (FINISHING, (1, 1, 1, 200, 330), Window(20, 30)),
    "dQ finished where two warpgroups share keys": (
        "hopper backward (BF16, 256, 64, 64, 2): stages_2_2+ordered+persistent+finishes_dQ",
        (1, 2, 2, 65, 200),
        Window(),
    ),
    "dQ finished, two warpgroups along its columns": (
        "hopper backward (BF16, 128, 64, 128, 2): stages_3_3+register_P+ordered+persistent+finishes_dQ",
        (1, 2, 1, 130, 260),
        CAUSAL,
    ),
    "dQ finished, two warpgroups along its rows": (
        "hopper backward (BF16, 64, 128, 128, 2): stages_2_2+register_P+ordered+persistent+keys_ahead+finishes_dQ",
        (1, 1, 1, 200, 300),
        CAUSAL,
    ),
    "dQ finished by pairs of thread blocks": (HOPPER_CLUSTER + "+ordered+finishes_dQ", (1, 2, 2, 70, 300), CAUSAL),
    "pairs, keys that no row attends to, grouped heads": (HOPPER_PAIRS, (1, 2, 1, 70, 400), CAUSAL_TOP_LEFT),
    "pairs, an odd number of blocks of keys, two batches": (HOPPER_PAIRS, (2, 2, 2, 130, 260), CAUSAL),
    "pairs, all rows attend to all keys": (HOPPER_PAIRS, (1, 1, 1, 70, 500), Window()),
    "pairs that add to dQ in order": (HOPPER_PAIRS.replace("+pers", "+ordered+pers"), (1, 1, 1, 70, 300), CAUSAL),
    "pairs of two warpgroups each": (
        "hopper backward (BF16, 256, 64, 64, 2): stages_2_1+paired+persistent",
        (1, 1, 1, 260, 260),
        CAUSAL,
    ),
    "no row attends to any key": (HOPPER_PERSISTENT, (1, 1, 1, 70, 200), Window(right=-300)),
}
SLOW_PERSISTENT = (
    "pairs, all rows attend to all keys",
    "pairs that add to dQ in order",
    "dQ finished where two warpgroups share keys",
    "dQ finished, two warpgroups along its rows",
    "dQ finished in any order by pairs of one tile each",
)


@pytest.mark.parametrize("case", sampled(PERSISTENT, SLOW_PERSISTENT))
def test_persistent_thread_blocks_compute_every_block_of_keys(case):
    """Two of them, or two pairs, that have several among them."""
    text, shape, window = case
    config = parse_config(text)
    problem = Problem.random((*shape, config.d_head), config.dtype, AttentionOptions(window))
    found = check_backward(config, problem, multiprocessors=4 if config.paired else 2)
    assert found.run.findings == []


def test_a_kernel_that_finishes_dQ_has_none_after_it_and_needs_no_sums_at_zero():
    apart = parse_config(HOPPER_PERSISTENT.replace("+pers", "+ordered+pers"))
    problem = Problem.random((1, 6, 6, 64, 256, 64), apart.dtype)
    two, one = (check_backward(each, problem, multiprocessors=2) for each in (apart, replace(apart, finishes_dQ=True)))
    assert list(two.companions) == ["rows", "dq"]
    assert list(one.companions) == ["rows"]
    cleared = [each.companions["rows"].counters.bytes_registers_to_global for each in (two, one)]
    assert cleared[0] - cleared[1] == 6 * 64 * 64 * 4
    assert np.array_equal(bits(two.dq), bits(one.dq))


@pytest.mark.parametrize(
    ("text", "window"), [(FINISHING, CAUSAL), (HOPPER_PERSISTENT + "+finishes_dQ", Window(left=40, right=0))]
)
def test_dQ_of_packed_sequences_is_finished_and_zero_where_no_key_is_attended_to(text, window):
    """Rows of no sequence, and those of sequences with more rows than keys, among them."""
    sequences = [(40, 50), (170, 30), (3, 200), (70, 0)]
    check_packed_backward(parse_config(text), sequences, options=AttentionOptions(window), multiprocessors=2)


def test_vector_reductions_give_the_same_sums():
    """Of GPUs from sm_90 on; the order in which threads hold a block of dQ is another."""
    problem = Problem.random((1, 2, 2, 100, 150, 64), DType.FP16)
    one_by_one, in_vectors = (check_backward(AMPERE, problem, arch=arch) for arch in ("sm_80", "sm_90"))
    for name in ("dk", "dv"):
        assert np.array_equal(bits(getattr(one_by_one, name)), bits(getattr(in_vectors, name)))
    assert reductions(in_vectors) * 4 == reductions(one_by_one)


def reductions(found: BackwardSimulation) -> int:
    return sum(count for opcode, count in found.run.counters.instructions.items() if opcode.startswith("red"))


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint16)


def test_waits_for_barriers_may_fail_spuriously():
    """As hardware lets them: each is tried again."""
    check_backward(HOPPER, Problem.random((1, 1, 1, 200, 64, 64), DType.FP16), spurious_waits=True)


# --- Kinds of scores ---------------------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("offset", [-300.0, 300.0], ids=["far below zero", "far above zero"])
def test_scores_far_from_zero_are_differentiated_like_others(config, offset):
    """The columns of zeros beside the last key, and rows behind the last, have scores of 0: beside -300, an exponential
    of them is infinite."""
    problem = Problem.random((1, 1, 1, 70, 90, 64), DType.FP16)
    q, k = (np.array(x) for x in (problem.q, problem.k))
    q[..., 0], k[..., 0] = 16, offset * 8 / 16
    check_backward(config, replace(problem, q=q, k=k))


@FAMILIES
def test_where_one_key_takes_all_only_its_value_has_a_gradient(config):
    problem = Problem.random((1, 1, 1, 70, 90, 64), DType.FP16)
    problem.q[..., :4], problem.k[..., :4], problem.k[:, :, 80, :4] = 8, 0, 15  # a score 60 above the others
    found = check_backward(config, problem)
    others = np.arange(90) != 80
    assert largest_of(found.dv[:, :, others]) == 0
    assert largest_of(found.dq) < 1e-5


def largest_of(array: np.ndarray) -> float:
    return np.abs(array.astype(np.float64)).max()


# --- Tensors -----------------------------------------------------------------------------------------------------


@FAMILIES
def test_tensors_may_have_any_strides_and_nothing_is_written_between_rows(config):
    """Gradients have the strides of what they are of. What lies between rows of inputs is NaN."""
    problem = Problem.random((2, 2, 1, 70, 90, 40), DType.FP16, AttentionOptions(CAUSAL), with_dlse=True)
    expected = check_backward(config, problem)
    apart = replace(
        problem, q=with_gaps(problem.q), k=rows_outermost(problem.k), v=with_gaps(problem.v), do=with_gaps(problem.do)
    )
    found = check_backward(config, apart)
    assert found.dq.strides == apart.q.strides and found.dk.strides == apart.k.strides
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(bits(getattr(found, name)), bits(getattr(expected, name)))


@FAMILIES
@pytest.mark.parametrize("part", [np.s_[:, :1], np.s_[:, :, :1]], ids=["heads", "rows"])
def test_the_gradient_of_the_output_may_be_one_row_for_many(config, part):
    """That of a sum over heads, or over rows."""
    problem = Problem.random((1, 2, 2, 70, 90, 64), DType.FP16)
    check_backward(config, replace(problem, do=np.broadcast_to(problem.do[part], problem.do.shape)))


# --- Packed sequences --------------------------------------------------------------------------------------------

PACKED = {
    "empty ones, shorter and longer than a block": ([(5, 70), (100, 33), (0, 10), (64, 64), (90, 1)], CAUSAL, (1,)),
    "first and last are spoilt": ([(40, 50), (30, 33), (0, 0), (40, 0), (70, 80)], Window(left=20, right=30), (0, 4)),
}


@pytest.mark.parametrize(
    "config",
    [AMPERE, HOPPER_PAIR, HOPPER_CLUSTER, HOPPER_PERSISTENT, HOPPER_PAIRS],
    ids=["ampere", "hopper", "cluster", "persistent", "persistent clusters"],
)
@pytest.mark.parametrize("case", PACKED.values(), ids=list(PACKED))
def test_packed_sequences_are_differentiated_apart(config, case):
    """What is NaN or infinite in one does not reach its neighbours. Persistent thread blocks have several."""
    lengths, window, spoilt = case
    how = {"spoilt": spoilt, "head_dim": 56, "with_dlse": True, "multiprocessors": 4}
    check_packed_backward(config, lengths, AttentionOptions(window), **how)


@FAMILIES
@pytest.mark.parametrize("case", UNOWNED_ROWS.values(), ids=list(UNOWNED_ROWS))
def test_rows_and_keys_of_no_sequence_have_gradients_of_0(config, case):
    before, behind, lengths = case
    check_packed_backward(config, lengths, heads=(2, 2), rows_before=before, rows_behind=behind)


# --- What it does on the way -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "conflicts"),
    [(AMPERE, False), (AMPERE_WIDE_PAIRS, False), (AMPERE.replace("+swizzled", ""), True), (HOPPER, False)],
    ids=["ampere", "ampere, P in shared memory", "ampere, not swizzled", "hopper"],
)
def test_a_swizzled_layout_has_no_bank_conflicts(config, conflicts):
    config = parse_config(config)
    found = simulated(config, Problem.random((1, 1, 1, 70, 90, config.d_head), config.dtype))
    assert (found.run.counters.bank_conflicts > 0) is conflicts


@FAMILIES
def test_traffic_and_products_are_those_of_the_tiles(config):
    """K and V are read once; Q, dO and two numbers a row once for each block of keys; dK and dV are written once.
    Five products a pair of blocks."""
    problem = Problem.random((1, 2, 1, 128, 192, 64), DType.FP16)
    counters = simulated(config, problem).run.counters
    kv_blocks, rows = 192 // 64, 2 * 128
    per_block = problem.q.nbytes + problem.do.nbytes + 2 * 4 * rows
    assert counters.bytes_global_to_shared == problem.k.nbytes + problem.v.nbytes + kv_blocks * per_block
    assert counters.bytes_registers_to_global == problem.k.nbytes + problem.v.nbytes + kv_blocks * 4 * rows * 64
    assert counters.tensor_flops == 5 * 2 * rows * 192 * 64


@FAMILIES
def test_blocks_beyond_the_window_are_not_visited(config):
    problem = Problem.random((1, 1, 1, 256, 256, 64), DType.FP16)

    def steps(window: Window) -> float:
        run = simulated(config, replace(problem, options=AttentionOptions(window)), check_hazards=False).run
        return run.counters.tensor_flops / (5 * 2 * 64 * 64 * 64)

    assert steps(CAUSAL) == 4 + 3 + 2 + 1
    assert steps(Window(left=0, right=0)) == 4
    assert steps(Window(left=1, right=0)) == 4 + 3


def test_steps_whose_keys_are_all_masked_are_left_out():
    """The second 64 keys of each tile are behind its first 64 queries: S, dP, dV and dK of them."""
    every = parse_config("hopper backward (BF16, 128, 64, 128, 2): stages_2_2+register_P+persistent")
    problem = Problem.random((1, 1, 1, 256, 256, 128), DType.BF16, AttentionOptions(CAUSAL))
    all_steps, fewer = (
        check_backward(config, problem, multiprocessors=1).run.counters.tensor_flops
        for config in (every, replace(every, skips_masked=True))
    )
    assert all_steps - fewer == 2 * 4 * (2 * 64 * 64 * 128)


def test_no_warpgroup_leaves_out_a_step_whose_last_rows_are_of_the_next_sequence():
    """Sequences end within a block of queries: all warpgroups clear what is behind, in the first step, too."""
    config = "hopper backward (FP16, 128, 64, 128, 2): stages_2_1+register_P+skips_masked"
    check_packed_backward(config, [(100, 100), (190, 190), (64, 64)], AttentionOptions(CAUSAL))


# --- All of it, when there is time -------------------------------------------------------------------------------

VARIANTS = {
    "full": AttentionOptions(),
    "causal": AttentionOptions(CAUSAL),
    "top left": AttentionOptions(CAUSAL_TOP_LEFT),
    "window": AttentionOptions(Window(left=90, right=30)),
    "left": AttentionOptions(Window(left=100)),
    "capped": AttentionOptions(CAUSAL, softcap=5.0),
}
BACKWARDS = families("backward")


def space_of(family: KernelFamily) -> list[Any]:
    """What a search times. Every other one adds to dQ in order, and those that finish it."""
    kept = [
        config for d_head in family.d_heads for config, reason in family.space.configs(DType.BF16, d_head) if not reason
    ]
    return [replace(config, ordered=config.ordered or bool(number % 2)) for number, config in enumerate(kept)]


def default_of(family: KernelFamily, dtype: DType, d_head: int, **kind: Any) -> Any:
    hopper = GPUModel.of_architecture("", "sm_90")
    usual = Occasion(dtype, d_head, causal=False, q_bucket=LONG, kv_bucket=LONG, gpu=hopper)
    return family.default_config(replace(usual, **kind))


DEFAULTS = dict.fromkeys(
    default_of(family, dtype, d_head, causal=causal, q_bucket=length, kv_bucket=length, ordered=ordered)
    for family in BACKWARDS
    for dtype in DType
    for d_head in family.d_heads
    for causal in (False, True)
    for length in (MEDIUM, LONG, LONGEST)
    for ordered in (False, True)
)


@pytest.mark.slow
@pytest.mark.parametrize("config", DEFAULTS, ids=str)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=list(VARIANTS))
@pytest.mark.parametrize("lengths", [(1, 201), (200, 64), (256, 201)], ids=str)
def test_every_variant_of_every_default(config, options, lengths):
    """Persistent thread blocks have several tiles each."""
    how = {"multiprocessors": 2}
    problem = Problem.random((2, 2, 1, *lengths, config.d_head), config.dtype, options, with_dlse=True)
    check_backward(config, problem, **how)
    check_packed_backward(config, [lengths, (3, 5), lengths], options, head_dim=config.d_head - 8, spoilt=(1,), **how)


@pytest.mark.slow
@pytest.mark.parametrize("family", BACKWARDS, ids=lambda family: family.name)
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dimension(family, head_dim):
    config = default_of(family, DType.BF16, family.native_d_head(head_dim))
    shape = (1, 2, 1, 100, 150, head_dim)
    check_backward(config, Problem.random(shape, config.dtype, AttentionOptions(CAUSAL), with_dlse=True))


@pytest.mark.slow
@pytest.mark.parametrize("config", [config for family in BACKWARDS for config in space_of(family)], ids=str)
def test_every_config_of_the_space(config):
    shape = (1, 2, 1, 150, 200, config.d_head)
    check_backward(config, Problem.random(shape, config.dtype, AttentionOptions(CAUSAL)))
