"""`flashwright compare`: exactly the differing facts of two configs are marked."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from explain_cases import (
    AMPERE_BACKWARD,
    EAGER,
    HOPPER_BACKWARD,
    HOPPER_OVERLAPPED,
    HOPPER_PLAIN,
    INVALID,
    LATE,
    REJECTED,
    TWO_STAGES,
    CommandLine,
    explained,
)

from flashwright.problem.options import AttentionOptions
from flashwright.workbench.explain.compare import compare_facts, config_labels
from flashwright.workbench.explain.comparison_page import comparison_page
from flashwright.workbench.explain.report import sections
from flashwright.workbench.sample import Sample


@pytest.fixture
def flashwright(monkeypatch, capsys):
    return CommandLine(monkeypatch, capsys)


def marked(comparison, section):
    rows = next(s.rows for s in comparison.sections if s.key == section)
    return {row.name: row.values for row in rows if row.differs}


def test_a_config_does_not_differ_from_itself():
    assert compare_facts(explained(EAGER), explained(EAGER)).differing == 0


def test_exactly_the_differing_facts_are_marked():
    comparison = compare_facts(explained(EAGER), explained(LATE))
    assert marked(comparison, "knobs") == {"eager_load_blocks": ("on", "off")}
    verdict = marked(comparison, "verdict")  # besides, what result files have measured of either
    assert {name: values for name, values in verdict.items() if not name.startswith("measured")} == {
        "search space": ("default", "full")
    }
    for same in ("shapes", "shared", "buffering"):
        assert marked(comparison, same) == {}
    for section in comparison.sections:
        values = [
            {row.name: row.value for s in sections(facts) if s.key == section.key for row in s.rows}
            for facts in comparison.facts
        ]
        for row in section.rows:
            assert row.differs == (values[0].get(row.name) != values[1].get(row.name))


def test_what_a_rejection_is_held_against_is_no_difference():
    verdict = marked(compare_facts(explained(EAGER), explained(REJECTED)), "verdict")
    assert verdict["filter"] == ("kept", "rejected")
    assert not {"estimated", "compiled"} & set(verdict)  # which a config that is kept has as well, in other tables


def test_facts_that_only_one_config_has_keep_their_place():
    comparison = compare_facts(explained(EAGER), explained(TWO_STAGES))
    shared = next(s for s in comparison.sections if s.key == "shared")
    assert [row.name for row in shared.rows if row.name.startswith("K")] == ["K, stage 0", "K, stage 1", "K"]
    assert marked(comparison, "shared")["K"][1] == "–"


def test_json_lists_every_row_with_both_values(flashwright):
    code, out, _ = flashwright("compare", EAGER, LATE, "--json")
    assert code == 0
    document = json.loads(out)
    assert document.keys() == {"schema", "configs", "arch", "sample", "differing", "effects", "sections"}
    assert document["configs"] == [EAGER, LATE]
    rows = [row for section in document["sections"] for row in section["rows"]]
    assert all(row.keys() == {"name", "values", "notes", "differs"} for row in rows)
    assert sum(row["differs"] for row in rows) == document["differing"] > 0


def test_the_table_marks_differences(flashwright):
    code, out, _ = flashwright("compare", EAGER, LATE)
    assert code == 0
    lines = {line.split("│")[2].strip(): line for line in out.splitlines() if line.count("│") == 5}
    assert "≠" in lines["eager_load_blocks"]
    assert "≠" not in lines["async_copy"]


def test_only_differing_facts_can_be_asked_for(flashwright, tmp_path):
    _, table, _ = flashwright("compare", EAGER, LATE, "--differing")
    page = tmp_path / "page.html"
    _, document, _ = flashwright("compare", EAGER, LATE, "--differing", "--json", "--html", str(page))
    for out in (table, document, written(page)):
        assert "eager_load_blocks" in out
        assert "async_copy" not in out
    assert all(row["differs"] for section in json.loads(document)["sections"] for row in section["rows"])
    every = compare_facts(explained(EAGER), explained(LATE)).facts_compared
    assert f"of {every:,}</small>" in written(page)


def written(page: Path) -> str:
    """What a page says, wherever its lines may break."""
    return page.read_text("utf-8").replace("<wbr>", "")


def test_the_page_has_differing_facts_first_and_every_fact_once(flashwright, tmp_path):
    page = tmp_path / "page.html"
    code, _, _ = flashwright("compare", EAGER, LATE, "--html", str(page))
    assert code == 0
    text = written(page)
    comparison = compare_facts(explained(EAGER), explained(LATE))
    assert text.count('class="differs"') == comparison.differing
    assert text.count('<th scope="row">') == comparison.facts_compared
    places = [text.index(f'id="{key}"') for key in ("differing", "registers", "timeline", "order", "same")]
    assert text.index("facts that differ") < places[0] and places == sorted(places)
    assert text.rindex('class="differs"') < places[1] < text.index("async_copy")


def test_timelines_of_two_configs_are_on_one_scale():
    page = comparison_page(compare_facts(explained(HOPPER_PLAIN), explained(HOPPER_OVERLAPPED)))
    pictures = re.findall(r'<svg[^>]*class="picture timeline-0.*?</svg>', page)
    assert len(pictures) == 2
    places = [
        {text.text: text.get("x") for text in ElementTree.fromstring(picture).iter() if text.tag.endswith("text")}
        for picture in pictures
    ]
    assert all(places[0][tick] == places[1][tick] for tick in ("0", "100", "500"))


def test_figures_say_which_config_they_speak_for():
    comparison = compare_facts(explained(HOPPER_PLAIN), explained(HOPPER_OVERLAPPED))
    judged = {effect.name: effect.second_is_better for effect in comparison.effects}
    assert judged["instructions_per_thousand_scores"] is True  # lazy rescaling
    assert judged["shared_bytes"] is False  # persistent blocks have two slots of Q
    assert judged["registers"] is None  # what a thread is launched with is a share of the multiprocessor's
    assert "shared bytes" in comparison.effects_judged(False)


def test_operations_are_different_problems_and_both_are_named():
    comparison = compare_facts(explained(HOPPER_PLAIN), explained(HOPPER_BACKWARD))
    assert {effect.second_is_better for effect in comparison.effects} == {None}
    assert "A forward and a backward kernel, compiled for sm_90a" in comparison_page(comparison)
    titles = [section.title for section in comparison.sections]
    assert "The KV loop in PTX; The query loop in PTX" in titles and "Registers per thread" in titles


def test_what_was_not_simulated_is_said_with_the_reason():
    narrow = Sample(AttentionOptions.of(window=(90, 0)))
    facts = [explained(config, sample=narrow) for config in (AMPERE_BACKWARD, AMPERE_BACKWARD.replace("_1+", "_2+"))]
    page = comparison_page(compare_facts(*facts))
    assert "compiled for sm_80, window 90 left, 0 right" in page
    assert page.count("<small>not simulated</small>") == 2
    for label in ("stages_2_1", "stages_2_2"):
        assert f"{label} was not simulated: 64 keys visit 3 blocks of 64 rows, of which an edge" in page


def test_lines_of_the_page_break_between_the_words_that_tell_configs_apart():
    config = "(BF16, 64, 64, 64, 4): async+swizzled+load_0_2_2_tiles"
    page = comparison_page(compare_facts(explained(config), explained(f"{config}+buffer+opt_softmax")))
    label = "buffer+<wbr>opt_<wbr>softmax"
    for place in (f"<dt>better in {label}</dt>", f"and <b>{label}</b>", f"<h3>{label}"):
        assert place in page


def test_head_dimensions_are_different_problems_and_not_judged():
    wider = replace(explained(LATE), config=LATE.replace("(BF16, 64, ", "(BF16, 128, "))
    comparison = compare_facts(explained(EAGER), wider)
    assert {effect.second_is_better for effect in comparison.effects} == {None}


@pytest.mark.parametrize(
    ("second", "labels"),
    [
        (LATE, ("eager", "without eager")),
        (TWO_STAGES, ("(BF16, 64, 64, 64, 4)", "(BF16, 64, 64, 32, 4)")),
        (HOPPER_PLAIN, ("(BF16, 64, 64, 64, 4)", "hopper (BF16, 64, 128, 64)")),
        (EAGER, (EAGER, EAGER)),
        (EAGER.replace("eager", "two_stages"), ("eager", "two_stages")),
    ],
)
def test_configs_are_named_by_what_tells_them_apart(second, labels):
    assert config_labels(EAGER, second) == labels


def test_tables_are_headed_by_the_configs(flashwright):
    _, out, _ = flashwright("compare", EAGER, LATE)
    assert "without eager" in out and "first" not in out.split()


@pytest.mark.parametrize("other", [INVALID, "nonsense"])
def test_bad_input_is_one_message_and_exit_code_1(flashwright, other):
    code, _, err = flashwright("compare", EAGER, other)
    assert code == 1
    assert "error:" in err and "Traceback" not in err
