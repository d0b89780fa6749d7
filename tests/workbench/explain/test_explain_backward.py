"""Explaining and comparing configs of the backward: registers, shared memory, products, phases, conflicts."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from explain_cases import AMPERE_BACKWARD as AMPERE
from explain_cases import HOPPER_BACKWARD as HOPPER
from explain_cases import CommandLine, explained

from flashwright.kernels.registry import families, parse_config, tile_shapes
from flashwright.problem.options import AttentionOptions
from flashwright.workbench.explain.compare import compare_facts
from flashwright.workbench.explain.explanations import explanation_of, shared_map_of
from flashwright.workbench.explain.facts import ConfigFacts
from flashwright.workbench.explain.page import config_page
from flashwright.workbench.explain.report import sections
from flashwright.workbench.sample import Sample


@pytest.fixture(scope="module")
def ampere() -> ConfigFacts:
    return explained(AMPERE)


@pytest.fixture(scope="module")
def hopper() -> ConfigFacts:
    return explained(HOPPER)


# --- By arithmetic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families("backward"), ids=lambda family: family.name)
def test_every_default_has_words_for_its_knobs_and_a_map_of_its_shared_memory(family):
    for d_head in family.d_heads:
        configs = [config for config, reason in family.space.configs("BF16", d_head) if reason is None]
        for config in configs[:8]:
            assert all(knob.meaning for knob in explanation_of(config).knobs(config))
            shared = shared_map_of(config)
            assert shared.total_bytes == tile_shapes(config).shared_bytes
            regions = sorted(shared.regions, key=lambda region: region.offset)
            assert [region.offset for region in regions] == [0, *(region.end for region in regions[:-1])]
            assert regions[-1].end == shared.total_bytes


def test_registers_count_the_gradients_that_stay_and_the_scores_that_come_and_go(ampere, hopper):
    operands = {operand.operand: operand.registers for operand in ampere.registers.operands}
    assert operands["dK accumulator"] == operands["dV accumulator"] == 16 * 64 // 32
    assert operands["S accumulator"] == operands["dP accumulator"] == 16 * 64 // 32
    assert operands["dQ accumulator"] == 64 * 64 // 128
    assert hopper.registers.planned == 2 * 32 + 2 * 64  # dK and dV of 64 columns, S and dP of 128 queries
    assert hopper.registers.spill_bytes == ampere.registers.spill_bytes == 0


def test_neighbours_turn_every_knob():
    for text in (AMPERE, HOPPER):
        config = parse_config(text)
        own = explanation_of(config)
        turned = {name for _, values in own.neighbours(config) for name in values}
        assert turned == set(own.knobs_to_turn)


# --- By the simulator ----------------------------------------------------------------------------------------------


def test_a_step_of_the_loop_over_queries_is_simulated_and_right(ampere, hopper):
    assert (ampere.simulation.q_rows, ampere.simulation.kv_rows) == (4 * 64, 64)
    assert (hopper.simulation.q_rows, hopper.simulation.kv_rows) == (5 * 128, 128)  # the first step is before the loop
    for facts in (ampere, hopper):
        assert facts.simulation.relative_error < 4e-3
        assert facts.operation == "backward"
        titles = [section.title for section in sections(facts)]
        assert "The query loop in PTX" in titles
        assert "One query step of one warp, simulated" in titles


def test_five_products_a_step_are_counted(ampere, hopper):
    # Each product of 64 × 64 × 64 a warp of 16 rows: 8 tiles of 8 columns, 4 of 16 deep.
    assert ampere.loop.ptx.by_kind["matrix product (mma)"] == 5 * 8 * 4
    # S, dP: 64 columns deep; dV, dK: 128 queries; dQ: 128 keys. 16 deep each.
    assert hopper.loop.ptx.by_kind["matrix product (mma)"] == (64 + 64 + 128 + 128 + 128) // 16
    assert hopper.loop.serialised is False


def test_the_phases_of_the_ampere_kernel_are_its_products_in_their_order(ampere):
    names = [phase.name for phase in ampere.timeline.phases]
    # Probabilities come before dP, their gradients after.
    assert names == 2 * ["S", "gradients of scores", "dP", "gradients of scores", "dV", "dK", "dQ"]


@pytest.mark.parametrize(
    ("config", "step"),
    [
        (
            "ampere backward (BF16, 32, 64, 64, 4): stages_1_1+slices_2+swizzled",
            [*2 * ["S", "gradients of scores", "dP", "gradients of scores", "dV", "dK"], "dQ"],
        ),
        (  # the products of its own queries before the late dQ, those of other warps' behind it
            "ampere backward (FP16, 64, 64, 64, 8): stages_1_1+parts_2+swizzled+late_dQ",
            ["S", "gradients of scores", "dP", "gradients of scores", "dV", "dK", "dQ", "dV", "dK"],
        ),
    ],
    ids=["slices", "late dQ"],
)
def test_parts_that_come_several_times_a_step_are_drawn_as_often_and_never_over_each_other(config, step):
    timeline = explained(config).timeline
    assert [phase.name for phase in timeline.phases] == 2 * step
    assert all(before.end <= after.start for before, after in pairwise(timeline.phases))


@pytest.mark.parametrize("config", [AMPERE, HOPPER])
def test_steps_are_counted_of_kernels_with_a_cap_and_grouped_heads_too(config):
    capped = Sample(AttentionOptions.of(False, None, None, 20.0))
    for sample, blocks in ((capped, 1), (Sample(kv_heads=2), 2)):
        facts = explained(config, sample=sample)
        assert facts.simulation.relative_error < 8e-3
        assert facts.simulation.thread_blocks == blocks
        assert len(facts.timelines) == len(explained(config).timelines)


def test_the_run_of_a_pair_is_that_of_both_thread_blocks_with_keys_of_their_own():
    facts = explained("hopper backward (BF16, 256, 64, 64, 2): stages_2_1+paired")
    assert facts.simulation.kv_rows == 2 * 64
    assert facts.simulation.thread_blocks == 2
    page = config_page(facts)
    assert "2 thread blocks, from the start of the kernel to its end: all their warps" in page
    assert "of all 2 thread blocks" in page and "whole thread block" not in page


def test_a_step_of_blocks_that_take_turns_is_that_of_one_between_the_first_and_the_last():
    """The last rounds dQ, which of many blocks of keys one does."""
    config = "hopper backward (BF16, 64, 128, 128, 2): stages_2_2+register_P+finishes_dQ"
    between, last, alone = (
        explained(config),
        explained(config, sample=Sample(keys=128)),
        explained(config.removesuffix("+finishes_dQ")),
    )
    assert (between.simulation.kv_rows, between.simulation.thread_blocks) == (3 * 128, 3)
    assert between.effects.instructions_per_step < 1.15 * alone.effects.instructions_per_step
    assert last.effects.instructions_per_step > 1.25 * alone.effects.instructions_per_step
    assert "all 3 thread blocks" in config_page(between)
    assert max(each.simulation.relative_error for each in (between, last)) < 4e-3


def test_q_is_copied_a_step_ahead_and_do_during_the_step_before(ampere):
    flights = {flight.block: flight for flight in ampere.timeline.flights}
    S, dK, dQ = (next(p for p in ampere.timeline.phases if p.name == name) for name in ("S", "dK", "dQ"))
    assert flights["Q block 2"].issued < S.start  # two stages: before anything is computed
    assert dK.end < flights["dO block 2"].start < dQ.start  # one stage: when all have read it


def test_a_product_of_the_hopper_kernel_runs_during_the_gradients_of_scores_and_three_behind_them(hopper):
    consumer = hopper.timelines[0]
    gradients = consumer.phases[0]
    under_way = {
        flight.region for flight in consumer.flights if flight.issued < gradients.start and flight.end > gradients.start
    }
    assert under_way == {"dP"}
    behind = [flight.region for flight in consumer.flights if gradients.start < flight.issued][:3]
    assert behind == ["dQ", "dV", "dK"]  # dQ of the step before
    assert {flight.region for flight in consumer.flights} == {"S", "dP", "dV", "dK", "dQ"}
    producer = hopper.timelines[-1]
    assert {flight.block.split()[0] for flight in producer.flights} == {"Q", "dO"}


def test_the_page_says_behind_how_much_of_the_gradients_of_scores_a_product_runs(hopper):
    page = config_page(hopper)
    gradients = hopper.timelines[0].phases[0]
    assert re.search(
        rf"dP is under way for \d+ instructions, behind \d+ of the {gradients.end - gradients.start} instr", page
    )
    assert "dP is under way" in page and "S is under way for" in page
    assert re.search(r"S is under way for \d+ instructions, with no gradients of scores", page)


def test_without_swizzle_reads_of_shared_memory_meet_in_the_same_banks(ampere):
    wavefronts = {load.swizzled: load.wavefronts for load in ampere.matrix_loads}
    assert wavefronts == {True: 4, False: 32}


# --- Pages and commands --------------------------------------------------------------------------------------------


def test_the_page_is_about_a_backward_kernel(ampere, hopper):
    for facts in (ampere, hopper):
        page = config_page(facts)
        assert "Backward kernel of the" in page
        assert "Instructions of the query loop" in page
        assert "KV step" not in page
        not_prose = 'class="[^"]*"|<section id="code">.*?</section>|<script.*?</script>'
        assert "softmax" not in re.sub(not_prose, "", page.partition("</style>")[2], flags=re.DOTALL)


def test_the_command_explains_it(monkeypatch, capsys, ampere):
    run = CommandLine(monkeypatch, capsys)
    code, out, _ = run("explain", AMPERE, "--no-neighbours")
    assert code == 0
    assert "dS" in out


def test_configs_of_both_families_are_compared(ampere, hopper):
    comparison = compare_facts(ampere, hopper)
    rows = {row.name: row.values for section in comparison.sections for row in section.rows}
    assert rows["B_r"] == ("64", "128")
    assert rows["P_in_registers"] == ("–", "on")


def test_a_config_without_a_kernel_is_refused_with_the_rule(monkeypatch, capsys):
    run = CommandLine(monkeypatch, capsys)
    config = replace(parse_config(AMPERE), n_warps=3)
    code, _, error = run("explain", str(config))
    assert code == 1
    assert "3 warps do not share B_c = 64 keys evenly" in error


def test_the_producer_of_a_pair_is_followed_in_its_own_loop():
    """Beside it, a loop sends gradients of scores to the other thread block, which the producer does not execute."""
    facts = explained("hopper backward (BF16, 256, 64, 64, 2): stages_1_1+paired")
    assert {timeline.role for timeline in facts.timelines} == {"consumer", "producer"}
