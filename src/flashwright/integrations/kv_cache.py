"""`flash_attn_with_kvcache`, as the second and the third generation of `flash_attn` spell it."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from flashwright.integrations import refuse
from flashwright.kernels.decode.append import ROTARY_STEP
from flashwright.kernels.decode.launch import PAGE_STEP
from flashwright.operators.columns import kernel_columns, with_columns
from flashwright.problem.options import AttentionOptions
from flashwright.problem.shapes import HEAD_DIM_STEP, MAX_D_HEAD
from flashwright.runtime.tensors import check_kernel_dtype, check_tensors

if TYPE_CHECKING:
    import torch

NO_WINDOW = (-1, -1)
MOST_COLUMNS = 1024
"""Of a cache's rows; above MAX_D_HEAD, PyTorch's products compute with them."""


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    out: torch.Tensor | None = None,
    row_invariant: bool = False,
) -> Any:
    """Attention of new queries to a cache of keys and values, into which new ones are written first.

    q: (batch, rows, heads, head_dim), or with `cu_seqlens_q` (rows of all sequences, heads, head_dim). Caches:
    (sequences, rows, kv_heads, head_dim), or (pages, rows of a page, kv_heads, head_dim) with `block_table`, which the
    third generation calls `page_table`: (batch, pages of a sequence) int32. `cache_seqlens` is how many keys each
    sequence has; `k` and `v`, (batch, new rows, kv_heads, head_dim), or with `cu_seqlens_k_new` (new rows of all
    sequences, kv_heads, head_dim), are written behind them. `cache_leftpad` is where each sequence begins in its cache,
    `cache_batch_idx` which of the sequences of the cache, or of the table, it has. Masks are aligned to the bottom
    right. Values may have another head dimension than keys. One that is no multiple of 8 copies its cache in every
    call. Above 256, up to 1,024, PyTorch's products compute, with scores in memory: 576 and 512 are those of multi-head
    latent attention, where `v_cache` may be `k_cache[..., :512]`.

    With `rotary_cos` and `rotary_sin`, (positions, columns / 2), the new keys are rotated for their positions, and the
    queries for the same where the mask is causal or a window, otherwise all for the first of them. Positions are
    counted from `rotary_seqlens` on, if they are given, instead of `cache_seqlens`.

    On a GPU, lengths that lead out of the cache are clamped, keys on pages or in sequences that the cache does not have
    count as zeros, and what does not fit is not written. `num_splits`, `scheduler_metadata`, `pack_gqa` and `sm_margin`
    are accepted: splits are chosen on the device from the actual lengths, and heads are always packed. With
    `row_invariant`, the bits of a sequence do not depend on the others. Rows of no sequence are 0, unless `out` is
    given, and their log-sum-exp is -inf. Gradients are not computed.
    """
    import torch

    from flashwright.operators.decode import decode
    from flashwright.operators.ragged_append import append_ragged
    from flashwright.runtime.decode_plans import NOTHING_NEW, CacheTensors

    refuse(
        alibi_slopes=alibi_slopes is not None, qv=qv is not None, q_descale=q_descale is not None,
        k_descale=k_descale is not None, v_descale=v_descale is not None, attention_chunk=attention_chunk != 0,
    )  # fmt: skip
    if block_table is not None and page_table is not None:
        raise ValueError("block_table and page_table are two names of the same; give one of them")
    if (k is None) != (v is None):
        raise ValueError("k and v: give both of them, or none")
    table = block_table if page_table is None else page_table
    _check(q, k_cache, v_cache, ragged=cu_seqlens_q is not None)
    sequences = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    for name, new_rows, cache_rows in (("k", k, k_cache), ("v", v, v_cache)):
        _check_new_rows(name, new_rows, cache_rows, None if cu_seqlens_k_new is not None else sequences)
    if out is not None:
        _check_output(out, q, v_cache.shape[-1])

    def whole(numbers: torch.Tensor | None) -> torch.Tensor | None:
        return None if numbers is None else numbers.to(torch.int32).contiguous()

    is_wide = max(q.shape[-1], v_cache.shape[-1]) > MAX_D_HEAD
    if not is_wide and (q.shape[-1] % HEAD_DIM_STEP or v_cache.shape[-1] % HEAD_DIM_STEP):
        return _with_padded_columns(
            q, k_cache, v_cache, k, v, softmax_scale, return_softmax_lse, out, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad, block_table=table, causal=causal, window_size=window_size, softcap=softcap,
            rotary_interleaved=rotary_interleaved, num_splits=num_splits, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, row_invariant=row_invariant, cu_seqlens_k_new=cu_seqlens_k_new,
            rotary_seqlens=rotary_seqlens,
        )  # fmt: skip
    options = AttentionOptions.of(causal, window_size, softmax_scale, softcap)
    capacity = k_cache.shape[1]
    if table is not None:
        _check_numbers("block_table", table, 2, sequences if cache_batch_idx is None else None, q)
    if cache_batch_idx is not None:
        _check_numbers("cache_batch_idx", cache_batch_idx, 1, sequences, q)
        _check_range("cache_batch_idx", cache_batch_idx, len(k_cache if table is None else table))
    if table is not None:
        if cache_batch_idx is not None:
            table, cache_batch_idx = _rows_of_table(table, cache_batch_idx), None
        if capacity % PAGE_STEP:
            raise ValueError(f"pages of {capacity} rows are not allowed; allowed: multiples of {PAGE_STEP}")
        capacity *= table.shape[1]
    appended = 0 if k is None or cu_seqlens_k_new is not None else k.shape[1]
    lengths = _lengths(cache_seqlens, sequences, capacity, q, appended=appended)
    if k is not None and lengths is None:
        raise ValueError("cache_seqlens: needed with k and v, which are written behind the keys that are there")
    for name, numbers, count in (
        ("cache_leftpad", cache_leftpad, sequences),
        ("rotary_seqlens", rotary_seqlens, sequences),
        ("cu_seqlens_k_new", cu_seqlens_k_new, sequences + 1),
    ):
        if numbers is not None:
            _check_numbers(name, numbers, 1, count, q)
    if cu_seqlens_k_new is not None and k is None:
        raise ValueError("cu_seqlens_k_new: says something of k and v, which are not given")
    if rotary_cos is None:
        rotary_seqlens = None  # there is nothing to rotate, as the third generation has it
    if table is not None:
        new_rows = appended if k is None or cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
        _check_pages(table, lengths, new_rows, k_cache)
    elif cache_batch_idx is None and k_cache.shape[0] != sequences:
        raise ValueError(f"k_cache holds {k_cache.shape[0]} sequences, but there are {sequences}")
    starts = None
    if cu_seqlens_q is not None:
        if max_seqlen_q is None:
            raise ValueError("max_seqlen_q: the most rows of a sequence; needed with cu_seqlens_q")
        _check_numbers("cu_seqlens_q", cu_seqlens_q, 1, sequences + 1, q)
        starts = whole(cu_seqlens_q)
    new = _new_rows(q, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_seqlens, options)
    cache = CacheTensors(
        lengths, whole(cache_leftpad), whole(cache_batch_idx), whole(table), starts, int(max_seqlen_q or 0)
    )
    queries = q.transpose(1, 2) if cu_seqlens_q is None else q.transpose(0, 1)[None]
    target = None
    if out is not None:
        target = out.transpose(1, 2) if cu_seqlens_q is None else out.transpose(0, 1)[None]
    caches = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    with torch.no_grad():
        rotates_ragged = rotary_cos is not None and (cu_seqlens_q is not None or rotary_seqlens is not None)
        if k is not None and (is_wide or cu_seqlens_k_new is not None or rotates_ragged):
            queries, cache = append_ragged(queries, *caches, cache, new, whole(cu_seqlens_k_new), whole(rotary_seqlens))
            new = NOTHING_NEW
        result, lse = decode(
            queries, *caches, options, cache, new, out=target, with_lse=return_softmax_lse, row_invariant=row_invariant,
        )  # fmt: skip
    if cu_seqlens_q is None:
        result = result.transpose(1, 2)
    else:
        result, lse = result[0].transpose(0, 1), None if lse is None else lse[0]
    return (result, lse) if return_softmax_lse else result


def _with_padded_columns(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    softmax_scale: float | None,
    return_softmax_lse: bool,
    out: torch.Tensor | None,
    **options: Any,
) -> Any:
    """The same with a head dimension that the kernels have; what is appended to the copies is written back."""
    head_dim, value_head_dim = q.shape[-1], v_cache.shape[-1]
    queries, keys, values = (with_columns(x, kernel_columns(x.shape[-1])) for x in (q, k_cache, v_cache))
    new_keys, new_values = (None if x is None else with_columns(x, kernel_columns(x.shape[-1])) for x in (k, v))
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    result, lse = flash_attn_with_kvcache(
        queries, keys, values, new_keys, new_values, softmax_scale=scale, return_softmax_lse=True, **options
    )
    if k is not None:
        for cache, padded in ((k_cache, keys), (v_cache, values)):
            if padded is not cache:
                cache.copy_(padded[..., : cache.shape[-1]])
    result = result[..., :value_head_dim]
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_softmax_lse else result


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, ragged: bool) -> None:
    check_tensors(q, k_cache, v_cache)
    if q.is_cuda:
        check_kernel_dtype(q)
    layouts = {
        "q": (q, "(rows, heads, head_dim)" if ragged else "(batch, rows, heads, head_dim)", 3 if ragged else 4),
        "k_cache": (k_cache, "(sequences or pages, rows, kv_heads, head_dim)", 4),
        "v_cache": (v_cache, "(sequences or pages, rows, kv_heads, head_dim)", 4),
    }
    for name, (x, layout, dimensions) in layouts.items():
        if x.dim() != dimensions:
            raise ValueError(f"{name}: shape {tuple(x.shape)} is not allowed; allowed: {layout}")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache and v_cache must agree in all but their head dimensions; got {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    head_dim = q.shape[-1]
    if head_dim != k_cache.shape[-1] or not 0 < head_dim <= MOST_COLUMNS:
        raise ValueError(
            f"head_dim: q has {head_dim}, k_cache {k_cache.shape[-1]}; allowed: equal, 1 to {MOST_COLUMNS}"
        )
    if not 0 < v_cache.shape[-1] <= MOST_COLUMNS:
        raise ValueError(f"head_dim: v_cache has {v_cache.shape[-1]}; allowed: 1 to {MOST_COLUMNS}")
    heads, kv_heads = q.shape[-2], k_cache.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is not a multiple of the cache's {kv_heads}")


def _check_new_rows(name: str, x: torch.Tensor | None, cache: torch.Tensor, sequences: int | None) -> None:
    """Of so many sequences; None: of all, one after the other."""
    if x is None:
        return
    batch = () if sequences is None else (sequences,)
    rows = x.shape[len(batch)] if x.dim() == len(batch) + 3 else 0
    if tuple(x.shape) != (*batch, rows, *cache.shape[2:]) or x.dtype != cache.dtype or x.device != cache.device:
        layout = f"({f'batch {sequences}, ' if batch else ''}new rows, {cache.shape[2]}, {cache.shape[3]})"
        raise ValueError(
            f"{name}: {tuple(x.shape)} of {x.dtype} on {x.device} is not allowed; allowed: {layout} of {cache.dtype} "
            f"on {cache.device}"
        )


def _check_output(out: torch.Tensor, q: torch.Tensor, columns: int) -> None:
    expected = (*q.shape[:-1], columns)
    if tuple(out.shape) != expected or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out: {tuple(out.shape)} of {out.dtype} on {out.device} is not allowed; allowed: {expected} of {q.dtype} "
            f"on {q.device}"
        )


def _rows_of_table(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The pages of the sequences that `cache_batch_idx` names; of a number beyond them, none that exist."""
    import torch

    exists = (index >= 0) & (index < len(table))
    return torch.where(exists[:, None], table[index.clamp(0, len(table) - 1).long()], -1)


def _check_range(name: str, numbers: torch.Tensor, end: int) -> None:
    """Where the host knows them; on a GPU, numbers that are out of range lead nowhere."""
    if numbers.device.type == "cpu" and numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < end:
        raise ValueError(f"{name}: from {int(numbers.min())} to {int(numbers.max())}; allowed: 0 to {end - 1}")


def _check_pages(
    table: torch.Tensor, lengths: torch.Tensor | None, new_rows: int | torch.Tensor, k_cache: torch.Tensor
) -> None:
    """Those that hold keys: what stands behind them in a table is not read."""
    import torch

    if table.device.type != "cpu":
        return
    if lengths is not None:
        first_keys = torch.arange(table.shape[1]) * k_cache.shape[1]
        table = table[first_keys < (lengths + new_rows)[:, None]]
    _check_range("block_table", table, len(k_cache))


def _check_numbers(name: str, numbers: Any, dimensions: int, count: int | None, q: torch.Tensor) -> None:
    import torch

    if not isinstance(numbers, torch.Tensor) or numbers.dtype not in (torch.int32, torch.int64):
        kind = getattr(numbers, "dtype", type(numbers).__name__)
        raise TypeError(f"{name}: expected an int32 tensor, got {kind}")
    if numbers.dim() != dimensions or numbers.shape[0] != (numbers.shape[0] if count is None else count):
        first = "" if count is None else f", the first of {count}"
        raise ValueError(
            f"{name}: shape {tuple(numbers.shape)} is not allowed; allowed: {dimensions} dimensions{first}"
        )
    if numbers.device != q.device:
        raise ValueError(f"{name} is on {numbers.device}, q on {q.device}; all tensors must be on one device")


def _lengths(given: Any, sequences: int, capacity: int, q: torch.Tensor, *, appended: int) -> torch.Tensor | None:
    import torch

    if given is None:
        return None
    if isinstance(given, Integral):
        length = int(given)
        if not 0 <= length <= capacity - appended:
            raise ValueError(
                f"cache_seqlens: {length} is not allowed; allowed: 0 to {capacity - appended} (a cache of "
                f"{capacity} keys{f', {appended} of them new' if appended else ''})"
            )
        return torch.full((sequences,), length, dtype=torch.int32, device=q.device)
    _check_numbers("cache_seqlens", given, 1, sequences, q)
    if (
        given.device.type == "cpu"
        and sequences
        and not 0 <= int(given.min()) <= int(given.max()) <= capacity - appended
    ):
        raise ValueError(
            f"cache_seqlens: from {int(given.min())} to {int(given.max())}; allowed: 0 to {capacity - appended}"
        )
    return given.to(torch.int32).contiguous()


def _new_rows(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
    interleaved: bool,
    cache_seqlens: Any,
    options: AttentionOptions,
) -> Any:
    from flashwright.runtime.decode_plans import NewRows

    if (cosines is None) != (sines is None):
        raise ValueError("rotary_cos and rotary_sin: give both of them, or none")
    if cosines is not None and sines is not None:
        if k is None:
            raise ValueError("rotary_cos: rotations are applied to new keys; give k and v too")
        if cache_seqlens is None:
            raise ValueError("rotary_cos: positions follow from cache_seqlens; give them too")
        columns = 2 * cosines.shape[-1]
        if cosines.dim() != 2 or cosines.shape != sines.shape or columns % ROTARY_STEP or columns > q.shape[-1]:
            raise ValueError(
                f"rotary_cos: shape {tuple(cosines.shape)} is not allowed; allowed: (positions, columns / 2), equal to "
                f"rotary_sin's, columns a multiple of {ROTARY_STEP} up to head_dim = {q.shape[-1]}"
            )
        if cosines.dtype != q.dtype or cosines.device != q.device:
            raise ValueError(f"rotary_cos: {cosines.dtype} on {cosines.device} differs from q: {q.dtype} on {q.device}")
        cosines, sines = cosines.contiguous(), sines.contiguous()
    window = options.window
    return NewRows(
        None if k is None else _heads_first(k),
        None if v is None else _heads_first(v),
        cosines,
        sines,
        interleaved,
        advances=window.left is not None or window.right is not None,
    )


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """As a batch of (heads, rows, head_dim); rows of all sequences are one."""
    return x.transpose(-3, -2) if x.dim() == 4 else x.transpose(-3, -2)[None]
