"""What functions on shared sequences say about arguments they cannot take; a process by itself, without a group."""

import pytest

torch = pytest.importorskip("torch")

from flashwright import distributed

Q = torch.zeros(1, 2, 20, 64)


def attend(**arguments):
    return distributed.attention(Q, Q, Q, **arguments)


@pytest.mark.parametrize("function", [distributed.shard, distributed.unshard])
@pytest.mark.parametrize(
    ("x", "dim", "error", "message"),
    [
        (None, 0, TypeError, "x: expected a torch.Tensor, got NoneType"),
        ([1, 2], 0, TypeError, "x: expected a torch.Tensor, got list"),
        (Q, "rows", TypeError, "dim: expected an integer, got 'rows'"),
        (Q, None, TypeError, "dim: expected an integer, got None"),
        (Q, 4, ValueError, "dim: 4 is not allowed; allowed: -4 to 3, as x has 4 dimensions"),
    ],
)
def test_shards_are_of_a_dimension_of_a_tensor(function, x, dim, error, message):
    with pytest.raises(error, match=message):
        function(x, dim)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attend(layout=3), TypeError, r"layout: 3 is not allowed; allowed: 'contiguous', 'zigzag', "),
        (lambda: attend(layout=[1]), TypeError, r"layout: \[1\] is not allowed"),
        (lambda: attend(layout=[[(0, 10.5), (10, 20)]]), TypeError, "layout: .* is not allowed; allowed: 'contiguous'"),
        (lambda: attend(layout=distributed.Documents("ab")), TypeError, r"layout: Documents\(starts='ab'\) is not"),
        (lambda: attend(length="20"), TypeError, "length: expected an integer of at least 0, got '20'"),
        (lambda: attend(length=-1), ValueError, "length: -1 is not allowed; allowed: integers of at least 0"),
        (lambda: attend(kv_length=20), ValueError, "length: missing; kv_length is 20"),
        (lambda: attend(cu_seqlens="x"), TypeError, "cu_seqlens: expected integers, .* got 'x'"),
        (lambda: attend(cu_seqlens=torch.tensor([0.0, 20.0])), TypeError, "cu_seqlens: expected integers"),
        (lambda: attend(cu_seqlens=3), TypeError, "cu_seqlens: expected integers, .* got 3"),
        (lambda: attend(link=["nvlink"]), ValueError, r"link: \['nvlink'\] is not known; allowed: nvlink, "),
        (lambda: attend(link=""), ValueError, "link: '' is not known; allowed: nvlink, "),
        (lambda: attend(family=""), ValueError, "family: '' is not known; allowed: ampere, hopper"),
        (lambda: attend(strategy=["ring"]), ValueError, r"strategy: \['ring'\] is not known; allowed: 'auto', 'ring'"),
        (lambda: distributed.strategy_for(None, Q), TypeError, "q: expected a torch.Tensor, got NoneType"),
        (lambda: distributed.strategy_for(Q[0], Q), ValueError, r"q: shape \(2, 20, 64\) is not allowed"),
        (lambda: distributed.unshard(Q, 2, length=2.5), TypeError, "length: expected an integer of .*, got 2.5"),
        (lambda: distributed.positions(-3), ValueError, "length: -3 is not allowed; allowed: integers of at least 0"),
        (lambda: distributed.shard_batch({"labels": Q}), TypeError, "batch: expected a mapping with 'input_ids'"),
        (lambda: distributed.shard_batch([Q]), TypeError, "batch: expected a mapping with 'input_ids', got list"),
        (lambda: distributed.shard_batch({"input_ids": 1}), TypeError, "input_ids: expected a torch.Tensor, got int"),
    ],
)  # fmt: skip
def test_the_argument_the_value_and_what_is_allowed_are_named(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()


@pytest.mark.parametrize("strategy", ["auto", "ring", "all-gather", "all-to-all"])
@pytest.mark.parametrize("kv_heads", [0, 2])
def test_no_heads_leave_nothing_to_compute(strategy, kv_heads):
    q, k = torch.zeros(1, 0, 20, 64), torch.zeros(1, kv_heads, 20, 64)
    assert distributed.attention(q, k, k, strategy=strategy).shape == q.shape
