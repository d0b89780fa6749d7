"""Attention over a sequence that several processes share, against one process in float64."""

from itertools import pairwise, product

import pytest

torch = pytest.importorskip("torch")

from distributed_cases import Case, check_cases
from rank_processes import on_ranks

from flashwright.distributed import Documents

MASKS = (
    {},
    {"causal": True},
    {"causal": "top-left", "window": (6, None)},
    {"window": (3, 2)},
    {"causal": True, "window": (5, 0), "softcap": 2.0, "scale": 0.7},
)
STRATEGIES = ("ring", "all-gather", "all-to-all", "auto")
PACKED = (0, 12, 12, 20, 37)
UNEVEN_HEADS = ((4, 2), (3, 1), (6, 2), (5, 5))


def assigned(length: int, ranks: int) -> list[list[tuple[int, int]]]:
    """Every third position or so to another rank, the last rank's first."""
    bounds = [*range(0, length, 3), length]
    chunks = [(a, b) for a, b in pairwise(bounds) if a < b]
    return [chunks[rank::ranks][::-1] for rank in reversed(range(ranks))]


def every_case(ranks: int) -> list[Case]:
    """Strategies × layouts × masks × packings × lengths × heads."""
    cases = []
    layouts = ("zigzag", "contiguous", "assigned", "documents")
    for number, (strategy, layout, mask, packing, length) in enumerate(
        product(STRATEGIES, layouts, MASKS, (None, PACKED), (37, 5))
    ):
        starts = None if packing is None else tuple(min(start, length) for start in packing)
        chosen = {"assigned": assigned(length, ranks), "documents": Documents(starts or (0, length))}.get(
            layout, layout
        )
        cases.append(
            Case(
                length,
                layout=chosen,
                strategy=strategy,
                heads=UNEVEN_HEADS[number % 4],
                starts=starts,
                options=mask,
                tells_length=bool(number % 2),
                seed=number,
            )
        )
    return cases


def cross_attention_cases() -> list[Case]:
    return [
        Case(length, keys, layout=layout, strategy=strategy, options=mask, seed=number)
        for number, (strategy, layout, (length, keys), mask) in enumerate(
            product(("ring", "all-gather"), ("zigzag", "contiguous"), ((11, 29), (29, 11)), MASKS)
        )
    ]


def other_values_cases() -> list[Case]:
    """Values with fewer and with more columns than queries and keys."""
    return [
        Case(strategy=strategy, value_head_dim=columns, options={"causal": True})
        for strategy, columns in product(("ring", "all-gather", "all-to-all"), (3, 16))
    ]


def sample(cases: list[Case], count: int) -> list[Case]:
    """Some of every kind."""
    step = max(1, len(cases) // count) | 1
    return cases[:: step if step % 3 else step + 2]


def mesh_cases(mesh: tuple[int, int]) -> list[Case]:
    return [
        Case(mesh=mesh, layout=layout, strategy=strategy, heads=heads, starts=starts, options=mask, seed=number)
        for number, (strategy, layout, heads, starts, mask) in enumerate(
            product(
                (("ring", "all-to-all"), ("all-gather", "all-to-all"), "auto"),
                ("zigzag", "contiguous"),
                ((4, 2), (3, 1)),
                (None, PACKED),
                MASKS,
            )
        )
    ]


def test_three_processes_compute_what_one_computes():
    cases = sample(every_case(3), 24) + sample(cross_attention_cases(), 6) + other_values_cases()
    assert on_ranks(3, check_cases, cases) == [len(cases)] * 3


def test_a_mesh_shares_the_sequence_and_heads():
    cases = sample(mesh_cases((2, 2)), 12)
    assert on_ranks(4, check_cases, cases) == [len(cases)] * 4


def test_a_process_by_itself_needs_no_group():
    check_cases([Case(), Case(strategy="auto", options={"causal": True}), Case(strategy="all-to-all")])


def simulated(family: str, **more) -> Case:
    """By a family's kernels, on the simulator."""
    call = {"backend": "simulator", "family": family}
    return Case(150, heads=(2, 1), batch=1, head_dim=64, dtype=torch.bfloat16, call=call, **more)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ampere", "hopper"])
def test_simulated_kernels_of_each_family_compute_parts(family):
    masks = ({"causal": True}, {"causal": True, "window": (40, 0)}, {"window": (30, 20), "softcap": 3.0})
    ways = (("zigzag", "ring"), ("contiguous", "all-gather"), ("zigzag", "all-to-all"))
    cases = [
        simulated(options=mask, layout=layout, strategy=strategy, family=family)
        for mask, (layout, strategy) in zip(masks, ways, strict=True)
    ]
    assert on_ranks(2, check_cases, cases, 0.02, timeout_s=250) == [len(cases)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_processes_compute_what_one_computes(ranks):
    cases = every_case(ranks) + cross_attention_cases() + other_values_cases()
    assert on_ranks(ranks, check_cases, cases) == [len(cases)] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2), (4, 2), (2, 4), (1, 3), (3, 1)])
def test_meshes_share_the_sequence_and_heads(mesh):
    ranks = mesh[0] * mesh[1]
    cases = mesh_cases(mesh)
    assert on_ranks(ranks, check_cases, cases) == [len(cases)] * ranks
