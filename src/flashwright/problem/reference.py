"""The definition of attention in float64, on NumPy arrays; random inputs, and the error of a result."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import numpy as np

from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.problem.shapes import as_size
from flashwright.problem.window import FULL, Window

TOLERANCE = {DType.FP16: 1e-3, DType.BF16: 8e-3}
"""Largest relative error that rounding to the dtype explains."""


@runtime_checkable
class Elements(Protocol):
    """The part of a config, of any family, that random inputs depend on."""

    @property
    def dtype(self) -> DType: ...
    @property
    def d_head(self) -> int: ...


def reference_forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    window: Window = FULL,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """The definition of attention in float64: the output, and the log-sum-exp of the scores."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen_keys(q.shape[2], k.shape[2], window), scores, -np.inf)
    maximum = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(scores - np.where(np.isinf(maximum), 0, maximum))
    total = exponentials.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, maximum + np.log(total), -np.inf)[..., 0]
    return np.where(total > 0, exponentials / np.where(total > 0, total, 1), 0) @ v, lse


def reference_backward(
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    window: Window = FULL,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The gradients of q, k and v in float64, from that of the output."""
    do, q, k, v = (x.astype(np.float64) for x in (do, q, k, v))
    group = q.shape[1] // k.shape[1]
    repeated_k, repeated_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    _, lse = reference_forward(q, k, v, scale=scale, window=window, softcap=softcap)
    scores = q @ repeated_k.swapaxes(-1, -2) * factor
    slope: np.ndarray | float = 1.0
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
        slope = 1 - (scores / softcap) ** 2
    seen = seen_keys(q.shape[2], k.shape[2], window)
    with np.errstate(invalid="ignore"):  # a row that attends to no key: -inf - -inf
        probabilities = np.where(seen, np.exp(scores - lse[..., None]), 0.0)
    probabilities = np.nan_to_num(probabilities, nan=0.0, posinf=0.0)
    of_probabilities = do @ repeated_v.swapaxes(-1, -2)
    delta = (probabilities * of_probabilities).sum(axis=-1, keepdims=True)
    of_scores = probabilities * (of_probabilities - delta) * slope * factor
    dk, dv = of_scores.swapaxes(-1, -2) @ q, probabilities.swapaxes(-1, -2) @ do
    of_groups = (k.shape[0], k.shape[1], group, *k.shape[2:])
    return of_scores @ repeated_k, dk.reshape(of_groups).sum(axis=2), dv.reshape(of_groups).sum(axis=2)


def seen_keys(rows: int, keys: int, window: Window) -> np.ndarray:
    """[row, key]: whether a row attends to a key."""
    key = np.arange(keys)
    position = np.arange(rows)[:, None] + (keys - rows if window.bottom_right else 0)
    seen = np.ones((rows, keys), bool)
    if window.left is not None:
        seen &= key >= position - window.left
    if window.right is not None:
        seen &= key <= position + window.right
    return seen


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """‖actual − expected‖ / ‖expected‖; NaN if any element is."""
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))


def random_inputs(
    config: Elements,
    *,
    batch: int = 1,
    heads: int = 2,
    rows: int = 256,
    kv_heads: int | None = None,
    keys: int | None = None,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Standard normal q, k and v of a config's dtype and head dimension, laid out (batch, rows, heads, d_head).

    k and v have as many heads and rows as q, unless `kv_heads` and `keys` are given.
    """
    if not isinstance(config, Elements):
        raise TypeError(
            f"config: expected a config, got {type(config).__name__} {config!r}; parse_config() reads short forms"
        )
    generator = np.random.default_rng(seed)
    batch, rows, heads = as_size("batch", batch), as_size("rows", rows), as_size("heads", heads)
    of_q = (rows, heads)
    of_kv = (
        rows if keys is None else as_size("keys", keys),
        heads if kv_heads is None else as_size("kv_heads", kv_heads),
    )
    q, k, v = (
        generator.standard_normal((batch, *sizes, config.d_head))
        .astype(NUMPY_DTYPES[config.dtype])
        .transpose(0, 2, 1, 3)
        for sizes in (of_q, of_kv, of_kv)
    )
    return q, k, v
