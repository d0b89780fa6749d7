"""Ranks that share one GPU: kernels on every rank, messages through pinned host memory."""

import pytest

torch = pytest.importorskip("torch")

from distributed_cases import Case, check_cases
from rank_processes import on_ranks

pytestmark = pytest.mark.gpu

MASKS = ({}, {"causal": True}, {"causal": True, "window": (100, 0)}, {"window": (70, 30), "softcap": 5.0})


def cases(**more):
    found = [
        Case(
            700, strategy=strategy, layout=layout, options=mask, heads=(4, 2), head_dim=64, batch=1,
            dtype=torch.bfloat16, device="cuda", seed=number, **more,
        )
        for number, (strategy, layout, mask) in enumerate(
            (strategy, layout, mask)
            for strategy in ("ring", "all-gather", "all-to-all")
            for layout in ("zigzag", "contiguous")
            for mask in MASKS
        )
    ]  # fmt: skip
    return [*found, Case(700, starts=(0, 150, 151, 400, 700), options={"causal": True}, heads=(4, 2), head_dim=64,
                         batch=1, dtype=torch.bfloat16, device="cuda")]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_that_share_a_gpu_compute_what_one_process_computes(ranks):
    expected = cases()
    assert on_ranks(ranks, check_cases, expected, 0.02) == [len(expected)] * ranks
