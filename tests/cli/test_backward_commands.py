"""The commands take configs of the backward, and climb its ladders."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from command_line import flashwright

from flashwright.hardware.architectures import architecture
from flashwright.kernels.ladder import climbed
from flashwright.kernels.registry import families, family_named, parse_config, search_space_of, tile_shapes
from flashwright.workbench import ladder as ladder_module
from flashwright.workbench.ladder import Ladder, climb, climbable_operations, ladder_of, read_ladder, write_ladder
from flashwright.workbench.ladder_plot import ladder_figure

SMALL = "ampere backward (FP16, 32, 32, 64, 4): stages_1_1"
LADDERS = [(family, d_head) for family in families("backward") for d_head in family.d_heads]


# --- The rungs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "d_head"), LADDERS, ids=lambda each: getattr(each, "name", str(each)))
def test_every_rung_can_be_built_for_the_architectures_of_its_ladder(family, d_head):
    most = min(architecture(arch).shared_bytes_per_block for arch in family.ladder.architectures)
    rungs = family.ladder.rungs("BF16", d_head)
    assert [rung.number for rung in rungs] == list(range(1, len(rungs) + 1))
    for rung in rungs:
        assert tile_shapes(rung.config).shared_bytes <= most
        assert rung.config.d_head == d_head


@pytest.mark.parametrize(("family", "d_head"), LADDERS, ids=lambda each: getattr(each, "name", str(each)))
def test_a_rung_is_one_idea_above_the_last_and_the_top_is_in_the_search_space(family, d_head):
    rungs = family.ladder.rungs("BF16", d_head)
    for before, after in pairwise(rungs):
        changed = {
            f.name for f in fields(after.config) if getattr(before.config, f.name) != getattr(after.config, f.name)
        }
        assert changed, after.change
        twice_the_keys = "B_c" in changed and changed <= {"B_c", "n_warps", "parts", "slices"}
        assert len(changed) == 1 or twice_the_keys or changed == {"Q_stages", "dO_stages"} or "n_consumers" in changed
    assert search_space_of(rungs[-1].config) == "default"


def test_operations_with_kernels_are_climbed():
    assert set(climbable_operations()) == {"forward", "backward", "decode"}
    assert ladder_of("hopper", "backward").peers == ("sdpa-cudnn", "sdpa-fa2")
    with pytest.raises(ValueError, match="operation: 'train' has no ladder; allowed: forward, backward, decode"):
        climb(operation="train")


# --- Climbing ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_ladder() -> Ladder:
    """Two rungs, which compile in a few seconds, climbed once."""
    short = climbed(parse_config(SMALL), [("base", {}), ("swizzled shared memory", {"swizzled": True})])
    ladder = replace(ladder_of("ampere", "backward"), rungs=lambda dtype, d_head: short, architectures=("sm_80",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder_module, "ladder_of", lambda family, operation: {"backward": ladder}[operation])
        return climb("FP16", operation="backward", progress=False)


def test_the_rungs_of_the_backward_are_simulated_and_checked_against_float64(short_ladder):
    assert short_ladder.title == "The Ampere backward ladder"
    assert short_ladder.wrong == []
    plain, swizzled = (result.simulation for result in short_ladder.rungs)
    assert swizzled.bank_conflicts < plain.bank_conflicts / 4
    assert swizzled.relative_error < 1e-3


def test_a_ladder_of_the_backward_is_stored_shown_and_drawn(short_ladder, tmp_path):
    path = tmp_path / "ladder.json"
    write_ladder(path, short_ladder)
    assert read_ladder(path).rungs == short_ladder.rungs
    assert "The Ampere backward ladder" in ladder_figure(short_ladder).get_suptitle()
    code, out, error = flashwright("ladder", "--from", str(path))
    assert (code, error) == (0, "")
    assert "The Ampere backward ladder" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--operation", "train"), "operation: 'train' has no ladder; allowed: forward, backward, decode"),
        (("--operation", "backward", "--family", "volta"), "family: 'volta' is not known; allowed: ampere, hopper"),
        (("--operation", "backward", "--family", "hopper", "--d-head", "96"), "d_head: 96 is not allowed"),
        (("--operation", "backward", "--from", "ladder.json"), "--from shows a stored result as it is"),
    ],
)
def test_what_cannot_be_climbed_is_one_message(options, message):
    code, out, error = flashwright("ladder", *options)
    assert (code, out) == (1, "")
    assert message in error


# --- Simulating ----------------------------------------------------------------------------------------------------


def test_a_config_of_the_backward_is_simulated_on_random_inputs():
    code, out, error = flashwright("simulate", SMALL, "--rows", "64", "--heads", "1", "--json")
    assert (code, error) == (0, "")
    document = json.loads(out)
    assert document["config"] == SMALL
    assert 0 < document["relative_error"] < 1e-3


def test_a_config_without_a_kernel_is_refused_with_the_rule():
    config = "ampere backward (FP16, 32, 64, 64, 8): stages_1_1+parts_2"
    code, _, error = flashwright("simulate", config)
    assert code == 1
    assert "columns: 2 warps share d_head = 32 columns of dK and dV" in error


def test_every_family_of_the_backward_has_what_the_commands_read():
    for name in ("ampere", "hopper"):
        family = family_named(name, "backward")
        assert family.space is not None
        assert family.ladder is not None
        assert family.explanation is not None
