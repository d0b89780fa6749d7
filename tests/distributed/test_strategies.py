"""Which strategy a call uses, and why; what calls are refused."""

import pytest

torch = pytest.importorskip("torch")

from flashwright import distributed
from flashwright.distributed.heads import HeadShares
from flashwright.distributed.layouts import holdings
from flashwright.distributed.strategies import chosen_strategy, named_strategy
from flashwright.distributed.visibility import Mask
from flashwright.problem.window import Window

CAUSAL = Window(None, 0)


def chosen(link, window=CAUSAL, layout="zigzag", heads=(32, 8), length=65_536, shape=(8,)):
    by_rank = holdings(layout, length, 8)
    mask = Mask(window, (0, length), (0, length))
    return chosen_strategy(
        shape, by_rank, by_rank, mask, batch=1, q_heads=heads[0], kv_heads=heads[1], head_dim=128, element_bytes=2,
        link=link,
    )  # fmt: skip


def test_slow_links_are_hidden_behind_computation():
    assert str(chosen("ib400").strategy) == "ring"


def test_many_heads_of_short_sequences_are_exchanged_over_fast_links():
    assert str(chosen("nvlink", heads=(32, 32), length=16_384).strategy) == "all-to-all"


def test_a_window_is_not_exchanged_by_heads():
    choice = chosen("ib400", Window(1024, 0), "contiguous")
    assert choice.strategy.head_ranks == 1
    assert max(choice.costs, key=lambda cost: cost.time_s).strategy.head_ranks == 8


def test_ranks_without_a_head_are_not_planned():
    assert {cost.strategy.head_ranks for cost in chosen("nvlink", heads=(4, 1)).costs} == {1}


def test_the_reason_names_the_link_and_what_the_others_take():
    reason = chosen("ib400").reason
    assert "over ib400" in reason and "MiB sent by each rank" in reason
    assert "all-gather" in reason and "all-to-all" in reason


def test_a_mesh_of_two_dimensions_shares_heads_in_the_second():
    strategy = chosen("nvlink", shape=(2, 4)).strategy
    assert (strategy.sequence_ranks, strategy.head_ranks) == (2, 4)
    assert str(named_strategy(("ring", "all-to-all"), (2, 4), 8).strategy) == "ring 2 × all-to-all 4"


@pytest.mark.parametrize(
    ("strategy", "shape", "message"),
    [
        ("star", (4,), "'star' is not known; allowed: 'auto', 'ring', 'all-gather', 'all-to-all'"),
        ("ring", (2, 2), "not allowed for a mesh of two dimensions; allowed: 'auto', .'ring', 'all-to-all'."),
        (("all-to-all", "ring"), (2, 2), "not allowed for a mesh of two dimensions"),
    ],
)
def test_unknown_strategies_are_refused(strategy, shape, message):
    with pytest.raises(ValueError, match=message):
        named_strategy(strategy, shape, 2)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (6, 2), (5, 1), (3, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_head_has_one_rank_and_its_keys(heads, ranks):
    shares = HeadShares.of(*heads, ranks)
    assert [head for share in shares.q for head in range(*share)] == list(range(heads[0]))
    group = heads[0] // heads[1]
    for rank, (q, kv) in enumerate(zip(shares.q, shares.kv, strict=True)):
        of_each = shares.kv_head_of_each(rank)
        found = [kv.start + index for index in of_each] if of_each is not None else [
            kv.start + index * kv.length // q.length for index in range(q.length)
        ]  # fmt: skip
        assert found == [head // group for head in range(*q)]


def tensors(rows=10, keys=10, dtype=torch.float32):
    return [torch.zeros(1, heads, count, 8, dtype=dtype) for heads, count in ((2, rows), (1, keys), (1, keys))]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"length": 12}, "q: 10 rows, but of 12 rank 0 of 1 holds 12 in this layout"),
        ({"cu_seqlens": [0, 4, 9]}, r"cu_seqlens: \[0, 4, 9\] is not allowed; .* the whole length, 10"),
        ({"cu_seqlens_k": [0, 10]}, "cu_seqlens: missing"),
        ({"layout": "striped"}, "layout: 'striped' is not known"),
        ({"backend": "gpu"}, "backend: 'gpu' needs CUDA tensors, but q is on cpu"),
        ({"backend": "reference", "family": "ampere"}, "config and family name a kernel"),
        ({"backend": "simulator"}, "float32"),
        ({"softcap": -1.0}, "softcap: -1.0 is not allowed"),
        ({"link": "telegraph"}, "link: 'telegraph' is not known"),
    ],
)
def test_what_is_not_allowed_is_refused_with_what_is(more, message):
    with pytest.raises((ValueError, TypeError), match=message):
        distributed.attention(*tensors(), **more)


def test_keys_of_another_length_need_their_length():
    with pytest.raises(ValueError, match="kv_length: missing; q has 10 local rows and k has 6"):
        distributed.attention(*tensors(keys=6), length=10)


def test_a_group_needs_torch_distributed():
    with pytest.raises(ValueError, match=r"call torch.distributed.init_process_group"):
        distributed.attention(*tensors(), group=object())


def test_a_single_rank_says_so():
    q, k, _ = tensors()
    assert "there is one rank" in str(distributed.strategy_for(q, k, causal=True))
