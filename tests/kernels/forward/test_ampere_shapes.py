"""Static shapes against values computed by hand, the validity rules, and the shared-memory layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright import ForwardKernelTileShapes, parse_kernel_name_into_config
from flashwright.hardware.architectures import ARCHITECTURES
from flashwright.kernels.forward.ampere.shapes import MOST_SHARED_BYTES

ATTRIBUTES = (
    "d_head_fragments", "QO_rows_per_warp", "QO_fragments_per_warp", "KV_calc_fragments",
    "KV_ldst_fragments_per_warp", "QK_rmem_tile_fragments", "PV_rmem_tile_fragments", "QK_rmem_tiles",
    "PV_rmem_tiles", "Q_rmem_tile_buffers", "K_rmem_tile_buffers", "V_rmem_tile_buffers", "threads",
)  # fmt: skip
REGISTERS = (
    "S_accumulator_registers", "O_accumulator_registers", "P_operand_registers", "Q_operand_registers",
    "K_operand_registers", "V_operand_registers",
)  # fmt: skip
SHARED = ("Q_shared_bytes", "KV_shared_bytes", "K_shared_offset", "V_shared_offset", "shared_bytes")

HAND_COMPUTED = {
    "(BF16, 128, 64, 64, 4): async+load_0_2_2_tiles+buffer": {
        ATTRIBUTES: (16, 16, 2, 8, 2, 2, 2, 8, 4, 8, 2, 2, 128),
        REGISTERS: (32, 64, 16, 32, 32, 64),
        SHARED: (16384, 16384, 16384, 32768, 49152),
        "double buffers": (False, True, False, True),
    },
    "(FP16, 64, 64, 32, 4): load_2_2_2_tiles": {
        ATTRIBUTES: (8, 16, 2, 4, 1, 2, 2, 4, 2, 1, 1, 1, 128),
        REGISTERS: (16, 32, 8, 4, 8, 16),
        SHARED: (8192, 4096, 8192, 12288, 16384),
        "double buffers": (False, False, False, False),
    },
    "(BF16, 128, 128, 64, 8): async+load_4_4_0_tiles+buffer": {
        ATTRIBUTES: (16, 16, 2, 8, 1, 4, 8, 4, 1, 2, 2, 1, 256),
        REGISTERS: (32, 64, 16, 16, 64, 128),
        SHARED: (32768, 16384, 32768, 49152, 65536),
        "double buffers": (True, True, False, False),
    },
    "(FP16, 64, 128, 128, 4): load_0_0_0_tiles": {
        ATTRIBUTES: (8, 32, 4, 16, 4, 8, 16, 1, 1, 1, 1, 1, 128),
        REGISTERS: (128, 64, 64, 32, 128, 128),
        SHARED: (16384, 16384, 16384, 32768, 49152),
        "double buffers": (False, False, False, False),
    },
    "(BF16, 128, 128, 32, 8): async+load_2_2_2_tiles+buffer": {
        ATTRIBUTES: (16, 16, 2, 4, 1, 2, 2, 8, 2, 2, 2, 2, 256),
        REGISTERS: (16, 64, 8, 8, 16, 64),
        SHARED: (32768, 8192, 32768, 40960, 49152),
        "double buffers": (True, True, False, True),
    },
    "(BF16, 128, 64, 64, 4): async+load_0_0_4_tiles": {
        ATTRIBUTES: (16, 16, 2, 8, 2, 16, 4, 1, 2, 1, 1, 1, 128),
        REGISTERS: (32, 64, 16, 32, 128, 64),
        SHARED: (16384, 16384, 16384, 32768, 49152),
        "double buffers": (False, False, False, False),
    },
}


@pytest.mark.parametrize("names", [ATTRIBUTES, REGISTERS, SHARED], ids=["tiles", "registers", "shared memory"])
@pytest.mark.parametrize("short_form", HAND_COMPUTED)
def test_shapes_are_those_computed_by_hand(short_form, names):
    shapes = ForwardKernelTileShapes(parse_kernel_name_into_config(short_form))
    assert {name: getattr(shapes, name) for name in names} == dict(
        zip(names, HAND_COMPUTED[short_form][names], strict=True)
    )


@pytest.mark.parametrize("short_form", HAND_COMPUTED)
def test_an_operand_is_double_buffered_if_it_is_streamed_through_two_buffers(short_form):
    shapes = ForwardKernelTileShapes(parse_kernel_name_into_config(short_form))
    flags = (shapes.QK.DoubleBufferA, shapes.QK.DoubleBufferB, shapes.PV.DoubleBufferA, shapes.PV.DoubleBufferB)
    assert flags == HAND_COMPUTED[short_form]["double buffers"]
    assert (shapes.QK.DoubleBuffer, shapes.PV.DoubleBuffer) == (any(flags[:2]), any(flags[2:]))


@given(st.sampled_from((16, 32, 64, 128)), st.sampled_from((2, 4, 8)))
def test_shares_of_a_copy_are_whole_fragments_that_together_hold_the_block(B_c, n_warps):
    config = parse_kernel_name_into_config(f"(BF16, 32, 128, {B_c}, {n_warps}): load_2_2_2_tiles")
    shapes = ForwardKernelTileShapes(config)
    share = shapes.KV_ldst_fragments_per_warp
    assert type(share) is int
    assert (share - 1) * n_warps < shapes.KV_calc_fragments <= share * n_warps


def test_a_gemm_knows_its_tiles():
    shapes = ForwardKernelTileShapes(parse_kernel_name_into_config("(BF16, 128, 128, 64, 8): load_4_4_0_tiles+buffer"))
    assert (shapes.QK.tiles, shapes.QK.tile_fragments) == (4, 4)
    assert (shapes.PV.tiles, shapes.PV.tile_fragments) == (1, 8)
    assert (shapes.QK.mma_steps_per_tile, shapes.PV.mma_steps_per_tile) == (2, 4)  # an mma is 16 deep


# --- Validity ------------------------------------------------------------------------------------------------


RING = {"eager_load_blocks": True, "ring_stages": 3}


@pytest.mark.parametrize(
    ("invalid", "rule", "valid"),
    [
        ({"Q_mma_load_K_tiles": 1}, "Q_mma_load_K_tiles: 1 .*power of two", {"Q_mma_load_K_tiles": 2}),
        ({"K_mma_load_K_tiles": 3}, "K_mma_load_K_tiles: 3 .*power of two", {"K_mma_load_K_tiles": 4}),
        ({"V_mma_load_K_tiles": 6}, "V_mma_load_K_tiles: 6 .*power of two", {"V_mma_load_K_tiles": 8}),
        ({"Q_mma_load_K_tiles": 32}, "Q_mma_load_K_tiles: 32 .*d_head/8 = 16", {"Q_mma_load_K_tiles": 16}),
        ({"K_mma_load_K_tiles": 32}, "K_mma_load_K_tiles: 32 .*d_head/8 = 16", {"K_mma_load_K_tiles": 16}),
        ({"V_mma_load_K_tiles": 16}, "V_mma_load_K_tiles: 16 .*B_c/8 = 8", {"V_mma_load_K_tiles": 8}),
        (
            {"K_mma_load_K_tiles": 16, "mma_double_buffer_loads": True},
            "K_mma_load_K_tiles: 16 .*d_head/16 = 8 .*mma_double_buffer_loads",
            {"K_mma_load_K_tiles": 8, "mma_double_buffer_loads": True},
        ),
        (
            {"V_mma_load_K_tiles": 8, "mma_double_buffer_loads": True},
            "V_mma_load_K_tiles: 8 .*B_c/16 = 4 .*mma_double_buffer_loads",
            {"V_mma_load_K_tiles": 8, "mma_double_buffer_loads": False},
        ),
        ({"n_warps": 8}, "B_r = 64 with n_warps = 8 .*16", {"n_warps": 8, "B_r": 128}),
        ({"n_warps": 3}, "B_r = 64 with n_warps = 3 .*16", {"n_warps": 2}),
        ({"d_head": 96, "Q_mma_load_K_tiles": 8}, "8 does not divide the 12 fragments", {"Q_mma_load_K_tiles": 8}),
        ({"ring_stages": 3}, "ring_stages = 3 needs async_copy and eager_load_blocks", RING),
        (RING | {"two_kv_stages": True}, "ring_stages = 3 and two_kv_stages are two ways", RING),
    ],
)
def test_an_invalid_config_is_refused_with_the_rule_and_its_valid_neighbour_is_not(invalid, rule, valid):
    base = parse_kernel_name_into_config("(BF16, 128, 64, 64, 4): async+load_2_2_2_tiles")
    with pytest.raises(ValueError, match=rule):
        ForwardKernelTileShapes(replace(base, **invalid))
    ForwardKernelTileShapes(replace(base, **valid))


@pytest.mark.parametrize(("stages", "ahead"), [(2, 1), (3, 1), (4, 2), (5, 3)])
def test_a_ring_copies_two_stages_less_ahead_than_it_has_and_one_at_least(stages, ahead):
    config = parse_kernel_name_into_config(f"(BF16, 64, 64, 32, 4): async+eager+load_2_2_2_tiles+ring_{stages}")
    shapes = ForwardKernelTileShapes(config)
    assert (shapes.KV_stages, shapes.steps_ahead) == (stages, ahead)
    assert shapes.shared_bytes == 64 * 128 + stages * (2 * 32 * 128 + 2 * 8)


LARGEST_BLOCK = "(BF16, 256, 192, 128, 12): async+load_2_2_2_tiles"  # 224 KiB
MOST_ACCUMULATORS = "(BF16, 128, 256, 128, 4): load_2_2_2_tiles"  # 64 rows a warp: 256 of S and 256 of O


@pytest.mark.parametrize(
    ("short_form", "changes", "reason"),
    [
        (LARGEST_BLOCK, {"B_r": 384}, "shared memory: .*needs 327680 bytes; a thread block has at most 232448"),
        (LARGEST_BLOCK, {"B_c": 144}, "shared memory: .*needs 245760 bytes"),
        (
            LARGEST_BLOCK,
            {"two_kv_stages": True, "eager_load_blocks": True},
            "shared memory: .*needs 360448 bytes; a thread block has at most 232448",
        ),
        (MOST_ACCUMULATORS, {"B_c": 144}, r"registers: .*take 288 \+ 256 registers of a thread; allowed: up to 512"),
        (MOST_ACCUMULATORS, {"n_warps": 2}, r"registers: .*take 512 \+ 512 registers"),
    ],
)
def test_a_kernel_that_no_gpu_can_hold_is_refused_with_its_size_and_the_largest_is_not(short_form, changes, reason):
    config = parse_kernel_name_into_config(short_form)
    ForwardKernelTileShapes(config)
    with pytest.raises(ValueError, match=reason):
        ForwardKernelTileShapes(replace(config, **changes))


def test_the_limit_of_shared_memory_is_the_largest_of_any_architecture():
    assert max(arch.shared_bytes_per_block for arch in ARCHITECTURES.values()) == MOST_SHARED_BYTES == 227 * 1024


# --- Shared memory -------------------------------------------------------------------------------------------

D_HEADS = (16, 32, 48, 64, 96, 128, 160, 256)


def layout_of(d_head: int, *, swizzled: bool):
    config = parse_kernel_name_into_config("(BF16, 64, 64, 64, 4): async+load_0_0_0_tiles")
    return ForwardKernelTileShapes(replace(config, d_head=d_head, swizzled=swizzled)).shared_layout


def banks(vector_offsets: list[int]) -> set[int]:
    """The 4-byte banks that 16-byte vectors at these offsets lie in."""
    return {(offset // 4 + word) % 32 for offset in vector_offsets for word in range(4)}


@pytest.mark.parametrize("swizzled", [False, True])
@given(d_head=st.sampled_from(D_HEADS), rows=st.sampled_from((16, 32, 64, 128)))
def test_every_element_of_a_block_has_a_place_of_its_own_and_none_is_left_over(d_head, rows, swizzled):
    layout = layout_of(d_head, swizzled=swizzled)
    offsets = [layout.offset(row, column, rows) for row in range(rows) for column in range(d_head)]
    assert sorted(offsets) == list(range(0, rows * d_head * 2, 2))


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("d_head", D_HEADS)
def test_sixteen_byte_vectors_stay_whole(d_head, swizzled):
    layout = layout_of(d_head, swizzled=swizzled)
    for row in range(16):
        for vector in range(0, d_head, 8):
            start = layout.offset(row, vector, 16)
            assert start % 16 == 0
            assert [layout.offset(row, vector + i, 16) for i in range(8)] == [start + 2 * i for i in range(8)]


@pytest.mark.parametrize("d_head", D_HEADS)
def test_swizzled_ldmatrix_has_no_bank_conflicts(d_head):
    layout = layout_of(d_head, swizzled=True)
    for first_row in range(0, 64, 8):
        for column in range(0, d_head, 8):
            rows = [layout.offset(first_row + row, column, 64) for row in range(8)]
            assert len(banks(rows)) == 32


@pytest.mark.parametrize(("d_head", "banks_used"), [(16, 16), (32, 8), (64, 4), (96, 8), (128, 4), (256, 4)])
def test_ldmatrix_without_swizzle_conflicts(d_head, banks_used):
    layout = layout_of(d_head, swizzled=False)
    assert len(banks([layout.offset(row, 0, 64) for row in range(8)])) == banks_used


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("d_head", [64, 128])
def test_sixteen_byte_copies_of_neighbouring_threads_have_no_bank_conflicts(d_head, swizzled):
    """A 16-byte access is served in quarters of a warp: eight threads, one vector each, along a row."""
    layout = layout_of(d_head, swizzled=swizzled)
    for row in range(8):
        for first in range(0, d_head, 64):
            assert len(banks([layout.offset(row, first + 8 * thread, 64) for thread in range(8)])) == 32


@pytest.mark.parametrize("d_head", D_HEADS)
def test_moving_on_by_whole_swizzle_periods_is_an_addition(d_head):
    layout = layout_of(d_head, swizzled=True)
    period = layout.swizzle_period_rows
    assert 16 % period == 0, "16-row blocks are a whole number of periods apart"
    for row in range(period):
        for column in range(0, d_head, 8):
            step = layout.offset(row + period, column, 64) - layout.offset(row, column, 64)
            assert step == period * layout.row_bytes
