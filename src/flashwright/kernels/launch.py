"""How the launches of a family depend on the sizes of a problem, which change from call to call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from flashwright.problem.dtypes import DType
from flashwright.problem.variant import AttentionVariant
from flashwright.problem.window import Window


class Sizes(NamedTuple):
    """What changes from call to call. Lengths are those of every sequence, or of the longest if they are packed."""

    batches: int
    q_heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    packed_rows: int | None = None
    """Rows of q of all sequences, where they are packed and share one line of slots."""

    def q_blocks(self, config: Blocking) -> int:
        """Blocks of query rows of each sequence, or slots for the blocks of all packed ones: `PackedLine` of
        attention/tile.cuh."""
        if self.packed_rows is not None:
            return self.packed_rows // config.B_r + self.batches
        return -(-self.q_length // config.B_r)

    @property
    def lines(self) -> int:
        """How often a head's `q_blocks` come: once for each sequence, or once."""
        return self.batches if self.packed_rows is None else 1


Grid = tuple[int, int, int]


class Blocking(Protocol):
    """What a launch depends on of a config of any family."""

    @property
    def dtype(self) -> DType: ...
    @property
    def d_head(self) -> int: ...
    @property
    def B_r(self) -> int: ...
    @property
    def B_c(self) -> int: ...


def one_block_per_tile(config: Blocking, q_blocks: int, heads: int, batches: int, multiprocessors: int) -> Grid:
    return q_blocks * heads * batches, 1, 1


@dataclass(frozen=True)
class LaunchRules:
    """How the launches of a family depend on a problem's sizes, beyond what all families share."""

    grid: Callable[[Any, int, int, int, int], Grid] = one_block_per_tile
    """Thread blocks for so many blocks of B_r query rows, heads and batches, on a GPU with so many multiprocessors."""
    boxes: Callable[[Any], tuple[int, int, int, int]] | None = None
    """(columns, rows of q, of k, of v) that one bulk copy moves, where the kernel copies by tensor maps."""
    schedule: Callable[[Any, AttentionVariant, Sizes, Window, int], ctypes.Structure] | None = None
    """Which of so many thread blocks computes which tiles, where the kernel takes a list of them."""
    deals_tiles: Callable[[Any, AttentionVariant], bool] = lambda config, variant: False
    """Whether a schedule can balance thread blocks better than the kernel's own rule does."""
    schedule_by_rule: Callable[[int, int, int], tuple[int, int]] = lambda q_blocks, heads, batches: (0, 0)
    """The first 16 bytes of a schedule, as two words, that leaves all tiles of a grid to a rule of the kernel's own:
    found at once, for lengths that may not come again."""
    key_blocks_together: Callable[[Any], int] = lambda config: 1
    """Blocks of B_c keys whose thread blocks work together, where a thread block owns keys: there are whole groups."""
    key_blocks_at_once: int = 2
    """For each multiprocessor, blocks of keys of the heads that take turns, where a thread block owns keys."""
    finishes_dq: Callable[[Any], bool] = lambda config: False
    """Whether a backward kernel rounds dq itself."""
    row_stride: Callable[[Any], int] = lambda config: 0
    """Elements from a row of the tensors to the next, where a config's kernel was compiled for them; 0: any."""
    values_in_keys: int = 0
    """Values are the first columns of the keys, up to so many, and are not read again; 0: a tensor of their own."""
    deals_items: bool = False
    """Whether a decode kernel takes equal items whole, in rounds, before it shares what is left."""
