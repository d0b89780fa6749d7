"""Problems for caches of keys and values, drawn at random."""

from __future__ import annotations

import random
from typing import Any

import torch


def some(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def random_problem(seed: int, *, capacity: int = 96, head_dim: int = 64) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tensors as the drop-in takes them, with everything that a cache may have, mixed."""
    draw = random.Random(seed)
    batch, rows, kv_heads, group, head_dim = (
        draw.randint(1, 3),
        draw.randint(1, 5),
        draw.randint(1, 2),
        draw.randint(1, 4),
        64,
    )
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
