"""What a launch of a decode kernel is given."""

from __future__ import annotations

import pytest

from flashwright.kernels.decode.launch import ITEM_OVERHEAD, CacheView, DecodeArguments
from flashwright.kernels.registry import family_of, parse_config
from flashwright.kernels.tensors import DeviceTensor
from flashwright.problem.dtypes import DType

CONFIG = "ampere decode (BF16, 128, 16, 16, 8): rows_1+stages_3+blocks_1+swizzled"
TWO_BLOCKS = "ampere decode (BF16, 128, 16, 16, 4): rows_1+stages_3+blocks_2+swizzled"


def arguments_of(
    batch: int, kv_heads: int, config: str = CONFIG, *, kv_lengths: int = 0, **options: int
) -> DecodeArguments:
    def tensor(name: str, heads: int, rows: int) -> DeviceTensor:
        shape = (batch, heads, rows, 128)
        return DeviceTensor(name, 256, DType.BF16, shape, (heads * rows * 128, 128, heads * 128, 1))

    known = parse_config(config)
    launch = family_of(known).launch(
        known, tensor("q", 4 * kv_heads, 1), tensor("k", kv_heads, 8192), tensor("v", kv_heads, 8192),
        tensor("out", 4 * kv_heads, 1), cache=CacheView(batch, kv_lengths), partials_address=256, zeros_address=256,
        multiprocessors=132, **options,
    )  # fmt: skip
    assert launch.grid == (132 * known.blocks_per_sm, 1, 1)
    arguments: DecodeArguments = launch.arguments
    return arguments


@pytest.mark.parametrize(
    ("batch", "kv_heads", "config", "blocks"),
    (
        (1, 8, CONFIG, 128),  # 16 parts of each item
        (16, 8, CONFIG, 128),  # an item each
        (64, 8, CONFIG, 128),  # four items each
        (16, 8, TWO_BLOCKS, 256),  # two parts of each item
        (64, 8, TWO_BLOCKS, 256),  # two items each
        (17, 8, CONFIG, 132),  # 136 items: two each would leave half of the multiprocessors idle
        (1, 1, CONFIG, 132),
    ),
)
def test_shares_of_equal_items_are_whole_ones_or_equal_parts(batch, kv_heads, config, blocks):
    assert arguments_of(batch, kv_heads, config).line_blocks == blocks


@pytest.mark.parametrize(
    ("batch", "kv_heads", "dealt", "line_blocks"),
    (
        (64, 8, (512, 128), 128),  # four rounds
        (52, 8, (396, 132), 132),  # three rounds, and twenty items that all thread blocks share
    ),
)
def test_equal_items_are_dealt_whole_in_rounds_and_what_is_left_is_shared(batch, kv_heads, dealt, line_blocks):
    arguments = arguments_of(batch, kv_heads)
    assert (arguments.whole_items, arguments.round_blocks) == dealt
    assert arguments.line_blocks == line_blocks


@pytest.mark.parametrize("batch", (1, 16, 17, 30, 32, 33, 49))
def test_items_are_not_dealt_where_there_are_fewer_than_three_rounds(batch):
    """17 sequences: 132 whole items and four cut ones took 133 µs on an H200, 136 cut ones 130."""
    arguments = arguments_of(batch, 8)
    assert arguments.whole_items == 0
    assert arguments.item_overhead == (ITEM_OVERHEAD if batch > 16 else 0)


def test_items_whose_lengths_only_the_device_knows_are_not_dealt():
    assert arguments_of(64, 8, kv_lengths=256).whole_items == 0
    assert arguments_of(64, 8, split_units=4).whole_items == 0


def test_items_have_a_cost_of_their_own_where_thread_blocks_have_several_in_the_line():
    assert arguments_of(16, 8, kv_lengths=256).item_overhead == 0
    assert arguments_of(64, 8, kv_lengths=256).item_overhead == ITEM_OVERHEAD
    assert arguments_of(64, 8).item_overhead == 0  # they are dealt
    assert arguments_of(64, 8, split_units=4).item_overhead == 0  # a split's bits depend on its own item alone


def test_more_units_than_can_be_counted_are_refused():
    with pytest.raises(ValueError, match=r"room for 4\d{9} units of 128 keys .* allowed: up to 4294967295"):
        arguments_of(2**20, 64)
