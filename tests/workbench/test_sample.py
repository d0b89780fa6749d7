"""Samples: the same kernel of a config under masks, caps and grouped heads, in explain, compare and the ladder."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from command_line import flashwright
from explain_cases import (
    AMPERE_BACKWARD,
    DECODE,
    EAGER,
    HOPPER_BACKWARD,
    HOPPER_DECODE,
    HOPPER_GUESSING,
    HOPPER_PLAIN,
    LATENT_DECODE,
    TWO_STAGES,
    CommandLine,
    explained,
)
from hypothesis import given
from hypothesis import strategies as st

from flashwright import compile_kernel, parse_config
from flashwright.kernels.registry import family_of
from flashwright.problem.options import AttentionOptions
from flashwright.workbench import ladder as ladder_module
from flashwright.workbench.explain.execution import execute
from flashwright.workbench.explain.gather import STEADY_ITERATIONS_NEEDED
from flashwright.workbench.explain.page import config_page
from flashwright.workbench.ladder import climb, ladder_of, read_ladder, write_ladder
from flashwright.workbench.sample import PLAIN_SAMPLE, Sample, kv_steps, visited_blocks

CAUSAL = Sample(AttentionOptions.of(causal=True))
GROUPED = Sample(kv_heads=1)
PAIRED_BACKWARD = "hopper backward (BF16, 256, 64, 64, 2): stages_2_1+paired+persistent+finishes_dQ"
PERSISTENT_BACKWARD = "hopper backward (BF16, 128, 64, 128, 2): stages_3_3+register_P+persistent+skips_masked"
NARROW = Sample(AttentionOptions.of(window=(16, 0)))
CONFIG = parse_config(EAGER)


# --- Arithmetic --------------------------------------------------------------------------------------------------

sides = st.none() | st.integers(0, 200)


@given(
    B_r=st.sampled_from([16, 64]), B_c=st.sampled_from([16, 48, 64]), rows=st.integers(1, 150),
    more_keys=st.integers(0, 150), left=sides, right=sides,
)  # fmt: skip
def test_visited_blocks_are_those_with_a_key_for_some_row(B_r, B_c, rows, more_keys, left, right):
    config = replace(CONFIG, B_r=B_r, B_c=B_c)
    options, keys = AttentionOptions.of(window=(left, right)), rows + more_keys
    position = np.arange(rows)[:, None] + more_keys
    key = np.arange(keys)
    seen = (key >= position - (keys if left is None else left)) & (key <= position + (keys if right is None else right))
    total = 0
    for first in range(0, rows, B_r):
        tile = seen[first : first + B_r]
        blocks = [tile[:, start : start + B_c] for start in range(0, keys, B_c)]
        visited = visited_blocks(options.window, rows, keys, tile=B_r, step=B_c, first_row=first)
        assert visited.count == sum(block.any() for block in blocks)
        assert visited.plain <= sum(block.all() and block.shape[1] == B_c for block in blocks)
        total += visited.count
    assert kv_steps(config, options, rows, keys) == total


def test_heads_are_grouped_in_pairs_unless_given():
    assert Sample().head_counts(2) == (2, 2)
    assert Sample(kv_heads=3).head_counts(2) == (6, 3)
    assert Sample(heads=4, kv_heads=1).head_counts(2) == (4, 1)
    with pytest.raises(ValueError, match="kv_heads: 2 does not divide heads, 3"):
        Sample(heads=3, kv_heads=2)


@pytest.mark.parametrize("sample", [PLAIN_SAMPLE, CAUSAL, GROUPED, NARROW, Sample(keys=7, heads=3)])
def test_a_sample_survives_json(sample):
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


# --- Explain -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        EAGER,
        pytest.param(TWO_STAGES, marks=pytest.mark.slow),
        HOPPER_PLAIN,
        pytest.param(HOPPER_GUESSING, marks=pytest.mark.slow),
        AMPERE_BACKWARD,
        HOPPER_BACKWARD,
        pytest.param(PAIRED_BACKWARD, marks=pytest.mark.slow),
        DECODE,
        HOPPER_DECODE,
        pytest.param(LATENT_DECODE, marks=pytest.mark.slow),
    ],
)
def test_a_causal_kernel_is_right_and_examined_in_steps_that_the_mask_does_not_cut(config):
    plain, causal = explained(config), explained(config, sample=CAUSAL)
    assert causal.target == f"{plain.arch}, causal"
    assert causal.simulation.relative_error < 8e-3
    assert causal.effects.instructions_per_step < 1.25 * plain.effects.instructions_per_step
    copied = {flight.block[0] for flight in plain.timeline.flights}
    assert {flight.block[0] for flight in causal.timeline.flights} == copied


@pytest.mark.parametrize(
    ("config", "cut"),
    [(AMPERE_BACKWARD, 0), (PERSISTENT_BACKWARD, 0), (HOPPER_DECODE, -1)],
    ids=["first", "first", "last"],
)
def test_the_step_that_is_counted_has_fewer_instructions_than_one_that_the_mask_cuts(config, cut):
    known = parse_config(config)
    kernel = compile_kernel(known, family_of(known).target("oldest"), CAUSAL.variant(known))
    execution = execute(kernel, STEADY_ITERATIONS_NEEDED, sample=CAUSAL)
    steps = [end - first for first, end in execution.iterations]
    assert steps[execution.steady] < steps[cut]
    assert steps[execution.steady] == pytest.approx(steps[execution.steady + 1], rel=0.02)


def test_every_step_of_an_ampere_kernel_tests_the_mask_and_no_plain_step_of_a_hopper_kernel_does():
    ampere, hopper = (
        [explained(config, sample=sample).effects.instructions_per_step for sample in (PLAIN_SAMPLE, CAUSAL)]
        for config in (EAGER, HOPPER_PLAIN)
    )
    assert ampere[1] > ampere[0]
    assert hopper[1] <= hopper[0]


def test_grouped_heads_and_a_cap_are_part_of_the_kernel():
    facts = explained(EAGER, sample=Sample(AttentionOptions.of(softcap=30.0), kv_heads=1))
    assert facts.simulation.relative_error < 8e-3
    assert facts.effects.instructions_per_step > explained(EAGER).effects.instructions_per_step
    assert "compiled for sm_80, softcap 30, 2 heads of Q on 1 of K and V" in config_page(facts)


def test_a_window_with_too_few_whole_blocks_is_compiled_but_not_counted():
    facts = explained(EAGER, sample=NARROW)
    assert facts.simulation is None
    assert facts.registers.used > 0
    assert "64 rows visit 2 blocks of 64 keys, of which an edge of the mask cuts 2" in facts.simulation_problem


@pytest.fixture
def command(monkeypatch, capsys):
    return CommandLine(monkeypatch, capsys)


def test_explain_and_compare_take_the_options_of_attention(command):
    code, out, error = command("explain", EAGER, "--causal", "--no-neighbours", "--json")
    assert code == 0, error
    assert json.loads(out)["sample"]["window"] == [None, 0]
    code, out, error = command("compare", EAGER, EAGER, "--kv-heads", "1")
    assert code == 0, error
    assert "0 facts differ on sm_80, 2 heads of Q on 1 of K and V" in out


def test_keys_are_as_many_as_requested(command):
    keys = (STEADY_ITERATIONS_NEEDED + 2) * CONFIG.B_c
    code, out, error = command("explain", EAGER, "--keys", str(keys), "--no-neighbours", "--json")
    assert code == 0, error
    assert json.loads(out)["simulation"]["kv_rows"] == keys


# --- The ladder --------------------------------------------------------------------------------------------------


@pytest.fixture
def short_ladder(monkeypatch):
    """Its first rung, on one architecture."""
    full = ladder_of("ampere")
    short = replace(full, rungs=lambda dtype, d_head: full.rungs(dtype, d_head)[:1], architectures=("sm_80",))
    monkeypatch.setattr(ladder_module, "ladder_of", lambda family, operation: short)


def test_a_causal_ladder_is_climbed_on_half_of_the_steps(short_ladder, tmp_path):
    plain, causal = (climb(d_head=64, sample=sample, progress=False) for sample in (PLAIN_SAMPLE, CAUSAL))
    (of_plain,), (of_causal,) = plain.rungs, causal.rungs
    assert not causal.wrong
    assert of_causal.simulation.instructions < of_plain.simulation.instructions
    assert of_causal.simulation.instructions_per_kv_step > of_plain.simulation.instructions_per_kv_step
    assert causal.title == "The ladder: causal"
    write_ladder(tmp_path / "ladder.json", causal)
    assert read_ladder(tmp_path / "ladder.json").sample == CAUSAL


def test_ladder_takes_the_options_of_attention(short_ladder):
    options = ("--d-head", "64", "--window", "100,0", "--softcap", "30", "--kv-heads", "1", "--keys", "300", "--json")
    code, out, error = flashwright("ladder", *options)
    assert code == 0, error
    document = json.loads(out)
    assert document["sample"] == {"window": [100, 0], "softcap": 30.0, "heads": None, "kv_heads": 1, "keys": 300}
    assert document["rungs"][0]["simulation"]["relative_error"] < 8e-3


def test_a_stored_ladder_is_shown_as_it_is():
    code, _, error = flashwright("ladder", "--from", "ladder.json", "--causal")
    assert code == 1
    assert "--from shows a stored result as it is" in error
