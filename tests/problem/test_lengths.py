"""Lengths of sequences fall into ranges within which one config serves."""

from __future__ import annotations

import pytest

from flashwright.problem.lengths import LENGTH_BUCKETS, LONG, LONGEST, MEDIUM, SHORT, SHORTEST, length_bucket


@pytest.mark.parametrize(
    ("length", "bucket"),
    [
        (1, SHORTEST),
        (16, SHORTEST),
        (17, SHORT),
        (64, SHORT),
        (65, MEDIUM),
        (1024, MEDIUM),
        (1025, LONG),
        (4096, LONG),
        (4097, LONGEST),
        (2**20, LONGEST),
    ],
)
def test_lengths_fall_into_five_buckets(length, bucket):
    assert length_bucket(length) == bucket
    first, _, last = bucket.partition("-")
    assert int(first) <= length <= int(last or length)


def test_buckets_are_named_in_the_order_of_their_lengths():
    assert [length_bucket(length) for length in (1, 40, 100, 2_000, 10_000)] == list(LENGTH_BUCKETS)
