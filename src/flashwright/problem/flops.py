"""Floating-point operations of attention."""

from __future__ import annotations


def forward_flops(batch: int, heads: int, q_length: int, kv_length: int, d_head: int) -> int:
    """FLOPs of the two matrix products of a forward pass without a mask."""
    return 4 * batch * heads * q_length * kv_length * d_head


OPERATIONS = FORWARD, BACKWARD, TRAIN, DECODE = ("forward", "backward", "train", "decode")
"""What may be counted and timed; a training step is a forward and a backward, a decode a forward of few rows."""
MATRIX_PRODUCTS = {FORWARD: 2, BACKWARD: 5, TRAIN: 7, DECODE: 2}
"""S and O; S, dP, dV, dK and dQ; all of them."""


def operation_flops(operation: str, batch: int, heads: int, q_length: int, kv_length: int, d_head: int) -> float:
    """FLOPs of an operation's matrix products without a mask."""
    in_forwards = MATRIX_PRODUCTS[operation] / MATRIX_PRODUCTS[FORWARD]
    return in_forwards * forward_flops(batch, heads, q_length, kv_length, d_head)


def checked_operation(name: str) -> str:
    if name not in OPERATIONS:
        raise ValueError(f"operation: {name!r} is not known; allowed: {', '.join(OPERATIONS)}")
    return name


def cache_bytes(keys: int, kv_heads: int, d_head: int, *, values_in_keys: bool = False) -> int:
    """Bytes of so many keys and values of 16 bits, of all heads: what a decode reads at least."""
    return 2 * (1 if values_in_keys else 2) * keys * kv_heads * d_head
