"""What ranks send and launch, counted while they do; which ranks of a group take part."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from distributed_cases import Case, check_a_gradient_that_one_rank_does_not_have, check_a_mesh_of_some_ranks, counted
from rank_processes import on_ranks

from flashwright.distributed import transport
from flashwright.distributed.transport import Transport


@pytest.mark.parametrize("strategy", ["ring", "all-gather"])
def test_of_a_window_only_the_rows_before_a_shard_travel(strategy):
    """32 rows on 4 ranks: a rank needs the last 3 keys of the one before it, and sends their gradients back."""
    case = Case(32, layout="contiguous", strategy=strategy, heads=(2, 1), options={"causal": True, "window": (3, 0)})
    for rank, each in enumerate(on_ranks(4, counted, case)):
        after, before = [(rank + 1, 3)] * (rank < 3), [(rank - 1, 3)] * (rank > 0)
        assert each["sent"] == after + after + before  # keys and values, and again in the backward; gradients
        tiles = 1 if strategy == "all-gather" or rank == 0 else 2
        assert each["launches"] == ["forward"] * tiles + ["backward"] * tiles


def test_ranks_without_messages_connect_and_launch_what_is_theirs():
    """Ranks 0 and 1 share a sequence; 2 and 3 have one each, and ranks send nothing to them."""
    starts = (0, 16, 24, 32)
    case = Case(32, layout="contiguous", starts=starts, heads=(2, 1), options={"causal": True})
    found = on_ranks(4, counted, case)
    assert [each["sent"] for each in found] == [[(1, 8), (1, 8)], [(0, 8)], [], []]
    assert [each["launches"].count("forward") for each in found] == [1, 2, 1, 1]
    assert [each["connects"] for each in found] == [1] * 4


class FakeDistributed:
    """In the place of torch.distributed: two ranks, of which this is the first."""

    def __init__(self, config):
        self.get_backend_config = lambda group: config
        self.closed = []

    def irecv(self, tensor, src, group, tag):
        self.closed.append(src)
        return SimpleNamespace(wait=lambda timeout: None)


@pytest.mark.parametrize(
    ("config", "connects", "closes"),
    [
        ("cpu:gloo,cuda:gloo", False, True), ("cuda:nccl", True, False), ("cpu:gloo,cuda:nccl", True, True),
        ("cpu:gloo", False, True),
    ],
)  # fmt: skip
def test_nccl_is_connected_and_gloo_is_closed(monkeypatch, config, connects, closes):
    ranks = Transport.alone()
    ranks.group, ranks.size, ranks._members, ranks._dist = "group", 2, [0, 5], FakeDistributed(config)
    connected = []
    monkeypatch.setattr(transport, "_connect_all", lambda *arguments: connected.append(arguments))
    ranks.connect(torch.device("cpu"))
    assert not connected
    ranks.connect(torch.device("cuda", 0))
    assert connected == [("group", torch.device("cuda", 0))] * connects
    ranks.close()
    assert ranks._dist.closed == [5] * closes


def test_a_mesh_may_have_some_ranks_in_any_order():
    on_ranks(5, check_a_mesh_of_some_ranks, [[3, 0], [1, 4]])


@pytest.mark.parametrize("strategy", ["ring", "all-to-all"])
def test_a_rank_without_a_gradient_computes_those_of_others(strategy):
    on_ranks(2, check_a_gradient_that_one_rank_does_not_have, strategy)
