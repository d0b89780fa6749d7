"""`flashwright explain`: the facts about a config, held against arithmetic done by hand, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from command_line import flashwright as command
from explain_cases import (
    EAGER,
    HOPPER_GUESSING,
    HOPPER_PLAIN,
    INVALID,
    LATE,
    REJECTED,
    SOME_KNOBS,
    THROUGH_REGISTERS,
    TWO_STAGES,
    CommandLine,
    explained,
)

from flashwright import parse_kernel_name_into_config
from flashwright.kernels.forward.ampere import explain as ampere
from flashwright.workbench.bench.claims import ClaimResults, claims
from flashwright.workbench.bench.knob_effects import LENGTHS, bases, effect, read_knob_effects
from flashwright.workbench.bench.results import CellResult, Measurement
from flashwright.workbench.explain import explain_config, gather, measured
from flashwright.workbench.explain.facts import Flight, Timeline
from flashwright.workbench.explain.instruction_kinds import Kind
from flashwright.workbench.explain.measured import CLAIMS, EFFECTS, ROOT, measured_effects
from flashwright.workbench.explain.page import config_page
from flashwright.workbench.explain.report import differences, is_better, sections, shown_difference

WIDE = "(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"


def config_of(short_form):
    return parse_kernel_name_into_config(short_form)


# --- Arithmetic ------------------------------------------------------------------------------------------------


def test_registers_of_operands_are_those_computed_by_hand():
    phases = {phase.name: phase for phase in ampere.register_phases(config_of(WIDE))}
    registers = {o.operand: o.registers for phase in phases.values() for o in phase.operands}
    assert registers == {
        "O accumulator": 16 * 128 // 32,
        "S accumulator": 16 * 64 // 32,
        "P operand": 16 * 64 // 2 // 32,
        "Q fragments": 16 * 128 // 2 // 32,  # whole
        "K fragments": 2 * 64 * 16 // 2 // 32,  # two buffers of 16 columns
        "V fragments": 2 * 128 * 16 // 2 // 32,
        "row max and sum": 4,
    }
    assert {name: phase.total for name, phase in phases.items()} == {
        "S = QKᵀ": 64 + 32 + 32 + 32 + 4,
        "softmax": 64 + 32 + 32 + 4,
        "O += PV": 64 + 16 + 32 + 64 + 4,
    }


def test_a_streamed_q_is_alive_only_in_its_product():
    streamed = ampere.register_phases(config_of(WIDE.replace("load_0_2_2", "load_2_2_2")))
    assert ["Q fragments" in {o.operand for o in phase.operands} for phase in streamed] == [True, False, False]


def test_tensor_core_row_sums_take_an_accumulator():
    (row_state,) = {
        o.registers
        for phase in ampere.register_phases(config_of(WIDE + "+mma_sum"))
        for o in phase.operands
        if o.operand == "row max and sum"
    }
    assert row_state == 2 + 4


def test_shared_memory_map_of_one_and_two_stages():
    one = ampere.shared_map(config_of(WIDE))
    assert [(r.name, r.offset, r.bytes) for r in one.regions] == [
        ("Q", 0, 16384),
        ("K", 16384, 16384),
        ("V", 32768, 16384),
    ]
    two = ampere.shared_map(config_of("(BF16, 128, 128, 64, 4): async+eager+load_2_2_2_tiles+two_stages"))
    assert [(r.name, r.offset) for r in two.regions] == [
        ("Q", 0),
        ("K, stage 0", 32768),
        ("V, stage 0", 49152),
        ("K, stage 1", 65536),
        ("V, stage 1", 81920),
    ]
    assert two.total_bytes == two.regions[-1].end == 98304
    assert two.region_at(65535).name == "V, stage 0"


def test_double_buffering_says_for_each_operand_why():
    by_operand = {b.operand: b for b in ampere.buffering(config_of(WIDE))}
    assert {operand: b.is_double_buffered for operand, b in by_operand.items()} == {
        "Q": False,
        "K": True,
        "P": False,
        "V": True,
    }
    assert "Q_mma_load_K_tiles = 0" in by_operand["Q"].reason and "no effect" in by_operand["Q"].reason
    assert "of 8" in by_operand["K"].reason  # 128 columns in tiles of 16
    assert "of 4" in by_operand["V"].reason  # 64 rows in tiles of 16
    assert "never loaded" in by_operand["P"].reason


def test_the_flag_has_no_effect_on_operands_loaded_whole():
    whole = ampere.buffering(config_of("(BF16, 128, 64, 64, 4): async+load_0_0_0_tiles+buffer"))
    assert not any(b.is_double_buffered for b in whole)
    assert all("no effect" in b.reason for b in whole if b.operand != "P")


def test_without_the_flag_the_reason_is_the_flag():
    (reason,) = {b.reason for b in ampere.buffering(config_of(LATE.replace("+buffer", ""))) if b.operand == "K"}
    assert "mma_double_buffer_loads is off" in reason


@pytest.mark.parametrize(("options", "warned"), [("", True), ("+reorder", True), ("+reorder+keep_order", False)])
def test_the_reason_warns_where_the_assembler_orders_loads_its_own_way(options, warned):
    reasons = {b.operand: b.reason for b in ampere.buffering(config_of(WIDE + options))}
    assert ("its own way" in reasons["K"]) == warned
    assert "its own way" not in reasons["Q"]


def test_every_knob_is_put_into_words():
    config = config_of(WIDE)
    knobs = ampere.knobs(config)
    assert [knob.name for knob in knobs] == list(config.__dataclass_fields__)
    assert all(knob.meaning for knob in knobs)
    assert {knob.name for knob in knobs if knob.is_on} == {
        "async_copy",
        "eager_load_blocks",
        "swizzled",
        "mma_double_buffer_loads",
        "optimized_softmax",
    }


def test_neighbours_turn_every_knob_of_how_alone():
    config = config_of(WIDE)
    changes = [values for _, values in ampere.neighbours(config)]
    assert all(len(values) == 1 for values in changes)
    turned = {name for values in changes for name in values}
    assert turned == set(config.__dataclass_fields__) - {"dtype", "d_head"}
    assert all(getattr(config, name) != value for values in changes for name, value in values.items())


# --- Compiled and simulated ------------------------------------------------------------------------------------


def test_the_ptx_loop_holds_the_products_of_one_step():
    by_opcode = explained(EAGER).loop.ptx.by_opcode
    (mma,) = [count for opcode, count in by_opcode.items() if opcode.startswith("mma")]
    assert mma == 2 * (64 // 8) * (64 // 16)  # 16 rows a warp: S is 8 tiles wide and 4 deep, and so is O
    loads = {opcode.count(".trans"): count for opcode, count in by_opcode.items() if opcode.startswith("ldmatrix")}
    assert loads == {0: 16, 1: 16}  # K and V: 4 × 4 blocks of 16 × 16; Q stays in registers


def test_counts_of_a_step_are_those_of_the_loop_body():
    facts = explained(EAGER)
    assert 0 < facts.simulation.step.instructions <= facts.loop.ptx.total  # what only the tensors' ends need is skipped
    for kind in (Kind.LOAD, Kind.MMA, Kind.EXPONENTIAL, Kind.SHUFFLE, Kind.CONVERT):
        executed = sum(span.length for span in facts.timeline.spans if span.kind == kind.value)
        assert executed == 2 * facts.loop.ptx.by_kind[kind.value], kind  # in two steps
    assert sum(facts.loop.ptx.by_kind.values()) == facts.loop.ptx.total
    assert facts.simulation.step.barriers == 2
    assert facts.simulation.step.global_sectors == 2 * (64 * 64 * 2 // 32) // 4  # a warp's share of K and V
    assert facts.simulation.relative_error < 8e-3


def test_swizzling_makes_the_eight_rows_of_a_matrix_hit_different_banks():
    swizzled, plain = explained(EAGER).matrix_loads
    assert (swizzled.swizzled, plain.swizzled) == (True, False)
    for load, groups, wavefronts in ((swizzled, 8, 4), (plain, 1, 32)):
        first = [access for access in load.lanes if access.lane < 8]
        assert [(access.row, access.vector) for access in first] == [(row, 0) for row in range(8)]
        assert len({access.bank_group for access in first}) == groups
        assert (load.wavefronts, load.wavefronts_ideal) == (wavefronts, 4)


def test_executed_addresses_lie_where_the_coloured_tile_says():
    for load in explained(EAGER).matrix_loads:
        assert len(load.lanes) == 32
        for access in load.lanes:
            assert load.bank_groups[access.row][access.vector] == access.bank_group


def test_conflicts_are_charged_to_the_operand_that_has_them():
    effects = {n.change: n.effects for n in explained(EAGER, turning=SOME_KNOBS).neighbours}
    assert effects["swizzled: on → off"].bank_conflicts_per_step == (16 + 16) * (32 - 4)
    assert explained(EAGER).simulation.step.bank_conflicts == 0
    ldmatrix = {t.operand: t for t in explained(EAGER).simulation.step.shared if t.operation == "ldmatrix"}
    assert {operand: t.accesses for operand, t in ldmatrix.items()} == {"K": 16, "V": 16}


def hidden_behind(timeline: Timeline, flight: Flight) -> list[str]:
    return [p.name for p in timeline.phases if flight.issued <= p.start and p.end <= (flight.end or 0)]


def whole_flights(timeline: Timeline) -> list[Flight]:
    return [f for f in timeline.flights if f.start >= 0 and f.end is not None and f.end < timeline.instructions]


def test_eager_copies_are_under_way_during_the_arithmetic():
    timeline = explained(EAGER).timeline
    assert {f.block: hidden_behind(timeline, f) for f in whole_flights(timeline)} == {
        "V block 1": ["S = QKᵀ"],
        "K block 2": ["softmax", "O += PV"],
        "V block 2": ["S = QKᵀ"],
    }


def test_late_copies_have_nothing_to_hide_behind():
    timeline = explained(LATE).timeline
    flights = whole_flights(timeline)
    assert [f.block for f in flights] == ["V block 1", "K block 2", "V block 2"]
    assert all(hidden_behind(timeline, flight) == [] for flight in flights)


def test_two_stages_copy_a_whole_step_ahead_with_one_barrier_and_blocks_in_reverse():
    facts = explained(TWO_STAGES)
    assert facts.simulation.step.barriers == 1
    (k, v) = whole_flights(facts.timeline)
    assert [(k.block, k.region), (v.block, v.region)] == [("K block 1", "K, stage 0"), ("V block 1", "V, stage 0")]
    assert hidden_behind(facts.timeline, k) == ["S = QKᵀ", "softmax", "O += PV"]


def test_copies_into_a_ring_end_at_the_wait_for_their_stage():
    facts = explained(TWO_STAGES.replace("+reversed+two_stages", "+ring_3"))
    timeline = facts.timeline
    (k, v) = whole_flights(timeline)
    assert [k.block, v.block] == ["K block 2", "V block 2"] and k.end == v.end
    assert hidden_behind(timeline, k) == ["S = QKᵀ", "softmax", "O += PV"]
    assert {flight.block for flight in timeline.flights} == {
        f"{operand} block {i}" for operand in "KV" for i in (1, 2, 3)
    }
    assert "K is under way for" in config_page(facts)


def test_a_neighbour_that_fits_no_thread_block_says_so():
    config = "(BF16, 256, 128, 64, 8): async+eager+swizzled+load_2_2_2_tiles+opt_softmax"
    facts = explained(config, turning=("two_kv_stages",))
    (neighbour,) = facts.neighbours
    assert neighbour.effects.instructions_per_step is None
    needed, allowed = facts.shared.total_bytes + 2 * 64 * 256 * 2, 163 * 1024
    problem = f"not simulated: a block needs {needed:,} bytes of shared memory; sm_80 allows {allowed:,}"
    assert problem in neighbour.verdict
    assert problem in config_page(facts).replace("<wbr>", "")


def test_copies_through_registers_are_told_apart_and_the_peeled_step_is_counted():
    timeline = explained(THROUGH_REGISTERS).timeline
    assert timeline.first_step == 2  # step 0 is peeled, iteration 0 is step 1
    assert timeline.flights and not any(flight.asynchronous for flight in timeline.flights)
    assert [f.block for f in whole_flights(timeline)][:3] == ["V block 2", "K block 3", "V block 3"]


def test_a_kernel_specialised_for_a_row_stride_is_simulated_with_it():
    assert "stride_128" in THROUGH_REGISTERS
    assert explained(THROUGH_REGISTERS).simulation.relative_error < 1e-3


def test_spans_cover_the_timeline_without_gaps():
    timeline = explained(EAGER).timeline
    position = 0
    for span in timeline.spans:
        assert span.start == position
        position += span.length
    assert position == timeline.instructions == 2 * explained(EAGER).simulation.step.instructions


def test_a_neighbour_that_cannot_be_built_says_why():
    neighbours = {n.change: n for n in explained(EAGER, turning=SOME_KNOBS).neighbours}
    impossible = neighbours["n_warps: 4 → 8"]
    assert impossible.effects is None and "an mma needs a multiple of 16" in impossible.problem
    assert neighbours["async_copy: on → off"].rejection.startswith("rule 1")


def test_instructions_compare_per_thousand_scores_whatever_the_size_of_a_step():
    facts = explained(EAGER, turning=SOME_KNOBS)
    neighbours = {n.change: n for n in facts.neighbours}
    name = "instructions_per_thousand_scores"
    slower = neighbours["optimized_softmax: on → off"]
    change = differences(facts.effects, slower.effects)[name]
    assert change > 100 and is_better(name, change) is False
    wider = neighbours["n_warps: 4 → 2"]  # 32 rows a warp instead of 16: a step has more instructions, a score fewer
    assert wider.effects.instructions_per_step > facts.effects.instructions_per_step
    change = differences(facts.effects, wider.effects)[name]
    assert change < 0 and is_better(name, change) is True


@pytest.mark.parametrize(
    ("difference", "text"), [(984.0, "+984"), (-1234, "−1,234"), (0.3, "+0.3"), (0.0, "·"), (None, "?")]
)
def test_differences_are_shown_with_their_sign_and_no_needless_digits(difference, text):
    assert shown_difference(difference) == text


def test_a_step_is_counted_per_thousand_scores_that_its_warp_computes():
    step = explained(EAGER).simulation.step
    assert step.scores == 16 * 64
    assert step.instructions_per_thousand_scores == round(step.instructions / 1.024)


def test_a_step_that_later_ones_may_undercut_says_so():
    """Where rows still find new maxima, laziness seems to cost what it saves in most steps."""
    facts, early = explained(EAGER), "an early step, in which rows still find new maxima"
    for operation, is_said in (("forward", True), ("decode", True), ("backward", False)):
        (step,) = (s for s in sections(replace(facts, operation=operation)) if s.key == "simulation")
        assert (early in step.rows[0].note) == is_said
    assert f"The step is {early}" in config_page(explained(EAGER, turning=("eager_load_blocks",)))


def test_figures_of_the_whole_run_are_not_among_those_of_one_step():
    tables = {section.key: {row.name for row in section.rows} for section in sections(explained(EAGER))}
    whole = {"bytes global to shared", "tensor flops", "relative error"}
    assert tables["run"] == whole and not tables["simulation"] & whole
    assert {"instructions", "instructions per 1,000 scores", "bank conflicts"} <= tables["simulation"]


@pytest.mark.parametrize("config", [EAGER, HOPPER_GUESSING])
def test_the_loops_size_and_what_a_step_executes_of_it_are_told_apart(config):
    facts = explained(config)
    (row,) = (row for s in sections(facts) if s.key == "ptx" for row in s.rows if row.name == "executed in a step")
    executed, body = facts.simulation.step.instructions, facts.loop.ptx.total
    assert row.value == executed
    page = config_page(facts)
    if executed == body:
        assert row.note == "every instruction of the body, once" and "a step executed" not in page
    else:
        assert row.note == f"the other {body - executed:,} stand on branches that this step did not take"
        assert f"The body has {body:,} in PTX; a step executed {executed:,}: {row.note}." in page
    assert (executed == body) == (config == EAGER)


@pytest.mark.parametrize("arch", ["sm_103", "sm_121"])
def test_later_architectures_of_a_generation_are_explained(arch):
    facts = explained(EAGER, arch)
    assert facts.arch == arch
    assert facts.occupancy.blocks_per_sm >= 1 and facts.simulation is not None


def test_a_kernel_too_big_for_an_architecture_is_explained_without_running_it():
    facts = explained("(BF16, 128, 64, 128, 4): async+eager+swizzled+load_2_2_2_tiles+two_stages", "sm_86")
    assert facts.occupancy.blocks_per_sm == 0
    assert facts.simulation is None and facts.timeline is None and facts.matrix_loads == ()
    assert "147,456 bytes of shared memory; sm_86 allows 101,376" in facts.simulation_problem


# --- The command -----------------------------------------------------------------------------------------------


@pytest.fixture
def flashwright(monkeypatch, capsys):
    return CommandLine(monkeypatch, capsys)


def test_json_holds_every_fact(flashwright):
    code, out, _ = flashwright("explain", EAGER, "--no-neighbours", "--json")
    assert code == 0
    document = json.loads(out)
    assert document.keys() == {
        "schema",
        "config",
        "family",
        "arch",
        "sample",
        "kernel",
        "knobs",
        "shapes",
        "verdict",
        "estimate",
        "registers",
        "shared",
        "occupancy",
        "buffering",
        "loop",
        "orders",
        "code",
        "simulation",
        "simulation_problem",
        "matrix_loads",
        "timelines",
        "effects",
        "neighbours",
        "operation",
        "steps",
    }
    assert document["config"] == EAGER
    assert document["registers"].keys() >= {"phases", "limit", "used", "spill_bytes", "planned"}
    assert document["occupancy"]["limits"].keys() == {"registers", "shared memory", "threads", "blocks"}
    assert document["effects"]["instructions_per_step"] == document["simulation"]["step"]["instructions"]
    verdict = document["verdict"]
    assert (verdict["kept"], verdict["reason"], verdict["space"]) == (True, None, "default")
    assert document["estimate"].keys() == {"arch", "operands", "others", "limit", "blocks_per_sm"}


def test_tables_name_every_part(flashwright):
    code, out, _ = flashwright("explain", EAGER, "--no-neighbours")
    assert code == 0
    for title in ("Registers per thread", "Shared memory", "Occupancy on sm_80", "The KV loop in PTX", "KV step"):
        assert title in out


def test_a_rejected_config_is_explained_with_the_rule(flashwright):
    code, out, _ = flashwright("explain", REJECTED, "--no-neighbours")
    assert code == 0
    assert "rejected" in out and "rule 5: B_r = 64, B_c = 64" in out


def test_a_verdict_is_beside_the_estimate_and_what_the_compiler_used():
    facts = explained(REJECTED)
    rows = {row.name: row for section in sections(facts) if section.key == "verdict" for row in section.rows}
    estimated, used = facts.estimate, facts.effects
    assert rows["estimated"].value == f"{estimated.registers} registers, {estimated.blocks_per_sm} per SM"
    assert rows["estimated"].note.startswith("before compiling: ")
    assert rows["compiled"].value == f"{used.registers} registers, {used.blocks_per_sm} per SM"
    assert rows["compiled"].note == "0 bytes spilled; for sm_80"


EIGHT_WARPS = EAGER.replace("64, 4)", "64, 8)")


def test_64_rows_in_8_warps_are_explained_by_rule_3_though_no_kernel_can_be_built(flashwright, tmp_path):
    code, out, _ = flashwright("explain", EIGHT_WARPS)
    assert code == 0
    assert "rejected" in out and "rule 3: B_r = 64 with n_warps = 8 leaves 8 rows per warp" in out
    assert "an mma needs a multiple of 16" in out
    assert "The config in words" in out
    code, out, _ = flashwright("explain", EIGHT_WARPS, "--json")
    document = json.loads(out)
    assert document.keys() == {"schema", "config", "family", "knobs", "verdict", "problem", "operation"}
    assert (document["verdict"]["kept"], document["verdict"]["space"]) == (False, None)
    page = tmp_path / "page.html"
    assert flashwright("explain", EIGHT_WARPS, "--html", str(page))[0] == 0
    assert "Rejected by the autotuning filter: rule 3" in page.read_text("utf-8")


def test_copies_that_are_not_asynchronous_are_never_said_to_arrive_during_the_arithmetic():
    eager = {knob.name: knob.meaning for knob in ampere.knobs(config_of(EAGER))}
    assert "arrive during the arithmetic" in eager["eager_load_blocks"]
    through_registers = EAGER.replace("async+", "")
    staged = {knob.name: knob.meaning for knob in ampere.knobs(config_of(f"{through_registers}+two_stages"))}
    for name in ("eager_load_blocks", "two_kv_stages"):
        assert "async_copy is off" in staged[name] and "the warp waits" in staged[name]


@pytest.mark.parametrize(
    ("kept", "space", "said"),
    [
        (True, "default", "flashwright tune times it"),
        (True, "full", "flashwright tune --space full times it; the default space leaves it out"),
        (True, None, "no search combines these knobs"),
        (False, None, "no search times what the filter rejects"),
        (False, "default", "flashwright tune times it, in spite of the filter"),
    ],
)
def test_explain_says_which_search_times_a_config(kept, space, said):
    facts = explained(EAGER)
    other = replace(facts, verdict=replace(facts.verdict, kept=kept, space=space))
    rows = {row.name: row for section in sections(other) if section.key == "verdict" for row in section.rows}
    assert (rows["search space"].value, rows["search space"].note) == (space or "none", said)


def test_a_config_of_the_committed_results_has_its_measured_effect():
    """Rule 5 excludes it, and a result file holds its speed beside the kernel that the rule keeps."""
    (base, *_) = bases()
    (turn,) = [turn for turn in base.turns_of("Q_mma_load_K_tiles") if turn.config]
    found = [each for each in measured_effects(turn.config) if each.file == EFFECTS]
    assert [(each.base, each.change, each.rows) for each in found] == [
        ("early", "Q_mma_load_K_tiles: 0 → 2", length) for length in LENGTHS
    ]
    committed = effect(read_knob_effects(ROOT / found[0].file), base, turn.config, LENGTHS[0])
    assert found[0].times_base == committed.times_base
    assert "H200" in found[0].gpu


def test_a_config_of_the_documents_claims_has_its_measured_effect(monkeypatch):
    claim = claims()[1]
    pair = claim.pairs[0]
    times = {str(pair.first): 3.0, str(pair.second): 2.0}
    cell = CellResult(pair.cell, {name: Measurement(ms, 10.0, 1e-3) for name, ms in times.items()}, {})
    monkeypatch.setattr(measured, "_committed_claims", lambda: ClaimResults({"gpu": "Fake"}, (cell,)))
    (found,) = (each for each in measured_effects(pair.second) if each.file == CLAIMS)
    assert (found.base_config, found.times_base, found.rows) == (str(pair.first), 1.5, 4096)
    assert found.change == "mma_double_buffer_loads: off → on"


def test_a_config_that_nobody_timed_has_no_measured_effect():
    assert measured_effects(config_of(REJECTED)) == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((INVALID,), "Q_mma_load_K_tiles: 3 is not allowed; allowed: 0, or a power of two from 2"),
        ((EAGER.replace("swizzled", "swizzeld"),), "did you mean 'swizzled'?"),
        (
            ("BF16, 128, 64, 64, 4: async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax",),
            f"did you mean '{WIDE}'?",
        ),
        (("whatever",), "names no kernel"),
        ((HOPPER_PLAIN, "--arch", "sm_80"), "the hopper family runs on sm_90a alone, not on sm_80"),
        (("hopper (BF16, 128, 192, 256): stages_4",), "bytes of shared memory; a thread block has at most"),
        ((EAGER, "--arch", "sm_70"), "sm_70"),
        ((EAGER, "--html", "/no/such/place/page.html"), "the directory /no/such/place does not exist"),
        ((EAGER, "--html", "/"), "/ is a directory"),
        ((EAGER, "--pages", "/no/such/place/pages"), "there is no directory /no/such/place to make pages in"),
        ((EAGER, "--pages", "/dev/null"), "/dev/null is a file; give the name of a directory"),
        ((EAGER, "--pages", "pages", "--no-neighbours"), "--pages: not together with --no-neighbours"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_1(flashwright, arguments, message):
    code, _, err = flashwright("explain", *arguments)
    assert code == 1
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [("explain", INVALID), ("compare", EAGER, INVALID), ("simulate", INVALID)])
def test_a_config_without_a_kernel_is_refused_before_anything_is_compiled_or_simulated(arguments, monkeypatch):
    def work(*_, **__):
        raise AssertionError("there is no kernel to work on")

    for place in ("explain.explain_config", "compare.explain_config", "simulate.simulate_config"):
        monkeypatch.setattr(f"flashwright.cli.{place}", work)
    code, _, error = command(*arguments)
    assert code == 1 and "Q_mma_load_K_tiles: 3 is not allowed" in error


def test_explain_config_checks_shapes_before_it_compiles(monkeypatch):
    monkeypatch.setattr(gather, "compile_many", None)
    with pytest.raises(ValueError, match="Q_mma_load_K_tiles: 3 is not allowed"):
        explain_config(INVALID)


def test_a_text_far_from_every_config_gets_no_hint(flashwright):
    _, _, err = flashwright("explain", "whatever")
    assert "did you mean" not in err


def test_html_is_written_and_said_so(flashwright, tmp_path):
    page = tmp_path / "page.html"
    code, out, _ = flashwright("explain", EAGER, "--no-neighbours", "--html", str(page))
    assert code == 0
    assert str(page) in out
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
