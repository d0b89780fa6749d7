"""How a kernel meets a cache of keys and values: what a caller may arrange without another kernel.

The functions work on arrays of NumPy and on tensors of PyTorch alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WHOLE = 1 << 20
"""Units of a split that no sequence has: every tile is one thread block's."""
BALANCED = 0
"""Every thread block has an equal share of all keys."""


@dataclass(frozen=True)
class CacheUse:
    packs_heads: bool = True
    """Heads of q that share a head of k and v are rows of one tile. Otherwise each is computed by itself, and reads all
    keys for itself."""
    split_units: int = BALANCED
    """Units of keys that a thread block has at most; `BALANCED`, or `WHOLE`."""
    page_rows: int = 0
    """Keys of a page, in shuffled order; 0: the cache is contiguous."""


def each_head_by_itself(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """The same problem without groups: a batch for each head of k and v, which all of its heads of q see. Nothing is
    copied where k and v are contiguous."""
    batch, heads, rows, columns = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    alone = q.reshape(batch * kv_heads, group, rows, columns)
    return alone, *(_repeated(x.reshape(batch * kv_heads, 1, keys, columns), group) for x in (k, v))


def _repeated(x: Any, count: int) -> Any:
    """A dimension of size 1 as one of so many, in the same memory."""
    shape = (x.shape[0], count, *x.shape[2:])
    if hasattr(x, "expand"):
        return x.expand(shape)
    import numpy as np

    return np.broadcast_to(x, shape)


def in_pages(x: Any, page_rows: int, order: Any) -> Any:
    """(batch, heads, keys, columns) as (pages, heads, rows of a page, columns); page i of all sequences is stored as
    page `order[i]`."""
    batch, heads, keys, columns = x.shape
    if keys % page_rows:
        raise ValueError(f"keys: {keys} are no whole pages of {page_rows}")
    pages = x.reshape(batch, heads, keys // page_rows, page_rows, columns).swapaxes(1, 2)
    pages = pages.reshape(-1, heads, page_rows, columns)
    stored = pages[order]  # memory of the right size
    stored[order] = pages
    return stored
