"""`scaled_dot_product_attention`: the signature and meaning of PyTorch's, computed by our kernels where they can."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

from flashwright.attention import Causal, attention
from flashwright.integrations import warn_once
from flashwright.problem.shapes import HEAD_DIM_STEP, MAX_D_HEAD
from flashwright.runtime.tensors import check_is_tensor, has_allowed_dtype

if TYPE_CHECKING:
    import torch


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What `torch.nn.functional.scaled_dot_product_attention` computes.

    `is_causal` aligns the first row with the first key. PyTorch's own function computes what the kernels do not (an
    `attn_mask`, dropout, other dtypes, head dimensions and shapes), with one warning per reason.
    """
    import torch

    for name, x in (("query", query), ("key", key), ("value", value)):
        check_is_tensor(name, x)
    query, key, value = autocast(query, key, value)
    reason = _why_not(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
    if reason is not None:
        warn_once(f"scaled_dot_product_attention: {reason}; PyTorch's own computes this")
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    causal: Causal = "top-left" if is_causal else False
    if query.dim() == 4:
        return attention(query, key, value, causal=causal, scale=scale)
    heads = (x.unsqueeze(0) for x in (query, key, value))
    return attention(*heads, causal=causal, scale=scale).squeeze(0)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in the dtype of `torch.autocast` where it is enabled: attention is among the operations it lowers."""
    import torch

    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _why_not(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """Why the kernels cannot compute this; None if they can. PyTorch raises the errors."""
    import torch

    if attn_mask is not None:
        return "attn_mask is not supported"
    if dropout_p:
        return "dropout_p > 0 is not supported"
    if scale is not None and not (isinstance(scale, Real) and 0 < scale < math.inf):
        return f"scale {scale} is not supported"
    if query.is_nested or query.dim() not in (3, 4) or not query.dim() == key.dim() == value.dim():
        return "only dense tensors of 3 or 4 dimensions are supported"
    if not query.device == key.device == value.device or not query.dtype == key.dtype == value.dtype:
        return "query, key and value differ in device or dtype"
    if not has_allowed_dtype(query) or (query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16)):
        return f"dtype {query.dtype} is not supported"
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        return "key and value of different shapes are not supported"
    if query.shape[-1] % HEAD_DIM_STEP or not 0 < query.shape[-1] <= MAX_D_HEAD:
        return "head dimensions other than multiples of 8 up to 256 are not supported"
    batch_and_heads, kv_batch_and_heads = query.shape[:-2], key.shape[:-2]
    if batch_and_heads == kv_batch_and_heads:
        return None
    grouped = enable_gqa and batch_and_heads[:-1] == kv_batch_and_heads[:-1]
    if not grouped or kv_batch_and_heads[-1] == 0 or batch_and_heads[-1] % kv_batch_and_heads[-1]:
        return "broadcasting batches or heads is not supported"
    return None
