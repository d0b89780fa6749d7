"""The problem on which a kernel is executed to be explained: one tile with as many steps as are counted and drawn."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.kernels.explanation import TracedWarp
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.operation import OVER_QUERIES
from flashwright.kernels.registry import family_of
from flashwright.problem.window import FULL, Window
from flashwright.workbench.explain.explanations import explanation_of
from flashwright.workbench.quantities import counted
from flashwright.workbench.sample import Sample, VisitedBlocks, visited_blocks


class TooFewSteps(ValueError):
    """A sample has fewer steps free of a mask's edges than are counted and drawn."""


@dataclass(frozen=True)
class TileToFollow:
    """Tensors that have one tile, and its steps. Thread blocks that work together have a tile each, and so have those
    around them, where it takes others to make a tile's steps what they are."""

    q_rows: int
    kv_rows: int
    window: Window
    """Aligned so that the tile's steps are all there is."""
    cut_first: int
    """Steps from the first to the last of those that the first edge of the mask cuts."""
    block: int = 0
    """The thread block that has the tile, or a part of it."""
    blocks: int = 1
    """With those around it."""


def tile_to_follow(config: KernelConfig, sample: Sample, warp: TracedWarp, iterations: int) -> TileToFollow:
    """With so many passes through a warp's loop that no edge of the mask cuts, beside those that one cuts.

    Raises `TooFewSteps` if the sample's window or keys leave fewer."""
    of = _tile_of_keys if family_of(config).operation.steps is OVER_QUERIES else _tile_of_queries
    return of(config, sample, warp, iterations)


def _tile_of_queries(config: KernelConfig, sample: Sample, warp: TracedWarp, iterations: int) -> TileToFollow:
    window, rows = sample.options.window, config.B_r
    if family_of(config).operation.reads_cache:  # heads that share keys are rows of one tile
        heads, kv_heads = sample.head_counts(1)
        rows = max(rows * kv_heads // heads, 1)
    steps = _steps(warp, iterations) + _cut_at_diagonal(window, rows, config.B_c)
    keys = sample.keys or steps * config.B_c
    visited = visited_blocks(window, rows, keys, tile=rows, step=config.B_c)
    remedy = "more keys" if window == FULL else "a wider window, more keys"
    _check_plain_steps(visited, iterations, f"{rows} rows", f"{config.B_c} keys", remedy)
    return TileToFollow(rows, keys, window, _cut_first(visited, warp))


def _tile_of_keys(config: KernelConfig, sample: Sample, warp: TracedWarp, iterations: int) -> TileToFollow:
    """Among the first keys, by the first queries: windows are aligned to the top left."""
    window = sample.options.window._replace(bottom_right=False)
    together = family_of(config).launch_rules.key_blocks_together(config)
    around = explanation_of(config).tiles_around(config)
    tile = together * config.B_c
    keys = sample.keys or (2 * around + 1) * tile
    tiles = -(-keys // tile)
    before = min(around, (tiles - 1) // 2)
    steps = _steps(warp, iterations) + _cut_at_diagonal(window, tile, config.B_r)
    q_rows = (-(-before * tile // config.B_r) + steps) * config.B_r
    # A key's queries lie as far to its left as a query's keys to its right.
    mirrored = window._replace(left=window.right, right=window.left)
    visited = visited_blocks(mirrored, keys, q_rows, tile=tile, step=config.B_r, first_row=before * tile)
    _check_plain_steps(visited, iterations, f"{tile} keys", f"{config.B_r} rows", "a wider window")
    return TileToFollow(
        q_rows,
        keys,
        window,
        _cut_first(visited, warp),
        block=before * together,
        blocks=tiles * together if around else 1,
    )


def _steps(warp: TracedWarp, iterations: int) -> int:
    return iterations + warp.steps_before_loop + warp.steps_ahead - 1


def _cut_at_diagonal(window: Window, rows: int, block: int) -> int:
    """Blocks that a tile of so many rows visits, and in which the window's right edge cuts."""
    return 0 if window.right is None else -(-max(0, rows - 1 - window.right) // block)


def _check_plain_steps(visited: VisitedBlocks, needed: int, rows: str, block_rows: str, remedy: str) -> None:
    if visited.plain < needed:
        cut = visited.count - visited.plain
        which = f", of which an edge of the mask cuts {cut}" if cut else ""
        raise TooFewSteps(
            f"{rows} visit {counted(visited.count, 'block')} of {block_rows}{which}; counts need {needed} whole ones: "
            f"{remedy}, or smaller blocks"
        )


def _cut_first(visited: VisitedBlocks, warp: TracedWarp) -> int:
    cut = visited.cut_right if warp.last_key_first else visited.cut_left
    return warp.steps_before_cut + cut if cut else 0
