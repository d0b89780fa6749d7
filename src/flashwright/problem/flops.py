"""Floating-point operations of attention."""

from __future__ import annotations


def forward_flops(batch: int, heads: int, q_length: int, kv_length: int, d_head: int) -> int:
    """FLOPs of the two matrix products of a forward pass without a mask."""
    return 4 * batch * heads * q_length * kv_length * d_head
