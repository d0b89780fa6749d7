"""The table of instruction coverage says what loading says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from knob_pages.instruction_coverage import FORMS, coverage_table, refused_forms

EVERY_FORM = {form for section in FORMS.values() for forms in section.values() for form in forms}


@pytest.mark.parametrize(
    ("form", "is_executed"),
    [
        ("mma.sync", True),
        ("cp.reduce.async.bulk.global", True),
        ("lop3.or", True),
        ("wmma.mma", True),
        ("mma.sp", False),
        ("tcgen05.wait", False),
        ("tex.1d", False),
    ],
)
def test_forms_are_tried_by_loading_them(form: str, is_executed: bool) -> None:
    found = [other for other in EVERY_FORM if other.startswith(form)]
    assert found and any(other not in refused_forms() for other in found) == is_executed


def test_every_instruction_is_in_one_column_of_its_section() -> None:
    rows = coverage_table().splitlines()[2:]
    assert len(rows) == len(FORMS)
    for row, (section, instructions) in zip(rows, FORMS.items(), strict=True):
        title, *columns = row.strip("| ").split(" | ")
        assert title == section
        names = [re.sub(r" \(not [^)]*\)", "", column) for column in columns]
        for name in instructions:
            assert sum(f"`{name}`" in column for column in names) == 1, name
