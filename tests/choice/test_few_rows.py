"""Which calls are decoded."""

from __future__ import annotations

import pytest

from flashwright.choice.few_rows import MANY_KEYS, MOST_PACKED_ROWS, attended_keys, decodes
from flashwright.problem.window import Window

CAUSAL, TOP_LEFT, FULL = Window(right=0), Window(right=0, bottom_right=False), Window()


@pytest.mark.parametrize("window", (FULL, CAUSAL, Window(left=100, right=0)))
@pytest.mark.parametrize("keys", (1, 64, 65, 1025, 100_000))
def test_a_single_row_is_decoded_whatever_the_number_of_keys(window, keys):
    assert decodes(window, 1, 32, 8, 1, keys)


@pytest.mark.parametrize("keys", (5, 64, 65, 1025, 100_000))
def test_a_few_rows_behind_a_cache_are_decoded_whatever_the_number_of_keys(keys):
    assert decodes(CAUSAL, 1, 32, 8, 4, keys)


def test_prompts_are_the_forwards():
    for rows in (4, 64, 128, 4096):
        assert not decodes(CAUSAL, 1, 32, 8, rows, rows)


def test_more_rows_are_decoded_where_keys_are_many():
    assert decodes(CAUSAL, 1, 32, 8, 16, MANY_KEYS)
    assert not decodes(CAUSAL, 1, 32, 8, 16, MANY_KEYS - 1)
    assert not decodes(CAUSAL, 1, 32, 8, MOST_PACKED_ROWS // 4 + 1, 100_000)


def test_keys_outside_of_the_window_do_not_count():
    assert attended_keys(16, 100_000, Window(left=99, right=0)) == 115
    assert attended_keys(16, 100_000, TOP_LEFT) == 16
    assert not decodes(Window(left=99, right=0), 1, 32, 8, 16, 100_000)
    assert not decodes(TOP_LEFT, 1, 32, 8, 1, 100_000), "the row attends to one key"
