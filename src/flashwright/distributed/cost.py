"""What a strategy costs: bytes, seconds and memory of a call, from who sends what and how fast kernels are.

A rank computes a round while the next one travels, so a round takes the longer of the two. Exchanges of heads overlap
with nothing. The model adds the traffic of merging partial results. It knows neither contention on a switch nor ranks
that wait for slower ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashwright.distributed.heads import HeadShares
from flashwright.distributed.layouts import Chunk, Holdings, local_rows
from flashwright.distributed.links import Link
from flashwright.distributed.ranks import shared_by_heads
from flashwright.distributed.rounds import RING, Round, rounds_of
from flashwright.distributed.visibility import Mask, pieces, tiles
from flashwright.problem.flops import BACKWARD, FORWARD, operation_flops

FP32_BYTES = 4
BACKWARD_WORK = operation_flops(BACKWARD, 1, 1, 1, 1, 1) / operation_flops(FORWARD, 1, 1, 1, 1, 1)
"""In forwards."""
MERGE_BYTES = ADDING_BYTES = 6
"""Of global memory, for each element of a partial output or gradient: a sum is read and written (4 + 4) where a kernel
that computes the whole writes 16 bits."""
RANKS_LOOKED_AT = 16
"""Of large groups, evenly spaced ones and the last; the slowest of them decides."""


class Machine(NamedTuple):
    """How fast one GPU computes."""

    forward_flops_per_s: float
    backward_flops_per_s: float
    memory_bytes_per_s: float = 4.8e12
    merge_bytes: float = MERGE_BYTES
    adding_bytes: float = ADDING_BYTES


class Sizes(NamedTuple):
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2


class Strategy(NamedTuple):
    """How ranks share the work: `sequence_ranks` × `head_ranks` of them."""

    sequence: str | None
    """"ring" or "all-gather"; None: each rank has the whole sequence of its heads."""
    sequence_ranks: int
    head_ranks: int
    steps: int = 1
    """In how many an all-gather brings the heads."""

    def __str__(self) -> str:
        names = [self.sequence] if self.sequence is not None and self.sequence_ranks > 1 else []
        if self.head_ranks > 1:
            names.append("all-to-all")
        if len(names) == 2:
            return f"{names[0]} {self.sequence_ranks} × {names[1]} {self.head_ranks}"
        return names[0] if names else "one rank"


@dataclass(frozen=True)
class PassCost:
    """The forward or the backward, of the slowest rank examined; bytes are those of the rank that sends most."""

    sent_bytes: float
    compute_s: float
    communication_s: float
    """What the messages take, hidden behind computation or not."""
    time_s: float


@dataclass(frozen=True)
class Cost:
    strategy: Strategy
    forward: PassCost
    backward: PassCost
    ideal_s: float
    """Of both passes: the work of one GPU that holds everything, divided by the ranks."""
    ideal_forward_s: float
    memory_bytes: float
    """Of each GPU, for one layer's attention: shards, buffers and sums."""

    @property
    def time_s(self) -> float:
        return self.forward.time_s + self.backward.time_s

    @property
    def efficiency(self) -> float:
        return self.ideal_s / self.time_s if self.time_s else 1.0

    @property
    def forward_efficiency(self) -> float:
        return self.ideal_forward_s / self.forward.time_s if self.forward.time_s else 1.0


def cost_of(
    strategy: Strategy,
    q_holdings: Holdings,
    kv_holdings: Holdings,
    mask: Mask,
    sizes: Sizes,
    machine: Machine,
    link: Link,
    head_link: Link | None = None,
) -> Cost:
    """`head_link` connects the ranks that share heads, where it is another than the one that all are connected by."""
    shares = HeadShares.of(sizes.q_heads, sizes.kv_heads, strategy.head_ranks)
    q_shared, kv_shared = q_holdings, kv_holdings
    if strategy.head_ranks > 1:
        q_shared, kv_shared = (shared_by_heads(each, strategy.head_ranks) for each in (q_holdings, kv_holdings))
    most_q = max(share.length for share in shares.q)
    most_kv = max(share.length for share in shares.kv)
    forward, backward, memory = [], [], 0.0
    for index in _looked_at(len(q_shared)):
        rounds = rounds_of(
            strategy.sequence or RING, index, q_shared, kv_shared, mask, most_kv, min(strategy.steps, most_kv)
        )
        rank = _Rank(rounds, sizes, machine, link, most_q, most_kv, local_rows(q_shared[index]))
        exchange = _exchange(strategy, shares, sizes, local_rows(q_holdings[index * strategy.head_ranks]))
        heads = _HeadCost(exchange, strategy.head_ranks, head_link or link, sizes.element_bytes)
        forward.append(heads.around_forward(rank.forward()))
        backward.append(heads.around_backward(rank.backward()))
        memory = max(memory, rank.memory(local_rows(kv_shared[index])))
    work = _whole_work(mask, sizes)
    each = work / len(q_holdings)
    ideal_forward = each / machine.forward_flops_per_s
    return Cost(
        strategy,
        _slowest(forward),
        _slowest(backward),
        ideal_forward + BACKWARD_WORK * each / machine.backward_flops_per_s,
        ideal_forward,
        memory,
    )


def _slowest(passes: Sequence[PassCost]) -> PassCost:
    slowest = max(passes, key=lambda each: each.time_s)
    return replace(slowest, sent_bytes=max(each.sent_bytes for each in passes))


def _looked_at(ranks: int) -> Iterator[int]:
    step = max(1, ranks // RANKS_LOOKED_AT)
    yield from sorted({*range(0, ranks, step), ranks - 1})


def _whole_work(mask: Mask, sizes: Sizes) -> float:
    """FLOPs of a forward."""
    queries = pieces([Chunk(0, mask.q_starts[-1])], mask.q_starts)
    keys = pieces([Chunk(0, mask.kv_starts[-1])], mask.kv_starts)
    scores = sum(tile.scores for tile in tiles(queries, keys, mask))
    return 4.0 * sizes.batch * sizes.q_heads * sizes.head_dim * scores


@dataclass(frozen=True)
class _Rank:
    """Rounds of one rank, each of some of its heads of keys."""

    rounds: Sequence[Round]
    sizes: Sizes
    machine: Machine
    link: Link
    q_heads: int
    kv_heads: int
    rows: int

    def forward(self) -> PassCost:
        computed = [self._forward_s(each) for each in self.rounds]
        travels = [self._kv_s(each) for each in self.rounds]
        time = travels[0] + sum(map(max, computed, [*travels[1:], 0.0]))
        sent = sum(self._kv_bytes(each.sent_rows, each) for each in self.rounds)
        return PassCost(sent, sum(computed), sum(travels), time)

    def backward(self) -> PassCost:
        computed = [self._backward_s(each) for each in self.rounds]
        travels = [self._kv_s(each) for each in self.rounds]
        returns = [self._gradients_s(each) for each in self.rounds]
        busy = [a + b for a, b in zip([*travels[1:], 0.0], [0.0, *returns[:-1]], strict=True)]
        time = travels[0] + sum(map(max, computed, busy)) + returns[-1]
        widened = FP32_BYTES / self.sizes.element_bytes
        sent = sum(
            self._kv_bytes(each.sent_rows, each) + widened * self._kv_bytes(each.received_rows, each)
            for each in self.rounds
        )
        return PassCost(sent, sum(computed), sum(travels) + sum(returns), time)

    def memory(self, keys: int) -> float:
        """q, k, v, dO, O and their sums, the gradients, and the buffers of two rounds."""
        row = self.sizes.batch * self.sizes.head_dim
        q = self.rows * row * self.q_heads
        kv = 2 * keys * row * self.kv_heads
        buffered = sorted((self._buffer_elements(each) for each in self.rounds), reverse=True)[:2]
        element = self.sizes.element_bytes
        return element * (3 * q + kv) + FP32_BYTES * (q + kv) + sum(buffered) * (element + FP32_BYTES)

    def _buffer_elements(self, each: Round) -> float:
        return 0 if each.in_place else self._kv_bytes(each.buffer_rows, each) / self.sizes.element_bytes

    def _q_heads_of(self, each: Round) -> float:
        return self.q_heads * each.heads.length / max(1, self.kv_heads)

    def _flops(self, each: Round) -> float:
        return 4.0 * self.sizes.batch * self._q_heads_of(each) * self.sizes.head_dim * each.scores

    def _q_elements(self, each: Round) -> float:
        """Of the queries that the round's tiles have."""
        rows = sum(tile.rows.length for tile in each.tiles)
        return rows * self.sizes.batch * self._q_heads_of(each) * self.sizes.head_dim

    def _kv_elements(self, each: Round) -> float:
        return self._kv_bytes(sum(tile.keys.length for tile in each.tiles), each) / self.sizes.element_bytes

    def _forward_s(self, each: Round) -> float:
        merging = self._q_elements(each) * self.machine.merge_bytes / self.machine.memory_bytes_per_s
        return self._flops(each) / self.machine.forward_flops_per_s + merging

    def _backward_s(self, each: Round) -> float:
        elements = self._q_elements(each) + self._kv_elements(each)
        adding = elements * self.machine.adding_bytes / self.machine.memory_bytes_per_s
        return BACKWARD_WORK * self._flops(each) / self.machine.backward_flops_per_s + adding

    def _kv_bytes(self, rows: float, each: Round) -> float:
        return 2.0 * rows * self.sizes.batch * each.heads.length * self.sizes.head_dim * self.sizes.element_bytes

    def _kv_s(self, each: Round) -> float:
        most = max(each.sent_rows, each.received_rows)
        return self.link.seconds(self._kv_bytes(most, each), max(len(each.sends), len(each.receives)))

    def _gradients_s(self, each: Round) -> float:
        most = max(each.sent_rows, each.received_rows)
        fp32 = self._kv_bytes(most, each) * FP32_BYTES / self.sizes.element_bytes
        return self.link.seconds(fp32, max(len(each.sends), len(each.receives)))


def _exchange(strategy: Strategy, shares: HeadShares, sizes: Sizes, rows: int) -> tuple[float, float]:
    """Elements of a rank's rows of q, and of k and v, that go to others in an exchange of heads."""
    if strategy.head_ranks == 1:
        return 0.0, 0.0
    row = rows * sizes.batch * sizes.head_dim
    q = row * sizes.q_heads * (1 - 1 / strategy.head_ranks)
    kv = 2 * row * sum(share.length for share in shares.kv) * (1 - 1 / strategy.head_ranks)
    return q, kv


class _HeadCost(NamedTuple):
    elements: tuple[float, float]
    ranks: int
    link: Link
    element_bytes: int

    def around_forward(self, inner: PassCost) -> PassCost:
        """q, k and v there, O back."""
        q, kv = self.elements
        return self._around(inner, (2 * q + kv) * self.element_bytes)

    def around_backward(self, inner: PassCost) -> PassCost:
        """dO there; dQ, dK and dV back, in fp32."""
        q, kv = self.elements
        return self._around(inner, q * self.element_bytes + (q + kv) * FP32_BYTES)

    def _around(self, inner: PassCost, sent: float) -> PassCost:
        if self.ranks == 1:
            return inner
        seconds = self.link.seconds(sent, 2 * (self.ranks - 1))
        return PassCost(
            inner.sent_bytes + sent, inner.compute_s, inner.communication_s + seconds, inner.time_s + seconds
        )
