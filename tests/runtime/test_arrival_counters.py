"""Counters of launches: shared along a stream, a captured launch's own."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from flashwright.runtime.arrival_counters import ArrivalCounters


@pytest.fixture
def capturing(monkeypatch):
    state = {"capturing": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    return state


def test_launches_of_a_stream_share_counters_and_those_of_others_do_not(capturing):
    counters = ArrivalCounters(torch.device("cpu"))
    first, again, other = (counters.take(10, stream) for stream in (1, 1, 2))
    assert first.data_ptr() == again.data_ptr() != other.data_ptr()
    assert len(counters.take(1000, 1)) >= 1000


def test_every_captured_launch_has_counters_of_its_own_that_are_zero_already(capturing):
    counters = ArrivalCounters(torch.device("cpu"))
    usual = counters.take(10, 1)
    capturing["capturing"] = True
    ranges = []
    for count in (10, 3000, 10):
        taken = counters.take(count, 1)
        assert len(taken) == count and not taken.any()
        ranges.append((taken.data_ptr(), taken.data_ptr() + 4 * count))
    ranges.append((usual.data_ptr(), usual.data_ptr() + 4 * len(usual)))
    ranges.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))


def test_a_capture_without_a_launch_before_clears_its_counters_itself(capturing):
    capturing["capturing"] = True
    assert not ArrivalCounters(torch.device("cpu")).take(5, 1).any()


def test_more_counters_are_set_aside_before_the_last_are_gone(capturing, monkeypatch):
    monkeypatch.setattr(ArrivalCounters, "RESERVE", 100)
    counters = ArrivalCounters(torch.device("cpu"))
    counters.take(20, 1)
    capturing["capturing"] = True
    kept = [counters.take(40, 1), counters.take(40, 1)]
    capturing["capturing"] = False
    counters.take(30, 1)  # 20 are left: not enough for the next capture
    capturing["capturing"] = True
    last = counters.take(30, 1)
    assert all(last.data_ptr() + 120 <= x.data_ptr() or x.data_ptr() + 160 <= last.data_ptr() for x in kept)
