"""Caches with head dimensions that no kernel has, by PyTorch's products. Scores are held in memory, in fp32. Nothing is
read back by the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashwright.operators.ragged_append import row_places
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window
from flashwright.runtime.decode_plans import CacheTensors, is_in_keys


def decode_wide(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, options: AttentionOptions, cache: CacheTensors
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp. Tensors are as of `decode`, with nothing to append."""
    keys, values = _rows_of_caches(k_cache, v_cache, cache)
    sequences, kv_heads, capacity, _ = keys.shape
    queries, q_lengths = _padded(q, cache, sequences)
    rows, group = queries.shape[2], q.shape[1] // kv_heads
    packed = queries.unflatten(1, (kv_heads, group)).flatten(2, 3)
    scores = _products(packed, keys).unflatten(2, (group, rows)) * options.scale_of(q.shape[3])
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    begins, ends = _key_ranges(cache, sequences, capacity, q.device)
    visible = _visible(options.window, begins, ends, q_lengths, rows, capacity)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).to(q.dtype)
    out = (weights.flatten(2, 3) @ values).unflatten(2, (group, rows)).flatten(1, 2)
    return _unpadded(out, q, cache), _unpadded(lse.flatten(1, 2)[..., None], q, cache, -torch.inf)[..., 0]


def _rows_of_caches(k_cache: Tensor, v_cache: Tensor, cache: CacheTensors) -> tuple[Tensor, Tensor]:
    """(sequences, heads, keys, head_dim). Values that are columns of the keys are not gathered again."""
    keys = _rows_of_cache(k_cache, cache)
    if is_in_keys(k_cache, v_cache):
        return keys, keys[..., : v_cache.shape[-1]]
    return keys, _rows_of_cache(v_cache, cache)


def _rows_of_cache(x: Tensor, cache: CacheTensors) -> Tensor:
    """Those in a place that does not exist are zero."""
    places = cache.page_table
    if places is None:
        if cache.cache_index is None:
            return x
        places = cache.cache_index[:, None]
    exists = (places >= 0) & (places < len(x))
    rows = x[places.clamp(0, len(x) - 1).long()].masked_fill(~exists[..., None, None, None], 0)
    return rows.transpose(1, 2).flatten(2, 3)


def _padded(q: Tensor, cache: CacheTensors, sequences: int) -> tuple[Tensor, Any]:
    """(sequences, heads, rows, head_dim), and how many rows each sequence has."""
    if cache.q_starts is None:
        return q, q.shape[2]
    sequence, row, is_any = row_places(cache.q_starts, q.shape[2])
    spare = cache.max_q_length  # takes the rows of no sequence
    padded = q.new_zeros((sequences, spare + 1, *q.shape[1::2]))
    padded[sequence, row.clamp(max=spare).where(is_any, spare)] = q[0].transpose(0, 1)
    return padded[:, :spare].transpose(1, 2), cache.q_starts.diff()[:, None, None]


def _unpadded(x: Tensor, q: Tensor, cache: CacheTensors, of_no_sequence: float = 0.0) -> Tensor:
    """In the layout of `q`."""
    if cache.q_starts is None:
        return x
    sequence, row, is_any = row_places(cache.q_starts, q.shape[2])
    rows = x.transpose(1, 2)[sequence, row.clamp(0, x.shape[2] - 1)]
    return rows.masked_fill(~is_any[:, None, None], of_no_sequence).transpose(0, 1)[None]


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q·kᵀ in fp32 or better."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return q @ k.mT
    batch = q.shape[:2]
    if q.is_cuda:
        try:
            return torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out_dtype=torch.float32).unflatten(0, batch)
        except TypeError:  # a PyTorch whose products have the type of their factors
            pass
    return q.float() @ k.float().mT


def _key_ranges(cache: CacheTensors, sequences: int, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(sequences, 1, 1): the first key of each, and behind its last."""
    if cache.kv_lengths is None:
        ends = torch.full((sequences,), capacity, dtype=torch.int32, device=device)
    else:
        ends = cache.kv_lengths.clamp(0, capacity)
    begins = torch.zeros_like(ends) if cache.kv_begins is None else torch.minimum(cache.kv_begins.clamp(min=0), ends)
    return begins[:, None, None], ends[:, None, None]


def _visible(window: Window, begins: Tensor, ends: Tensor, q_lengths: Any, rows: int, capacity: int) -> Tensor:
    """(sequences, rows, keys): which keys a row attends to."""
    key, row = (torch.arange(count, device=ends.device) for count in (capacity, rows))
    place = row[:, None] + (ends - q_lengths if window.bottom_right else begins)
    visible = (key >= begins) & (key < ends)
    if window.left is not None:
        visible = visible & (key >= place - window.left)
    if window.right is not None:
        visible = visible & (key <= place + window.right)
    return visible.expand(-1, rows, -1)
