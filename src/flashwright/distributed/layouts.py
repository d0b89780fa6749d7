"""Who holds what: the chunks of a sequence that each rank has, by their positions in the whole.

A layout assigns every position of a sequence to one rank. No length must divide by anything: parts differ by one row at
most, and a rank may hold nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

CONTIGUOUS, ZIGZAG = NAMED_LAYOUTS = ("contiguous", "zigzag")
_ALLOWED = f"{', '.join(map(repr, NAMED_LAYOUTS))}, Documents(cu_seqlens), or every rank's (start, stop) pairs"


class Chunk(NamedTuple):
    """Consecutive positions of a sequence: `start` … `stop` - 1."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


Holdings: TypeAlias = tuple[tuple[Chunk, ...], ...]
"""By rank: its chunks, in the order of its local rows."""


class Documents(NamedTuple):
    """A layout of packed sequences: each is dealt to all ranks in zigzag, so that each rank has an equal share of the
    work of every one. `starts` are their cu_seqlens: sequence b is positions starts[b] … starts[b + 1] - 1."""

    starts: tuple[int, ...]


Assignment: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""By rank: its (start, stop) pairs."""

Layout: TypeAlias = str | Documents | Sequence[Sequence[Sequence[int]]]
"""A name, `Documents`, or every rank's chunks as (start, stop) pairs."""


def holdings(layout: Layout, length: int, ranks: int) -> Holdings:
    """The chunks of each rank; raises `ValueError` for a layout that does not assign every position once."""
    layout = frozen(layout)
    if isinstance(layout, str):
        if layout not in NAMED_LAYOUTS:
            raise ValueError(f"layout: {layout!r} is not known; allowed: {_ALLOWED}")
        return _named(layout, length, ranks)
    if isinstance(layout, Documents):
        return _of_documents(layout.starts, length, ranks)
    return _assigned(layout, length, ranks)


def frozen(layout: Layout) -> str | Documents | Assignment:
    """The layout as a value that has a hash; raises `TypeError` for what is no layout."""
    if isinstance(layout, str):
        return layout
    try:
        if isinstance(layout, Documents):
            return Documents(tuple(operator.index(start) for start in layout.starts))
        index = operator.index
        return tuple(tuple((index(start), index(stop)) for start, stop in chunks) for chunks in layout)
    except (TypeError, ValueError):  # no integers, or no pairs
        raise TypeError(f"layout: {layout!r} is not allowed; allowed: {_ALLOWED}") from None


def local_rows(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.length for chunk in chunks)


def joined(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """The same positions in the same order, neighbours joined and empty chunks left out."""
    found: list[Chunk] = []
    for chunk in chunks:
        if chunk.start >= chunk.stop:
            continue
        if found and found[-1].stop == chunk.start:
            found[-1] = Chunk(found[-1].start, chunk.stop)
        else:
            found.append(chunk)
    return tuple(found)


def even_parts(first: int, last: int, parts: int) -> Iterator[Chunk]:
    """[first, last) in so many parts, whose lengths differ by one at most."""
    bounds = [first + (last - first) * part // parts for part in range(parts + 1)]
    return (Chunk(*pair) for pair in pairwise(bounds))


@lru_cache(maxsize=256)
def _named(layout: str, length: int, ranks: int) -> Holdings:
    if layout == CONTIGUOUS:
        return tuple(joined([chunk]) for chunk in even_parts(0, length, ranks))
    return tuple(joined(chunks) for chunks in _zigzag(0, length, ranks))


def _zigzag(first: int, last: int, ranks: int) -> list[tuple[Chunk, Chunk]]:
    """Rank r has the chunks r and 2·ranks - 1 - r of 2·ranks: under a causal mask, an early one with little work and a
    late one with much."""
    chunks = list(even_parts(first, last, 2 * ranks))
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(ranks)]


@lru_cache(maxsize=256)
def _of_documents(starts: tuple[int, ...], length: int, ranks: int) -> Holdings:
    check_document_starts("layout", starts, length)
    dealt = [_zigzag(start, stop, ranks) for start, stop in pairwise(starts)]
    return tuple(joined(chunk for document in dealt for chunk in document[rank]) for rank in range(ranks))


def check_document_starts(name: str, starts: Sequence[int], length: int) -> None:
    """Raises `ValueError` for cu_seqlens that do not cover a sequence of `length` positions."""
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != length or any(b < a for a, b in pairwise(starts)):
        raise ValueError(
            f"{name}: {_shortened(starts)} is not allowed; allowed: starts that do not decrease, from 0 to the whole "
            f"length, {length}"
        )


@lru_cache(maxsize=256)
def _assigned(layout: Assignment, length: int, ranks: int) -> Holdings:
    if len(layout) != ranks:
        raise ValueError(f"layout: chunks of {len(layout)} ranks were given; there are {ranks}")
    position = 0
    for start, stop in sorted(chunk for chunks in layout for chunk in chunks):
        if start != position or stop < start:
            raise ValueError(
                f"layout: the chunk ({start}, {stop}) does not begin where the one before it ends, {position}; every "
                f"position from 0 to {length - 1} belongs to one rank"
            )
        position = stop
    if position != length:
        raise ValueError(f"layout: the chunks end at {position}; the sequence has {length} positions")
    return tuple(joined(Chunk(*chunk) for chunk in chunks) for chunks in layout)


def _shortened(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:6]))
    return f"[{shown}{', …' if len(values) > 6 else ''}]"
