"""FlashAttention-2's forward in NumPy: the same numbers are rounded in the same places.

Scores and sums are fp32. Blocks of keys are visited from the last to the first. Exponentials are relative to the
running maximum, rounded to 16 bits for the product with V, and added up before; O is rescaled whenever it grows.
"""

from __future__ import annotations

import math

import numpy as np

BLOCK_KEYS = {64: 128, 128: 64, 256: 64}
"""By head dimension, from sm_80 on."""


def flash_attention_2(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, parts: int = 1
) -> np.ndarray:
    """Of (batch, heads, rows, head_dim) arrays of a 16-bit dtype.

    `parts` of equally many keys are computed apart and mixed in fp32, as on a GPU that the rows of queries do not fill.
    """
    rows, keys, d_head = q.shape[2], k.shape[2], q.shape[3]
    scores = q.astype(np.float32) @ k.astype(np.float32).swapaxes(2, 3) * np.float32(1 / math.sqrt(d_head))
    if causal:
        scores[..., np.arange(keys)[None] > np.arange(rows)[:, None] + keys - rows] = -np.inf
    part_keys = keys // parts
    places = (slice(part * part_keys, (part + 1) * part_keys) for part in range(parts))
    outputs, lses = zip(*(_part(scores[..., part], v[:, :, part], BLOCK_KEYS[d_head]) for part in places), strict=True)
    weights = np.exp(np.stack(lses) - np.logaddexp.reduce(lses, axis=0))
    mixed: np.ndarray = (weights * np.stack(outputs)).sum(axis=0).astype(q.dtype)
    return mixed


def _part(scores: np.ndarray, v: np.ndarray, block_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp, in fp32."""
    log2_e = np.float32(math.log2(math.e))
    maximum = np.full((*scores.shape[:3], 1), -np.inf, np.float32)
    total, output = np.zeros_like(maximum), np.zeros((*scores.shape[:3], v.shape[3]), np.float32)
    for begin in reversed(range(0, scores.shape[3], block_keys)):
        block = slice(begin, begin + block_keys)
        grown = np.maximum(maximum, scores[..., block].max(axis=-1, keepdims=True))
        relative_to = np.where(np.isfinite(grown), grown, 0)
        exponentials = np.exp2((scores[..., block] - relative_to) * log2_e)
        shrink = np.exp2((maximum - relative_to) * log2_e)
        total = total * shrink + exponentials.sum(axis=-1, keepdims=True)
        output = output * shrink + exponentials.astype(v.dtype).astype(np.float32) @ v[:, :, block].astype(np.float32)
        maximum = grown
    with np.errstate(divide="ignore"):
        return output / np.maximum(total, np.finfo(np.float32).tiny), maximum + np.log(total)
