"""Quantities as people read them."""

import re

import pytest
from command_line import flashwright

from flashwright.workbench.quantities import counted, kib, per_thousand


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 instructions"), (1, "1 instruction"), (2, "2 instructions"), (1024, "1,024 instructions")],
)
def test_one_thing_is_not_several(count, text):
    assert counted(count, "instruction") == text


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0"), (48 * 1024, "48"), (147_648, "144.2"), (231_008, "225.6")])
def test_sizes_have_at_most_four_digits(size_bytes, text):
    assert kib(size_bytes) == text


@pytest.mark.parametrize(("count", "scores", "rate"), [(691, 1024, 675), (436, 2048, 213), (3, 1024, 2.9), (0, 64, 0)])
def test_counts_per_thousand_scores_are_rounded_as_they_are_read(count, scores, rate):
    assert per_thousand(count, scores) == rate


def test_errors_have_three_digits():
    code, out, _ = flashwright(
        "simulate", "(BF16, 64, 64, 64, 4): async+load_2_2_2_tiles", "--rows", "64", "--heads", "1"
    )
    assert code == 0 and re.search(r"^relative error: 0\.00\d{1,3}$", out, re.MULTILINE)
