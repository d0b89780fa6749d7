"""Shapes of attention's tensors: (batch, heads, rows, head_dim)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

MAX_D_HEAD = 256
HEAD_DIM_STEP = 8
MOST_COLUMNS = 1024
"""Of the rows of a decode's tensors; above MAX_D_HEAD, PyTorch's products compute with most of them."""


def check_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> None:
    """Raises `ValueError` for shapes that are not attention's."""
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 4:
            raise ValueError(f"{name}: shape {tuple(shape)} is not allowed; allowed: (batch, heads, rows, head_dim)")
    if tuple(k) != tuple(v):
        raise ValueError(f"k and v must have the same shape; got {tuple(k)} and {tuple(v)}")
    if q[0] != k[0]:
        raise ValueError(f"k: batch is {k[0]}, but q's is {q[0]}")
    if q[3] != k[3]:
        raise ValueError(f"k: head_dim is {k[3]}, but q's is {q[3]}")
    if q[3] % HEAD_DIM_STEP or not 0 < q[3] <= MAX_D_HEAD:
        raise ValueError(
            f"q: head_dim {q[3]} is not allowed; allowed: multiples of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to "
            f"{MAX_D_HEAD}"
        )
    if q[1] != k[1] and (k[1] == 0 or q[1] % k[1]):
        raise ValueError(f"q has {q[1]} heads, which is not a multiple of the {k[1]} heads of k and v")


def as_size(name: str, value: Any) -> int:
    """A number of rows or of something else, as Python's; raises for what is no integer of at least 0."""
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer of at least 0, got {value!r}") from None
    if size < 0:
        raise ValueError(f"{name}: {size} is not allowed; allowed: integers of at least 0")
    return size


def are_wide(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> bool:
    """Whether shapes are attention's but for head dimensions that differ and exceed MAX_D_HEAD, which decodes
    compute."""
    return (
        len(q) == len(k) == len(v) == 4
        and tuple(k[:3]) == tuple(v[:3])
        and (q[0], q[3]) == (k[0], k[3])
        and k[1] > 0
        and q[1] % k[1] == 0
        and q[3] != v[3]
        and min(q[3], v[3]) > 0
        and MAX_D_HEAD < max(q[3], v[3]) <= MOST_COLUMNS
    )


def is_empty(q: Sequence[int], k: Sequence[int]) -> bool:
    """Whether tensors of these shapes leave no row to compute, or no key to attend to."""
    return 0 in q or 0 in k
