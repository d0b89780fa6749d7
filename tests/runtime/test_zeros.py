"""Words that launches find and leave at zero: shared along a stream, and along a stream of a capture."""

from __future__ import annotations

from itertools import combinations

import pytest

torch = pytest.importorskip("torch")

from flashwright.runtime import zeros
from flashwright.runtime.zeros import Zeros


@pytest.fixture
def capture(monkeypatch):
    """The number of the capture that is under way; None if there is none."""
    state: dict[str, int | None] = {"number": None}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["number"] is not None)
    monkeypatch.setattr(zeros, "_capture_number", lambda stream: state["number"])
    return state


def overlap(a, b):
    return a.data_ptr() < b.data_ptr() + 4 * len(b) and b.data_ptr() < a.data_ptr() + 4 * len(a)


def test_launches_of_a_stream_share_words_and_those_of_others_do_not(capture):
    words = Zeros(torch.device("cpu"))
    first, again, other = (words.take(10, stream) for stream in (1, 1, 2))
    assert first.data_ptr() == again.data_ptr() != other.data_ptr()
    assert len(words.take(1000, 1)) >= 1000


def test_captured_launches_share_words_with_those_of_the_same_stream_and_capture_alone(capture):
    words = Zeros(torch.device("cpu"))
    taken = {(0, 1): words.take(10, 1)}
    for capture["number"] in (1, 2):
        for stream in (1, 2):
            taken[capture["number"], stream] = words.take(3000, stream)
            assert words.take(10, stream).data_ptr() == taken[capture["number"], stream].data_ptr()
    assert not any(each.any() for each in taken.values())
    assert not any(overlap(a, b) for a, b in combinations(taken.values(), 2))


def test_a_captured_launch_that_needs_more_has_its_own(capture):
    words = Zeros(torch.device("cpu"))
    words.take(10, 1)
    capture["number"] = 1
    few, many = words.take(10, 1), words.take(2000, 1)
    assert len(many) >= 2000 and not overlap(few, many)


def test_a_capture_without_a_launch_before_clears_its_words_itself(capture):
    capture["number"] = 1
    assert not Zeros(torch.device("cpu")).take(5, 1).any()


def test_more_words_are_set_aside_before_the_last_are_gone(capture, monkeypatch):
    monkeypatch.setattr(Zeros, "RESERVE", 100)
    words = Zeros(torch.device("cpu"))
    words.take(20, 1)
    kept = []
    for capture["number"] in (1, 2):
        kept.append(words.take(40, 1))
    capture["number"] = None
    words.take(30, 1)  # 20 are left: not enough for the next capture
    capture["number"] = 3
    last = words.take(30, 1)
    assert not any(overlap(last, each) for each in kept)
