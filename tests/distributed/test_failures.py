"""A rank that fails makes all ranks raise; none waits for it until the group's timeout, or until its process ends."""

import pytest

torch = pytest.importorskip("torch")

from distributed_cases import call_after_the_store_has_gone, call_that_fails_on, check_disagreements
from rank_processes import on_ranks, outcomes


@pytest.mark.parametrize("how", ["kernel", "argument", "killed", "disagreement"])
def test_a_failure_of_one_rank_is_an_error_of_all(how):
    found = outcomes(3, call_that_fails_on, 1, how, timeout_s=240)
    kinds = [kind for kind, _ in found]
    if how == "killed":
        assert kinds == ["RankFailure", "Died", "RankFailure"]
    elif how == "disagreement":
        assert kinds == ["ValueError"] * 3
        assert all("disagree about options" in message for _, message in found)
    else:
        assert kinds == ["RankFailure", "ValueError", "RankFailure"]
        for rank in (0, 2):
            assert "rank 1 failed: ValueError" in found[rank][1]


def test_a_failure_reaches_ranks_of_a_mesh_that_share_no_dimension_with_it():
    found = outcomes(4, call_that_fails_on, 1, "argument", (2, 2), timeout_s=240)
    assert [kind for kind, _ in found] == ["RankFailure", "ValueError", "RankFailure", "RankFailure"]
    for rank in (0, 2, 3):
        assert f"rank {rank} of 4 stops, because rank 1 failed: ValueError" in found[rank][1]


def test_the_end_of_the_rank_with_the_store_is_an_error_of_all():
    found = outcomes(3, call_after_the_store_has_gone, timeout_s=240)
    assert [kind for kind, _ in found] == ["Died", "RankFailure", "RankFailure"]


def test_ranks_that_mean_different_calls_say_what_they_disagree_about():
    on_ranks(3, check_disagreements)
