"""Hugging Face transformers: `register()` once, then `attn_implementation="flashwright"`.

    from flashwright.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashwright", dtype=torch.bfloat16)

The kernels compute causal, sliding-window and bidirectional attention, with a KV cache, grouped heads, soft caps and
packed sequences (`cu_seq_lens_q`, …). Inside `flashwright.distributed.context_parallel`, ranks share the sequence. A
mask of another form (padded batches, a static cache) goes to PyTorch's SDPA, with one warning. As `flash_attention_2`,
this relies on models handing their window over as `sliding_window`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashwright.attention import attention
from flashwright.distributed.context import active_context
from flashwright.integrations import warn_once
from flashwright.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from flashwright.integrations.sdpa import autocast
from flashwright.problem.shapes import HEAD_DIM_STEP, MAX_D_HEAD
from flashwright.problem.window import Window

if TYPE_CHECKING:
    import torch

NAME = "flashwright"


def register() -> None:
    """Makes `attn_implementation="flashwright"` known to transformers 5; calling it again changes nothing."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "register() needs transformers 5 or later; install it with: pip install 'transformers>=5'"
        ) from error
    _be_importable_as_flash_attention()
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def _be_importable_as_flash_attention() -> None:
    """Takes part in how transformers finds the functions of implementations whose name contains "flash".

    It imports them when a model is built, from a list of packages it knows; ours is not among them.
    """
    from transformers import modeling_flash_attention_utils as utils

    import_known = getattr(utils, "_lazy_imports", None)
    if import_known is None or getattr(import_known, "knows_flashwright", False):
        return

    def import_functions(implementation: str | None, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        if implementation != NAME:
            return import_known(implementation, *arguments, **options)
        no_kv_cache_function = None
        return flash_attn_func, flash_attn_varlen_func, no_kv_cache_function, utils._pad_input, utils._unpad_input

    import_functions.knows_flashwright = True  # type: ignore[attr-defined]
    utils._lazy_imports = import_functions


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **options: Any,
) -> torch.Tensor | None:
    """None where `attention_forward` derives the mask from its arguments; otherwise the mask, as for SDPA."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if active_context() is not None and _nothing_is_padded(attention_mask, kv_length, kv_offset):
        return None  # by positions in the whole sequence, which the lengths of a shard do not tell
    chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    # The last row attends to the last key, unless the cache has room for keys to come.
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    skips = (allow_is_causal_skip and ends_together and not chunked) or (
        allow_is_bidirectional_skip and local_size is None
    )
    if skips and _nothing_is_padded(attention_mask, kv_length, kv_offset):
        return None
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=causal_mask_function if mask_function is None else mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **options,
    )


def _nothing_is_padded(mask: torch.Tensor | None, kv_length: int, kv_offset: Any) -> bool:
    import torch

    if mask is None:
        return True
    if torch.compiler.is_compiling() or mask.shape[-1] < kv_offset + kv_length:
        return False
    return bool(mask[:, kv_offset : kv_offset + kv_length].all())


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Called by the model: (batch, heads, rows, head_dim) in, (batch, rows, heads, head_dim) out."""
    import torch

    if s_aux is not None:
        raise NotImplementedError("s_aux (attention sinks): not supported by flashwright")
    if kwargs.get("output_attentions"):
        warn_once("flashwright gives no attention weights (output_attentions); use attn_implementation='eager'")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = _window(sliding_window, causal)
    query, key, value = autocast(query, key, value)

    if position_bias is not None:
        bias = position_bias if attention_mask is None else _as_bias(attention_mask, query.dtype) + position_bias
        attention_mask = _with_window(bias, window, query, key) if attention_mask is None else bias
    context = active_context()
    if context is not None:
        _check_shared(query, key, attention_mask, dropout)
        out = context.attention(
            query, key, value, cu_seqlens=cu_seq_lens_q, causal=causal, window=(window.left, window.right),
            scale=scaling, softcap=softcap or 0.0,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None
    packed = query.shape[0] == 1 and cu_seq_lens_q is not None and cu_seq_lens_k is not None
    reason = _why_not(query, key, value, None if packed else attention_mask, dropout)
    if reason is not None:
        warn_once(f"attn_implementation='flashwright': {reason}; PyTorch's SDPA computes this")
        out = _by_pytorch(query, key, value, attention_mask, dropout, scaling, softcap, window)
        return out.transpose(1, 2).contiguous(), None
    if packed:
        assert cu_seq_lens_q is not None and cu_seq_lens_k is not None
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        q_starts, k_starts = (x.to(torch.int32) for x in (cu_seq_lens_q, cu_seq_lens_k))
        sides = (-1 if window.left is None else window.left, -1 if window.right is None else window.right)
        out = flash_attn_varlen_func(
            q, k, v, q_starts, k_starts, max_length_q or q.shape[0], max_length_k or k.shape[0],
            softmax_scale=scaling, window_size=sides, softcap=softcap or 0.0,
        )  # fmt: skip
        return out.unsqueeze(0), None
    out = attention(
        query, key, value, causal=causal, window=(window.left, window.right), scale=scaling, softcap=softcap or 0.0
    )
    return out.transpose(1, 2).contiguous(), None


def _check_shared(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, dropout: float) -> None:
    """Raises `ValueError` for what ranks that share a sequence do not compute."""
    if mask is not None:
        raise ValueError(
            "context_parallel: a mask was given; allowed: causal or a window, of sequences without padding"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"context_parallel: {query.shape[2]} rows attend to {key.shape[2]} keys; allowed: calls without a KV cache"
        )
    if dropout:
        raise ValueError(f"context_parallel: attention dropout is {dropout}; allowed: 0")


def _window(sliding_window: int | None, causal: bool) -> Window:
    """transformers counts a row's own key into its window."""
    side = None if sliding_window is None else sliding_window - 1
    return Window(side, 0 if causal else side)


def _why_not(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> str | None:
    import torch

    if mask is not None:
        return "a mask that is more than causal or a window (padding, a static cache, packed sequences) was given"
    if dropout:
        return "attention dropout is not supported"
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {query.dtype} is not supported"
    if key.shape != value.shape or query.shape[-1] % HEAD_DIM_STEP or query.shape[-1] > MAX_D_HEAD:
        return "head dimensions other than multiples of 8 up to 256, or different ones of keys and values, are not"
    return None


def _by_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    window: Window,
) -> torch.Tensor:
    import torch

    if mask is None:
        mask = _with_window(None, window, query, key)
    else:
        mask = mask[..., : key.shape[-2]]
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # with a mask, PyTorch has no kernel that shares heads
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if not softcap:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh((query @ key.mT).float() * (scale / softcap))
    if mask is not None:
        scores = scores + _as_bias(mask, scores.dtype)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    return torch.nn.functional.dropout(weights, dropout, training=dropout > 0) @ value


def _with_window(bias: Any, window: Window, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    from flashwright.runtime.reference import visible_keys

    visible = visible_keys(window, query.shape[2], key.shape[2], device=query.device)
    if visible is None or bias is None:
        return bias if visible is None else visible
    return bias + _as_bias(visible, bias.dtype)


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bias of the scores that a mask of bool means (True: visible); a bias is returned unchanged."""
    import torch

    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
