"""Which thread block of a persistent kernel computes which tiles.

Without a causal mask all tiles cost the same, and are dealt in rounds. With one, the first blocks of rows attend to few
keys and the last to many. A long and a short tile of the same head form a pair; all pairs cost the same, and are dealt
in rounds. The tiles after the last full round would leave some thread blocks idle. They are dealt one by one, each to
the thread block with the least work, in lists that are passed to the kernel.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np

MAX_LISTED_BLOCKS = 160
"""Thread blocks that lists have room for. On a GPU with more multiprocessors the rule deals all tiles."""
MAX_LISTED_TILES = 4 * MAX_LISTED_BLOCKS
"""Two rounds of pairs."""
MOST_ROUNDS = 64
"""With more rounds than this, the last one is a negligible part of the work."""
NEVER = 2**30
"""Rounds before the lists, where there are no lists."""
_TILE_OVERHEAD = 0.7
"""Fixed cost of a tile, in steps: its first scores, which overlap with no product, and its store."""
_WORTHWHILE = 0.005
"""Least share of the longest thread block's time that lists must save: they separate tiles of one head, which otherwise
share its keys in L2."""


class Schedule(ctypes.Structure):
    """`Schedule` of pipeline/schedule.cuh."""

    _fields_ = (
        ("q_blocks", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("batches", ctypes.c_int32),
        ("rounds", ctypes.c_int32),
        ("list_starts", ctypes.c_uint16 * (MAX_LISTED_BLOCKS + 1)),
        ("listed_tiles", ctypes.c_uint16 * MAX_LISTED_TILES),
    )


def schedule_in_rounds(q_blocks: int, heads: int, batches: int) -> Schedule:
    """A schedule in which the kernel's rule deals all tiles."""
    return Schedule(q_blocks, heads, batches, NEVER)


@lru_cache(maxsize=4096)
def balanced_schedule(steps: tuple[int, ...], heads: int, batches: int, blocks: int) -> Schedule:
    """A schedule for `blocks` thread blocks, where each head's blocks of rows take `steps`, the longest last."""
    schedule = schedule_in_rounds(len(steps), heads, batches)
    pairs = (len(steps) + 1) // 2 * heads * batches
    full_rounds = pairs // blocks
    if blocks > MAX_LISTED_BLOCKS or full_rounds > MOST_ROUNDS:
        return schedule
    if len(steps) * heads * batches <= blocks:  # a thread block for each tile, whatever they cost
        tiles = _tiles(steps, range(pairs))
        _write(schedule, 0, [[number] for _, number in tiles] + [[]] * (blocks - len(tiles)))
        return schedule
    shortest = max(_loads_after_rounds(steps, pairs, blocks))
    for rounds in range(full_rounds, max(-1, full_rounds - 2), -1):
        tiles = _tiles(steps, range(rounds * blocks, pairs))
        if len(tiles) > MAX_LISTED_TILES:
            continue
        lists, longest = _deal_one_by_one(tiles, _loads_after_rounds(steps, rounds * blocks, blocks))
        if longest < (1 - _WORTHWHILE) * shortest:
            shortest = longest
            _write(schedule, rounds, lists)
    return schedule


def _loads_after_rounds(steps: tuple[int, ...], pairs: int, blocks: int) -> list[float]:
    """Cost per thread block after `pairs` pairs were dealt in rounds, each round starting one place further."""
    long, short = np.array(steps[::-1], float), np.array(steps, float)
    costs = long + short + 2 * _TILE_OVERHEAD
    if len(steps) % 2:
        costs[len(steps) // 2] /= 2  # alone
    number = np.arange(pairs)
    block = (number - number // blocks) % blocks
    return list(np.bincount(block, costs[number % ((len(steps) + 1) // 2)], minlength=blocks))


def _tiles(steps: tuple[int, ...], pairs: range) -> list[tuple[float, int]]:
    """(cost, number) of the tiles of some pairs. The number is twice the pair's index among them, plus 1 for the
    shorter tile. The middle one of an odd number of blocks of rows has no partner."""
    pairs_per_head, alone = (len(steps) + 1) // 2, len(steps) // 2
    tiles = []
    for number, pair in enumerate(pairs):
        place = pair % pairs_per_head
        tiles.append((steps[-1 - place] + _TILE_OVERHEAD, 2 * number))
        if place != alone:
            tiles.append((steps[place] + _TILE_OVERHEAD, 2 * number + 1))
    return tiles


def _deal_one_by_one(tiles: list[tuple[float, int]], loads: list[float]) -> tuple[list[list[int]], float]:
    """Deals the longest tiles first, each to the thread block with the least work: the lists, and the largest load."""
    lists: list[list[int]] = [[] for _ in loads]
    queue = [(load, block) for block, load in enumerate(loads)]
    heapify(queue)
    for cost, number in sorted(tiles, key=lambda tile: -tile[0]):
        load, block = queue[0]
        lists[block].append(number)
        heapreplace(queue, (load + cost, block))
    return lists, max(load for load, _ in queue)


def _write(schedule: Schedule, rounds: int, lists: list[list[int]]) -> None:
    schedule.rounds = rounds
    end = 0
    for block, tiles in enumerate(lists):
        schedule.list_starts[block] = end
        schedule.listed_tiles[end : end + len(tiles)] = tiles
        end += len(tiles)
    schedule.list_starts[len(lists)] = end
