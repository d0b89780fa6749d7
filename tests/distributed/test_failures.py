"""A rank that fails makes all ranks raise; none waits for it until the group's timeout."""

import time

import pytest

torch = pytest.importorskip("torch")

from distributed_cases import call_that_fails_on
from rank_processes import outcomes


@pytest.mark.parametrize("how", ["kernel", "argument", "exit", "disagreement"])
def test_a_failure_of_one_rank_is_an_error_of_all(how):
    began = time.perf_counter()
    found = outcomes(3, call_that_fails_on, 1, how, timeout_s=240)
    assert time.perf_counter() - began < 200, "ranks waited for the group's timeout, 240 s"
    kinds = [kind for kind, _ in found]
    if how == "exit":
        assert kinds == ["RankFailure", "Died", "RankFailure"]
    elif how == "disagreement":
        assert kinds == ["ValueError"] * 3
        assert all("disagree about head" in message or "disagree about dtype" in message for _, message in found)
    else:
        assert kinds == ["RankFailure", "ValueError", "RankFailure"]
        for rank in (0, 2):
            assert "rank 1 failed: ValueError" in found[rank][1]
