"""The commands take configs of the decode, and climb its ladder."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from itertools import pairwise

import numpy as np
import pytest
from command_line import flashwright

from flashwright.hardware.architectures import architecture
from flashwright.kernels.cache_use import WHOLE, CacheUse, each_head_by_itself, in_pages
from flashwright.kernels.ladder import USE, RungProblem, climbed
from flashwright.kernels.registry import families, parse_config, search_space_of, tile_shapes
from flashwright.problem.reference import random_inputs, reference_forward
from flashwright.workbench import ladder as ladder_module
from flashwright.workbench.ladder import Ladder, Timed, climb, ladder_of, read_ladder, write_ladder
from flashwright.workbench.ladder_plot import ladder_figure

SMALL = "ampere decode (FP16, 32, 16, 16, 2): rows_1+stages_2+blocks_1+swizzled"
LADDERS = [(family, d_head) for family in families("decode") if family.ladder is not None for d_head in family.d_heads]


# --- The rungs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "d_head"), LADDERS, ids=lambda each: getattr(each, "name", str(each)))
def test_every_rung_is_one_idea_above_the_last_and_fits_the_architectures_of_the_ladder(family, d_head):
    most = min(architecture(arch).shared_bytes_per_block for arch in family.ladder.architectures)
    rungs = family.ladder.rungs("BF16", d_head)
    assert [rung.number for rung in rungs] == list(range(1, len(rungs) + 1))
    for before, after in pairwise(rungs):
        old, new = ((*astuple(rung.config), *astuple(rung.use)) for rung in (before, after))
        assert sum(a != b for a, b in zip(old, new, strict=True)) == 1, after.change
    for rung in rungs:
        assert tile_shapes(rung.config).shared_bytes <= most
    assert search_space_of(rungs[-1].config) == "default"


def test_the_ideas_are_packing_splitting_balancing_and_pages():
    changes = " ".join(rung.change for rung in ladder_of("ampere", "decode").rungs("BF16", 128))
    for idea in ("pack", "split and combine", "balance", "pages"):
        assert idea in changes


# --- How a kernel meets a cache ------------------------------------------------------------------------------------


def test_heads_by_themselves_are_the_same_problem_and_share_memory():
    q, k, v = (np.ascontiguousarray(x) for x in random_inputs(parse_config(SMALL), heads=6, rows=3, kv_heads=2, keys=5))
    alone = each_head_by_itself(q, k, v)
    assert [x.shape for x in alone] == [(2, 3, 3, 32), (2, 3, 5, 32), (2, 3, 5, 32)]
    assert np.shares_memory(alone[1], k)
    expected, _ = reference_forward(q, k, v)
    found, _ = reference_forward(*alone)
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def test_pages_are_stored_in_another_order_and_found_by_their_numbers():
    k = np.arange(2 * 3 * 8 * 1).reshape(2, 3, 8, 1)
    order = np.array([2, 0, 3, 1])
    pages = in_pages(k, 4, order)
    assert pages.shape == (4, 3, 4, 1)
    table = order.reshape(2, 2)
    for sequence, page in np.ndindex(2, 2):
        np.testing.assert_array_equal(pages[table[sequence, page]], k[sequence, :, 4 * page : 4 * page + 4])
    with pytest.raises(ValueError, match="keys: 8 are no whole pages of 3"):
        in_pages(k, 3, order)


# --- Climbing ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_ladder() -> Ladder:
    """Four rungs of one kernel, climbed once."""
    changes = [
        ("base", {USE: CacheUse(packs_heads=False, split_units=WHOLE)}),
        ("pack", {USE: CacheUse(split_units=WHOLE)}),
        ("split", {USE: CacheUse()}),
        ("pages", {USE: CacheUse(page_rows=16)}),
    ]
    short = climbed(parse_config(SMALL), changes)
    ladder = replace(
        ladder_of("ampere", "decode"),
        rungs=lambda dtype, d_head: short,
        architectures=("sm_80",),
        simulated=RungProblem(batch=1, heads=8, kv_heads=2, rows=1, keys=192),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder_module, "ladder_of", lambda family, operation: {"decode": ladder}[operation])
        return climb("FP16", operation="decode", progress=False)


def test_packed_heads_read_the_cache_once_and_splits_write_partial_results(short_ladder):
    assert short_ladder.wrong == []
    base, packed, split, paged = (result.simulation for result in short_ladder.rungs)
    assert packed.global_sectors < base.global_sectors / 3
    assert packed.instructions_per_thousand_scores < base.instructions_per_thousand_scores / 3
    assert packed.global_sectors < split.global_sectors  # partial results
    assert split.global_sectors < paged.global_sectors < 1.1 * split.global_sectors  # the page table


def test_a_ladder_of_the_decode_is_stored_shown_and_drawn(short_ladder, tmp_path):
    path = tmp_path / "ladder.json"
    write_ladder(path, short_ladder)
    assert read_ladder(path).rungs == short_ladder.rungs
    assert json.loads(path.read_text())["timed_shape"] == {
        "batch": 8, "heads": 32, "kv_heads": 8, "rows": 1, "keys": 16384,
    }  # fmt: skip
    assert "The Ampere decode ladder" in ladder_figure(short_ladder).get_suptitle()
    code, out, error = flashwright("ladder", "--from", str(path))
    assert (code, error) == (0, "")
    assert "The Ampere decode ladder" in out


def test_speeds_of_a_decode_are_bytes_of_the_cache(short_ladder):
    timed = Timed(0.125, 34.0, {"sdpa-cudnn": 0.9, "sdpa-fa2": 1.1}, tbps=4.295)
    with_times = replace(short_ladder, rungs=tuple(replace(result, gpu=timed) for result in short_ladder.rungs))
    assert (with_times.unit, with_times.speed(timed)) == ("TB/s", "4.29")
    assert Timed.from_dict(with_times.to_dict()["rungs"][0]["gpu"]) == timed


# --- Simulating ----------------------------------------------------------------------------------------------------


def test_a_config_of_the_decode_is_simulated_on_random_inputs():
    code, out, error = flashwright(
        "simulate", SMALL, "--rows", "2", "--keys", "100", "--heads", "4", "--kv-heads", "2", "--causal", "--json"
    )
    assert (code, error) == (0, "")
    document = json.loads(out)
    assert document["config"] == SMALL
    assert 0 < document["relative_error"] < 1e-3
