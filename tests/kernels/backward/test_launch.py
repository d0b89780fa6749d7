"""Launches of a backward: the memory it works in, its grids, and tensors that it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright.kernels.backward.launch import BackwardLaunch, Scratch, scratch_for
from flashwright.kernels.forward.launch import PackedSequences
from flashwright.kernels.launch import Sizes
from flashwright.kernels.registry import family_of, parse_config
from flashwright.kernels.tensors import DeviceTensor
from flashwright.problem.dtypes import DType

AMPERE = parse_config("ampere backward (BF16, 128, 64, 128, 8): stages_2_1+swizzled")
HOPPER = parse_config("hopper backward (BF16, 128, 64, 128, 2): stages_2_2+register_P")
FAMILIES = pytest.mark.parametrize("config", [AMPERE, HOPPER], ids=["ampere", "hopper"])


def tensor(name: str, *shape: int, **changes: Any) -> DeviceTensor:
    strides = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
    return replace(DeviceTensor(name, 0x1000, DType.BF16, shape, strides), **changes)


def tensors(q_shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> list[DeviceTensor]:
    names = {"q": q_shape, "k": kv_shape, "v": kv_shape, "out": q_shape, "do": q_shape}
    names |= {"dq": q_shape, "dk": kv_shape, "dv": kv_shape}
    return [tensor(name, *shape) for name, shape in names.items()]


def launch(config: Any, given: list[DeviceTensor], **options: Any) -> BackwardLaunch:
    addresses = {"lse_address": 1, "scratch_address": 0x10000}
    return family_of(config).launch(config, *given, multiprocessors=132, **addresses | options)


# --- Memory ------------------------------------------------------------------------------------------------------


def test_scratch_by_hand():
    """300 rows of 2 × 4 heads are 5 blocks of 64: two fp32 numbers a row, 128 sums, and a turn for each block."""
    scratch = Scratch.of(AMPERE, Sizes(2, 4, 2, 300, 500))
    rows = 2 * 4 * 320
    assert scratch.padded_rows == 320
    assert (scratch.row_lse, scratch.row_dot, scratch.dQ_sums) == (0, 4 * rows, 8 * rows)
    assert scratch.turns == 8 * rows + 4 * 128 * rows
    assert scratch.tiles_taken == scratch.turns + 4 * 4 * 40  # four counters for each of 40 blocks
    assert scratch.total == scratch.turns + 768  # with a count of 8 bytes, rounded up


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9), st.integers(0, 100))
def test_packed_sequences_begin_with_whole_blocks_that_do_not_overlap_and_fit(lengths, rows_before):
    """As the kernels compute it: `padded_row` of key_tile.cuh."""
    block, start, end = AMPERE.B_r, rows_before, 0
    for number, length in enumerate(lengths):
        padded = (start + number * block) // block * block
        assert padded >= end
        end = padded + -(-length // block) * block
        start += length
    sizes = Sizes(len(lengths), 1, 1, max(1, *lengths), 1, packed_rows=start)
    assert end <= Scratch.of(AMPERE, sizes).padded_rows


@FAMILIES
def test_no_memory_beyond_rows_and_the_sums_of_dq(config):
    """However many keys there are."""
    q = tensor("q", 1, 8, 1024, 128)
    few, many = (scratch_for(config, q, tensor("k", 1, 8, keys, 128), None) for keys in (128, 2**20))
    assert few == many
    assert many.total <= 8 * 1024 * 4 * (128 + 2 + 1)


# --- Grids and parameters ----------------------------------------------------------------------------------------


@FAMILIES
def test_a_thread_block_for_each_block_of_keys(config):
    found = launch(config, tensors((2, 4, 300, 128), (2, 2, 500, 128)))
    assert found.grid == (2 * 2 * 4, 1, 1)
    assert found.rows_grid == (2 * 5, 4, 1)
    assert found.arguments.kv_blocks == 4
    assert found.variant.grouped_heads and not found.variant.returns_lse
    assert found.arguments.dQ_sums == 0x10000 + 8 * 2 * 4 * 320
    assert len(found.tensor_maps) == (4 if config is HOPPER else 0)
    assert found.parameters[-1] is found.arguments


@pytest.mark.parametrize(("batch", "blocks"), [(2, 32), (20, 132)])
def test_persistent_thread_blocks_are_as_many_as_multiprocessors_or_as_blocks_of_keys(batch, blocks):
    persistent = replace(HOPPER, persistent=True)
    found = launch(persistent, tensors((batch, 4, 300, 128), (batch, 4, 500, 128)))
    assert found.grid == (blocks, 1, 1)


@pytest.mark.parametrize(("multiprocessors", "blocks"), [(132, 32), (7, 6), (1, 2)])
def test_persistent_pairs_are_as_many_as_find_two_multiprocessors_each(multiprocessors, blocks):
    """At least one, and as many as have two blocks of keys."""
    pairs = parse_config("hopper backward (BF16, 256, 64, 64, 2): stages_2_1+paired+persistent")
    grid = family_of(pairs).launch_rules.grid
    assert grid(pairs, 8, 2, 2, multiprocessors) == (blocks, 1, 1)


@pytest.mark.parametrize(
    ("rows", "keys", "of_ampere", "of_hopper"),
    [(8192, 8192, 4, 2), (2048, 2048, 16, 8), (512, 512, 32, 32), (65536, 65536, 1, 1), (512, 8192, 32, 32)],
)
def test_heads_take_turns_until_132_multiprocessors_have_enough_blocks_of_keys_or_of_queries(
    rows, keys, of_ampere, of_hopper
):
    """One each of the Hopper kernels, two of the others; of 32 heads."""
    for config, at_once in ((AMPERE, of_ampere), (HOPPER, of_hopper)):
        found = launch(config, tensors((2, 16, rows, 128), (2, 16, keys, 128)))
        assert found.arguments.pairs_at_once == at_once


def test_heads_that_share_keys_are_counted_as_rows():
    found = launch(HOPPER, tensors((2, 64, 512, 128), (2, 16, 8192, 128)))
    assert found.arguments.pairs_at_once == 132 * 128 // (4 * 512)


@FAMILIES
def test_packed_sequences_are_found_by_their_first_row(config):
    packed = PackedSequences(3, 0x2000, 0x3000, 200, 100)
    found = launch(config, tensors((1, 4, 300, 128), (1, 2, 250, 128)), packed=packed)
    assert found.grid == (2 * (250 // 128 + 3), 1, 1)
    assert found.rows_grid == (300 // 64 + 3, 4, 1)
    for name in ("dO", "dQ", "dK", "dV"):
        assert getattr(found.arguments, name).batch_stride == 0


# --- What is refused ---------------------------------------------------------------------------------------------


@FAMILIES
def test_more_blocks_of_keys_than_a_grid_has_are_refused(config):
    message = f"keys are {2**15 * 2**4 * 2**13} tiles of 128 keys; allowed: up to {2**31 - 1}"
    with pytest.raises(ValueError, match=message):
        launch(config, tensors((2**15, 2**4, 64, 128), (2**15, 2**4, 2**20, 128)))


@FAMILIES
@pytest.mark.parametrize(
    ("index", "changes", "message"),
    [
        (4, {"shape": (1, 2, 64, 64)}, r"do: \(1, 2, 64, 64\) of BF16 does not match q: \(1, 2, 64, 128\) of BF16"),
        (5, {"dtype": DType.FP16}, r"dq: \(1, 2, 64, 128\) of FP16 does not match q"),
        (6, {"shape": (1, 2, 65, 128)}, r"dk: \(1, 2, 65, 128\) of BF16 does not match k"),
        (4, {"strides": (16384, 8192, 132, 1)}, r"do: the row stride of 132 elements is not a multiple of 8"),
        (4, {"strides": (16384, 8192, 1, 64)}, r"do: the last dimension has stride 64; it must be contiguous"),
        (7, {"address": 0x1008}, "dv: address 0x1008 is not aligned to 16 bytes"),
        (0, {"dtype": DType.FP16}, "q: dtype is FP16, but the config computes BF16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(config, index, changes, message):
    given_tensors = tensors((1, 2, 64, 128), (1, 2, 64, 128))
    given_tensors[index] = replace(given_tensors[index], **changes)
    with pytest.raises(ValueError, match=message):
        launch(config, given_tensors)
