"""Other implementations of attention, to measure against."""

from __future__ import annotations

from typing import Any


def flash_attention_2(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """PyTorch's own build of FlashAttention-2."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
