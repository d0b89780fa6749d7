"""Which thread block of a persistent kernel computes which tiles.

Without a causal mask all tiles are alike, and are dealt in rounds. With one, the first blocks of rows look at few keys
and the last at many: they are dealt in pairs of a long and a short one of the same head, which are alike. What is left
when no full round remains would keep some thread blocks busy while others have nothing to do; it is dealt tile by tile
instead, to whoever has the least, from lists that are passed to the kernel.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np

MAX_LISTED_BLOCKS = 160
"""Thread blocks that can have lists; a GPU with more multiprocessors goes without."""
MAX_LISTED_TILES = 4 * MAX_LISTED_BLOCKS
"""Two rounds of pairs."""
MOST_ROUNDS = 64
"""Beyond which what is left over hardly matters."""
NEVER = 2**30
"""Rounds after which lists begin, if there are none."""
_TILE_OVERHEAD = 0.7
"""What a tile costs beside its steps, in steps: its first scores, with no product to overlap, and its store."""
_WORTHWHILE = 0.005
"""Lists keep tiles of one head apart that would share its keys in a cache: only for so much of the time."""


class Schedule(ctypes.Structure):
    """`Schedule` of tile_scheduler.cuh."""

    _fields_ = (
        ("q_blocks", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("batches", ctypes.c_int32),
        ("rounds", ctypes.c_int32),
        ("list_starts", ctypes.c_uint16 * (MAX_LISTED_BLOCKS + 1)),
        ("listed_tiles", ctypes.c_uint16 * MAX_LISTED_TILES),
    )


def schedule_in_rounds(q_blocks: int, heads: int, batches: int) -> Schedule:
    """All tiles by the rule."""
    return Schedule(q_blocks, heads, batches, NEVER)


@lru_cache(maxsize=4096)
def balanced_schedule(steps: tuple[int, ...], heads: int, batches: int, blocks: int) -> Schedule:
    """For blocks of rows that take so many steps, the longest last, in each head; dealt to so many thread blocks."""
    schedule = schedule_in_rounds(len(steps), heads, batches)
    pairs = (len(steps) + 1) // 2 * heads * batches
    full_rounds = pairs // blocks
    if blocks > MAX_LISTED_BLOCKS or full_rounds > MOST_ROUNDS:
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
    """What each thread block has to do when so many pairs are dealt in rounds, each a place further than the last."""
    long, short = np.array(steps[::-1], float), np.array(steps, float)
    costs = long + short + 2 * _TILE_OVERHEAD
    if len(steps) % 2:
        costs[len(steps) // 2] /= 2  # alone
    number = np.arange(pairs)
    block = (number - number // blocks) % blocks
    return list(np.bincount(block, costs[number % ((len(steps) + 1) // 2)], minlength=blocks))


def _tiles(steps: tuple[int, ...], pairs: range) -> list[tuple[float, int]]:
    """(cost, number) of the tiles of some pairs. The number is the pair's among them doubled, plus 1 for the shorter.
    The middle one of an odd number of blocks of rows is alone."""
    pairs_per_head, alone = (len(steps) + 1) // 2, len(steps) // 2
    tiles = []
    for number, pair in enumerate(pairs):
        place = pair % pairs_per_head
        tiles.append((steps[-1 - place] + _TILE_OVERHEAD, 2 * number))
        if place != alone:
            tiles.append((steps[place] + _TILE_OVERHEAD, 2 * number + 1))
    return tiles


def _deal_one_by_one(tiles: list[tuple[float, int]], loads: list[float]) -> tuple[list[list[int]], float]:
    """The longest tiles first, each to the thread block with the least to do: their lists, and the most of any."""
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
