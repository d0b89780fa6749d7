"""Packed sequences: `cu_seqlens` that no tensor has are refused with their values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright.problem.sequences import check_starts, sequence_rows


def starts(*values: int, dtype: type = np.int32) -> np.ndarray:
    return np.array(values, dtype)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 5), st.integers(0, 5))
def test_sequences_are_the_rows_between_their_starts(lengths, before, after):
    ends = np.cumsum([before, *lengths])
    parts = sequence_rows("cu_seqlens_q", starts(*ends), int(ends[-1]) + after, max(lengths))
    assert [part.stop - part.start for part in parts] == lengths
    assert parts[0].start == before


@pytest.mark.parametrize(
    ("values", "longest", "message"),
    [
        ((-1, 4), None, r"cu_seqlens_k: \[-1, 4\] is not allowed; allowed: starts that do not decrease, from 0 on"),
        ((0, 5, 4), None, "do not decrease"),
        ((0, 4, 11), None, "ends at row 11, but the tensor has 10 rows"),
        ((0, 4, 10), 5, "max_seqlen_k: 5 is not allowed; a sequence of cu_seqlens_k has 6 rows"),
    ],
)
def test_starts_that_no_tensor_of_ten_rows_has_are_refused(values, longest, message):
    with pytest.raises(ValueError, match=message):
        sequence_rows("cu_seqlens_k", starts(*values), 10, longest)


@pytest.mark.parametrize(
    ("q_starts", "kv_starts", "error", "message"),
    [
        (None, starts(0, 1), ValueError, "cu_seqlens_q: missing; packed sequences need cu_seqlens of both q and k"),
        (starts(0, 1), None, ValueError, "cu_seqlens_k: missing"),
        ([0, 1], starts(0, 1), TypeError, "cu_seqlens_q: expected a tensor of int32, got list"),
        (starts(0, 1), starts(0, 1, dtype=np.int64), ValueError, "of int64 is not allowed; allowed: int32"),
        (starts(0), starts(0), ValueError, "one more entry than there are sequences"),
        (starts(0, 1)[None], starts(0, 1), ValueError, "one dimension"),
        (starts(0, 1), starts(0, 1, 2), ValueError, "cu_seqlens_k: 3 entries, but cu_seqlens_q has 2"),
    ],
)
def test_what_cannot_be_starts_is_refused_whatever_its_values(q_starts, kv_starts, error, message):
    with pytest.raises(error, match=message):
        check_starts(q_starts, kv_starts)


def test_starts_of_both_are_accepted():
    check_starts(starts(0, 3, 7), starts(0, 0, 9))
