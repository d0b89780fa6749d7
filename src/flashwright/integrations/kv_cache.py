"""`flash_attn_with_kvcache`, as the second and the third generation of `flash_attn` spell it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from flashwright.integrations import refuse
from flashwright.kernels.decode.append import ROTARY_STEP
from flashwright.kernels.decode.launch import PAGE_STEP
from flashwright.operators.columns import kernel_columns, with_columns
from flashwright.operators.plain_calls import LAUNCHED, way_of_call
from flashwright.problem.options import AttentionOptions, as_pair
from flashwright.problem.shapes import HEAD_DIM_STEP, MAX_D_HEAD, MOST_COLUMNS
from flashwright.runtime.tensors import check_is_tensor, check_kernel_dtype, check_tensors

if TYPE_CHECKING:
    import torch

NO_WINDOW = (-1, -1)
MOST_FORMS = 1024
_checked_forms: set[Any] = set()
"""Of calls that were found to be right."""


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
    call. Above 256, up to 1,024, PyTorch's products compute, with scores in memory; but where `v_cache` is a view of
    the first columns of `k_cache`, up to 512 of up to 576, a kernel does on sm_90: multi-head latent attention has
    `k_cache[..., :512]`.

    With `rotary_cos` and `rotary_sin`, (positions, columns / 2), the new keys are rotated for their positions, and the
    queries for the same where the mask is causal or a window, otherwise all for the first of them. Positions are
    counted from `rotary_seqlens` on, if they are given, instead of `cache_seqlens`.

    On a GPU, lengths that lead out of the cache are clamped, keys on pages or in sequences that the cache does not have
    count as zeros, and what does not fit is not written. `num_splits`, `scheduler_metadata`, `pack_gqa` and `sm_margin`
    are accepted: splits are chosen on the device from the actual lengths, and heads are always packed. With
    `row_invariant`, the bits of a sequence do not depend on the others. Rows of no sequence are 0, unless `out` is
    given, and their log-sum-exp is -inf. Gradients are not computed.
    """
    table = block_table if page_table is None else page_table
    given = Given(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, table,
        softmax_scale, causal, as_pair(window_size), softcap, rotary_interleaved, return_softmax_lse, cu_seqlens_q,
        cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, out, row_invariant,
    )  # fmt: skip
    refuse(
        alibi_slopes=alibi_slopes is not None, qv=qv is not None, q_descale=q_descale is not None,
        k_descale=k_descale is not None, v_descale=v_descale is not None, attention_chunk=attention_chunk != 0,
    )  # fmt: skip
    if block_table is not None and page_table is not None:
        raise ValueError("block_table and page_table are two names of the same; give one of them")
    form = _form(given)
    if form is None or form not in _checked_forms:
        _check_call(given)
        if len(_checked_forms) >= MOST_FORMS:
            _checked_forms.clear()
        if form is not None:
            _checked_forms.add(form)
    return _computed(given)


class Given(NamedTuple):
    """The arguments that say what is computed."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None
    cache_seqlens: Any
    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    table: torch.Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: Any
    softcap: float
    rotary_interleaved: bool
    return_softmax_lse: bool
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k_new: torch.Tensor | None
    max_seqlen_q: int | None
    rotary_seqlens: torch.Tensor | None
    out: torch.Tensor | None
    row_invariant: bool

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1

    @property
    def is_wide(self) -> bool:
        return max(self.q.shape[-1], self.v_cache.shape[-1]) > MAX_D_HEAD

    @property
    def appended(self) -> int:
        """New rows of each sequence, if they all have as many."""
        return 0 if self.k is None or self.cu_seqlens_k_new is not None else self.k.shape[1]


def _form(given: Given) -> Any:
    """All that checks read, in calls on a GPU that nothing watches; None of others, whose values are read too.
    A cache may grow without being checked again."""
    q, k_cache, v_cache = given[:3]
    if way_of_call(q, k_cache, v_cache) != LAUNCHED or isinstance(given.cache_seqlens, int):
        return None
    plain = q.__class__
    checked: tuple[Any, ...] = (q, *given[3:])
    others = ((x.shape, x.stride(), x.dtype, x.get_device()) if x.__class__ is plain else x for x in checked)
    caches = (
        (x.shape if given.table is not None else (x.dim(), x.shape[0], x.shape[2:]), x.dtype, x.get_device())
        for x in (k_cache, v_cache)
    )
    form = (*caches, *others)
    try:
        hash(form)
    except TypeError:  # something that is refused by its name
        return None
    return form


def _check_call(given: Given) -> None:
    """Raises for what is wrong with the arguments."""
    for name in ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cu_seqlens_q", "out"):
        x = getattr(given, name)
        if x is not None or name in ("q", "k_cache", "v_cache"):
            check_is_tensor(name, x)
    q, k_cache, v_cache, k, v = given[:5]
    table, index, sequences = given.table, given.cache_batch_idx, given.sequences
    if (k is None) != (v is None):
        raise ValueError("k and v: give both of them, or none")
    _check(q, k_cache, v_cache, ragged=given.cu_seqlens_q is not None)
    for name, new_rows, cache_rows in (("k", k, k_cache), ("v", v, v_cache)):
        _check_new_rows(name, new_rows, cache_rows, None if given.cu_seqlens_k_new is not None else sequences)
    if given.out is not None:
        _check_output(given.out, q, v_cache.shape[-1])
    AttentionOptions.of(given.causal, given.window_size, given.softmax_scale, given.softcap)
    capacity = k_cache.shape[1]
    if table is not None:
        _check_numbers("block_table", table, 2, sequences if index is None else None, q)
        if capacity % PAGE_STEP:
            raise ValueError(f"pages of {capacity} rows are not allowed; allowed: multiples of {PAGE_STEP}")
        capacity *= table.shape[1]
    if index is not None:
        _check_numbers("cache_batch_idx", index, 1, sequences, q)
        _check_range("cache_batch_idx", index, len(k_cache if table is None else table))
    _check_lengths(given, capacity)
    for name, numbers, count in (
        ("cache_leftpad", given.cache_leftpad, sequences),
        ("rotary_seqlens", given.rotary_seqlens, sequences),
        ("cu_seqlens_k_new", given.cu_seqlens_k_new, sequences + 1),
        ("cu_seqlens_q", given.cu_seqlens_q, sequences + 1),
    ):
        if numbers is not None:
            _check_numbers(name, numbers, 1, count, q)
    if given.cu_seqlens_k_new is not None and k is None:
        raise ValueError("cu_seqlens_k_new: says something of k and v, which are not given")
    if given.cu_seqlens_q is not None and given.max_seqlen_q is None:
        raise ValueError("max_seqlen_q: the most rows of a sequence; needed with cu_seqlens_q")
    if table is not None:
        _check_pages(given)
    elif index is None and k_cache.shape[0] != sequences:
        raise ValueError(f"k_cache holds {k_cache.shape[0]} sequences, but there are {sequences}")
    _check_rotary(given)


def _computed(given: Given) -> Any:
    """Of arguments that are checked."""
    import torch

    from flashwright.operators.decode import decode
    from flashwright.operators.ragged_append import append_ragged
    from flashwright.runtime.decode_plans import NOTHING_NEW, CacheTensors, NewRows

    q, k_cache, v_cache, k, v, cosines, sines = given[:7]
    if not given.is_wide and (q.shape[-1] % HEAD_DIM_STEP or v_cache.shape[-1] % HEAD_DIM_STEP):
        return _with_padded_columns(given)
    causal = given.causal if isinstance(given.causal, str) else bool(given.causal)
    options = _known_options(causal, given.window_size, given.softmax_scale, given.softcap)
    table, index, is_ragged = given.table, given.cache_batch_idx, given.cu_seqlens_q is not None
    if table is not None and index is not None:
        table, index = _rows_of_table(table, index), None
    lengths = given.cache_seqlens
    if isinstance(lengths, Integral):
        lengths = torch.full((given.sequences,), int(lengths), dtype=torch.int32, device=q.device)
    cache = CacheTensors(
        _whole(lengths), _whole(given.cache_leftpad), _whole(index), _whole(table), _whole(given.cu_seqlens_q),
        int(given.max_seqlen_q or 0),
    )  # fmt: skip
    new = NOTHING_NEW
    if k is not None and v is not None:
        cosines, sines = (None if x is None else x.contiguous() for x in (cosines, sines))
        advances = options.window.left is not None or options.window.right is not None
        new = NewRows(_heads_first(k), _heads_first(v), cosines, sines, given.rotary_interleaved, advances)
    queries, target = _heads_first(q), None if given.out is None else _heads_first(given.out)
    caches = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    with torch.no_grad():
        rotates_ragged = cosines is not None and (is_ragged or given.rotary_seqlens is not None)
        if k is not None and (given.is_wide or given.cu_seqlens_k_new is not None or rotates_ragged):
            starts = _whole(given.cu_seqlens_k_new), _whole(given.rotary_seqlens)
            queries, cache = append_ragged(queries, *caches, cache, new, *starts)
            new = NOTHING_NEW
        result, lse = decode(
            queries, *caches, options, cache, new, out=target, with_lse=given.return_softmax_lse,
            row_invariant=given.row_invariant,
        )  # fmt: skip
    result = result[0].transpose(0, 1) if is_ragged else result.transpose(1, 2)
    if lse is None:
        return result
    return result, lse[0] if is_ragged else lse


_known_options = lru_cache(maxsize=256)(AttentionOptions.of)


def _whole(numbers: torch.Tensor | None) -> torch.Tensor | None:
    """As kernels read them: int32 without gaps."""
    import torch

    return None if numbers is None else numbers.to(torch.int32).contiguous()


def _with_padded_columns(given: Given) -> Any:
    """The same with head dimensions that the kernels have; what is appended to the copies is written back."""
    padded = given._replace(
        **{
            name: with_columns(x, kernel_columns(x.shape[-1]))
            for name in ("q", "k_cache", "v_cache", "k", "v")
            if (x := getattr(given, name)) is not None
        },
        softmax_scale=given.q.shape[-1] ** -0.5 if given.softmax_scale is None else given.softmax_scale,
        return_softmax_lse=True,
        out=None,
    )
    result, lse = _computed(padded)
    if given.k is not None:
        for cache, copy in ((given.k_cache, padded.k_cache), (given.v_cache, padded.v_cache)):
            if copy is not cache:
                cache.copy_(copy[..., : cache.shape[-1]])
    result = result[..., : given.v_cache.shape[-1]]
    if given.out is not None:
        result = given.out.copy_(result)
    return (result, lse) if given.return_softmax_lse else result


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


def _check_pages(given: Given) -> None:
    """Those that hold keys: what stands behind them in a table is not read."""
    import torch

    table, lengths = given.table, given.cache_seqlens
    assert table is not None
    if table.device.type != "cpu":
        return
    if given.cache_batch_idx is not None:
        table = table[given.cache_batch_idx.long()]
    if lengths is not None:
        new = given.appended if given.cu_seqlens_k_new is None else given.cu_seqlens_k_new.diff()
        first_keys = torch.arange(table.shape[1]) * given.k_cache.shape[1]
        table = table[first_keys < (torch.as_tensor(lengths) + new).expand(given.sequences)[:, None]]
    _check_range("block_table", table, len(given.k_cache))


def _check_numbers(name: str, numbers: Any, dimensions: int, count: int | None, q: torch.Tensor) -> None:
    import torch

    if not isinstance(numbers, torch.Tensor) or numbers.dtype not in (torch.int32, torch.int64):
        kind = f"one of {numbers.dtype}" if isinstance(numbers, torch.Tensor) else type(numbers).__name__
        raise TypeError(f"{name}: expected an int32 tensor, got {kind}")
    if numbers.dim() != dimensions or numbers.shape[0] != (numbers.shape[0] if count is None else count):
        allowed = ", ".join(["any" if count is None else str(count), *["any"] * (dimensions - 1)])
        raise ValueError(f"{name}: shape {tuple(numbers.shape)} is not allowed; allowed: ({allowed})")
    if numbers.device != q.device:
        raise ValueError(f"{name} is on {numbers.device}, q on {q.device}; all tensors must be on one device")


def _check_lengths(given: Given, capacity: int) -> None:
    lengths, most = given.cache_seqlens, capacity - given.appended
    if lengths is None:
        if given.k is not None:
            raise ValueError("cache_seqlens: needed with k and v, which are written behind the keys that are there")
        return
    if isinstance(lengths, Integral):
        if not 0 <= int(lengths) <= most:
            new = f", {given.appended} of them new" if given.appended else ""
            raise ValueError(
                f"cache_seqlens: {lengths} is not allowed; allowed: 0 to {most} (a cache of {capacity} keys{new})"
            )
        return
    _check_numbers("cache_seqlens", lengths, 1, given.sequences, given.q)
    _check_range("cache_seqlens", lengths, most + 1)


def _check_rotary(given: Given) -> None:
    q, cosines, sines = given.q, given.rotary_cos, given.rotary_sin
    if (cosines is None) != (sines is None):
        raise ValueError("rotary_cos and rotary_sin: give both of them, or none")
    if cosines is None or sines is None:
        return
    if given.k is None:
        raise ValueError("rotary_cos: rotations are applied to new keys; give k and v too")
    columns = 2 * cosines.shape[-1]
    if cosines.dim() != 2 or cosines.shape != sines.shape or columns % ROTARY_STEP or columns > q.shape[-1]:
        raise ValueError(
            f"rotary_cos: shape {tuple(cosines.shape)} is not allowed; allowed: (positions, columns / 2), equal to "
            f"rotary_sin's, columns a multiple of {ROTARY_STEP} up to head_dim = {q.shape[-1]}"
        )
    for name, x in (("rotary_cos", cosines), ("rotary_sin", sines)):
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name}: {x.dtype} on {x.device} differs from q: {q.dtype} on {q.device}")


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """As a batch of (heads, rows, head_dim); rows of all sequences are one."""
    return x.transpose(-3, -2) if x.dim() == 4 else x.transpose(-3, -2)[None]
