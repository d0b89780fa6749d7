"""Decoding on PyTorch's tensors: a config chosen, a plan kept, launches queued; on other devices, the reference."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashwright.choice.choose import decode_choice, has_decode
from flashwright.kernels.family import KernelConfig
from flashwright.operators.rotary import rotated
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.problem.shapes import MAX_D_HEAD, is_empty
from flashwright.runtime.decode_plans import NOTHING_NEW, CacheTensors, DecodeKind, NewRows, is_in_keys
from flashwright.runtime.devices import gpu_model
from flashwright.runtime.reference import attention_reference
from flashwright.runtime.tensors import empty_output, has_vector_rows, with_vector_rows

if TYPE_CHECKING:
    import torch

INVARIANT_SPLIT_UNITS = 16
"""Units of keys of a split where bits may not depend on what else is computed."""


@lru_cache(maxsize=256)
def decode_kind(
    options: AttentionOptions, dtype: DType, device_index: int, returns_lse: bool, split_units: int
) -> DecodeKind:
    def choose(head_dim: int, packed_rows: int) -> KernelConfig:
        return decode_choice(dtype, head_dim, options.window, packed_rows, gpu=gpu_model(device_index)).config

    return DecodeKind(options, choose, returns_lse=returns_lse, device_index=device_index, split_units=split_units)


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    cache: CacheTensors,
    new: NewRows = NOTHING_NEW,
    *,
    out: torch.Tensor | None = None,
    with_lse: bool = False,
    row_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of (batch, heads, rows, head_dim) queries to a cache of (sequences, or pages, heads, rows, head_dim)
    keys and values, checked tensors; new rows are written into the cache first."""
    if not q.is_cuda:
        result, lse = _reference(q, k, v, options, cache, new)
        if out is not None:
            result = out.copy_(result)
        return result, lse if with_lse else None
    if max(q.shape[3], v.shape[3]) > MAX_D_HEAD and not _has_kernel(q, k, v, out):
        from flashwright.operators.wide_heads import decode_wide

        result, lse = decode_wide(q, k, v, options, cache)
        return result if out is None else out.copy_(result), lse if with_lse else None
    split_units = INVARIANT_SPLIT_UNITS if row_invariant else 0
    kind = decode_kind(options, DType.parse(str(q.dtype)), q.device.index, with_lse, split_units)
    q = with_vector_rows(q)
    new = new._replace(**{
        name: with_vector_rows(x) for name in ("k", "v") if (x := getattr(new, name)) is not None
    })  # fmt: skip
    return kind.run(q, k, v, _output(q, v, cache) if out is None else out, cache, new)


def _has_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Of wide heads: those whose values are columns of the keys may have one."""
    if is_empty(q.shape, k.shape) or not (has_vector_rows(k) and (out is None or has_vector_rows(out))):
        return False
    gpu = gpu_model(q.device.index)
    return has_decode(q.shape[3], v.shape[3], values_in_keys=is_in_keys(k, v), gpu=gpu)


def _output(q: torch.Tensor, v: torch.Tensor, cache: CacheTensors) -> torch.Tensor:
    if cache.q_starts is None and q.shape[3] == v.shape[3]:
        return empty_output(q)
    batch, heads, rows, _ = q.shape
    new = q.new_empty if cache.q_starts is None else q.new_zeros  # rows of no sequence are not written
    return new((batch, rows, heads, v.shape[3])).transpose(1, 2)  # as the drop-ins have them


# --- The reference ---------------------------------------------------------------------------------------------------


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, cache: CacheTensors, new: NewRows
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    starts = cache.q_starts
    sequences = q.shape[0] if starts is None else len(starts) - 1
    capacity = k.shape[2] if cache.page_table is None else cache.page_table.shape[1] * k.shape[2]
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32)
    for batch in range(sequences):
        held = capacity if cache.kv_lengths is None else int(cache.kv_lengths[batch])
        begin = 0 if cache.kv_begins is None else int(cache.kv_begins[batch])
        index = batch if cache.cache_index is None else int(cache.cache_index[batch])
        rows = slice(None) if starts is None else slice(int(starts[batch]), int(starts[batch + 1]))
        own = 0 if starts is not None else batch
        queries = q[own, :, rows]
        end = held
        if new.k is not None and new.v is not None:
            end = min(held + new.k.shape[2], capacity)
            places = torch.arange(held, end)
            keys = (
                rotated(new.k[batch], places_of(held, new.k.shape[2]), new) if new.cosines is not None else new.k[batch]
            )
            for target, values in ((k, keys), (v, new.v[batch])):
                _write(target, cache.page_table, index, places, values[:, : len(places)])
        if new.cosines is not None:
            count = queries.shape[1]
            positions = places_of(held, count) if new.advances else torch.full((count,), held)
            queries = rotated(queries, positions, new)
        keys, values = (_read(x, cache.page_table, index, begin, end) for x in (k, v))
        if queries.shape[1] and keys.shape[1]:
            o, row_lse = attention_reference(queries[None], keys[None], values[None], options=options)
            out[own, :, rows], lse[own, :, rows] = o[0], row_lse[0].float()
    return out, lse


def places_of(first: int, count: int) -> Any:
    import torch

    return torch.arange(first, first + count)


def _read(x: torch.Tensor, table: torch.Tensor | None, index: int, begin: int, end: int) -> torch.Tensor:
    """(heads, keys, head_dim) of a sequence."""
    if table is None:
        return x[index, :, begin:end]
    pages = table[index].long().clamp(0, x.shape[0] - 1)
    return x[pages].transpose(0, 1).flatten(1, 2)[:, begin:end]


def _write(x: torch.Tensor, table: torch.Tensor | None, index: int, places: Any, rows: torch.Tensor) -> None:
    if table is None:
        x[index, :, places] = rows
    else:
        pages = table[index].long().clamp(0, x.shape[0] - 1)[places // x.shape[2]]
        x[pages, :, places % x.shape[2]] = rows.transpose(0, 1)
