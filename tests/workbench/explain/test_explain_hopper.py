"""`flashwright explain` and `compare` for the Hopper family: arithmetic done by hand, and what its warps executed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from explain_cases import EAGER, HOPPER_GUESSING, HOPPER_OVERLAPPED, HOPPER_PLAIN, CommandLine, explained

from flashwright.hardware.architectures import architecture
from flashwright.kernels.forward.hopper import explain as hopper
from flashwright.kernels.registry import parse_config
from flashwright.runtime.compiling import compile_kernel
from flashwright.simulator.trace import TraceEntry
from flashwright.workbench.explain.compare import compare_facts
from flashwright.workbench.explain.comparison_page import comparison_page
from flashwright.workbench.explain.fragments import accumulator_holder, c_layout
from flashwright.workbench.explain.gather import loop_facts
from flashwright.workbench.explain.instruction_kinds import Kind
from flashwright.workbench.explain.page import config_page
from flashwright.workbench.explain.report import is_better, sections
from flashwright.workbench.explain.under_way import products_by_groups

WIDE = "hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy+guess"
SM_90 = architecture("sm_90")


# --- Arithmetic ------------------------------------------------------------------------------------------------


def test_registers_of_operands_are_those_computed_by_hand():
    phases = {phase.name: phase for phase in hopper.register_phases(parse_config(WIDE))}
    registers = {o.operand: o.registers for phase in phases.values() for o in phase.operands}
    assert registers == {
        "O accumulator": 64 * 128 // 128,
        "S accumulator": 64 * 128 // 128,
        "P operand": 64 * 128 // 2 // 128,
        "row state": 2 * 4,
        "guessed sums": 2,
    }
    assert phases["softmax"].total == 64 + 64 + 32 + 8 + 2  # P is still being multiplied
    assert phases["S → P"].total == 64 + 64 + 8
    assert hopper.register_limit(parse_config(WIDE)) == 240


def test_without_overlap_p_takes_the_place_of_s():
    phases = {phase.name: phase.total for phase in hopper.register_phases(parse_config(HOPPER_PLAIN))}
    assert phases == {"S = QKᵀ": 32 + 32 + 4, "softmax": 32 + 32 + 4, "O += PV": 32 + 16 + 4}


def test_the_register_shares_fit_the_multiprocessor():
    for B_r in (64, 128, 192):
        config = parse_config(f"hopper (BF16, 64, {B_r}, 64): stages_2")
        consumer, producer = hopper.reallocations(config)
        assert (consumer.part, producer.part) == ("consumer", "producer")
        assert 128 * (config.n_consumers * consumer.registers + producer.registers) <= SM_90.registers_per_sm


def test_shared_memory_map_holds_q_slots_stages_barriers_and_announced_tiles():
    shared = hopper.shared_map(parse_config(WIDE))
    assert [(r.name, r.offset, r.bytes) for r in shared.regions] == [
        ("Q 0, slot 0", 0, 16384),
        ("Q 1, slot 0", 16384, 16384),
        ("Q 0, slot 1", 32768, 16384),
        ("Q 1, slot 1", 49152, 16384),
        ("K, stage 0", 65536, 32768),
        ("K, stage 1", 98304, 32768),
        ("V, stage 0", 131072, 32768),
        ("V, stage 1", 163840, 32768),
        ("barriers, tiles", 196608, (2 * 2 + 2 + 2 + 2) * 16 + 2 * 16),
    ]
    assert shared.regions[-1].note == "10 pairs: full, empty; 2 tiles that come next"
    assert shared.total_bytes == shared.regions[-1].end
    assert all(a.end == b.offset for a, b in pairwise(shared.regions))


def test_a_consumer_has_a_second_slot_of_q_where_there_is_room():
    for config, slots in {
        WIDE: 2,
        WIDE.replace("persistent+", ""): 1,  # there is no next tile
        "hopper (BF16, 64, 192, 64): stages_2+persistent": 1,
        "hopper (BF16, 256, 128, 80): stages_2+persistent": 1,
    }.items():
        of_q = [region.name for region in hopper.shared_map(parse_config(config)).regions if region.operand == "Q"]
        assert len(of_q) == slots * parse_config(config).n_consumers
        shapes = {shape.name: shape for shape in hopper.shapes(parse_config(config))}
        assert shapes["Q_stages"].value == slots
        assert ("come while this one's are read" in shapes["Q_stages"].meaning) == (slots == 2)
        (reason,) = (b.reason for b in hopper.buffering(parse_config(config)) if b.operand == "Q")
        assert ("the next tile's has a slot of its own" in reason) == (slots == 2)


def test_every_knob_is_put_into_words():
    config = parse_config(WIDE)
    knobs = hopper.knobs(config)
    assert [knob.name for knob in knobs] == list(config.__dataclass_fields__)
    assert all(knob.meaning for knob in knobs)
    assert {knob.name for knob in knobs if knob.is_on} == {
        "overlaps_softmax",
        "ping_pong",
        "persistent",
        "lazy_rescale",
        "guesses_maxima",
    }


def test_what_a_guess_is_and_what_its_absence_means_is_said():
    guessed, sought = (
        next(knob.meaning for knob in hopper.knobs(parse_config(config)) if knob.name == "guesses_maxima")
        for config in (HOPPER_GUESSING, HOPPER_OVERLAPPED)
    )
    assert "after the first 128 keys that a row visits" in guessed
    assert "lifted by a power of two" in guessed and "computes the scores again" in guessed
    assert "before it takes exponentials" in sought


def test_neighbours_turn_every_knob_of_how_alone():
    config = parse_config(WIDE)
    changes = [values for _, values in hopper.neighbours(config)]
    assert all(len(values) == 1 for values in changes)
    assert {name for values in changes for name in values} == set(config.__dataclass_fields__) - {"dtype", "d_head"}
    assert all(getattr(config, name) != value for values in changes for name, value in values.items())


def test_an_accumulator_is_tiles_like_those_of_mma_and_every_lane_holds_its_share():
    for row, holders in enumerate(c_layout()):
        for column, holder in enumerate(holders):
            second_tile = accumulator_holder(row, column + 8)
            assert (second_tile.lane, second_tile.register) == (holder.lane, holder.register + 4)
    held = Counter(accumulator_holder(row, column).lane for row in range(16) for column in range(128))
    assert held == dict.fromkeys(range(32), 128 // 2)


def test_swizzling_makes_the_eight_rows_of_a_core_matrix_lie_in_different_banks():
    swizzled, plain = explained(HOPPER_PLAIN).matrix_loads
    assert (swizzled.swizzled, plain.swizzled) == (True, False)
    for load, groups, wavefronts in ((swizzled, 8, 4), (plain, 1, 32)):
        first = [access for access in load.lanes if access.lane < 8]
        assert [(access.row, access.vector) for access in first] == [(row, 2) for row in range(8)]  # columns 16 to 23
        assert len({access.bank_group for access in first}) == groups
        assert (load.wavefronts, load.wavefronts_ideal) == (wavefronts, 4)
        assert all(load.bank_groups[access.row][access.vector] == access.bank_group for access in load.lanes)


# --- Compiled and simulated ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "scores"), [(HOPPER_PLAIN, 1), (HOPPER_OVERLAPPED, 1), (HOPPER_GUESSING, 2)], ids=str
)
def test_the_kv_loop_holds_the_products_of_one_step_and_no_other_loop(config, scores):
    """Those of the scores once more where exponentials may overflow: in the loop without care, which votes on it."""
    facts = explained(config)
    assert facts.loop.ptx.by_kind.get(Kind.VOTE.value, 0) == scores - 1
    products = [n for opcode, n in facts.loop.ptx.by_opcode.items() if opcode.startswith("wgmma.mma")]
    assert sum(products) == scores * 64 // 16 + 64 // 16
    assert facts.loop.serialised is False
    if facts.loop.sass is not None:
        hgmma = [n for opcode, n in facts.loop.sass.by_opcode.items() if opcode.startswith("HGMMA")]
        assert sum(hgmma) == sum(products)
        assert facts.loop.sass.by_kind.get(Kind.VOTE.value, 0) == scores - 1
    assert facts.simulation.relative_error < 8e-3


def test_serialised_products_are_found_in_the_assemblers_log():
    kernel = compile_kernel(parse_config(HOPPER_PLAIN))
    log = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the function 'kernel'\n"
    )
    serialised = replace(kernel, program=replace(kernel.program, log=kernel.program.log + log))
    loop = loop_facts(serialised)
    assert loop.serialised is True
    facts = replace(explained(HOPPER_PLAIN), loop=loop)
    rows = {row.name: row.value for section in sections(facts) for row in section.rows}
    assert rows["products serialised"] == "yes"
    header = config_page(facts).partition("<main>")[0]
    assert "serialised the products" in header
    assert "serialised the products" not in config_page(explained(HOPPER_PLAIN)).partition("<main>")[0]


def test_the_launch_moves_what_q_k_and_v_hold():
    simulation = explained(HOPPER_PLAIN).simulation
    assert simulation.counters["bytes_global_to_shared"] == 2 * 64 * (simulation.q_rows + 2 * simulation.kv_rows)
    assert simulation.counters["tensor_flops"] == 4 * 64 * simulation.q_rows * simulation.kv_rows


def test_there_is_a_timeline_of_every_consumer_and_of_the_producer():
    roles = [(timeline.warp, timeline.role) for timeline in explained(HOPPER_OVERLAPPED).timelines]
    assert roles == [
        ("consumer warpgroup 0", "consumer"),
        ("consumer warpgroup 1", "consumer"),
        ("producer", "producer"),
    ]
    for timeline in explained(HOPPER_OVERLAPPED).timelines:
        assert sum(span.length for span in timeline.spans) == timeline.instructions


def softmax_between_issue_and_wait(config: str) -> dict[str, bool]:
    """Per product of the two steps shown, whether a whole softmax lies between its commit and the wait for it."""
    timeline = explained(config).timeline
    assert [phase.name for phase in timeline.phases].count("softmax") == 2
    return {
        flight.block: any(
            phase.name == "softmax" and flight.issued <= phase.start and phase.end <= flight.end
            for phase in timeline.phases
        )
        for flight in timeline.flights
    }


@pytest.mark.parametrize(("config", "first"), [(HOPPER_OVERLAPPED, 2), (HOPPER_GUESSING, 3)], ids=str)
def test_with_overlap_softmax_runs_while_the_step_befores_output_is_multiplied(config, first):
    """Shown are the second and the third iteration of the loop, which a kernel that guesses enters after the two blocks
    that hold a row's first 128 keys."""
    assert explained(config).timeline.first_step == first
    assert softmax_between_issue_and_wait(config) == {
        f"S of step {first}": False,
        f"O of step {first - 1}": True,
        f"S of step {first + 1}": False,
        f"O of step {first}": True,
    }


def test_the_producers_loop_begins_with_the_second_step_whatever_the_consumers_do():
    assert {timeline.first_step for timeline in explained(HOPPER_GUESSING).timelines[:-1]} == {3}
    assert explained(HOPPER_GUESSING).timelines[-1].first_step == 2


def test_without_overlap_no_product_is_under_way_during_softmax():
    found = softmax_between_issue_and_wait(HOPPER_PLAIN)
    assert list(found) == ["S of step 2", "O of step 2", "S of step 3", "O of step 3"]
    assert not any(found.values())


def subjects(timeline, kind):
    return Counter(
        {
            operand: sum(s.length for s in timeline.spans if s.kind == kind.value and s.operand == operand)
            for operand in {s.operand for s in timeline.spans if s.kind == kind.value}
        }
    )


def test_consumers_wait_for_each_tile_and_take_turns_once_a_step():
    for config, turns in ((HOPPER_OVERLAPPED, {"turn": 2 * 2}), (HOPPER_PLAIN, {})):
        consumer = explained(config).timeline
        assert subjects(consumer, Kind.MMA) == {"S": 2 * 4, "O": 2 * 4}
        waits = subjects(consumer, Kind.WAIT)
        assert (waits["K"], waits["V"], waits[None]) == (2, 2, 0)
        assert subjects(consumer, Kind.BARRIER) == {"release": 2 * 2, **turns}


def test_a_guess_that_goes_well_saves_maxima_and_computes_no_scores_twice():
    """One exponential a score; and between lanes, a vote on whether exponentials overflowed, and one on whether a sum
    has grown."""
    guessed, sought = explained(HOPPER_GUESSING), explained(HOPPER_OVERLAPPED)
    of_guess, of_search = (
        Counter(kind for span in facts.timeline.spans for kind in span.length * [span.kind])
        for facts in (guessed, sought)
    )
    assert of_guess[Kind.MMA.value] == of_search[Kind.MMA.value]
    assert of_guess[Kind.EXPONENTIAL.value] == 2 * 64 // 2 < of_search[Kind.EXPONENTIAL.value]
    assert of_guess[Kind.SHUFFLE.value] == 2 * 2
    assert guessed.effects.instructions_per_step < sought.effects.instructions_per_step


def test_where_sums_stay_small_o_is_not_rescaled():
    assert [phase.name for phase in explained(HOPPER_GUESSING).timeline.phases] == 2 * ["softmax"]


def test_votes_on_a_guess_are_told_from_turns():
    timeline = explained(HOPPER_GUESSING).timeline
    assert subjects(timeline, Kind.BARRIER) == {"release": 2 * 2, "turn": 2 * 2}
    assert subjects(timeline, Kind.VOTE) == {"guess": 2}


def test_scores_computed_again_belong_to_the_step_whose_guess_failed():
    opcodes = {
        "S": "wgmma.mma_async", "O": "wgmma.mma_async", "commit": "wgmma.commit_group.sync.aligned",
        "wait": "wgmma.wait_group.sync.aligned", "guess": "bar.red.or.pred", "release": "mbarrier.arrive.b64",
    }  # fmt: skip
    order = "S commit wait release S commit O commit wait guess S commit wait release S commit O commit wait guess"
    subjects = order.split()
    trace = [TraceEntry(line, opcodes[name], None, f"{opcodes[name]} 0;") for line, name in enumerate(subjects)]
    flights = products_by_groups(trace, lambda entry: subjects[entry.ptx_line])
    assert [flight.block for flight in flights] == [
        "S of step 0", "S of step 1", "O of step 0", "S of step 1 again", "S of step 2", "O of step 1",
    ]  # fmt: skip


def test_the_producer_copies_one_k_and_one_v_a_step_into_stages_found_empty():
    producer = explained(HOPPER_OVERLAPPED).timelines[-1]
    assert subjects(producer, Kind.COPY) == {"K": 2, "V": 2}  # one panel of 64 columns each
    assert subjects(producer, Kind.WAIT) == {"K": 2, "V": 2}
    begun = [(f.block, f.region) for f in producer.flights if f.start >= 0]
    assert begun == [  # V is needed a step later
        ("K of step 2", "K, stage 0"),
        ("V of step 1", "V, stage 1"),
        ("K of step 3", "K, stage 1"),
        ("V of step 2", "V, stage 0"),
    ]
    for region in {flight.region for flight in producer.flights}:
        of_stage = [flight for flight in producer.flights if flight.region == region]
        assert all(a.end <= b.start for a, b in pairwise(of_stage))


def test_neighbours_say_what_would_change_and_why_some_cannot_be():
    facts = explained(HOPPER_GUESSING, turning=("ping_pong", "kv_stages", "lazy_rescale"))
    neighbours = {neighbour.change: neighbour for neighbour in facts.neighbours}
    assert neighbours.keys() == {
        "kv_stages: 2 → 1", "kv_stages: 2 → 3", "ping_pong: on → off", "lazy_rescale: on → off"
    }  # fmt: skip
    assert "a guess is that O need not be rescaled" in neighbours["lazy_rescale: on → off"].problem
    assert "needs kv_stages of at least 2" in neighbours["kv_stages: 2 → 1"].problem
    assert neighbours["kv_stages: 2 → 3"].effects.shared_bytes == facts.effects.shared_bytes + 2 * 64 * 128 + 2 * 16
    fewer = neighbours["ping_pong: on → off"]
    assert fewer.effects.instructions_per_step < facts.effects.instructions_per_step
    assert not fewer.fewer_registers_are_better  # the launch fixes them
    assert is_better("registers", -8, fewer_registers_are_better=False) is None


# --- The commands ----------------------------------------------------------------------------------------------


@pytest.fixture
def flashwright(monkeypatch, capsys):
    return CommandLine(monkeypatch, capsys)


def schema(value):
    """The keys of a document, at every depth; of lists, those of the first element."""
    if isinstance(value, dict):
        return {key: schema(inner) for key, inner in value.items()}
    return [schema(value[0])] if isinstance(value, list) and value else None


def test_json_has_the_schema_of_the_ampere_family(flashwright):
    documents = []
    for config in (HOPPER_PLAIN, EAGER):
        code, out, _ = flashwright("explain", config, "--no-neighbours", "--json")
        assert code == 0
        documents.append(json.loads(out))
    hopper_document, ampere_document = documents
    assert hopper_document["arch"] == "sm_90a" and hopper_document["family"] == "Hopper"
    assert hopper_document.keys() == ampere_document.keys()
    assert hopper_document["verdict"].keys() == ampere_document["verdict"].keys()  # what was measured differs
    for part in ("knobs", "shapes", "occupancy", "buffering", "effects", "timelines", "matrix_loads"):
        assert schema(hopper_document[part]) == schema(ampere_document[part])


def test_tables_name_every_part(flashwright):
    code, out, _ = flashwright("explain", HOPPER_PLAIN, "--no-neighbours")
    assert code == 0
    for title in ("Registers per thread", "consumer after launch", "Occupancy on sm_90a", "products serialised"):
        assert title in out
    assert "overlap: off; a warpgroup's products wait for its softmax" in out


def test_two_hopper_configs_are_compared(flashwright):
    code, out, _ = flashwright("compare", HOPPER_PLAIN, HOPPER_OVERLAPPED, "--json")
    assert code == 0
    (knobs,) = [section for section in json.loads(out)["sections"] if section["section"] == "knobs"]
    differing = {row["name"] for row in knobs["rows"] if row["differs"]}
    assert differing == {"overlaps_softmax", "ping_pong", "persistent", "lazy_rescale"}


def test_configs_of_both_families_are_compared_on_the_architecture_that_runs_both(flashwright):
    code, out, _ = flashwright("compare", EAGER, HOPPER_PLAIN, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["arch"] == "sm_90a"
    rows = {(s["section"], row["name"]): row for s in document["sections"] for row in s["rows"]}
    assert rows["knobs", "B_c"]["values"] == ["64", "64"]
    assert rows["knobs", "ping_pong"]["values"] == ["–", "off"]
    assert rows["registers", "O accumulator"]["values"] == [32, 32]
    code, _, err = flashwright("compare", EAGER, HOPPER_PLAIN, "--arch", "sm_80")
    assert code == 1 and "the hopper family runs on sm_90a alone" in err


def test_a_page_of_two_families_has_the_timelines_of_both():
    page = comparison_page(compare_facts(explained(EAGER), explained(HOPPER_PLAIN)))
    assert page.count('class="picture timeline-') == 1 + 2  # of Hopper, one warp of each kind
