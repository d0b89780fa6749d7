"""The configuration: its names and their parsing, its errors, the filter, the space and the ladder."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright import (
    DType,
    FlashForwardKernelConfig,
    ForwardKernelTileShapes,
    compile_kernel,
    get_autotuning_kernel_configs,
    get_kernel_progression,
    get_kernel_progression_configs,
    parse_config,
    parse_kernel_name_into_config,
    rejection_reason,
    should_autotune_config,
)
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import Occasion
from flashwright.kernels.registry import family_named, search_space_of
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.lengths import LENGTH_BUCKETS, LONGEST, MEDIUM, SHORT, SHORTEST

AMPERE = family_named("ampere")
AMPERE_D_HEADS = AMPERE.d_heads
GPUS = (None, GPUModel.of_architecture("an A100", "sm_80"), GPUModel.of_architecture("an H200", "sm_90"))
OCCASIONS = [(rows, keys, gpu) for rows in LENGTH_BUCKETS for keys in (MEDIUM, LONGEST) for gpu in GPUS]
"""Of all sequences but short ones: few rows may attend to many keys."""
SEED_FIELDS = 13
SPEC_SHORT_FORM = "(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"
SPEC_CONFIG = FlashForwardKernelConfig(DType.BF16, 128, 64, 64, 4, True, True, True, 0, 2, 2, True, True)
LADDERS = [(dtype, d_head) for dtype in DType for d_head in (64, 128)]


def default_for(
    dtype: DType | str, d_head: int, rows: str, keys: str, gpu: GPUModel | None
) -> FlashForwardKernelConfig:
    return AMPERE.default_config(Occasion(DType.parse(dtype), d_head, False, rows, keys, gpu))


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
        ring_stages=draw(st.sampled_from((0, 2, 3, 8))),
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
        ({"ring_stages": 3}, "ring_3"),
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


MANGLED = (
    "_Z20flash_forward_kernelIXtl24FlashForwardKernelConfigL5DType15ELi128ELi64ELi64ELi4ELb1ELb1ELb1ELi0ELi2ELi2ELb1ELb1E"
    "Lb0ELb0ELb0ELi0ELb0ELb0ELb0ELb0EEEEv16ForwardArguments"
)


@pytest.mark.parametrize(
    "text",
    [
        MANGLED,
        MANGLED.replace("ELb0ELb0ELb0ELi0ELb0ELb0ELb0ELb0E", "E"),  # trailing zeros left out
        MANGLED.replace("L5DType15E", "LN3c1010ScalarTypeE15E"),
        "_ZN2ns20flash_forward_kernelIXtlNS_24FlashForwardKernelConfigELNS_5DTypeE15ELi128ELi64ELi64ELi4ELb1ELb1ELb1ELi0E"
        "Li2ELi2ELb1ELb1EEEEEvNS_16ForwardArgumentsE",
    ],
)
def test_a_mangled_kernel_name_is_understood(text):
    assert parse_kernel_name_into_config(text) == SPEC_CONFIG


@pytest.mark.parametrize("text", [SPEC_SHORT_FORM, "hopper (BF16, 64, 128, 64): stages_2"])
def test_the_name_of_a_compiled_kernel_is_that_of_its_config(text):
    kernel = compile_kernel(text)
    assert kernel.name.startswith("_Z")
    assert parse_config(kernel.name) == kernel.config


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
    [
        ("FP16", DType.FP16), ("half", DType.FP16), ("torch.bfloat16", DType.BF16), (5, DType.FP16), (15, DType.BF16),
        *((dtype, of) for of, dtype in NUMPY_DTYPES.items()),
    ],
)  # fmt: skip
def test_a_dtype_may_be_given_by_name_or_code_or_as_numpy_has_it(text, dtype):
    assert replace(SPEC_CONFIG, dtype=text).dtype is dtype


def test_a_dtype_may_be_one_of_pytorch():
    torch = pytest.importorskip("torch")
    assert replace(SPEC_CONFIG, dtype=torch.bfloat16) == SPEC_CONFIG
    assert replace(SPEC_CONFIG, dtype=torch.float16).dtype is DType.FP16
    with pytest.raises(ValueError, match=r"dtype: torch.float32 .*FP16, BF16"):
        replace(SPEC_CONFIG, dtype=torch.float32)


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
def test_the_space_of_a_dtype_is_large_without_duplicates_buildable_and_kept_but_for_rungs(dtype):
    space = get_autotuning_kernel_configs(dtype)
    assert len(space) >= 40
    assert len(set(space)) == len(space)
    assert {config.dtype for config in space} == {dtype}
    rungs = {rung for d_head in (64, 128) for rung in get_kernel_progression_configs(dtype, d_head)}
    assert [config for config in space if rejection_reason(config) and config not in rungs] == []
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


@pytest.mark.parametrize(("dtype", "d_head"), [*LADDERS, (DType.BF16, 256), (DType.FP16, 96)])
def test_the_default_space_has_every_rung_and_every_default(dtype, d_head):
    space = set(get_autotuning_kernel_configs(dtype, d_head))
    assert set(get_kernel_progression_configs(dtype, d_head)) <= space
    assert {default_for(dtype, d_head, *occasion) for occasion in OCCASIONS} <= space


def test_heads_of_256_columns_have_a_ring_where_a_thread_block_may_have_as_much_shared_memory():
    small, large = (default_for("BF16", 256, LONGEST, LONGEST, gpu) for gpu in GPUS[1:])
    assert (small.ring_stages, large.ring_stages) == (0, 3)
    assert ForwardKernelTileShapes(small).shared_bytes <= 99 * 1024
    assert 164 * 1024 < ForwardKernelTileShapes(large).shared_bytes <= 227 * 1024


@pytest.mark.parametrize("d_head", AMPERE_D_HEADS)
def test_short_sequences_have_small_blocks_and_a_few_rows_of_many_keys_have_not(d_head):
    def blocks(rows: str, keys: str) -> set[tuple[int, int, int]]:
        found = {default_for("BF16", d_head, rows, keys, gpu) for gpu in GPUS}
        return {(config.B_r, config.B_c, config.n_warps) for config in found}

    assert blocks(SHORTEST, SHORTEST) == blocks(SHORTEST, SHORT) == {(16, 16, 1)}
    assert blocks(SHORT, SHORT) == blocks(SHORT, SHORTEST) == {(32, 32, 2) if d_head <= 128 else (64, 64, 4)}
    assert blocks(SHORTEST, MEDIUM) == blocks(SHORT, MEDIUM) == {(64, 64, 4)}


def test_the_filter_refuses_the_three_rungs_that_stream_q_at_64_by_64_and_some_defaults():
    refused = {rung.number: rejection_reason(rung.config) for rung in get_kernel_progression()}
    assert {number for number, reason in refused.items() if reason} == {4, 5, 6}
    assert all(refused[number].startswith("rule 5: ") for number in (4, 5, 6))
    used = {d_head: {default_for("BF16", d_head, *occasion) for occasion in OCCASIONS} for d_head in AMPERE_D_HEADS}
    rules = {d_head: {(rejection_reason(c) or "").partition(":")[0] for c in found} for d_head, found in used.items()}
    assert rules == {32: {"", "rule 6"}, 64: {""}, 96: {""}, 128: {""}, 160: {"", "rule 5"}, 192: {"", "rule 5"},
                     256: {"rule 5", "rule 6"}}  # fmt: skip


def documents_filter(cfg: FlashForwardKernelConfig) -> bool:
    """`should_autotune_config`, condition by condition in the order of the documents."""
    Q, K = cfg.Q_mma_load_K_tiles, cfg.K_mma_load_K_tiles
    rejected = (
        not cfg.async_copy and cfg.eager_load_blocks,
        Q != K and Q != 0,
        cfg.B_r == 64 and cfg.n_warps == 8,
        cfg.B_r == 64 and cfg.B_c == 32 and Q == 0,
        cfg.B_r == 64 and cfg.B_c == 64 and Q != 0,
        cfg.B_r == 128 and Q == 0,
    )
    return not any(rejected)


def has_valid_load_tiles(cfg: FlashForwardKernelConfig) -> bool:
    """The documents' validity: at most K/8 fragments, K/16 with double buffering."""
    most = {"Q": cfg.d_head, "K": cfg.d_head, "V": cfg.B_c}
    buffers = 2 if cfg.mma_double_buffer_loads else 1
    return all(getattr(cfg, f"{operand}_mma_load_K_tiles") <= K // (8 * buffers) for operand, K in most.items())


def test_the_full_space_is_every_combination_that_the_documents_keep_and_the_default_space():
    """All thirteen fields, against the product of their values and the documents' filter."""
    QK_tiles, V_tiles, flags = (0, 2, 4, 8), (0, 2, 4, 8, 16), (False, True)
    combined = (
        FlashForwardKernelConfig(DType.FP16, 64, *values)
        for values in product((64, 128), (32, 64, 128), (4, 8), *[flags] * 3, QK_tiles, QK_tiles, V_tiles, flags, flags)
    )
    documented = {config for config in combined if documents_filter(config) and has_valid_load_tiles(config)}
    full = get_autotuning_kernel_configs("FP16", 64, full=True)
    assert len(full) == len(set(full))
    rungs = set(get_kernel_progression_configs("FP16", 64))
    assert {config for config in full if not any(config.values()[SEED_FIELDS:])} - rungs == documented - rungs
    assert set(full) == documented | set(get_autotuning_kernel_configs("FP16", 64))
    assert len(documented) == 2412


@pytest.mark.parametrize("d_head", [64, 128])
def test_the_full_space_has_all_values_and_a_buffered_twin_where_two_tiles_fit(d_head):
    full = get_autotuning_kernel_configs("BF16", d_head, full=True)
    known = set(full)
    assert set(get_autotuning_kernel_configs("BF16", d_head)) < known
    rungs = get_kernel_progression("BF16", d_head)
    assert [config for config in full if not should_autotune_config(config)] == [rungs[n - 1].config for n in (4, 5, 6)]
    for field in ("async_copy", "eager_load_blocks", "swizzled", "mma_double_buffer_loads", "optimized_softmax"):
        assert {getattr(config, field) for config in full} == {False, True}
    assert {(config.Q_mma_load_K_tiles, config.K_mma_load_K_tiles) for config in full} >= {(0, 4), (4, 4)}
    assert {config.V_mma_load_K_tiles for config in full} == {0, 2, 4, 8, 16}
    for config in full:
        twin = replace(config, mma_double_buffer_loads=True)
        if not any(config.values()[SEED_FIELDS:]) and has_valid_load_tiles(twin):
            assert twin in known


@pytest.mark.parametrize(
    ("short_form", "space"),
    [
        ("(BF16, 64, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax", "default"),
        ("(BF16, 64, 64, 64, 4): async+load_0_0_0_tiles", "default"),  # the ladder's first rung
        ("(BF16, 256, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax+lazy", "default"),
        ("(BF16, 64, 64, 64, 4): async+eager+swizzled+load_0_4_4_tiles", "full"),
        ("(BF16, 64, 64, 64, 4): swizzled+load_0_2_2_tiles+opt_softmax", "full"),
        ("(BF16, 64, 64, 64, 4): swizzled+load_0_2_2_tiles+opt_softmax+peeled", None),
        ("(BF16, 64, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles", "default"),  # rule 5, but the fourth rung
        ("(BF16, 64, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax", None),  # rule 5
        ("(BF16, 48, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax", "default"),  # not a native width
        ("(BF16, 64, 256, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax", None),
        ("hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy+guess", "default"),
        ("hopper (BF16, 128, 128, 128): stages_2", None),
    ],
)
def test_the_smallest_space_that_has_a_config_is_known(short_form, space):
    assert search_space_of(short_form) == space


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
