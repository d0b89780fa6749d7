"""Explaining configs of the decode: registers, shared memory, products, copies that run ahead."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from explain_cases import DECODE, explained

from flashwright.kernels.registry import families, family_of, parse_config, tile_shapes
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.workbench.explain.explanations import explanation_of, shared_map_of
from flashwright.workbench.explain.facts import ConfigFacts
from flashwright.workbench.explain.page import config_page
from flashwright.workbench.sample import Sample

CONFIG = "ampere decode (BF16, 64, 16, 16, 2): rows_1+stages_3+blocks_1+swizzled"


@pytest.fixture(scope="module")
def facts() -> ConfigFacts:
    return explained(CONFIG)


@pytest.mark.parametrize("family", [f for f in families("decode") if f.space is not None], ids=lambda f: f.name)
def test_every_config_has_words_for_its_knobs_and_a_map_of_its_shared_memory(family):
    for d_head in family.d_heads:
        configs = [config for config, reason in family.space.configs(DType.BF16, d_head) if reason is None]
        for config in configs[::8]:
            assert all(knob.meaning for knob in explanation_of(config).knobs(config))
            shared = shared_map_of(config)
            assert shared.total_bytes == tile_shapes(config).shared_bytes
            assert [region.offset for region in shared.regions] == [0, *(r.end for r in shared.regions[:-1])]
            assert shared.regions[-1].end == shared.total_bytes


def test_neighbours_turn_every_knob():
    config = parse_config(CONFIG)
    own = explanation_of(config)
    assert {name for _, values in own.neighbours(config) for name in values} == set(own.knobs_to_turn)


def test_a_step_of_one_warp_is_simulated_and_right(facts):
    assert facts.operation == "decode"
    assert facts.simulation.q_rows == 16
    assert facts.simulation.relative_error < 8e-3
    operands = {operand.operand: operand.registers for operand in facts.registers.operands}
    assert (operands["O accumulator"], operands["S accumulator"]) == (16 * 64 // 32, 16 * 16 // 32)
    # S: 2 tiles of 8 keys, 4 of 16 columns deep; O: 8 tiles of 8 columns, 1 of 16 keys deep.
    assert facts.loop.ptx.by_kind["matrix product (mma)"] == 2 * 4 + 8


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_step_is_looked_at_however_many_thread_blocks_a_multiprocessor_has(blocks):
    """They share keys; the one that is looked at has all, so that its loop is no shorter."""
    config = f"ampere decode (BF16, 64, 16, 16, 2): rows_1+stages_2+blocks_{blocks}+swizzled"
    facts = explained(config)
    assert len(facts.timeline.step_starts) == 3
    assert facts.simulation.thread_blocks == 1
    one = explained(config.replace(f"blocks_{blocks}", "blocks_1"))
    assert facts.simulation.step.instructions == pytest.approx(one.simulation.step.instructions, rel=0.1)


def test_neighbours_of_a_config_with_two_thread_blocks_a_multiprocessor_are_simulated():
    facts = explained(DECODE, turning=("blocks_per_sm",))
    assert [each.change for each in facts.neighbours] == ["blocks_per_sm: 2 → 1", "blocks_per_sm: 2 → 4"]
    for neighbour in facts.neighbours:
        assert neighbour.effects.instructions_per_step == pytest.approx(facts.effects.instructions_per_step, rel=0.1)


@pytest.mark.parametrize("config", [CONFIG, "hopper decode (BF16, 64, 64, 32): stages_2"])
def test_the_command_of_which_for_grouped_heads_shows_steps(config):
    facts = explained(config, sample=Sample(kv_heads=1))
    assert facts.simulation.q_rows * 2 == parse_config(config).B_r  # rows of both heads fill a tile
    assert facts.simulation.relative_error < 8e-3
    assert len(facts.timeline.step_starts) == 3


def test_what_keeps_a_step_from_being_counted_is_named():
    few, narrow = Sample(keys=32), Sample(AttentionOptions.of(window=(90, 0)))
    problem = explained(CONFIG, sample=few).simulation_problem
    assert problem == "16 rows visit 1 block of 32 keys; counts need 4 whole ones: more keys, or smaller blocks"
    problem = explained(CONFIG, sample=narrow).simulation_problem
    assert problem == (
        "16 rows visit 4 blocks of 32 keys, of which an edge of the mask cuts 3; counts need 4 whole ones: a wider "
        "window, more keys, or smaller blocks"
    )


def test_a_warp_reads_its_own_keys_without_conflicts_and_waits_for_nobody(facts):
    step = facts.simulation.step
    assert (step.barriers, step.bank_conflicts) == (0, 0)
    traffic = {(each.operation, each.operand): each for each in step.shared}
    # Q stays in registers.
    assert traffic.keys() == {(load, each) for load in ("cp.async", "ldmatrix") for each in "KV"}
    assert step.global_sectors == 2 * 16 * 64 * 2 // 32  # 16 keys and values


def test_keys_and_values_are_copied_two_steps_ahead(facts):
    flights = {flight.block for flight in facts.timeline.flights if flight.issued >= 0}
    shown = facts.timeline.first_step
    assert {f"K block {shown + 2}", f"V block {shown + 2}", f"K block {shown + 3}"} <= flights


def test_the_swizzle_is_drawn_beside_its_absence(facts):
    assert {load.swizzled: load.wavefronts for load in facts.matrix_loads} == {True: 4, False: 32}


def test_the_page_is_about_a_decode_kernel(facts):
    assert "Decode kernel of the" in config_page(facts)


def test_a_consumer_of_the_hopper_decode_computes_scores_while_others_copy():
    facts = explained("hopper decode (BF16, 64, 64, 32): stages_2")
    assert facts.simulation.relative_error < 8e-3
    assert facts.simulation.step.global_sectors == 0
    assert facts.loop.ptx.by_kind["matrix product (mma)"] == 64 // 16 + 32 // 16  # S 64 columns deep, O 32 keys
    assert facts.loop.serialised is False
    assert {flight.region for flight in facts.timeline.flights} == {"S", "O"}


def test_registers_of_hopper_consumers_end_where_producers_have_handed_theirs_over():
    one, two = (parse_config(f"hopper decode (BF16, 128, {rows}, 64): stages_3") for rows in (64, 128))
    assert explanation_of(one).register_limit(one) is None  # two warpgroups have 255 registers a thread
    assert explanation_of(two).register_limit(two) == 208


def test_a_latent_decode_names_what_its_warps_store_and_what_they_may_hold():
    config = parse_config("latent decode (BF16, 576, 64, 64): stages_2")
    explanation = explanation_of(config)
    small = {region.name: region.operand for region in explanation.shared_map(config).regions[-3:]}
    assert small == {"factors": "factors", "terms": "terms", "barriers": "B"}
    consumers = {each.part: each.registers for each in explanation.reallocations(config)}["consumers"]
    assert explanation.register_limit(config) == consumers == 216


def test_a_config_is_explained_on_the_oldest_architecture_that_has_room_for_it():
    """Its stages take 205 KiB; a thread block of sm_80 has 163."""
    config = parse_config("ampere decode (BF16, 128, 16, 16, 8): rows_1+stages_3+blocks_1+swizzled")
    family = family_of(config)
    assert family.target("oldest") == "sm_80"
    assert family.target_for(config, "oldest") == "sm_90"
    assert family.target_for(config, "sm_80") == "sm_80"


def test_copies_that_are_under_way_at_once_have_rows_of_their_own(facts):
    bars = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"[^>]*class="flight', config_page(facts))
    rows = {}
    for x, y, width in ([float(each) for each in bar] for bar in bars):
        rows.setdefault(y, []).append((x, x + width))
    assert rows
    for row in rows.values():
        assert all(end <= start + 3 for (_, end), (start, _) in pairwise(sorted(row)))


@pytest.mark.slow
def test_the_scorer_of_the_latent_decode_multiplies_all_columns_of_keys_and_half_of_the_values():
    facts = explained("latent decode (BF16, 576, 64, 32): stages_2")
    assert facts.simulation.relative_error < 8e-3
    assert facts.simulation.step.global_sectors == 0
    assert facts.loop.ptx.by_kind["matrix product (mma)"] == 576 // 16 + 32 // 16  # S 576 columns deep, O 32 keys
    assert "Decode kernel of the" in config_page(facts)
