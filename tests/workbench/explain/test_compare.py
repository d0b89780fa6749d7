"""`flashwright compare`: exactly the differing facts of two configs are marked."""

from __future__ import annotations

import json

import pytest
from explain_cases import EAGER, INVALID, LATE, TWO_STAGES, CommandLine, explained

from flashwright.workbench.explain.compare import compare_facts
from flashwright.workbench.explain.report import sections


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
    assert marked(comparison, "verdict") == {"search space": ("default", "full")}
    for same in ("shapes", "shared", "buffering"):
        assert marked(comparison, same) == {}
    for section in comparison.sections:
        values = [
            {row.name: row.value for s in sections(facts) if s.key == section.key for row in s.rows}
            for facts in comparison.facts
        ]
        for row in section.rows:
            assert row.differs == (values[0].get(row.name) != values[1].get(row.name))


def test_facts_that_only_one_config_has_keep_their_place():
    comparison = compare_facts(explained(EAGER), explained(TWO_STAGES))
    shared = next(s for s in comparison.sections if s.key == "shared")
    assert [row.name for row in shared.rows if row.name.startswith("K")] == ["K, stage 0", "K, stage 1", "K"]
    assert marked(comparison, "shared")["K"][1] == "–"


def test_json_lists_every_row_with_both_values(flashwright):
    code, out, _ = flashwright("compare", EAGER, LATE, "--json")
    assert code == 0
    document = json.loads(out)
    assert document.keys() == {"schema", "configs", "arch", "sample", "differing", "sections"}
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


def test_only_differing_facts_can_be_asked_for(flashwright):
    _, out, _ = flashwright("compare", EAGER, LATE, "--differing")
    assert "eager_load_blocks" in out
    assert "async_copy" not in out


def test_a_page_is_written(flashwright, tmp_path):
    page = tmp_path / "page.html"
    code, _, _ = flashwright("compare", EAGER, LATE, "--html", str(page))
    assert code == 0
    text = page.read_text("utf-8")
    assert text.count('class="differs"') == compare_facts(explained(EAGER), explained(LATE)).differing
    assert text.count('class="picture timeline-') == text.count('class="picture order-') == 2


@pytest.mark.parametrize("other", [INVALID, "nonsense"])
def test_bad_input_is_one_message_and_exit_code_1(flashwright, other):
    code, _, err = flashwright("compare", EAGER, other)
    assert code == 1
    assert "error:" in err and "Traceback" not in err
