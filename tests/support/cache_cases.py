"""Problems for caches of keys and values, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def some(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def random_problem(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tensors as the drop-in takes them, and what plans and kernels compute of them without PyTorch's help."""
    draw, capacity, head_dim = random.Random(seed), 96, 64
    batch, rows, kv_heads, group = draw.randint(1, 3), draw.randint(1, 5), draw.randint(1, 2), draw.randint(1, 4)
    paged, appends = draw.random() < 0.5, draw.random() < 0.5
    heads, new_rows = kv_heads * group, draw.randint(1, 3)
    q = some(batch, rows, heads, head_dim, seed=seed + 1, dtype=torch.bfloat16)
    lengths = [draw.randint(0, capacity - new_rows) for _ in range(batch)]
    arguments: dict[str, Any] = {
        "cache_seqlens": int32(*lengths),
        "causal": draw.random() < 0.5,
        "window_size": draw.choice(((-1, -1), (-1, -1), (20, 5))),
        "softcap": draw.choice((0.0, 0.0, 5.0)),
    }
    if paged:
        page = draw.choice((16, 32, 48))
        pages = capacity // page * batch + 1
        caches = [some(pages, page, kv_heads, head_dim, seed=seed + i, dtype=torch.bfloat16) for i in (2, 3)]
        order = list(range(pages))
        draw.shuffle(order)
        arguments["block_table"] = int32(*order[: pages - 1]).view(batch, -1)
    else:
        caches = [some(batch + 1, capacity, kv_heads, head_dim, seed=seed + i, dtype=torch.bfloat16) for i in (2, 3)]
        index = list(range(batch + 1))
        draw.shuffle(index)
        arguments["cache_batch_idx"] = int32(*index[:batch])
    if draw.random() < 0.5:
        arguments["cache_leftpad"] = int32(*(draw.randint(0, n) for n in lengths))
    if appends:
        shape = (batch, new_rows, kv_heads, head_dim)
        arguments["k"], arguments["v"] = (some(*shape, seed=seed + i, dtype=torch.bfloat16) for i in (4, 5))
        if draw.random() < 0.7:
            angles = some(capacity, draw.choice((8, 16, 32)), seed=seed + 6)
            arguments["rotary_cos"], arguments["rotary_sin"] = angles.cos().bfloat16(), angles.sin().bfloat16()
            arguments["rotary_interleaved"] = draw.random() < 0.5
    return (q, *caches), arguments


@dataclass(frozen=True)
class CallsOfAKind:
    """What kernels are compiled for; all else may differ from call to call."""

    head_dim: int
    group: int = 1
    """Heads of q that share one of keys."""
    rows: int = 1
    value_head_dim: int = 0
    """0: the keys'."""
    dtype: Any = torch.bfloat16
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    values_in_keys: bool = False
    """Values are the first columns of the keys, in the same memory."""

    def copies(self, caches: Sequence[Any], convert: Callable[[Any], Any]) -> list[Any]:
        """Keys and values, converted."""
        k = convert(caches[0])
        return [k, k[..., : self.value_head_dim] if self.values_in_keys else convert(caches[1])]

    def problem(self, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Tensors as the drop-in takes them, with everything that a cache may have, mixed."""
        draw = random.Random(seed)
        seeds = iter(range(100 * seed, 100 * seed + 100))

        def tensor(*shape: int) -> Any:
            return torch.randn(shape, generator=torch.Generator().manual_seed(next(seeds))).to(self.dtype)

        def numbers(*values: int) -> Any:
            return int32(*values).to(draw.choice((torch.int32, torch.int32, torch.int64)))

        batch, kv_heads, page = draw.randint(1, 4), draw.choice((1, 1, 2, 3)), draw.choice((16, 48, 64, 256))
        new_rows, capacity = draw.randint(1, 4), page * draw.choice((1, 2, 1200 // page))
        value_head_dim = self.value_head_dim or self.head_dim
        widths = (self.head_dim, value_head_dim)
        lengths = [draw.randint(0, capacity - new_rows) for _ in range(batch)]
        arguments: dict[str, Any] = {
            "cache_seqlens": numbers(*lengths), "causal": self.causal, "window_size": self.window,
            "softcap": self.softcap, "num_splits": draw.choice((0, 1, 3)), "row_invariant": draw.random() < 0.3,
        }  # fmt: skip
        if draw.random() < 0.1:
            lengths = [lengths[0]] * batch
            arguments["cache_seqlens"] = lengths[0]
        if draw.random() < 0.5:  # ragged
            of_each = [draw.randint(0, self.rows) for _ in range(batch)]
            starts = [sum(of_each[:b]) for b in range(batch + 1)]
            arguments["cu_seqlens_q"], arguments["max_seqlen_q"] = numbers(*starts), self.rows
            q = tensor(max(1, starts[-1]), kv_heads * self.group, self.head_dim)
        else:
            q = tensor(batch, draw.randint(1, self.rows), kv_heads * self.group, self.head_dim)
        sequences = batch + draw.randint(0, 2)
        index = draw.sample(range(sequences), batch)
        if draw.random() < 0.6:
            columns = capacity // page
            pages = draw.sample(range(sequences * columns + 3), sequences * columns)
            table = numbers(*pages).view(sequences, columns)
            if draw.random() < 0.3:
                arguments["cache_batch_idx"] = numbers(*index)
            else:
                table = table[:batch]
            arguments[draw.choice(("block_table", "page_table"))] = table
            caches = [tensor(sequences * columns + 3, page, kv_heads, width) for width in widths]
        else:
            arguments["cache_batch_idx"] = numbers(*index)
            caches = [tensor(sequences, capacity, kv_heads, width) for width in widths]
        if self.values_in_keys:
            caches[1] = caches[0][..., :value_head_dim]
        if draw.random() < 0.4:
            arguments["cache_leftpad"] = numbers(*(draw.randint(0, n) for n in lengths))
        if draw.random() < 0.6:
            if draw.random() < 0.4:
                of_each = [draw.randint(0, new_rows) for _ in range(batch)]
                starts = [sum(of_each[:b]) for b in range(batch + 1)]
                arguments["cu_seqlens_k_new"], shape = numbers(*starts), (starts[-1],)
            else:
                shape = (batch, new_rows)
            arguments["k"], arguments["v"] = (tensor(*shape, kv_heads, width) for width in widths)
            if draw.random() < 0.7:
                angles = some(capacity, 8 * draw.randint(1, self.head_dim // 16), seed=next(seeds))
                arguments["rotary_cos"] = angles.cos().to(self.dtype)
                arguments["rotary_sin"] = angles.sin().to(self.dtype)
                arguments["rotary_interleaved"] = draw.random() < 0.5
                if draw.random() < 0.3:
                    arguments["rotary_seqlens"] = numbers(*(n // 2 for n in lengths))
        if draw.random() < 0.3:
            arguments["out"] = torch.full((*q.shape[:-1], value_head_dim), torch.nan, dtype=self.dtype)
        return (q, *caches), arguments
