"""Backward configs: their names, the shapes that follow from them, and what is refused, with the reason."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright import compile_kernel
from flashwright.hardware.architectures import GPUModel, architecture
from flashwright.kernels.backward.ampere import AMPERE_BACKWARD
from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.backward.ampere.shapes import AmpereBackwardShapes
from flashwright.kernels.backward.hopper import HOPPER_BACKWARD
from flashwright.kernels.backward.hopper.config import D_HEADS, HopperBackwardKernelConfig
from flashwright.kernels.backward.hopper.shapes import HopperBackwardShapes
from flashwright.kernels.family import Occasion
from flashwright.kernels.registry import families, family_of, parse_config, rejection_reason, tile_shapes
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import LENGTH_BUCKETS, LONG, LONGEST, MEDIUM

AMPERE = AmpereBackwardKernelConfig(DType.BF16, 128, 64, 128, 8, Q_stages=2)
HOPPER = HopperBackwardKernelConfig(DType.BF16, 128, 64, 128)
FAMILIES = pytest.mark.parametrize("config", [AMPERE, HOPPER], ids=["ampere", "hopper"])

dtypes, switches = st.sampled_from(DType), st.booleans()
ampere_configs = st.builds(
    AmpereBackwardKernelConfig,
    dtypes,
    st.integers(1, 8).map(lambda n: 32 * n),
    st.integers(1, 16).map(lambda n: 16 * n),
    st.integers(1, 16).map(lambda n: 16 * n),
    st.integers(1, 16),
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    switches,
    switches,
    switches,
)
hopper_configs = st.builds(
    HopperBackwardKernelConfig,
    dtypes,
    st.sampled_from(D_HEADS),
    st.sampled_from([64, 128]),
    st.sampled_from([64, 128, 192]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    switches,
    switches,
)
configs = st.one_of(ampere_configs, hopper_configs)
"""Any, whether or not a kernel can be built from them."""


# --- Names -------------------------------------------------------------------------------------------------------


@given(configs)
def test_the_short_form_and_the_kernel_name_parse_back(config):
    assert parse_config(config.short_form()) == parse_config(str(config)) == config
    assert parse_config(config.kernel_name()) == config
    assert parse_config(f"void {config.kernel_name()}(BackwardArguments)") == config


@pytest.mark.parametrize(
    "text",
    [
        "ampere backward (FP16, 64, 64, 64, 4): stages_2_1+swizzled",
        "ampere backward (FP16, 32, 32, 32, 2): stages_2_1+slices_2+swizzled+ordered",
        "ampere backward (FP16, 64, 32, 32, 4): stages_1_1+parts_2+late_dQ",
        "hopper backward (FP16, 64, 64, 64, 1): stages_2_1+register_P",
        "hopper backward (FP16, 64, 64, 64, 1): stages_2_1+register_P+ordered",
        "hopper backward (FP16, 64, 64, 64, 1): stages_2_1+register_P+bulk_dQ",
        "hopper backward (FP16, 128, 64, 64, 1): stages_2_1+paired+ordered",
        "hopper backward (FP16, 64, 64, 64, 1): stages_2_1+register_P+ordered+persistent+keys_ahead",
    ],
)
def test_the_mangled_name_of_a_compiled_kernel_parses_back(text):
    assert str(parse_config(compile_kernel(text).name)) == text


def test_the_names_of_a_config():
    assert str(AMPERE) == "ampere backward (BF16, 128, 64, 128, 8): stages_2_1+swizzled"
    assert str(replace(AMPERE, swizzled=False, ordered=True)) == (
        "ampere backward (BF16, 128, 64, 128, 8): stages_2_1+ordered"
    )
    assert AMPERE.kernel_name() == (
        "ampere_backward_kernel<AmpereBackwardKernelConfig"
        "{DType::BF16, 128, 64, 128, 8, 2, 1, 1, 1, true, false, false}>"
    )
    assert str(replace(AMPERE, parts=2, slices=4)) == (
        "ampere backward (BF16, 128, 64, 128, 8): stages_2_1+parts_2+slices_4+swizzled"
    )
    assert str(HOPPER) == "hopper backward (BF16, 128, 64, 128, 2): stages_2_2+register_P"
    assert HOPPER.kernel_name() == (
        "hopper_backward_kernel<HopperBackwardKernelConfig{DType::BF16, 128, 64, 128, 2, 2, 2, true, false, false, "
        "false, false, false, false, false}>"
    )


@pytest.mark.parametrize(
    "text",
    [
        "ampere backward(BF16,128,64,128,8):stages_2_1+swizzled",
        "  Ampere  Backward (bfloat16, 128, 64, 128, 8): stages_2_1+swizzled ",
        "AmpereBackwardKernelConfig{(DType)15, (int)128, (int)64, (int)128, (int)8, (int)2, (int)1, 1, 1, (bool)1}",
    ],
)
def test_other_ways_to_write_a_config(text):
    assert parse_config(text) == AMPERE


def test_a_config_leads_to_its_family():
    assert families("backward") == (AMPERE_BACKWARD, HOPPER_BACKWARD)
    assert (family_of(AMPERE), family_of(HOPPER)) == families("backward")
    assert (type(tile_shapes(AMPERE)), type(tile_shapes(HOPPER))) == (AmpereBackwardShapes, HopperBackwardShapes)


@FAMILIES
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text + "+orderd", r"unknown option 'orderd'.*; allowed: .*did you mean 'ordered'\?"),
        (lambda text: text + "+ordered+ordered", "option 'ordered' is given twice"),
        (lambda text: text.replace(": stages_2_", ": "), "names no kernel; expected a short form such as"),
        (lambda text: text.replace("BF16", "FP32"), "dtype: 'FP32' is not a known element type; allowed: FP16, BF16"),
        (lambda text: text.split("(")[0], "names no kernel; expected a short form such as"),
    ],
    ids=["unknown", "twice", "no stages", "dtype", "nothing else"],
)
def test_a_text_that_names_no_config_is_refused_with_what_is_wrong(config, change, message):
    with pytest.raises(ValueError, match=message):
        parse_config(change(str(config)))


@pytest.mark.parametrize(
    ("name", "expected"), [("AmpereBackwardKernelConfig", "9 to 12"), ("HopperBackwardKernelConfig", "7 to 15")]
)
def test_a_struct_with_too_few_fields_is_refused(name, expected):
    with pytest.raises(ValueError, match=rf"has 2 fields; expected {expected}: dtype, d_head, B_r"):
        parse_config(name + "{DType::BF16, 128}")


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (AMPERE, {"d_head": 80}, "d_head: 80 is not allowed; allowed: positive multiples of 32 up to 256"),
        (AMPERE, {"B_r": 0}, "B_r: 0 is not allowed; allowed: positive multiples of 16 up to 256"),
        (AMPERE, {"B_c": 272}, "B_c: 272 is not allowed; allowed: positive multiples of 16 up to 256"),
        (AMPERE, {"n_warps": 17}, "n_warps: 17 is not allowed; allowed: positive multiples of 1 up to 16"),
        (AMPERE, {"Q_stages": 3}, "Q_stages: 3 is not allowed; allowed: 1, 2"),
        (AMPERE, {"dO_stages": 0}, "dO_stages: 0 is not allowed; allowed: 1, 2"),
        (AMPERE, {"parts": 3}, "parts: 3 is not allowed; allowed: 1, 2, 4"),
        (AMPERE, {"slices": 0}, "slices: 0 is not allowed; allowed: 1, 2, 4"),
        (AMPERE, {"B_r": 64.0}, "B_r: 64.0 is not an integer"),
        (AMPERE, {"swizzled": 2}, "swizzled: 2 is not a truth value"),
        (HOPPER, {"d_head": 96}, "d_head: 96 is not allowed; allowed: 64, 128, 256"),
        (HOPPER, {"B_r": 192}, "B_r: 192 is not allowed; allowed: 64, 128"),
        (HOPPER, {"B_c": 32}, "B_c: 32 is not allowed; allowed: 64, 128, 192"),
        (HOPPER, {"n_consumers": 4}, "n_consumers: 4 is not allowed; allowed: 1, 2, 3"),
        (HOPPER, {"Q_stages": 5}, "Q_stages: 5 is not allowed; allowed: 1, 2, 3, 4"),
        (HOPPER, {"dO_stages": 0}, "dO_stages: 0 is not allowed; allowed: 1, 2, 3, 4"),
        (HOPPER, {"P_in_registers": "yes"}, "P_in_registers: 'yes' is not a truth value"),
    ],
)  # fmt: skip
def test_values_that_no_kernel_has_are_refused_by_name(config, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(config, **changes)


# --- Shapes ------------------------------------------------------------------------------------------------------


def test_the_shapes_of_an_ampere_config_by_hand():
    """K and V of 128 keys, two stages of Q and one of dO, dS; 8 warps of 16 keys each, P in registers."""
    shapes = AmpereBackwardShapes(AMPERE)
    assert (shapes.threads, shapes.keys_per_warp, shapes.slice_queries) == (256, 16, 64)
    assert (shapes.key_bytes, shapes.query_bytes, shapes.weight_bytes) == (32_768, 16_384, 16_384)
    assert (shapes.gradient_registers, shapes.score_registers, shapes.dQ_registers) == (64, 32, 32)
    assert shapes.shared_bytes == 2 * 32_768 + 3 * 16_384 + 16_384 + 2 * 512


def test_the_shapes_of_an_ampere_config_whose_warps_share_keys_by_hand():
    """Pairs of warps have 32 keys, half of the queries and half of the columns each; P lies beside dS. A warp's part of
    dQ is square."""
    config = replace(AMPERE, parts=2, slices=2)
    shapes = AmpereBackwardShapes(config)
    assert (shapes.key_groups, shapes.keys_per_warp, shapes.row_tiles, shapes.slice_queries) == (4, 32, 2, 16)
    assert (shapes.gradient_registers, shapes.score_registers, shapes.dQ_registers) == (64, 16, 32)
    assert (shapes.dQ_row_groups, shapes.dQ_column_parts) == (2, 4)
    assert shapes.shared_bytes == 2 * 32_768 + 3 * 16_384 + 2 * 16_384 + 2 * 512
    late = AmpereBackwardShapes(replace(config, late_dQ=True))
    assert late.shared_bytes == shapes.shared_bytes + 16_384


def test_the_shapes_of_a_hopper_config_by_hand():
    """K and V of two groups of 64 keys, two stages of Q and dO, two of dS; 14 pairs of barriers, 4 notes."""
    shapes = HopperBackwardShapes(HOPPER)
    assert (shapes.threads, shapes.key_groups, shapes.parts, shapes.dQ_column_parts) == (384, 2, 1, 2)
    assert (shapes.key_group_bytes, shapes.query_bytes, shapes.weight_group_bytes) == (16_384, 16_384, 8_192)
    assert shapes.operand_registers == 2 * 64 + 2 * 32
    assert shapes.shared_bytes == 4 * 16_384 + 4 * 16_384 + 4 * 8_192 + 4 * 256 + 4 * 16 + 14 * 16


def test_what_dq_takes_in_shared_memory_by_hand():
    """64 × 128 sums on their way, each warpgroup's half with barriers of its own."""
    plain = HopperBackwardShapes(HOPPER).shared_bytes
    assert HopperBackwardShapes(replace(HOPPER, bulk_dQ=True)).shared_bytes == plain + 4 * 64 * 128 + 2 * 16


def test_what_turns_take_in_shared_memory_by_hand():
    """Two that consumers have, and two to be passed on."""
    plain = HopperBackwardShapes(HOPPER).shared_bytes
    assert HopperBackwardShapes(replace(HOPPER, ordered=True)).shared_bytes == plain + 4 * 16


def test_what_persistent_thread_blocks_take_in_shared_memory_by_hand():
    """Two notes of tiles with their barriers; a second K and V with theirs."""
    plain = HopperBackwardShapes(HOPPER).shared_bytes
    persistent = HopperBackwardShapes(replace(HOPPER, persistent=True)).shared_bytes
    assert persistent == plain + 2 * 16 + 2 * 16
    ahead = HopperBackwardShapes(replace(HOPPER, persistent=True, keys_ahead=True)).shared_bytes
    assert ahead == persistent + 4 * 16_384 + 4 * 16


def test_what_turns_of_those_who_finish_dq_take_in_shared_memory_by_hand():
    """Two notes of turns; and of a pair, two that are sent if they are taken out of order, with their barriers."""

    def bytes_of(config, **knobs):
        return HopperBackwardShapes(replace(config, **knobs)).shared_bytes

    pair = parse_config("hopper backward (BF16, 256, 64, 64, 2): stages_2_1+paired")
    assert bytes_of(HOPPER, ordered=True) == bytes_of(HOPPER) + 2 * 2 * 16
    for ordered in (False, True):
        assert bytes_of(HOPPER, ordered=ordered, finishes_dQ=True) == bytes_of(HOPPER, ordered=True) + 2 * 16
    in_order = bytes_of(pair, ordered=True, finishes_dQ=True)
    assert bytes_of(pair, finishes_dQ=True) == in_order + 2 * 16 + 2 * 16


def test_two_thread_blocks_share_the_columns_of_dq_where_p_is_in_shared_memory():
    """Each of four warpgroups has 64 of 256 columns: half the registers, half of the other thread block's K."""
    alone = HopperBackwardShapes(parse_config("hopper backward (BF16, 256, 64, 64, 2): stages_2_1"))
    shapes = HopperBackwardShapes(parse_config("hopper backward (BF16, 256, 64, 64, 2): stages_2_1+paired"))
    assert (alone.dQ_registers, alone.operand_registers) == (64, 2 * 64 + 64)
    assert (shapes.dQ_registers, shapes.operand_registers) == (32, 2 * 64 + 2 * 16 + 32)
    assert shapes.shared_bytes == alone.shared_bytes + 64 * 128 * 2 + 2 * 8_192


REFUSED = {
    "ampere: keys": (
        "ampere backward (BF16, 128, 64, 64, 3): stages_1_1",
        "warps: 3 warps do not share B_c = 64 keys evenly, 1 to the same keys and 16 keys or a multiple for each",
    ),
    "ampere: too many warps for the keys": (
        "ampere backward (BF16, 128, 64, 32, 16): stages_1_1+parts_4",
        "warps: 16 warps do not share B_c = 32 keys evenly, 4 to the same keys",
    ),
    "ampere: queries": (
        "ampere backward (BF16, 128, 64, 64, 8): stages_1_1+parts_2+slices_4",
        "warps: 2 parts and 4 slices do not share B_r = 64 queries evenly, 16 or a multiple for each",
    ),
    "ampere: columns of dK": (
        "ampere backward (BF16, 96, 64, 64, 8): stages_1_1+parts_2",
        "columns: 2 warps share d_head = 96 columns of dK and dV; each needs a multiple of 32",
    ),
    "ampere: dQ": (
        "ampere backward (BF16, 32, 16, 128, 8): stages_1_1",
        "warps: 8 warps do not share B_r = 16 rows and d_head = 32 columns of dQ evenly, 16 or a multiple for each",
    ),
    "ampere: shared memory": (
        "ampere backward (BF16, 256, 128, 128, 16): stages_2_2+parts_2",
        "shared memory: ampere backward (BF16, 256, 128, 128, 16): stages_2_2+parts_2 needs 460800 bytes",
    ),
    "ampere: registers": (
        "ampere backward (BF16, 256, 64, 64, 4): stages_1_1",
        "registers: dK and dV of ampere backward (BF16, 256, 64, 64, 4): stages_1_1 take 256 registers of a thread, "
        "S and dP or dQ 128 more; allowed: up to 288",
    ),
    "hopper: keys": (
        "hopper backward (BF16, 128, 64, 128, 1): stages_2_2",
        "warpgroups: 1 do not share B_c = 128 keys; each needs 64 of its own, or shares them with one other",
    ),
    "hopper: columns of dK": (
        "hopper backward (BF16, 64, 64, 64, 2): stages_2_2",
        "warpgroups: 2 share d_head = 64 columns of dK and dV; each needs a multiple of 64",
    ),
    "hopper: dQ": (
        "hopper backward (BF16, 64, 64, 128, 2): stages_2_2",
        "warpgroups: 2 do not share dQ's 64 rows and 64 columns; each needs 64 rows and a multiple of 64 columns",
    ),
    "hopper: P in registers": (
        "hopper backward (BF16, 128, 64, 64, 2): stages_2_2+register_P",
        "P in registers: two warpgroups share the same keys, each with half of the queries",
    ),
    "hopper: columns of two thread blocks": (
        "hopper backward (BF16, 256, 128, 64, 2): stages_2_2+paired",
        "paired: two thread blocks share dQ's 256 columns in 2 parts; each needs 64",
    ),
    "hopper: dQ of two thread blocks": (
        "hopper backward (BF16, 256, 64, 64, 2): stages_1_1+bulk_dQ+paired",
        "paired: bulk_dQ is on",
    ),
    "hopper: keys ahead of a pair": (
        "hopper backward (BF16, 256, 64, 64, 2): stages_1_1+paired+persistent+keys_ahead",
        "paired: keys_ahead is on; two thread blocks hold one block of K and V and half of another K",
    ),
    "hopper: steps left out": (
        "hopper backward (BF16, 64, 128, 128, 2): stages_2_2+register_P+skips_masked",
        "skips masked: P_in_registers is on, B_r = 128, B_c = 128; a warpgroup leaves out steps with P in registers",
    ),
    "hopper: keys ahead": (
        "hopper backward (BF16, 128, 64, 128, 2): stages_2_2+register_P+keys_ahead",
        "persistent: off, and keys_ahead is on; a thread block has no next keys to copy ahead",
    ),
    "hopper: dQ finished by the copy engine": (
        "hopper backward (BF16, 128, 64, 128, 2): stages_2_2+register_P+bulk_dQ+ordered+finishes_dQ",
        "finishes dQ: bulk_dQ is on; the last block of keys to add to a block of dQ rounds the sum in registers",
    ),
    "hopper: P of two thread blocks": (
        "hopper backward (BF16, 128, 64, 64, 1): stages_2_2+register_P+paired",
        "paired: P_in_registers is on",
    ),
    "hopper: shared memory": (
        "hopper backward (BF16, 256, 64, 64, 2): stages_3_3",
        "shared memory: hopper backward (BF16, 256, 64, 64, 2): stages_3_3 needs",
    ),
    "hopper: registers": (
        "hopper backward (BF16, 256, 64, 64, 1): stages_2_2",
        "registers: sums of products of hopper backward (BF16, 256, 64, 64, 1): stages_2_2 take 384 registers of a "
        "thread; allowed: up to 232",
    ),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=list(REFUSED))
def test_a_config_that_no_kernel_can_be_built_from_is_refused_by_its_rule(text, reason):
    for refuse in (tile_shapes, compile_kernel):
        with pytest.raises(ValueError, match=re.escape(reason)):
            refuse(text)
    assert rejection_reason(text).startswith(reason)


@given(configs)
def test_whatever_is_refused_is_refused_by_a_rule_and_the_rest_fits(config):
    family = family_of(config)
    try:
        shapes = family.shapes(config)
    except ValueError as error:
        rules = "warps|columns|warpgroups|P in registers|paired|skips masked|persistent|stages|shared memory|registers"
        assert re.match(rf"({rules}): \S", str(error))
        assert rejection_reason(config) == str(error)
    else:
        assert shapes.shared_bytes <= architecture("sm_90").shared_bytes_per_block
        assert shapes.threads <= 1024


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swizzled": False}, "swizzle: without it, reads of shared memory meet in the same banks"),
        ({"d_head": 32, "n_warps": 2, "B_r": 32}, "warps: 64 keys of a warp leave too few registers"),
        ({"n_warps": 4, "late_dQ": True, "B_c": 64}, "late dQ: of 4 warps, none shares a scheduler with another"),
        ({"slices": 2}, "slices: without them, dK, dV, S and dP take 192 registers of a thread, which fit"),
    ],
)
def test_ampere_configs_that_cannot_be_fast_are_rejected(changes, reason):
    config = replace(AMPERE, **changes)
    assert tile_shapes(config).shared_bytes
    assert rejection_reason(config) == reason


# --- Defaults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families("backward"), ids=lambda family: family.name)
def test_every_head_dimension_has_a_default_that_is_worth_timing(family):
    for dtype, d_head, causal, length in product(DType, family.d_heads, (False, True), LENGTH_BUCKETS):
        config = family.default_config(Occasion(dtype, d_head, causal, length, length, None))
        assert (config.dtype, config.d_head) == (dtype, d_head)
        assert rejection_reason(config) is None


IN_ORDER = {
    64: "(BF16, 64, 128, 128, 2): stages_2_2+register_P+ordered+persistent+keys_ahead+finishes_dQ",
    128: "(BF16, 128, 64, 128, 2): stages_3_3+register_P+ordered+persistent+finishes_dQ",
    256: "(BF16, 256, 64, 64, 2): stages_2_1+paired+ordered+persistent+finishes_dQ",
}
"""Without a mask."""


@pytest.mark.parametrize(
    ("d_head", "causal", "length", "expected"),
    [
        (64, False, LONG, "(BF16, 64, 128, 128, 2): stages_2_2+register_P+persistent+keys_ahead"),
        (64, True, LONGEST, "(BF16, 64, 128, 128, 2): stages_3_2+register_P"),
        (128, False, LONGEST, "(BF16, 128, 64, 128, 2): stages_3_2+register_P+persistent"),
        (128, True, LONG, "(BF16, 128, 64, 128, 2): stages_3_3+register_P+persistent+skips_masked"),
        (256, True, LONGEST, "(BF16, 256, 64, 64, 2): stages_2_1+paired+persistent+finishes_dQ"),
        (64, True, MEDIUM, IN_ORDER[64]),
        (128, False, MEDIUM, IN_ORDER[128]),
        (256, False, MEDIUM, IN_ORDER[256]),
    ],
)
def test_the_hopper_default_is_what_was_fastest_for_a_mask_and_length(d_head, causal, length, expected):
    config = HOPPER_BACKWARD.default_config(Occasion(DType.BF16, d_head, causal, length, length, None))
    assert str(config) == f"hopper backward {expected}"


@pytest.mark.parametrize(("d_head", "expected"), IN_ORDER.items())
def test_in_order_hopper_has_one_default_for_all_lengths(d_head, expected):
    """With a causal mask, steps that it leaves nothing of are left out where warpgroups can."""
    for causal, length in product((False, True), LENGTH_BUCKETS):
        config = HOPPER_BACKWARD.default_config(
            Occasion(DType.BF16, d_head, causal, length, length, None, ordered=True)
        )
        assert str(replace(config, skips_masked=False)) == f"hopper backward {expected}"
        assert config.skips_masked == (causal and d_head == 128)


@pytest.mark.parametrize("d_head", AMPERE_BACKWARD.d_heads)
def test_the_ampere_default_fits_a_gpu_with_little_shared_memory(d_head):
    small = GPUModel.of_architecture("small", "sm_89")
    config = AMPERE_BACKWARD.default_config(occasion(DType.BF16, d_head, small))
    assert tile_shapes(config).shared_bytes <= architecture("sm_89").shared_bytes_per_block


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("d_head", AMPERE_BACKWARD.d_heads)
def test_ampere_defaults_leave_8_warps_room_on_a_large_gpu(d_head, arch):
    """Thread blocks of 4 warps come in pairs."""
    gpu = GPUModel.of_architecture("large", arch)
    for causal, length in ((False, LONG), (True, LONG), (True, LONGEST)):
        config = AMPERE_BACKWARD.default_config(Occasion(DType.BF16, d_head, causal, length, length, gpu))
        assert rejection_reason(config) is None
        blocks = 8 // config.n_warps
        assert blocks * (tile_shapes(config).shared_bytes + 1024) <= gpu.shared_bytes_per_sm


def occasion(dtype: DType, d_head: int, gpu: GPUModel | None = None) -> Occasion:
    return Occasion(dtype, d_head, False, LONG, LONG, gpu)
