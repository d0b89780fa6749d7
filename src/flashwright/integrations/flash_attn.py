"""The functions of the `flash_attn` package: the same names, signatures and layouts, on our kernels.

    from flashwright import flash_attn_func        # instead of: from flash_attn import flash_attn_func

Differences: the log-sum-exp of a row without keys is -inf, not +inf. Arguments that are not supported raise
`NotImplementedError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashwright.attention import attention
from flashwright.integrations import refuse
from flashwright.operators.columns import in_kernel_columns
from flashwright.operators.forward import config_chosen_for
from flashwright.problem.options import AttentionOptions
from flashwright.problem.sequences import check_starts
from flashwright.problem.shapes import MAX_D_HEAD, check_shapes
from flashwright.runtime.tensors import check_is_tensor, check_kernel_dtype, check_tensors

if TYPE_CHECKING:
    import torch

NO_WINDOW = (-1, -1)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of (batch, rows, heads, head_dim) tensors; k and v may have fewer heads than q.

    `causal` and `window_size` are aligned to the bottom right. With `return_attn_probs`: (out, log-sum-exp of
    (batch, heads, rows), an empty tensor: there is no dropout whose mask it could hold).
    """

    refuse(dropout_p=dropout_p != 0, alibi_slopes=alibi_slopes is not None)
    _check_layout(q, k, v, ("batch", "rows", "heads", "head_dim"))
    value_head_dim = v.shape[-1]
    q, k, v, softmax_scale = in_kernel_columns(q, k, v, softmax_scale)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    result = attention(
        q, k, v, causal=causal, window=window_size, scale=softmax_scale, softcap=softcap, return_lse=return_attn_probs,
        deterministic=deterministic,
    )  # fmt: skip
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out.transpose(1, 2)
    if value_head_dim != out.shape[-1]:
        out = out[..., :value_head_dim]
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]: qkv is (batch, rows, 3, heads, head_dim)."""
    check_is_tensor("qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv: shape {tuple(qkv.shape)} is not allowed; allowed: (batch, rows, 3, heads, head_dim)")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q, kv[:, :, 0], kv[:, :, 1]: kv is (batch, keys, 2, kv_heads, head_dim)."""
    check_is_tensor("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: shape {tuple(kv.shape)} is not allowed; allowed: (batch, keys, 2, kv_heads, head_dim)")
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    row_invariant: bool = False,
) -> Any:
    """Attention within sequences of different lengths, packed along the rows of (rows, heads, head_dim) tensors.

    Sequence b is rows cu_seqlens_q[b] … cu_seqlens_q[b + 1] - 1 of q and the same of k and v by cu_seqlens_k; both are
    int32 on the tensors' device. Rows of no sequence are 0. With `return_attn_probs`: (out, log-sum-exp of
    (heads, rows), an empty tensor). `row_invariant`, which `flash_attn` does not have, is `attention()`'s.

    With `block_table`, k and v are caches of (pages, rows of a page, kv_heads, head_dim), as in
    `flash_attn_with_kvcache`; then there are no gradients.
    """
    from flashwright.operators import torch_ops

    refuse(dropout_p=dropout_p != 0, alibi_slopes=alibi_slopes is not None)
    lengths = (_longest("max_seqlen_q", max_seqlen_q), _longest("max_seqlen_k", max_seqlen_k))
    if block_table is not None:
        from flashwright.integrations.kv_cache import flash_attn_with_kvcache

        result = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=cu_seqlens_k.diff(), block_table=block_table, softmax_scale=softmax_scale,
            causal=causal, window_size=window_size, softcap=softcap, return_softmax_lse=return_attn_probs,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=lengths[0], row_invariant=row_invariant,
        )  # fmt: skip
        return (*result, q.new_empty(0)) if return_attn_probs else result
    _check_layout(q, k, v, ("rows", "heads", "head_dim"))
    value_head_dim = v.shape[-1]
    q, k, v, softmax_scale = in_kernel_columns(q, k, v, softmax_scale)
    _check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
    options = AttentionOptions.of(causal, window_size, softmax_scale, softcap)
    name = ""
    if row_invariant:
        if not q.is_cuda:
            raise ValueError(f"row_invariant: needs CUDA tensors, but q is on {q.device}")
        name = config_chosen_for(q.transpose(0, 1)[None], k, options, None, row_invariant=True).short_form()
    request = torch_ops.Request(options, return_attn_probs, name, deterministic=deterministic)
    out, lse = torch_ops.varlen_forward(q, k, v, (cu_seqlens_q, cu_seqlens_k), lengths, request)
    if value_head_dim != out.shape[-1]:
        out = out[..., :value_head_dim]
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv[:, 0], qkv[:, 1], qkv[:, 2]: qkv is (rows, 3, heads, head_dim)."""
    check_is_tensor("qkv", qkv)
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv: shape {tuple(qkv.shape)} is not allowed; allowed: (rows, 3, heads, head_dim)")
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q, kv[:, 0], kv[:, 1]: kv is (keys, 2, kv_heads, head_dim)."""
    check_is_tensor("kv", kv)
    if kv.dim() != 4 or kv.shape[1] != 2:
        raise ValueError(f"kv: shape {tuple(kv.shape)} is not allowed; allowed: (keys, 2, kv_heads, head_dim)")
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _check_layout(q: Any, k: Any, v: Any, layout: tuple[str, ...]) -> None:
    """In the layout that the caller sees: what is computed on has other dimensions, in another order."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)
        if x.dim() != len(layout):
            raise ValueError(f"{name}: shape {tuple(x.shape)} is not allowed; allowed: ({', '.join(layout)})")
        if not 0 < x.shape[-1] <= MAX_D_HEAD:
            raise ValueError(f"{name}: head_dim {x.shape[-1]} is not allowed; allowed: 1 to {MAX_D_HEAD}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k and v must agree in all but their head dimensions; got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: head_dim is {k.shape[-1]}, but q's is {q.shape[-1]}")


def _longest(name: str, value: Any) -> int:
    """Rows of the longest sequence; tensors of one integer are taken as `flash_attn` takes them."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None


def _check_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    check_tensors(q, k, v)
    if q.is_cuda:
        check_kernel_dtype(q)
    # As one batch of shape (1, heads, rows, head_dim).
    check_shapes(*((1, x.shape[1], x.shape[0], x.shape[2]) for x in (q, k, v)))
    check_starts(cu_seqlens_q, cu_seqlens_k, least=1)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_is_tensor(name, starts)
        if starts.device != q.device:
            raise ValueError(f"{name} is on {starts.device}, q on {q.device}; all tensors must be on one device")
