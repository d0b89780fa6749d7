"""Ranks that share one GPU: kernels on every rank, messages through pinned host memory."""

from itertools import product

import pytest

torch = pytest.importorskip("torch")

from distributed_cases import Case, check_cases
from rank_processes import on_ranks

from flashwright.distributed import Documents

pytestmark = [pytest.mark.gpu, pytest.mark.long]

PACKED = (0, 20, 21, 90, 150, 151, 400, 400, 555, 700)
MASKS = ({}, {"causal": True}, {"causal": True, "window": (100, 0)}, {"window": (70, 30), "softcap": 5.0})


def case(number, **more):
    return Case(
        700, heads=(4, 2), head_dim=64, batch=1, dtype=torch.bfloat16, device="cuda", seed=number, **more
    )  # fmt: skip


def cases():
    """Strategies × layouts × masks, and packed sequences, whose tiles share launches."""
    found = product(("ring", "all-gather", "all-to-all"), ("zigzag", "contiguous"), MASKS)
    dense = [
        case(number, strategy=strategy, layout=layout, options=mask)
        for number, (strategy, layout, mask) in enumerate(found)
    ]
    packed = [
        case(number, starts=PACKED, layout=layout, strategy=strategy, options=mask)
        for number, (layout, strategy, mask) in enumerate(
            product(("contiguous", Documents(PACKED)), ("ring", "all-to-all"), MASKS[:3])
        )
    ]
    return dense + packed


def sample():
    """Few kinds of kernels, as each is compiled."""
    return [each for each in cases() if each.options == {"causal": True}]


def test_ranks_that_share_a_gpu_compute_what_one_process_computes():
    expected = sample()
    assert on_ranks(3, check_cases, expected, 0.02) == [len(expected)] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "of_all"), [(1, slice(None)), (2, slice(None)), (4, slice(0, None, 5)), (8, slice(2, None, 5))]
)
def test_any_ranks_that_share_a_gpu_compute_what_one_process_computes(ranks, of_all):
    """Many ranks wait for the GPU, and for each other: they compute one case in five, of every strategy and mask."""
    expected = cases()[of_all]
    assert on_ranks(ranks, check_cases, expected, 0.02, timeout_s=140) == [len(expected)] * ranks
