"""Who sends what, and when: a rank's part in attention over a sequence that several ranks hold, as rounds.

A round brings keys and values into a buffer; its tiles are what the rank's queries attend to of them. While a round is
computed, the next one is under way.

- Ring: round s brings what the rank s places before has, so that every link is busy in every round. A block goes
  straight from its owner to the rank that needs it: rows that a mask hides are not sent, and no rank forwards them.
- All-gather: a round brings the keys of all ranks, sorted by position, for some of the heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from flashwright.distributed.layouts import Chunk, Holdings, local_rows
from flashwright.distributed.visibility import Mask, Piece, Span, Tile, needed, pieces, tiles

RING, ALL_GATHER = SEQUENCE_STRATEGIES = ("ring", "all-gather")


class Transfer(NamedTuple):
    """Rows that travel as one message: `rows` of their owner to `buffer` of the rank that needs them."""

    rank: int
    """The other side."""
    rows: Span
    buffer: Span


@dataclass(frozen=True)
class Round:
    heads: Span
    """Of the keys and values."""
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    own: tuple[Transfer, ...]
    """Rows of the rank itself that the buffer has too."""
    tiles: tuple[Tile, ...]
    """Of the rank's rows and those of the buffer."""
    buffer_rows: int
    in_place: bool = False
    """Whether the buffer is the rank's own keys as they lie."""

    @property
    def received_rows(self) -> int:
        return sum(transfer.rows.length for transfer in self.receives)

    @property
    def sent_rows(self) -> int:
        return sum(transfer.rows.length for transfer in self.sends)

    @property
    def scores(self) -> float:
        return sum(tile.scores for tile in self.tiles)


@lru_cache(maxsize=512)
def rounds_of(
    strategy: str, rank: int, q_holdings: Holdings, kv_holdings: Holdings, mask: Mask, kv_heads: int, steps: int = 1
) -> tuple[Round, ...]:
    """The rounds of a rank. `steps`: in how many the heads of an all-gather come."""
    if strategy == RING:
        return _ring(rank, q_holdings, kv_holdings, mask, kv_heads)
    return _all_gather(rank, q_holdings, kv_holdings, mask, kv_heads, steps)


def _ring(rank: int, q_holdings: Holdings, kv_holdings: Holdings, mask: Mask, kv_heads: int) -> tuple[Round, ...]:
    ranks = len(q_holdings)
    heads = Span(0, kv_heads)
    queries, keys = pieces(q_holdings[rank], mask.q_starts), pieces(kv_holdings[rank], mask.kv_starts)
    found = [Round(heads, (), (), (), tuple(tiles(queries, keys, mask)), local_rows(kv_holdings[rank]), in_place=True)]
    for step in range(1, ranks):
        source, target = (rank - step) % ranks, (rank + step) % ranks
        coming = needed(queries, pieces(kv_holdings[source], mask.kv_starts), mask)
        going = needed(pieces(q_holdings[target], mask.q_starts), keys, mask)
        buffered, receives = _buffered([(source, piece) for piece in coming])
        _, sends = _buffered([(target, piece) for piece in going])
        there = tuple(tiles(queries, buffered, mask))
        # Also if there is nothing to do: every rank counts the same rounds, and so agrees on the order of messages.
        found.append(Round(heads, receives, sends, (), there, _rows(receives)))
    return tuple(found)


def _all_gather(
    rank: int, q_holdings: Holdings, kv_holdings: Holdings, mask: Mask, kv_heads: int, steps: int
) -> tuple[Round, ...]:
    buffered, transfers = _gathered(rank, q_holdings, kv_holdings, mask)
    receives = tuple(transfer for transfer in transfers if transfer.rank != rank)
    own = tuple(transfer for transfer in transfers if transfer.rank == rank)
    sends = tuple(
        transfer._replace(rank=target)
        for target in range(len(q_holdings))
        if target != rank
        for transfer in _gathered(target, q_holdings, kv_holdings, mask)[1]
        if transfer.rank == rank
    )
    there = tuple(tiles(pieces(q_holdings[rank], mask.q_starts), buffered, mask))
    return tuple(
        Round(heads, receives, sends, own, there, _rows(transfers))
        for heads in spans(kv_heads, min(steps, max(1, kv_heads)))
    )


@lru_cache(maxsize=512)
def _gathered(
    rank: int, q_holdings: Holdings, kv_holdings: Holdings, mask: Mask
) -> tuple[list[Piece], tuple[Transfer, ...]]:
    """What a rank needs of all, sorted by position."""
    queries = pieces(q_holdings[rank], mask.q_starts)
    owned = [
        (owner, piece)
        for owner, chunks in enumerate(kv_holdings)
        for piece in needed(queries, pieces(chunks, mask.kv_starts), mask)
    ]
    return _buffered(sorted(owned, key=lambda each: each[1].start))


def _buffered(owned: Iterable[tuple[int, Piece]]) -> tuple[list[Piece], tuple[Transfer, ...]]:
    """Pieces and their owners, one after the other in a buffer; neighbours of one owner travel together."""
    row = 0
    found: list[Piece] = []
    transfers: list[Transfer] = []
    for rank, piece in owned:
        found.append(piece._replace(first=row))
        end = row + piece.length
        last = transfers[-1] if transfers else None
        if last is not None and last.rank == rank and last.rows.stop == piece.first:
            rows, buffer = Span(last.rows.start, piece.rows.stop), Span(last.buffer.start, end)
            transfers[-1] = Transfer(rank, rows, buffer)
        else:
            transfers.append(Transfer(rank, piece.rows, Span(row, end)))
        row = end
    return found, tuple(transfers)


def _rows(transfers: Iterable[Transfer]) -> int:
    return sum(transfer.rows.length for transfer in transfers)


def spans(count: int, parts: int) -> list[Span]:
    """[0, count) in so many parts, whose lengths differ by one at most."""
    return [Span(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def sorted_transfers(by_rank: Holdings) -> tuple[tuple[Chunk, ...], tuple[Transfer, ...]]:
    """All rows of all ranks sorted by position: the chunks that they form, and where each rank's rows go."""
    owned = []
    for rank, chunks in enumerate(by_rank):
        row = 0
        for chunk in chunks:
            owned.append((rank, Piece(row, chunk.start, chunk.length, 0)))
            row += chunk.length
    ordered = sorted(owned, key=lambda each: each[1].start)
    _, transfers = _buffered(ordered)
    return tuple(Chunk(piece.start, piece.start + piece.length) for _, piece in ordered), transfers
