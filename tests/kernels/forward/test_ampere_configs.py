"""The configuration: its names and their parsing, its errors, the filter, the space and the ladder."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright import (
    DType,
    FlashForwardKernelConfig,
    ForwardKernelTileShapes,
    get_autotuning_kernel_configs,
    get_kernel_progression,
    get_kernel_progression_configs,
    parse_kernel_name_into_config,
    rejection_reason,
    should_autotune_config,
)

SEED_FIELDS = 13
SPEC_SHORT_FORM = "(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"
SPEC_CONFIG = FlashForwardKernelConfig(DType.BF16, 128, 64, 64, 4, True, True, True, 0, 2, 2, True, True)
LADDERS = [(dtype, d_head) for dtype in DType for d_head in (64, 128)]


@st.composite
def configs(draw: st.DrawFn) -> FlashForwardKernelConfig:
    """Any config that can be written down, whether or not a kernel can be built from it."""
    blocks = st.integers(1, 32).map(lambda n: 16 * n)
    tiles, flag = st.integers(0, 64), st.booleans()
    d_head = draw(st.integers(1, 16)) * 16
    return FlashForwardKernelConfig(
        draw(st.sampled_from(DType)),
        d_head,
        draw(blocks),
        draw(blocks),
        draw(st.integers(1, 32)),
        *(draw(flag) for _ in range(3)),
        *(draw(tiles) for _ in range(3)),
        *(draw(flag) for _ in range(2)),
        peeled_first_step=draw(flag),
        reversed_kv=draw(flag),
        streaming_stores=draw(flag),
        static_row_stride=draw(st.just(0) | st.integers(d_head // 8, 4096).map(lambda n: 8 * n)),
        mma_row_sum=draw(flag),
        assembler_reorders=draw(flag),
        keep_order=draw(flag),
    )


def assert_every_name_parses_back(config: FlashForwardKernelConfig) -> None:
    names = (config.short_form(), str(config), config.to_cpp_struct(), config.kernel_name())
    assert [parse_kernel_name_into_config(name) for name in names] == [config] * len(names)


def numeric_cpp_fields(config: FlashForwardKernelConfig) -> list[str]:
    """The fields as a profiler prints them: `(DType)15, 128, …, (bool)1, …`."""
    casts = {DType: "(DType)", bool: "(bool)", int: ""}
    return [f"{casts[type(value)]}{int(value)}" for value in config.values()]


# --- Names ---------------------------------------------------------------------------------------------------


@given(configs())
def test_every_config_parses_back_from_its_names(config):
    assert_every_name_parses_back(config)


def test_the_whole_space_and_every_ladder_parse_back_from_their_names():
    for config in get_autotuning_kernel_configs():
        assert_every_name_parses_back(config)
    for dtype, d_head in LADDERS:
        for config in get_kernel_progression_configs(dtype, d_head):
            assert_every_name_parses_back(config)


@given(configs(), configs())
def test_different_configs_have_different_names(one, other):
    assert (one == other) == (one.short_form() == other.short_form()) == (one.kernel_name() == other.kernel_name())


def test_the_documented_short_form_is_printed_and_parsed_verbatim():
    assert SPEC_CONFIG.short_form() == SPEC_SHORT_FORM
    assert parse_kernel_name_into_config(SPEC_SHORT_FORM) == SPEC_CONFIG


@pytest.mark.parametrize("buffer", [False, True])
def test_the_short_form_says_buffer_exactly_when_loads_are_double_buffered(buffer):
    options = replace(SPEC_CONFIG, mma_double_buffer_loads=buffer).short_form().split(": ")[1].split("+")
    assert ("buffer" in options) == buffer


def test_the_thirteen_seed_fields_come_first_and_the_later_ones_default_to_zero():
    assert [field.name for field in fields(FlashForwardKernelConfig)][:SEED_FIELDS] == [
        "dtype",
        "d_head",
        "B_r",
        "B_c",
        "n_warps",
        "async_copy",
        "eager_load_blocks",
        "swizzled",
        "Q_mma_load_K_tiles",
        "K_mma_load_K_tiles",
        "V_mma_load_K_tiles",
        "mma_double_buffer_loads",
        "optimized_softmax",
    ]
    assert not any(SPEC_CONFIG.values()[SEED_FIELDS:])


@pytest.mark.parametrize(
    ("change", "token"),
    [
        ({"peeled_first_step": True}, "peeled"),
        ({"reversed_kv": True}, "reversed"),
        ({"streaming_stores": True}, "streaming"),
        ({"mma_row_sum": True}, "mma_sum"),
        ({"assembler_reorders": True}, "reorder"),
        ({"keep_order": True}, "keep_order"),
        ({"static_row_stride": 256}, "stride_256"),
    ],
)
def test_a_later_field_adds_its_own_token_to_the_short_form(change, token):
    assert replace(SPEC_CONFIG, **change).short_form() == f"{SPEC_SHORT_FORM}+{token}"


@pytest.mark.parametrize(
    "text",
    [
        "void flash_forward_kernel<FlashForwardKernelConfig{(DType)15, 128, 64, 64, 4, (bool)1, (bool)1, (bool)1, 0, "
        "2, 2, (bool)1, (bool)1, (bool)0, (bool)0, (bool)0, 0, (bool)0, (bool)0}>(ForwardArguments)",
        "void flash_forward_kernel<FlashForwardKernelConfig{(DType)15, 128, 64, 64, 4, true, true, true, 0, 2, 2, "
        "true, true}>(ForwardArguments)",
        "FlashForwardKernelConfig{(c10::ScalarType)15, 128, 64, 64, 4, true, true, true, 0, 2, 2, true, true}",
        "FlashForwardKernelConfig{torch::kBFloat16, 128, 64, 64, 4, true, true, true, 0, 2, 2, true, true}",
        "FlashForwardKernelConfig{DType::BF16,128,64,64,4,1,1,1,0,2,2,1,1}",
        "void ns::flash_forward_kernel<ns::FlashForwardKernelConfig { (DType)15, (int)128, (int)64, (int)64, (int)4, "
        "(bool)1, (bool)1, (bool)1, (int)0, (int)2, (int)2, (bool)1, (bool)1 }>(ns::ForwardArguments)",
        f"  {SPEC_SHORT_FORM}\n",
        "(BF16,128,64,64,4):async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax",
        "(bfloat16, 128, 64, 64, 4): opt_softmax+buffer+load_0_2_2_tiles+swizzled+eager+async",
    ],
)
def test_a_name_is_understood_as_profilers_and_people_write_it(text):
    assert parse_kernel_name_into_config(text) == SPEC_CONFIG


@given(configs())
def test_trailing_members_that_are_zero_may_be_left_out_of_a_cpp_name(config):
    members = numeric_cpp_fields(config)
    while len(members) > 5 and re.fullmatch(r"(\(bool\))?0", members[-1]):
        members.pop()
    text = f"void flash_forward_kernel<FlashForwardKernelConfig{{{', '.join(members)}}}>(ForwardArguments)"
    assert parse_kernel_name_into_config(text) == config


# --- Values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "what_is_said"),
    [
        ({"d_head": 72}, r"d_head: 72 .*multiples of 16 up to 256"),
        ({"d_head": 0}, r"d_head: 0 .*multiples of 16"),
        ({"d_head": -128}, r"d_head: -128 .*multiples of 16"),
        ({"d_head": 272}, r"d_head: 272 .*up to 256"),
        ({"d_head": 128.0}, r"d_head: 128\.0 is not an integer"),
        ({"d_head": "128"}, r"d_head: '128' is not an integer"),
        ({"B_r": -64}, r"B_r: -64 .*multiples of 16"),
        ({"B_r": 40}, r"B_r: 40 .*multiples of 16"),
        ({"B_c": 0}, r"B_c: 0 .*multiples of 16"),
        ({"B_c": True}, r"B_c: True is not an integer"),
        ({"n_warps": 0}, r"n_warps: 0 .*positive"),
        ({"n_warps": 33}, r"n_warps: 33 .*up to 32"),
        ({"n_warps": None}, r"n_warps: None is not an integer"),
        ({"Q_mma_load_K_tiles": -2}, r"Q_mma_load_K_tiles: -2 .*power of two"),
        ({"K_mma_load_K_tiles": -1}, r"K_mma_load_K_tiles: -1 .*power of two"),
        ({"V_mma_load_K_tiles": -4}, r"V_mma_load_K_tiles: -4 .*power of two"),
        ({"V_mma_load_K_tiles": 2.5}, r"V_mma_load_K_tiles: 2\.5 is not an integer"),
        ({"async_copy": 2}, r"async_copy: 2 .*True, False"),
        ({"swizzled": "yes"}, r"swizzled: 'yes' .*True, False"),
        ({"dtype": "FP8"}, r"dtype: 'FP8' .*FP16, BF16"),
        ({"dtype": 6}, r"dtype: 6 .*FP16, BF16"),
        ({"dtype": None}, r"dtype: None .*FP16, BF16"),
        ({"static_row_stride": -128}, r"static_row_stride: -128 .*multiple of 8"),
        ({"static_row_stride": 132}, r"static_row_stride: 132 .*multiple of 8"),
        ({"static_row_stride": 64}, r"static_row_stride: 64 .*from d_head = 128"),
    ],
)
def test_a_bad_value_is_refused_with_its_field_its_value_and_what_is_allowed(change, what_is_said):
    with pytest.raises(ValueError, match=what_is_said):
        replace(SPEC_CONFIG, **change)


@pytest.mark.parametrize(
    ("text", "what_is_said"),
    [
        ("", "names no kernel; expected a short form such as"),
        ("flash_fwd_kernel<64, 64>", "names no kernel"),
        ("(BF16, 128, 64, 64): async+load_0_2_2_tiles", "names no kernel"),
        ("(BF16, 128, 64, 64, 4)", "names no kernel"),
        ("(BF16, 128, -64, 64, 4): load_0_2_2_tiles", "names no kernel"),
        ("(BF16, 128, 64, 64, 4): load_0_2_2_tiles and more", "names no kernel"),
        ("(FP8, 128, 64, 64, 4): load_0_2_2_tiles", "dtype: 'FP8' .*FP16, BF16"),
        ("(BF16, 100, 64, 64, 4): load_0_2_2_tiles", "d_head: 100 .*multiples of 16"),
        ("(BF16, 128, 64, 64, 0): load_0_2_2_tiles", "n_warps: 0 "),
        ("(BF16, 128, 64, 64, 4): async+eager", "expected an option load_Q_K_V_tiles"),
        ("(BF16, 128, 64, 64, 4): load_0_2_tiles", "unknown option 'load_0_2_tiles'.*load_Q_K_V_tiles"),
        ("(BF16, 128, 64, 64, 4): load_-2_2_2_tiles", "unknown option 'load_-2_2_2_tiles'"),
        ("(BF16, 128, 64, 64, 4): load_0_2_2_tiles+", "unknown option ''"),
        ("(BF16, 128, 64, 64, 4): async+fast+load_0_2_2_tiles", "unknown option 'fast'.*allowed: async, eager"),
        ("(BF16, 128, 64, 64, 4): async+async+load_0_2_2_tiles", "'async' is given twice"),
        ("(BF16, 128, 64, 64, 4): load_0_2_2_tiles+load_2_2_2_tiles", "load_.*given twice"),
        ("(BF16, 128, 64, 64, 4): load_0_2_2_tiles+stride_128+stride_256", "stride_.*given twice"),
        ("FlashForwardKernelConfig{}", "has 1 fields; expected 5 to"),
        ("FlashForwardKernelConfig{(DType)15, 128, 64, 64}", "has 4 fields; expected 5 to"),
        (f"FlashForwardKernelConfig{{(DType)15, 128, 64, 64, 4{', 0' * 40}}}", "has 45 fields"),
        ("FlashForwardKernelConfig{(DType)7, 128, 64, 64, 4}", "dtype: 7 .*FP16, BF16"),
        ("FlashForwardKernelConfig{(DType)15, 128, 64, 64, four}", "n_warps: 'four' is not a number"),
        ("FlashForwardKernelConfig{(DType)15, 128, 64, 64, 4, 3}", "async_copy: 3 .*True, False"),
        ("FlashForwardKernelConfig{(DType)15, 128, 64, 64, 4, 1, 1, 1, -2}", "Q_mma_load_K_tiles: -2 "),
    ],
)
def test_a_malformed_name_is_refused_with_what_is_wrong_in_it(text, what_is_said):
    with pytest.raises(ValueError, match=what_is_said):
        parse_kernel_name_into_config(text)


@given(st.text(alphabet="()BF16, :asyncloadti_+{}0248", max_size=60))
def test_no_text_makes_the_parser_fail_otherwise_than_by_value_error(text):
    try:
        config = parse_kernel_name_into_config(text)
    except ValueError:
        return
    assert_every_name_parses_back(config)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("FP16", DType.FP16), ("half", DType.FP16), ("torch.bfloat16", DType.BF16), (5, DType.FP16), (15, DType.BF16)],
)
def test_a_dtype_may_be_given_by_name_or_code(text, dtype):
    assert replace(SPEC_CONFIG, dtype=text).dtype is dtype


@pytest.mark.parametrize("field", [field.name for field in fields(FlashForwardKernelConfig)])
def test_a_config_cannot_be_changed(field):
    with pytest.raises(FrozenInstanceError):
        setattr(SPEC_CONFIG, field, getattr(SPEC_CONFIG, field))


@given(st.lists(configs(), min_size=2, max_size=5))
def test_configs_are_values_that_hash_and_sort_by_their_fields(some):
    copies = [replace(config) for config in some]
    assert set(copies) == set(some)
    assert [c.values() for c in sorted(copies)] == sorted(c.values() for c in some)


# --- The filter ----------------------------------------------------------------------------------------------

FILTER_TRUTH_TABLE = [
    # rule 1: eager loading without asynchronous copies
    ("(BF16, 128, 64, 64, 4): eager+swizzled+load_0_2_2_tiles", 1, ["eager_load_blocks", "async_copy"]),
    ("(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles", None, []),
    ("(BF16, 128, 64, 64, 4): swizzled+load_0_2_2_tiles", None, []),
    # rule 2: Q's load tiles differ from K's
    ("(BF16, 128, 128, 64, 4): async+eager+swizzled+load_2_4_2_tiles", 2, ["= 2", "= 4"]),
    ("(BF16, 128, 128, 64, 4): async+eager+swizzled+load_2_0_2_tiles", 2, ["= 2", "= 0"]),
    ("(BF16, 128, 128, 64, 4): async+eager+swizzled+load_4_4_2_tiles", None, []),
    ("(BF16, 128, 64, 128, 4): async+eager+swizzled+load_0_4_2_tiles", None, []),
    # rule 3: 64 rows for 8 warps
    ("(BF16, 128, 64, 64, 8): async+eager+swizzled+load_0_2_2_tiles", 3, ["64", "8"]),
    ("(BF16, 128, 64, 128, 8): async+eager+swizzled+load_2_2_2_tiles", 3, ["64", "8"]),
    ("(BF16, 128, 128, 64, 8): async+eager+swizzled+load_2_2_2_tiles", None, []),
    # rule 4: 64 × 32 blocks with the whole of Q in registers
    ("(BF16, 128, 64, 32, 4): async+eager+swizzled+load_0_2_2_tiles", 4, ["64", "32", "= 0"]),
    ("(BF16, 128, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles", None, []),
    # rule 5: 64 × 64 blocks with Q streamed
    ("(BF16, 128, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles", 5, ["B_r = 64", "B_c = 64", "= 2"]),
    ("(BF16, 128, 64, 128, 4): async+eager+swizzled+load_2_2_2_tiles", None, []),
    # rule 6: 128 rows with the whole of Q in registers
    ("(BF16, 128, 128, 64, 4): async+eager+swizzled+load_0_2_2_tiles", 6, ["128", "= 0"]),
    ("(BF16, 128, 128, 32, 8): async+eager+swizzled+load_0_0_0_tiles", 6, ["128", "= 0"]),
    ("(BF16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles", None, []),
    # the ladder's first rungs are kept where no rule speaks of them
    ("(FP16, 64, 64, 64, 4): load_0_0_0_tiles", None, []),
]


@pytest.mark.parametrize(("short_form", "rule", "mentions"), FILTER_TRUTH_TABLE)
def test_the_filter_rejects_by_its_six_rules_and_says_which(short_form, rule, mentions):
    reason = rejection_reason(parse_kernel_name_into_config(short_form))
    if rule is None:
        assert reason is None
    else:
        assert reason is not None
        assert reason.startswith(f"rule {rule}:")
        assert [text for text in mentions if text not in reason] == []


@given(configs())
def test_a_config_is_autotuned_exactly_when_there_is_no_reason_against_it(config):
    assert should_autotune_config(config) == (rejection_reason(config) is None)


@given(configs())
def test_a_config_without_a_kernel_is_never_worth_timing(config):
    try:
        ForwardKernelTileShapes(config)
    except ValueError as error:
        reason = rejection_reason(config)
        assert reason == str(error) or reason.startswith("rule ")
        assert re.match(r"(warps|stages|load tiles|shared memory|registers): ", str(error))


# --- The space -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DType)
def test_the_space_of_a_dtype_is_large_without_duplicates_and_all_kept_and_buildable(dtype):
    space = get_autotuning_kernel_configs(dtype)
    assert len(space) >= 40
    assert len(set(space)) == len(space)
    assert {config.dtype for config in space} == {dtype}
    assert [config for config in space if rejection_reason(config)] == []
    for config in space:
        ForwardKernelTileShapes(config)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("dtype", set(DType)),
        ("d_head", {64, 128}),
        ("B_r", {64, 128}),
        ("B_c", {32, 64, 128}),
        ("n_warps", {4, 8}),
        ("mma_double_buffer_loads", {False, True}),
    ],
)
def test_the_space_covers_every_value_that_users_are_promised(field, values):
    assert {getattr(config, field) for config in get_autotuning_kernel_configs()} == values


@pytest.mark.parametrize(("dtype", "d_head"), LADDERS)
def test_the_space_of_one_dtype_and_head_dimension_is_that_part_of_the_whole(dtype, d_head):
    part = [c for c in get_autotuning_kernel_configs() if c.dtype == dtype and c.d_head == d_head]
    assert get_autotuning_kernel_configs(dtype, d_head) == part
    assert {config.mma_double_buffer_loads for config in part} == {False, True}


# --- The ladder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "d_head"), LADDERS)
def test_each_rung_of_the_ladder_changes_the_one_before_and_can_be_built(dtype, d_head):
    rungs = get_kernel_progression(dtype, d_head)
    ladder = [rung.config for rung in rungs]
    assert ladder == get_kernel_progression_configs(dtype, d_head)
    assert [rung.number for rung in rungs] == list(range(1, len(rungs) + 1))
    assert all(rung.change for rung in rungs)
    assert len(set(ladder)) == len(ladder) >= 7
    assert {(config.dtype, config.d_head) for config in ladder} == {(dtype, d_head)}
    assert {config.mma_double_buffer_loads for config in ladder} == {False, True}
    for config in ladder:
        ForwardKernelTileShapes(config)


def test_the_first_rung_has_asynchronous_copies_and_nothing_else():
    assert get_kernel_progression_configs()[0].short_form() == "(BF16, 128, 64, 64, 4): async+load_0_0_0_tiles"


@pytest.mark.parametrize(
    ("rung", "changed"),
    [
        (2, {"swizzled"}),
        (3, {"eager_load_blocks"}),
        (4, {"Q_mma_load_K_tiles", "K_mma_load_K_tiles", "V_mma_load_K_tiles"}),
        (5, {"mma_double_buffer_loads"}),
        (6, {"optimized_softmax"}),
    ],
)
def test_the_first_six_rungs_are_those_of_the_seed_system(rung, changed):
    before, after = get_kernel_progression_configs()[rung - 2 : rung]
    names = [field.name for field in fields(FlashForwardKernelConfig)]
    assert {name for name in names if getattr(before, name) != getattr(after, name)} == changed
