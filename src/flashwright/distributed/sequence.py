"""Attention of a rank's queries to keys and values that several ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashwright.distributed.parts import Kernels, accumulation_dtype, no_keys_yet
from flashwright.distributed.rounds import Round
from flashwright.distributed.transport import Pending, Transport
from flashwright.distributed.visibility import Launch, Span

if TYPE_CHECKING:
    import torch

    Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SharedSequence:
    """A rank's part in it. Tensors are (batch, heads, rows, head_dim).

    Buffers of keys and values are (rows, 2, batch, heads, head_dim), so that some rows of them are one message.
    """

    transport: Transport
    rounds: Sequence[Round]
    kernels: Kernels

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp: in fp32 or better, or of one launch as they are."""
        launches = [self._launches(each, q, k) for each in self.rounds]
        parts = [
            (_q_heads(each.heads, q, k).length, launch.rows.length)
            for each, some in zip(self.rounds, launches, strict=True)
            for launch in some
        ]
        first_has_all = parts[:1] == [tuple(q.shape[1:3])]
        result = None if first_has_all and len(parts) == 1 else no_keys_yet(q, all_come_first=first_has_all)
        arrivals = _Arrivals(self.transport, self.rounds, k, v)
        for each, some in zip(self.rounds, launches, strict=True):
            keys, values = arrivals.next()
            for launch in some:
                rows = (slice(None), _q_heads(each.heads, q, k).slice, launch.rows.slice)
                at = (slice(None), slice(None), launch.keys.slice)
                sums = None if result is None else (result[0][rows], result[1][rows])
                part = self.kernels.forward(q[rows], keys[at], values[at], launch, sums)
                if result is None:
                    result = part
        assert result is not None
        return result

    def backward(
        self,
        do: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Gradients:
        """The gradients of q, k and v, in fp32 or better."""
        import torch

        precision = accumulation_dtype(q)
        dq = torch.zeros(q.shape, dtype=precision, device=q.device)
        dkv = torch.zeros(packed_shape(k), dtype=precision, device=k.device)
        arrivals = _Arrivals(self.transport, self.rounds, k, v)
        returning: _Returning | None = None
        for each in self.rounds:
            keys, values = arrivals.next()
            there = dkv[:, :, :, each.heads.slice] if each.in_place else _zeros_for(keys, precision)
            for launch in self._launches(each, q, k):
                rows = (slice(None), _q_heads(each.heads, q, k).slice, launch.rows.slice)
                at = (slice(None), slice(None), launch.keys.slice)
                self.kernels.backward(
                    do[rows], None if dlse is None else dlse[rows], q[rows], keys[at], values[at], out[rows], lse[rows],
                    launch, (dq[rows], unpacked(there, 0)[at], unpacked(there, 1)[at]),
                )  # fmt: skip
            # What was computed for other ranks goes back while the next round is computed.
            if returning is not None:
                returning.add_to(dkv)
            returning = None if each.in_place else _Returning(self.transport, each, there)
        if returning is not None:
            returning.add_to(dkv)
        return dq, unpacked(dkv, 0), unpacked(dkv, 1)

    def _launches(self, each: Round, q: torch.Tensor, k: torch.Tensor) -> Sequence[Launch]:
        return self.kernels.launches(each.tiles, q.shape[0]) if _q_heads(each.heads, q, k).length else ()


class _Arrivals:
    """Keys and values of each round in turn; those of the next are under way meanwhile."""

    def __init__(self, transport: Transport, rounds: Sequence[Round], k: torch.Tensor, v: torch.Tensor) -> None:
        self._transport = transport
        self._rounds = rounds
        self._k, self._v = k, v
        self._packed: dict[Span, torch.Tensor] = {}
        self._next = 0
        self._coming = self._start(0)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        pending, buffer, heads = self._coming
        pending.wait()
        self._next += 1
        self._coming = self._start(self._next)
        if buffer is None:
            return self._k[:, heads.slice], self._v[:, heads.slice]
        return unpacked(buffer, 0), unpacked(buffer, 1)

    def _start(self, index: int) -> tuple[Pending, torch.Tensor | None, Span]:
        if index >= len(self._rounds):
            return Pending(self._transport, []), None, Span(0, 0)
        each = self._rounds[index]
        if each.in_place:
            return Pending(self._transport, []), None, each.heads
        mine = self._packed_heads(each.heads)
        buffer = mine.new_empty((each.buffer_rows, *mine.shape[1:]))
        for transfer in each.own:
            buffer[transfer.buffer.slice] = mine[transfer.rows.slice]
        pending = self._transport.start(
            [(transfer.rank, mine[transfer.rows.slice]) for transfer in each.sends],
            [(transfer.rank, buffer[transfer.buffer.slice]) for transfer in each.receives],
        )
        return pending, buffer, each.heads

    def _packed_heads(self, heads: Span) -> torch.Tensor:
        if heads not in self._packed:
            self._packed.clear()  # rounds of the same heads follow one another
            self._packed[heads] = packed(self._k[:, heads.slice], self._v[:, heads.slice])
        return self._packed[heads]


class _Returning:
    """Gradients of keys and values on their way to the ranks that own them."""

    def __init__(self, transport: Transport, each: Round, gradients: torch.Tensor) -> None:
        self._round = each
        self._gradients = gradients
        shape = gradients.shape[1:]
        self._coming = [(transfer, gradients.new_empty((transfer.rows.length, *shape))) for transfer in each.sends]
        self._pending = transport.start(
            [(transfer.rank, gradients[transfer.buffer.slice]) for transfer in each.receives],
            [(transfer.rank, part) for transfer, part in self._coming],
        )

    def add_to(self, dkv: torch.Tensor) -> None:
        heads = self._round.heads.slice
        self._pending.wait()
        for transfer in self._round.own:
            dkv[transfer.rows.slice, :, :, heads] += self._gradients[transfer.buffer.slice]
        for transfer, part in self._coming:
            dkv[transfer.rows.slice, :, :, heads] += part


def packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(rows, 2, batch, heads, head_dim), contiguous."""
    buffer = k.new_empty(packed_shape(k))
    unpacked(buffer, 0).copy_(k)
    unpacked(buffer, 1).copy_(v)
    return buffer


def packed_shape(k: torch.Tensor) -> tuple[int, ...]:
    batch, heads, rows, head_dim = k.shape
    return rows, 2, batch, heads, head_dim


def unpacked(buffer: torch.Tensor, index: int) -> torch.Tensor:
    """The keys (0) or values (1) of a buffer as (batch, heads, rows, head_dim)."""
    return buffer[:, index].permute(1, 2, 0, 3)


def _zeros_for(keys: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    return keys.new_zeros(packed_shape(keys), dtype=precision)


def _q_heads(kv_heads: Span, q: torch.Tensor, k: torch.Tensor) -> Span:
    group = q.shape[1] // max(1, k.shape[1])
    return Span(kv_heads.start * group, kv_heads.stop * group)
