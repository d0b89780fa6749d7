"""Hopper configs: their names, the shapes that follow from them, which are worth timing, and the ladder."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuning_fakes import fake_compiler

from flashwright import (
    DType,
    HopperForwardKernelConfig,
    HopperTileShapes,
    get_hopper_configs,
    get_hopper_progression,
    get_hopper_progression_configs,
    hopper_rejection_reason,
    parse_config,
    parse_hopper_config,
)
from flashwright.choice.problem import problem_of, standard_problems
from flashwright.kernels.family import Occasion
from flashwright.kernels.forward.hopper.config import D_HEADS
from flashwright.kernels.forward.hopper.defaults import hopper_default
from flashwright.kernels.forward.hopper.shapes import blocks_with_care
from flashwright.kernels.forward.hopper.space import RULES, hopper_search_space, is_promising
from flashwright.kernels.registry import family_named, family_of
from flashwright.problem.lengths import LONG, LONGEST, MEDIUM
from flashwright.workbench.tuning.candidates import check_problems, compile_candidates
from flashwright.workbench.tuning.space import enumerate_space

BEST = parse_hopper_config("hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy+guess")
LEADING = replace(BEST, first_block_leads=True)


@st.composite
def configs(draw):
    """Any config, whether or not a kernel can be built from it."""
    consumers, stages = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    overlap, lazy = stages > 1 and draw(st.booleans()), draw(st.booleans())
    guesses, B_c = overlap and lazy and draw(st.booleans()), 16 * draw(st.integers(1, 16))
    leads = guesses and 64 * (consumers - 1) <= stages * B_c and draw(st.booleans())
    return HopperForwardKernelConfig(
        draw(st.sampled_from(DType)), draw(st.sampled_from(D_HEADS)), 64 * consumers, B_c,
        stages, overlaps_softmax=overlap, ping_pong=consumers > 1 and draw(st.booleans()),
        persistent=draw(st.booleans()), lazy_rescale=lazy, guesses_maxima=guesses, first_block_leads=leads,
    )  # fmt: skip


# --- Names -------------------------------------------------------------------------------------------------------


@given(configs())
def test_the_short_form_and_the_kernel_name_parse_back(config):
    assert parse_hopper_config(config.short_form()) == config
    assert parse_hopper_config(f"void {config.kernel_name()}(TensorMap, ForwardArguments)") == config
    assert parse_config(config.short_form()) == parse_config(config.kernel_name()) == config
    assert family_of(config) is family_named("hopper")


def test_the_names_of_a_config():
    assert str(BEST) == "hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy+guess"
    assert BEST.kernel_name() == (
        "hopper_forward_kernel<HopperForwardKernelConfig"
        "{DType::BF16, 128, 128, 128, 2, true, true, true, true, true, false}>"
    )  # fmt: skip
    assert str(LEADING) == f"{BEST}+first"
    plain = {"overlaps_softmax": False, "ping_pong": False, "persistent": False, "guesses_maxima": False}
    assert str(replace(BEST, kv_stages=1, **plain)) == "hopper (BF16, 128, 128, 128): stages_1+lazy"


def test_a_name_with_fewer_fields_is_that_of_a_kernel_without_the_last_knobs():
    older = "HopperForwardKernelConfig{DType::BF16, 128, 128, 128, 2, true, true, true, true"
    assert parse_config(f"{older}}}") == replace(BEST, guesses_maxima=False)
    assert parse_config(f"{older}, true}}") == BEST


@pytest.mark.parametrize(
    "text",
    [
        "hopper(BF16,128,128,64):stages_2",
        "  hopper (bfloat16, 128, 128, 64): stages_2  ",
        "HopperForwardKernelConfig{(DType)15, 128, 128, 64, 2}",  # a mangled name leaves out zeros at the end
        "HopperForwardKernelConfig{DType::BF16, (int)128, (int)128, (int)64, (int)2, (bool)0, (bool)0}",
    ],
)
def test_other_ways_to_write_a_config(text):
    assert parse_config(text) == HopperForwardKernelConfig(DType.BF16, 128, 128, 64, kv_stages=2)


def test_a_config_without_the_familys_name_is_an_ampere_config():
    assert family_of(parse_config("(BF16, 128, 64, 64, 4): async+load_2_2_2_tiles")) is family_named("ampere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hopper (BF16, 128, 128, 128): stages_2+pingpong", r"unknown option 'pingpong'.*did you mean 'ping_pong'\?"),
        ("hopper (BF16, 128, 128, 128): stages_2+lazy+lazy", "'lazy' is given twice"),
        ("hopper (BF16, 128, 128, 128): stages_2+stages_3", "'stages_3' is given twice"),
        ("hopper (BF16, 128, 128, 128): overlap", "does not say how many K/V stages"),
        (
            "hopper (BF16, 128, 128, 128) stages_2+overlap+ping_pong+lazy+guess",
            r"names no Hopper kernel.*did you mean 'hopper \(BF16, .*\): stages_2\+overlap\+ping_pong\+lazy\+guess'",
        ),
        ("hopper", "names no Hopper kernel; expected a short form such as"),
        ("hopper (FP32, 128, 128, 128): stages_2", "dtype: 'FP32' is not a known element type; allowed: FP16, BF16"),
        ("HopperForwardKernelConfig{DType::BF16, 128}", r"has 2 fields; expected 5 to \d+: dtype, d_head, B_r"),
    ],
)
def test_a_text_that_names_no_config_is_refused_with_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse_config(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_head": 80}, "d_head: 80 is not allowed; allowed: 64, 96, 128, 192, 256"),
        ({"B_r": 256}, "B_r: 256 is not allowed; allowed: 64, 128, 192"),
        ({"B_c": 100}, "B_c: 100 is not allowed; allowed: positive multiples of 16 up to 256"),
        ({"B_c": 0}, "B_c: 0 is not allowed"),
        ({"B_c": 64.0}, "B_c: 64.0 is not an integer"),
        ({"kv_stages": 0, "overlaps_softmax": False}, "kv_stages: 0 is not allowed; allowed: 1 or more"),
        ({"kv_stages": 1}, "overlaps_softmax: needs kv_stages of at least 2"),
        ({"B_r": 64}, r"ping_pong: one consumer warpgroup \(B_r = 64\) has nobody to take turns with"),
        ({"persistent": 2}, "persistent: 2 is not a truth value"),
        ({"lazy_rescale": False}, "guesses_maxima: needs overlaps_softmax and lazy_rescale"),
        ({"overlaps_softmax": False}, "guesses_maxima: needs overlaps_softmax and lazy_rescale"),
        ({"guesses_maxima": False, "first_block_leads": True}, "first_block_leads: needs guesses_maxima"),
        (
            {"B_r": 192, "B_c": 48, "first_block_leads": True},
            r"first_block_leads: needs kv_stages of at least 3; .* blocks of 48 keys .* \(B_r = 192\)",
        ),
    ],
)
def test_values_that_no_kernel_has_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BEST, **changes)


# --- Shapes ------------------------------------------------------------------------------------------------------


def test_the_shared_memory_of_a_config_by_hand():
    """128 columns are two panels of 128 bytes a row; two slots of two warpgroups' Q, two stages of K and V, ten pairs
    of barriers, two announcements of tiles."""
    shapes = HopperTileShapes(BEST)
    assert (shapes.panels, shapes.Q_bytes, shapes.KV_bytes) == (2, 16_384, 32_768)
    assert (shapes.K_offset, shapes.V_offset, shapes.Q_barriers_offset) == (65_536, 131_072, 196_608)
    assert (shapes.K_barriers_offset, shapes.V_barriers_offset) == (196_672, 196_704)
    assert (shapes.tile_barriers_offset, shapes.tiles_offset) == (196_736, 196_768)
    assert shapes.shared_bytes == 196_800
    assert shapes.threads == 384


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        ({}, 2),
        ({"persistent": False}, 1),  # there is no next tile
        ({"B_r": 64, "ping_pong": False}, 2),
        ({"B_r": 192, "d_head": 64}, 1),  # registers to tell which are missing
        ({"B_c": 160}, 2),  # 64 KiB of Q and 160 KiB of K and V
        ({"B_c": 176}, 1),  # 64 + 176 are more than 227
    ],
)
def test_q_has_a_second_slot_where_it_helps_and_fits(changes, slots):
    assert HopperTileShapes(replace(BEST, **changes)).Q_stages == slots


@given(configs())
def test_a_second_slot_of_q_is_never_what_makes_a_kernel_too_large(config):
    try:
        shapes = HopperTileShapes(config)
    except ValueError:
        with pytest.raises(ValueError, match="shared memory"):
            HopperTileShapes(replace(config, persistent=False))
        return
    others = replace(config, persistent=False)
    assert shapes.shared_bytes - HopperTileShapes(others).shared_bytes == (shapes.Q_stages - 1) * config.n_consumers * (
        shapes.Q_bytes + 16
    )


def test_half_a_block_is_whole_steps_of_the_product_over_keys():
    halves = {B_c: HopperTileShapes(replace(BEST, d_head=64, B_c=B_c)).half_block for B_c in (16, 32, 48, 80, 96, 128)}
    assert halves == {16: 16, 32: 16, 48: 32, 80: 48, 96: 48, 128: 64}


def test_half_a_block_is_computed_where_there_are_registers_for_its_scores():
    """O, S and P and half of S again; of 240 registers with two consumers, of 160 with three."""
    for changes, halves in {
        (128, 128, 128): 64 + 64 + 32 + 32 <= 240,
        (256, 128, 80): 128 + 40 + 20 + 24 <= 240,
        (192, 128, 96): 96 + 48 + 24 + 24 <= 240,
        (128, 128, 160): 64 + 80 + 40 + 40 <= 240,
        (128, 128, 176): 64 + 88 + 44 + 48 <= 240,
        (64, 192, 128): 32 + 64 + 32 + 32 <= 160,
        (64, 192, 144): 32 + 72 + 36 + 40 <= 160,
    }.items():
        d_head, B_r, B_c = changes
        assert HopperTileShapes(replace(BEST, d_head=d_head, B_r=B_r, B_c=B_c)).halves_first_block is halves, changes


def test_the_registers_of_a_config_by_hand():
    """64×128 fp32 over 128 threads are 64 each; S as many, and P half of that where both exist at once."""
    shapes = HopperTileShapes(BEST)
    assert (shapes.O_registers, shapes.S_registers, shapes.P_registers) == (64, 64, 32)
    assert shapes.operand_registers == 160
    in_sequence = HopperTileShapes(replace(BEST, overlaps_softmax=False, guesses_maxima=False))
    assert (in_sequence.P_registers, in_sequence.operand_registers) == (0, 128)


@given(configs())
def test_tiles_lie_apart_where_the_copy_engine_can_swizzle_them(config):
    try:
        shapes = HopperTileShapes(config)
    except ValueError as error:
        assert re.search(r"needs \d+ bytes of shared memory; a thread block has at most 232448", str(error))
        return
    Q_slots = shapes.Q_stages * config.n_consumers
    tiles = [(i * shapes.Q_bytes, shapes.Q_bytes) for i in range(Q_slots)]
    for offset in (shapes.K_offset, shapes.V_offset):
        tiles += [(offset + i * shapes.KV_bytes, shapes.KV_bytes) for i in range(config.kv_stages)]
    barriers = [
        (offset + 16 * i, 16)
        for offset, count in (
            (shapes.Q_barriers_offset, Q_slots),
            (shapes.K_barriers_offset, config.kv_stages),
            (shapes.V_barriers_offset, config.kv_stages),
            (shapes.tile_barriers_offset, 2),
            (shapes.tiles_offset, 2),  # each as large as a pair of barriers
        )
        for i in range(count)
    ]
    assert all(offset % 1024 == 0 for offset, _ in tiles)
    pieces = sorted(tiles + barriers)
    assert all(first + size <= second for (first, size), (second, _) in pairwise(pieces))
    assert sum(pieces[-1]) == shapes.shared_bytes <= 227 * 1024


@given(configs())
def test_warpgroups_share_out_the_registers_of_a_multiprocessor(config):
    """What consumers take, the producer has given back (setmaxnreg: multiples of 8, up to 256)."""
    try:
        shapes = HopperTileShapes(config)
    except ValueError:
        return
    held = 128 * (shapes.producer_registers + config.n_consumers * shapes.consumer_registers)
    assert held <= 64 * 1024
    assert shapes.producer_registers % 8 == shapes.consumer_registers % 8 == 0


@pytest.mark.parametrize(
    ("block_keys", "from_the_last", "behind_the_first"), [(16, 8, 7), (64, 2, 1), (80, 2, 1), (128, 1, 1), (160, 1, 1)]
)
def test_the_first_128_keys_that_a_row_visits_are_searched_for_maxima(block_keys, from_the_last, behind_the_first):
    """In whole blocks; behind a first block that leads, at least one more."""
    assert blocks_with_care(block_keys, first_leads=False) == from_the_last
    assert blocks_with_care(block_keys, first_leads=True) == behind_the_first


# --- The filter and the space ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_stages": 4}, r"shared memory: .*needs 295136 bytes of shared memory; a thread block has at most 232448"),
        ({"d_head": 256, "B_c": 96}, r"shared memory: .*needs 262304 bytes"),
        ({"B_r": 192}, r"registers: O, S and P take 64 \+ 64 \+ 32 of the 160 registers .* B_r = 192; 32 must remain"),
        ({"d_head": 64, "B_c": 240}, r"registers: O, S and P take 32 \+ 120 \+ 60 of the 240 registers"),
        ({"B_r": 64, "ping_pong": False}, "consumers: B_r = 64 is one warpgroup"),
        ({"overlaps_softmax": False, "guesses_maxima": False}, "overlap: off"),
        ({"lazy_rescale": False, "guesses_maxima": False}, "lazy: off; every step multiplies O's 64 registers"),
        ({"guesses_maxima": False}, "guess: off; every step compares 64 scores a thread"),
        ({"d_head": 192, "B_c": 96, "guesses_maxima": False}, None),  # products hide what it costs
        ({"d_head": 64, "B_c": 80}, "step: 80 keys of 64 columns are 5120 elements, fewer than the 6144"),
        ({"B_c": 80, "kv_stages": 3}, "stages: 2 of the 3 stages hold 80 KiB of K and V; 64 KiB on the way"),
        (
            {"ping_pong": False, "persistent": False},
            "grid: thread blocks of one tile each are tried with ping_pong and two stages; ping_pong = False with 2",
        ),
        ({}, None),
        ({"ping_pong": False}, None),
        ({"persistent": False}, None),
        ({"first_block_leads": True}, None),
        (
            {"first_block_leads": True, "persistent": False},
            "order: first_block_leads is tried with persistent thread blocks and two stages; persistent = False with 2",
        ),
    ],
)  # fmt: skip
def test_a_config_is_rejected_with_the_rule_and_its_numbers(changes, reason):
    found = hopper_rejection_reason(replace(BEST, **changes))
    assert found is None if reason is None else re.match(reason, found), found


SIZES = {64: 42 + 20, 96: 40 + 24, 128: 34 + 20, 192: 2 * 12 + 8, 256: 2 * 6 + 4}
"""Configs of a dtype by d_head: from the last block of keys to the first, and with the first before them."""


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("d_head", "size"), SIZES.items())
def test_the_space_is_what_the_rules_leave(dtype, d_head, size):
    """Of wide heads, everything with and without guesses."""
    space = list(hopper_search_space(dtype, d_head))
    kept = [config for config, reason in space if reason is None]
    assert kept == get_hopper_configs(dtype, d_head)
    assert len(kept) == len(set(kept)) == size
    assert {reason.partition(":")[0] for _, reason in space if reason} <= set(RULES)
    for config in kept:
        HopperTileShapes(config)
        assert hopper_rejection_reason(config) is None


def test_the_space_of_all_dtypes_and_head_dimensions():
    assert Counter((c.dtype, c.d_head) for c in get_hopper_configs()).keys() == {(t, d) for t in DType for d in D_HEADS}
    assert len(get_hopper_configs()) == 2 * sum(SIZES.values())


@pytest.mark.parametrize("d_head", D_HEADS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("long", [False, True])
def test_the_space_holds_the_untuned_defaults(d_head, causal, long):
    bucket = LONG if long else MEDIUM
    default = hopper_default(Occasion(DType.FP16, d_head, causal, bucket, bucket, gpu=None))
    assert (default.dtype, default.d_head) == (DType.FP16, d_head)
    assert default in get_hopper_configs("FP16", d_head)


@pytest.mark.parametrize("d_head", D_HEADS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [MEDIUM, LONG, LONGEST])
def test_the_first_block_leads_but_along_short_diagonals_of_narrow_heads(d_head, causal, keys):
    """Whatever the rows: a prefill in chunks visits as many blocks as a whole one."""
    for rows in (MEDIUM, LONG):
        occasion = Occasion(DType.BF16, d_head, causal, rows, keys, gpu=None)
        assert hopper_default(occasion).first_block_leads is not (d_head == 64 and causal and keys == MEDIUM)


@pytest.mark.parametrize(
    "config",
    [
        "hopper (BF16, 64, 192, 128): stages_2+overlap+ping_pong+persistent+lazy+guess",
        "hopper (BF16, 128, 128, 128): stages_2+overlap+persistent+lazy+guess",
        "hopper (BF16, 128, 128, 160): stages_2+overlap+ping_pong+persistent+lazy+guess",
        "hopper (BF16, 256, 128, 80): stages_2+overlap+ping_pong+persistent+lazy+guess",
    ],
)
def test_what_was_fast_on_an_h200_is_in_the_promising_part_of_the_space(config):
    config = parse_hopper_config(config)
    assert config in get_hopper_configs(config.dtype, config.d_head)
    assert is_promising(config)


@pytest.mark.parametrize("d_head", D_HEADS)
def test_the_family_can_be_tuned(d_head):
    problem = problem_of(family="hopper", d_head=d_head)
    space = enumerate_space(problem)
    assert sorted(space.configs) == sorted(get_hopper_configs("BF16", d_head))
    assert [removal.rule for removal in space.removals] == list(RULES)
    assert space.enumerated == space.kept + sum(removal.count for removal in space.removals)
    assert all(removal.example for removal in space.removals if removal.count)
    assert 0 < len(enumerate_space(problem, quick=True).configs) < len(space.configs)


def test_the_problems_to_tune_are_those_of_the_familys_head_dimensions():
    assert {problem.d_head for problem in standard_problems(family="hopper")} == set(D_HEADS)
    with pytest.raises(ValueError, match="d_head: 32 has no kernel of its own to tune; allowed: 64, 96"):
        problem_of(family="hopper", d_head=32)


@given(st.integers(1, 9000), st.integers(1, 9000), st.booleans(), st.sampled_from(get_hopper_configs("BF16", 128)))
def test_a_small_check_problem_is_computed_by_the_variant_that_is_timed(q_length, kv_length, causal, config):
    problem = problem_of(family="hopper", causal=causal, q_length=q_length, kv_length=kv_length)
    ragged, *_ = checks = check_problems(problem, config)
    assert all(check.q_length < 512 and check.kv_length < 512 for check in checks)
    assert ragged.q_length % config.B_r and ragged.kv_length % config.B_c
    assert {check.variant(config) for check in checks} == {problem.variant(config)}


def test_kernels_that_spill_a_little_are_timed(monkeypatch):
    """The largest tiles leave no registers to spare; whether that costs more than it gains is for the clock to say."""
    configs = get_hopper_configs("BF16", 64)
    monkeypatch.setattr("flashwright.workbench.tuning.candidates.compile_all", fake_compiler(spilling=configs[:3]))
    candidates = compile_candidates(configs, (), problem_of(family="hopper", d_head=64), "sm_90", progress=False)
    assert [candidate.config for candidate in candidates.survivors] == configs
    assert candidates.survivors[0].spill_bytes == 16


# --- The ladder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_head", D_HEADS)
def test_each_rung_is_one_idea_above_the_last_up_to_a_config_worth_timing(d_head):
    rungs = get_hopper_progression("FP16", d_head)
    ladder = get_hopper_progression_configs("FP16", d_head)
    assert [rung.config for rung in rungs] == ladder
    assert [rung.number for rung in rungs] == list(range(1, 10))
    assert str(ladder[0]) == f"hopper (FP16, {d_head}, 64, 64): stages_1"
    changed = [
        {field.name for field in fields(a) if getattr(a, field.name) != getattr(b, field.name)}
        for a, b in pairwise(ladder)
    ]
    tile, *others = changed[3], *changed[:3], *changed[4:]
    assert tile <= {"B_r", "B_c"} and tile
    assert others == [
        {"kv_stages"}, {"B_r"}, {"overlaps_softmax"}, {"ping_pong"}, {"persistent"}, {"lazy_rescale"},
        {"guesses_maxima"},
    ]  # fmt: skip
    assert hopper_rejection_reason(ladder[-1]) is None
