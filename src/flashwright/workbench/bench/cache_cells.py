"""The cells of a benchmark of decoding: few query rows on caches of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from flashwright.kernels.decode.launch import PAGE_STEP
from flashwright.problem.dtypes import DType
from flashwright.problem.flops import DECODE
from flashwright.workbench.bench.grid import Cell, check_d_head, positive
from flashwright.workbench.bench.scores import NORMAL

BATCH, HEADS, GROUP, KEYS, D_HEAD = 16, 32, 4, 8_192, 128
"""Of cells unless given: sequences, heads of q, how many of them share one of k and v, keys of a sequence."""
UNEVEN_PAGE = 64
"""Uneven sequences lie in pages: a contiguous cache would be mostly empty."""

USUAL_DECODES = (
    (1, 32, 8, 1_024, 128), (1, 32, 8, 8_192, 128), (1, 32, 8, 131_072, 128), (16, 32, 8, 8_192, 128),
    (64, 32, 8, 8_192, 128), (32, 64, 8, 4_096, 64), (16, 128, 1, 8_192, 128), (8, 16, 16, 8_192, 128),
)  # fmt: skip
"""(batch, heads, heads of k and v, keys, d_head) of one row."""
USUAL_CHUNKS = (4, 16, 128, 512)
"""Rows on 32k keys, of four sequences."""


def usual_cells(dtype: DType = DType.BF16, scores: Sequence[str] = (NORMAL,), causal: bool | None = None) -> list[Cell]:
    """Steps of generation, and chunks of rows, of usual sizes."""
    sizes = [
        *((1, keys, batch, heads, kv_heads, d_head) for batch, heads, kv_heads, keys, d_head in USUAL_DECODES),
        *((rows, 32_768, 4, HEADS, HEADS // GROUP, D_HEAD) for rows in USUAL_CHUNKS),
    ]
    return [
        cache_cell(dtype, rows, keys, batch=b, heads=q, kv_heads=kv, d_head=d, causal=causal, scores=kind)
        for rows, keys, b, q, kv, d in sizes
        for kind in scores
    ]


def cache_cells(
    dtype: DType,
    d_heads: Sequence[int] = (D_HEAD,),
    rows: Sequence[int] = (1,),
    keys: Sequence[int] = (KEYS,),
    pages: Sequence[int] = (0,),
    scores: Sequence[str] = (NORMAL,),
    *,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    causal: bool | None = None,
    uneven: bool = False,
) -> list[Cell]:
    """Every cell of head dimensions × rows × keys × sizes of pages × kinds of scores."""
    return [
        cache_cell(
            dtype, some_rows, some_keys, batch=batch, heads=heads, kv_heads=kv_heads, d_head=d_head, causal=causal,
            page=page, uneven=uneven, scores=kind,
        )
        for d_head, some_rows, some_keys, page, kind in product(
            dict.fromkeys(d_heads), sorted(set(rows)), sorted(set(keys)), dict.fromkeys(pages), dict.fromkeys(scores)
        )
    ]  # fmt: skip


def cache_cell(
    dtype: DType,
    rows: int,
    keys: int,
    *,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    d_head: int = D_HEAD,
    causal: bool | None = None,
    page: int = 0,
    uneven: bool = False,
    scores: str = NORMAL,
) -> Cell:
    """A cell; several rows see no later key, unless told otherwise, and the last of them sees all."""
    batch, heads = BATCH if batch is None else batch, HEADS if heads is None else heads
    kv_heads = kv_heads if kv_heads is not None else heads // GROUP if heads % GROUP == 0 else heads
    sizes = {"rows": rows, "keys": keys, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    for name, value in sizes.items():
        positive(name, value)
    check_d_head(d_head)
    if heads % kv_heads:
        raise ValueError(f"kv_heads: {kv_heads} does not divide the {heads} heads")
    if rows > keys:
        raise ValueError(f"rows: {rows} are more than the {keys} keys of the cache, which hold the rows' own")
    page = UNEVEN_PAGE if uneven and not page else page
    if page % PAGE_STEP or page < 0:
        raise ValueError(f"pages: {page} is not allowed; allowed: multiples of {PAGE_STEP}")
    if page and keys % page:
        raise ValueError(f"keys: {keys} are no whole pages of {page}")
    if uneven and scores != NORMAL:
        raise ValueError(f"scores: {scores} is not allowed; allowed of uneven sequences: {NORMAL}")
    return Cell(
        dtype, d_head, rows > 1 if causal is None else causal, keys, batch, heads, kv_heads, scores, DECODE, rows, page,
        uneven,
    )  # fmt: skip
