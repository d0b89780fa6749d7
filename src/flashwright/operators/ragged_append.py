"""New rows of different numbers for each sequence, rotations of ragged queries, and for positions of their own, by
PyTorch's operations: the kernel that appends has one number of rows for all. Nothing is read back by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from flashwright.operators.rotary import rotated
from flashwright.runtime.decode_plans import CacheTensors, NewRows


def append_ragged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache: CacheTensors,
    new: NewRows,
    k_starts: Tensor | None,
    rotary_lengths: Tensor | None,
) -> tuple[Tensor, CacheTensors]:
    """The queries, rotated, and the cache with its new lengths. Tensors are as of `decode`; with `k_starts`, the new
    keys and values have batch 1, and sequence b has rows k_starts[b] … k_starts[b + 1] - 1. Rotations are for positions
    from `rotary_lengths` on, or from the lengths of the cache."""
    assert new.k is not None and new.v is not None and cache.kv_lengths is not None
    lengths = cache.kv_lengths
    first_positions = lengths if rotary_lengths is None else rotary_lengths
    k_starts = _dense_starts(len(lengths), new.k) if k_starts is None else k_starts
    keys, values = (x.transpose(0, 1).flatten(1, 2) for x in (new.k, new.v))  # (heads, rows of all, head_dim)
    sequence, row, is_any = row_places(k_starts, keys.shape[1])
    if new.cosines is not None:
        keys = rotated(keys, first_positions[sequence] + row, new)
    _write(k_cache, v_cache, cache, keys, values, sequence, lengths[sequence] + row, is_any)
    if new.cosines is not None:
        starts = _dense_starts(len(lengths), q) if cache.q_starts is None else cache.q_starts
        flat = q.transpose(0, 1).flatten(1, 2)
        sequence, row, _ = row_places(starts, flat.shape[1])
        turned = rotated(flat, first_positions[sequence] + (row if new.advances else 0), new)
        q = turned.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)
    return q, cache._replace(kv_lengths=(lengths + k_starts.diff()).to(torch.int32))


def _dense_starts(sequences: int, x: Tensor) -> Tensor:
    return torch.arange(sequences + 1, device=x.device, dtype=torch.int32) * x.shape[2]


def row_places(starts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each of so many rows: its sequence, its number there, and whether it is of any."""
    row = torch.arange(rows, device=starts.device, dtype=starts.dtype)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    is_any = (sequence < len(starts) - 1) & (row >= starts[0])
    sequence = sequence.clamp(max=len(starts) - 2)
    return sequence, row - starts[sequence], is_any


def _write(
    k_cache: Tensor,
    v_cache: Tensor,
    cache: CacheTensors,
    keys: Tensor,
    values: Tensor,
    sequence: Tensor,
    place: Tensor,
    is_any: Tensor,
) -> None:
    """Writes rows to their places; what has none is not written."""
    if not len(place):
        return
    page_rows, page = k_cache.shape[2], sequence
    fits = is_any & (place >= 0)
    if cache.page_table is not None:
        number = place // page_rows
        fits = fits & (number < cache.page_table.shape[1])
        page, place = cache.page_table[sequence, number.clamp(0, cache.page_table.shape[1] - 1)], place % page_rows
    else:
        if cache.cache_index is not None:
            page = cache.cache_index[sequence]
        fits = fits & (place < page_rows)
    fits = fits & (page >= 0) & (page < k_cache.shape[0])
    page, place = page.long().clamp(0, k_cache.shape[0] - 1), place.long().clamp(0, page_rows - 1)
    # Whatever does not fit writes what the first that does writes, to the same place; if there is none, what is there.
    first = fits.int().argmax()
    page, place = torch.where(fits, page, page[first]), torch.where(fits, place, place[first])
    for target, rows in ((k_cache, keys), (v_cache, values)):
        there = target[page[first], :, place[first]]
        instead = torch.where(fits[first], rows[:, first], there)
        written = torch.where(fits[:, None, None], rows.transpose(0, 1), instead)
        target[page, :, place] = written.to(target.dtype)
