"""Additions to dQ in turn: the same bits in whatever order thread blocks run; without turns, nobody waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
from backward_cases import Problem, check_packed_backward, seen_keys
from ordering import expect_same_sums, impatient, run_in_order, three_blocks

from flashwright import compile_kernel
from flashwright.kernels.registry import parse_config
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window

AMPERE = parse_config("ampere backward (FP16, 32, 32, 32, 2): stages_2_1+swizzled+ordered")
HOPPER = parse_config("hopper backward (FP16, 64, 64, 64, 1): stages_2_1+register_P+ordered")
FAMILIES = pytest.mark.parametrize("config", [AMPERE, HOPPER], ids=["ampere", "hopper"])


@FAMILIES
def test_in_order_sums_have_the_same_bits_whatever_the_order_of_thread_blocks(config):
    expect_same_sums(config)


def test_in_order_a_late_dQ_has_the_same_bits_too():
    expect_same_sums(replace(AMPERE, late_dQ=True))


@FAMILIES
def test_in_any_order_sums_have_other_bits(config):
    with pytest.raises(AssertionError, match="the sums of dQ depend on the order"):
        expect_same_sums(replace(config, ordered=False))


@FAMILIES
def test_no_thread_block_waits_for_one_that_is_launched_after_it(config):
    """One after the other, each finds that it is its turn whenever it looks."""
    problem = three_blocks(config)
    one_by_one, all_at_once = (run_in_order(config, problem, blocks_per_wave=blocks) for blocks in (1, 64))
    assert np.array_equal(one_by_one.sums.view(np.uint32), all_at_once.sums.view(np.uint32))
    looks = [found.run.counters.instructions["ld.acquire.gpu.global.b32"] for found, *_ in (one_by_one, all_at_once)]
    assert looks[0] == 3 * 3 < looks[1]


def test_no_persistent_thread_block_waits_for_one_that_has_not_begun():
    """Six blocks of keys of two heads on four thread blocks, which run one after the other: the first computes all."""
    config = replace(HOPPER, persistent=True)
    problem = three_blocks(config, heads=(2, 2))
    one_by_one, all_at_once = (run_in_order(config, problem, blocks_per_wave=blocks) for blocks in (1, 64))
    assert np.array_equal(one_by_one.sums.view(np.uint32), all_at_once.sums.view(np.uint32))


@FAMILIES
@pytest.mark.parametrize("left", [None, 70], ids=["causal", "a window"])
def test_turns_end_at_the_number_of_blocks_of_keys_that_a_block_of_queries_attends_to(config, left):
    problem = three_blocks(config, Window(left, right=0), heads=(2, 1))
    turns = run_in_order(config, problem).turns
    assert np.array_equal(turns, [visiting_blocks(config, problem)] * 2)


def visiting_blocks(config, problem: Problem) -> list[int]:
    seen = seen_keys(problem.options.window, problem.q.shape[2], problem.k.shape[2])
    return [sum(bool(keys.any()) for keys in rows.split(config.B_c, dim=1)) for rows in seen.split(config.B_r)]


@FAMILIES
def test_without_order_there_are_no_turns(config):
    """Neither flags between thread blocks in the code, nor a counter in memory."""
    flags = ("ld.acquire.gpu", "st.release.gpu")
    unordered = replace(config, ordered=False)
    assert all(flag in compile_kernel(config).ptx for flag in flags)
    assert not any(flag in compile_kernel(unordered).ptx for flag in flags)
    turns = run_in_order(unordered, three_blocks(config)).turns
    assert np.all(np.isnan(turns.view(np.float32)))


@FAMILIES
def test_packed_sequences_take_turns_of_their_own(config):
    window = AttentionOptions(Window(right=0, bottom_right=False))
    with impatient():
        check_packed_backward(config, [(130, 140), (0, 70), (70, 200), (80, 0), (3, 1)], window, spoilt=(2,))
