"""The problem that kernels are simulated on to be examined: masks, cap, heads and keys beside a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashwright.kernels.family import KernelConfig
from flashwright.kernels.forward.launch import NO_OPTIONS, forward_variant
from flashwright.problem.options import AttentionOptions
from flashwright.problem.variant import AttentionVariant
from flashwright.problem.window import Window

QUERIES_PER_GROUP = 2
"""Heads of Q per head of K and V, unless given."""


@dataclass(frozen=True)
class Sample:
    """What is left to the reader of a page or a table: None where the reader did not choose."""

    options: AttentionOptions = NO_OPTIONS
    heads: int | None = None
    kv_heads: int | None = None
    keys: int | None = None

    def __post_init__(self) -> None:
        heads, kv_heads = self.head_counts(1)
        if min(heads, kv_heads) < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads: {kv_heads} does not divide heads, {heads}")

    def head_counts(self, usual: int) -> tuple[int, int]:
        """Of Q, and of K and V."""
        if self.kv_heads is None:
            heads = usual if self.heads is None else self.heads
            return heads, heads
        return self.kv_heads * QUERIES_PER_GROUP if self.heads is None else self.heads, self.kv_heads

    @property
    def is_grouped(self) -> bool:
        heads, kv_heads = self.head_counts(1)
        return heads != kv_heads

    def variant(self, config: KernelConfig, *, grouped_heads: bool | None = None) -> AttentionVariant:
        """What is compiled for it; of heads that are grouped as the sample's are, unless given."""
        return forward_variant(
            config,
            self.options,
            head_dim=config.d_head,
            grouped_heads=self.is_grouped if grouped_heads is None else grouped_heads,
            packed=False,
            returns_lse=False,
        )

    def __str__(self) -> str:
        """What differs from a full mask and plain scores: `causal, softcap 30`; nothing if nothing does."""
        (left, right, _), softcap = self.options.window, self.options.softcap
        parts = []
        if (left, right) == (None, 0):
            parts.append("causal")
        elif (left, right) != (None, None):
            parts.append(f"window {_side(left)} left, {_side(right)} right")
        if softcap:
            parts.append(f"softcap {softcap:g}")
        if self.is_grouped:
            heads, kv_heads = self.head_counts(1)
            parts.append(f"{heads} heads of Q on {kv_heads} of K and V")
        if self.keys is not None:
            parts.append(f"{self.keys} keys")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        (left, right, _), softcap = self.options.window, self.options.softcap
        heads = {"heads": self.heads, "kv_heads": self.kv_heads, "keys": self.keys}
        return {"window": [left, right], "softcap": softcap, **heads}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Sample:
        options = AttentionOptions.of(False, document["window"], None, document["softcap"])
        return cls(options, document["heads"], document["kv_heads"], document["keys"])


PLAIN_SAMPLE = Sample()


def _side(keys: int | None) -> str:
    return "all" if keys is None else str(keys)


@dataclass(frozen=True)
class VisitedBlocks:
    """Of one tile of rows: the blocks of the other side with a partner for any of them, by what the mask leaves of
    them. The other side of a tile of queries is keys, that of a tile of keys queries."""

    count: int
    cut_left: int
    """Blocks in which the window's left edge cuts partners off for some row."""
    cut_right: int

    @property
    def plain(self) -> int:
        return max(0, self.count - self.cut_left - self.cut_right)


def visited_blocks(
    window: Window, rows: int, others: int, *, tile: int, step: int, first_row: int = 0
) -> VisitedBlocks:
    """Of the tile that begins with `first_row`, in blocks of `step`; as `KeyBlocks` of ranges.cuh counts."""
    last_row = min(first_row + tile, rows) - 1
    (first_of_first, last_of_first), (first_of_last, last_of_last) = (
        window.keys_of(row, rows, others) for row in (first_row, last_row)
    )
    begin, end = first_of_first // step, -(-(last_of_last + 1) // step)
    plain_begin, plain_end = -(-first_of_last // step), (last_of_first + 1) // step
    return VisitedBlocks(max(0, end - begin), max(0, plain_begin - begin), max(0, end - max(plain_end, begin)))


def kv_steps(config: KernelConfig, options: AttentionOptions, rows: int, keys: int) -> int:
    """Of one head, over all blocks of query rows."""
    return sum(
        visited_blocks(options.window, rows, keys, tile=config.B_r, step=config.B_c, first_row=first).count
        for first in range(0, rows, config.B_r)
    )
