"""Which rows of a chunk of queries attend to which rows of a chunk of keys, by positions in the whole sequence.

Chunks are cut at the borders of packed sequences into pieces. Of a piece of queries and a piece of keys, the part that
a mask leaves is a rectangle with a window aligned to its top left: the distance between the two is in its bounds, so
that the kernels compute any pair of pieces as they compute a whole sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from flashwright.distributed.layouts import Chunk
from flashwright.problem.window import FULL, Window


class Span(NamedTuple):
    """Rows `start` … `stop` - 1 of a tensor."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class Mask(NamedTuple):
    """A window on the positions of whole sequences, one or several packed."""

    window: Window
    q_starts: tuple[int, ...]
    kv_starts: tuple[int, ...]
    """Sequence b is positions starts[b] … starts[b + 1] - 1."""

    def level(self, sequence: int) -> int:
        """The position of the key that is level with the query of position 0, if it belonged to the sequence."""
        ends = sequence + 1 if self.window.bottom_right else sequence
        return self.kv_starts[ends] - self.q_starts[ends]


class Piece(NamedTuple):
    """Consecutive positions of one packed sequence, and where a tensor has them."""

    first: int
    """The row of the tensor."""
    start: int
    """The position in the whole."""
    length: int
    sequence: int

    @property
    def rows(self) -> Span:
        return Span(self.first, self.first + self.length)


class Tile(NamedTuple):
    """Rows of queries that attend to rows of keys; its window is aligned to the top left of the two."""

    rows: Span
    keys: Span
    window: Window

    @property
    def scores(self) -> float:
        """Pairs of a query and a key that it attends to."""
        rows, keys = self.rows.length, self.keys.length
        left, right, _ = self.window
        seen = rows * keys
        if right is not None:  # row i misses the keys from i + right + 1 on
            seen -= _triangle(keys - right - 1, rows)
        if left is not None:  # row i misses those before i - left
            seen -= _triangle(rows - left - 1, keys)
        return seen


def _triangle(longest: int, count: int) -> int:
    """longest + (longest - 1) + …, of `count` terms at most, none of them negative."""
    terms = max(0, min(longest, count))
    return terms * longest - terms * (terms - 1) // 2


def pieces(chunks: Iterable[Chunk], starts: Sequence[int]) -> list[Piece]:
    """The chunks of a rank cut where packed sequences begin; in the order of its rows."""
    found: list[Piece] = []
    row = 0
    for chunk in chunks:
        position = chunk.start
        while position < chunk.stop:
            sequence = bisect_right(starts, position) - 1
            stop = min(chunk.stop, starts[sequence + 1])
            found.append(Piece(row, position, stop - position, sequence))
            row += stop - position
            position = stop
    return found


def visible_part(queries: Piece, keys: Piece, mask: Mask) -> Tile | None:
    """The rows and keys that take part, and the window between them; None if a mask leaves nothing."""
    if queries.sequence != keys.sequence:
        return None
    left, right, _ = mask.window
    # Row i attends to the keys i + distance - left … i + distance + right.
    distance = queries.start + mask.level(queries.sequence) - keys.start
    first_row = 0 if right is None else max(0, -(distance + right))
    rows_end = queries.length if left is None else min(queries.length, keys.length - distance + left)
    if first_row >= rows_end:
        return None
    first_key = 0 if left is None else max(0, first_row + distance - left)
    keys_end = keys.length if right is None else min(keys.length, rows_end + distance + right)
    if first_key >= keys_end:
        return None
    cuts_left = left is not None and rows_end - 1 + distance - left > first_key
    cuts_right = right is not None and first_row + distance + right < keys_end - 1
    distance += first_row - first_key
    window = FULL
    if cuts_left or cuts_right:
        window = Window(
            left - distance if cuts_left and left is not None else None,
            right + distance if cuts_right and right is not None else None,
            bottom_right=False,
        )
    return Tile(
        Span(queries.first + first_row, queries.first + rows_end),
        Span(keys.first + first_key, keys.first + keys_end),
        window,
    )


def needed(queries: Iterable[Piece], keys: Iterable[Piece], mask: Mask) -> list[Piece]:
    """Of each piece of keys, those that any of the queries attends to."""
    by_sequence = defaultdict(list)
    for piece in queries:
        by_sequence[piece.sequence].append(piece)
    found = []
    for piece in keys:
        seen = [tile.keys for each in by_sequence[piece.sequence] if (tile := visible_part(each, piece, mask))]
        for first, last in _united(seen):
            found.append(Piece(first, piece.start + first - piece.first, last - first, piece.sequence))
    return found


def _united(spans: Iterable[Span]) -> list[Span]:
    """The same rows, each once, in few spans."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return found


def tiles(queries: Sequence[Piece], keys: Sequence[Piece], mask: Mask) -> list[Tile]:
    """Everything that the queries attend to of the keys, in few tiles."""
    by_sequence = defaultdict(list)
    for piece in _joined(keys):
        by_sequence[piece.sequence].append(piece)
    found = []
    for piece in _joined(queries):
        row = [tile for each in by_sequence[piece.sequence] if (tile := visible_part(piece, each, mask))]
        found += _merged(row)
    return _merged(found)


def _joined(ordered: Iterable[Piece]) -> list[Piece]:
    """Neighbours in both the tensor and the whole as one piece."""
    found: list[Piece] = []
    for piece in ordered:
        last = found[-1] if found else None
        if (
            last is not None
            and last.sequence == piece.sequence
            and last.first + last.length == piece.first
            and last.start + last.length == piece.start
        ):
            found[-1] = last._replace(length=last.length + piece.length)
        else:
            found.append(piece)
    return found


def _merged(ordered: list[Tile]) -> list[Tile]:
    """Neighbours as one tile, where one window says the same as both."""
    found: list[Tile] = []
    for tile in ordered:
        both = _together(found[-1], tile) if found else None
        if both is None:
            found.append(tile)
        else:
            found[-1] = both
    return found


def _together(first: Tile, second: Tile) -> Tile | None:
    """Of two tiles without a limit to the left: the second has the next keys of the same rows, or the next rows."""
    if first.window.left is not None or second.window.left is not None:
        return None
    bound, next_bound = first.window.right, second.window.right
    if first.rows == second.rows and first.keys.stop == second.keys.start and bound is None:
        # All rows have all of the first keys, and some of the next.
        keys = Span(first.keys.start, second.keys.stop)
        return Tile(first.rows, keys, _right(None if next_bound is None else next_bound + first.keys.length))
    if first.rows.stop != second.rows.start or first.keys.start != second.keys.start:
        return None
    rows = Span(first.rows.start, second.rows.stop)
    if bound is None and next_bound is None:
        return Tile(rows, first.keys, FULL) if first.keys == second.keys else None
    if bound is None or next_bound != bound + first.rows.length:
        return None
    # One diagonal goes through both: the first rows end where their last row's keys do.
    ends = first.keys.length == first.rows.length + bound or first.keys.stop == second.keys.stop
    return Tile(rows, second.keys, _right(bound)) if ends and first.keys.stop <= second.keys.stop else None


def _right(bound: int | None) -> Window:
    return FULL if bound is None else Window(None, bound, bottom_right=False)


# --- Launches --------------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """Tiles that are computed at once: one, or several as packed sequences of the same window."""

    rows: Span
    keys: Span
    window: Window
    q_starts: tuple[int, ...] = ()
    kv_starts: tuple[int, ...] = ()
    """Of the packed sequences, from the first row and key on. Rows between two tiles are sequences without keys, keys
    between two tiles are sequences without rows."""

    @property
    def longest(self) -> tuple[int, int]:
        """Of the packed sequences' rows and keys."""
        return _longest(self.q_starts), _longest(self.kv_starts)


def single_launches(tiles: Iterable[Tile]) -> list[Launch]:
    return [Launch(*tile) for tile in tiles]


def packed_launches(tiles: Iterable[Tile]) -> list[Launch]:
    """Tiles of the same window whose rows and keys follow one another, as many as possible in each launch."""
    groups: list[list[Tile]] = []
    open_groups: dict[Window, list[Tile]] = {}
    for tile in tiles:
        group = open_groups.get(tile.window)
        if group and group[-1].rows.stop <= tile.rows.start and group[-1].keys.stop <= tile.keys.start:
            group.append(tile)
        else:
            open_groups[tile.window] = group = [tile]
            groups.append(group)
    return [Launch(*group[0]) if len(group) == 1 else _packed(group) for group in groups]


def _packed(group: Sequence[Tile]) -> Launch:
    rows = Span(group[0].rows.start, group[-1].rows.stop)
    keys = Span(group[0].keys.start, group[-1].keys.stop)
    q_starts, kv_starts = [0], [0]
    for tile in group:
        q_end, kv_end = tile.rows.start - rows.start, tile.keys.start - keys.start
        if q_end > q_starts[-1]:
            q_starts.append(q_end)
            kv_starts.append(kv_starts[-1])
        if kv_end > kv_starts[-1]:
            q_starts.append(q_starts[-1])
            kv_starts.append(kv_end)
        q_starts.append(tile.rows.stop - rows.start)
        kv_starts.append(tile.keys.stop - keys.start)
    return Launch(rows, keys, group[0].window, tuple(q_starts), tuple(kv_starts))


def _longest(starts: Sequence[int]) -> int:
    return max(stop - start for start, stop in pairwise(starts))
