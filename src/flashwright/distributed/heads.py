"""All-to-all over heads: ranks that each hold some rows of all heads come to hold all those rows of some heads.

Heads need not divide by ranks: a rank may have one more than another, or none. Heads of k and v that several ranks need
are sent to each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashwright.distributed.rounds import Transfer, spans
from flashwright.distributed.transport import Transport
from flashwright.distributed.visibility import Span

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HeadShares:
    """Which heads of q, and of k and v, each rank computes."""

    q: tuple[Span, ...]
    kv: tuple[Span, ...]
    group: int
    """Consecutive heads of q that share one of k and v."""

    @classmethod
    def of(cls, q_heads: int, kv_heads: int, ranks: int) -> HeadShares:
        group = q_heads // kv_heads
        q = tuple(spans(q_heads, ranks))
        kv = tuple(Span(0, 0) if not each.length else Span(each.start // group, -(-each.stop // group)) for each in q)
        return cls(q, kv, group)

    def kv_head_of_each(self, rank: int) -> list[int] | None:
        """For each of a rank's heads of q, which of its heads of k and v; None if equal numbers share each."""
        q, kv = self.q[rank], self.kv[rank]
        shared = [head // self.group - kv.start for head in range(q.start, q.stop)]
        sizes = {shared.count(head) for head in range(kv.length)}
        return shared if len(sizes) > 1 else None


@dataclass(frozen=True)
class HeadExchange:
    """The exchange as one rank takes part in it."""

    transport: Transport
    transfers: tuple[Transfer, ...]
    """Where the rows of each rank go in the tensors of all rows, sorted by position."""

    @property
    def rows(self) -> int:
        return sum(transfer.rows.length for transfer in self.transfers)

    def to_all_rows(self, tensors: Sequence[tuple[torch.Tensor, Sequence[Span]]]) -> list[torch.Tensor]:
        """Of each (batch, heads, own rows, …) tensor with every rank's heads: (batch, own heads, all rows, …)."""
        rank = self.transport.rank
        sends, receives, buffers = [], [], []
        for x, shares in tensors:
            by_rows = [_rows_first(x[:, share.slice]) for share in shares]
            buffer = by_rows[rank].new_empty((self.rows, *by_rows[rank].shape[1:]))
            for transfer in self.transfers:
                if transfer.rank == rank:
                    buffer[transfer.buffer.slice] = by_rows[rank][transfer.rows.slice]
                    sends += [
                        (target, part[transfer.rows.slice]) for target, part in enumerate(by_rows) if target != rank
                    ]
                else:
                    receives.append((transfer.rank, buffer[transfer.buffer.slice]))
            buffers.append(buffer)
        self.transport.start(sends, receives).wait()
        return [buffer.movedim(0, 2) for buffer in buffers]

    def to_own_rows(self, tensors: Sequence[tuple[torch.Tensor, Sequence[Span], int]]) -> list[torch.Tensor]:
        """The inverse, for tensors of so many heads in all; heads that several ranks had are added."""
        rank = self.transport.rank
        own_rows = sum(transfer.rows.length for transfer in self.transfers if transfer.rank == rank)
        sends, receives, parts = [], [], []
        for x, shares, _ in tensors:
            by_rows = _rows_first(x)
            batch, rest = by_rows.shape[1], by_rows.shape[3:]
            shapes = [(own_rows, batch, share.length, *rest) for share in shares]
            arrivals = [by_rows.new_empty(shape) for shape in shapes]
            for transfer in self.transfers:
                if transfer.rank == rank:
                    arrivals[rank][transfer.rows.slice] = by_rows[transfer.buffer.slice]
                    receives += [
                        (source, part[transfer.rows.slice]) for source, part in enumerate(arrivals) if source != rank
                    ]
                else:
                    sends.append((transfer.rank, by_rows[transfer.buffer.slice]))
            parts.append(arrivals)
        self.transport.start(sends, receives).wait()
        return [
            _all_heads(arrivals, shares, heads) for arrivals, (_, shares, heads) in zip(parts, tensors, strict=True)
        ]


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows, …) as (rows, batch, heads, …), contiguous."""
    return x.movedim(2, 0).contiguous()


def _all_heads(parts: Sequence[torch.Tensor], shares: Sequence[Span], heads: int) -> torch.Tensor:
    rows, batch, _, *rest = parts[0].shape
    whole = parts[0].new_zeros((batch, heads, rows, *rest))
    for part, share in zip(parts, shares, strict=True):
        whole[:, share.slice] += part.movedim(0, 2)
    return whole
