"""Sequences of different lengths, packed along the rows of tensors: `cu_seqlens` and their checks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any


def check_starts(q_starts: Any, kv_starts: Any, *, least: int = 2) -> None:
    """Raises `ValueError` for tensors or arrays that cannot be cu_seqlens of q and k; reads no values."""
    for name, starts in (("cu_seqlens_q", q_starts), ("cu_seqlens_k", kv_starts)):
        if starts is None:
            raise ValueError(f"{name}: missing; packed sequences need cu_seqlens of both q and k")
        if not hasattr(starts, "dtype") or not hasattr(starts, "shape"):
            raise TypeError(f"{name}: expected a tensor of int32, got {type(starts).__name__}")
        if len(starts.shape) != 1 or starts.shape[0] < least or str(starts.dtype).rpartition(".")[2] != "int32":
            raise ValueError(
                f"{name}: {tuple(starts.shape)} of {starts.dtype} is not allowed; allowed: int32, one dimension, "
                "one more entry than there are sequences"
            )
    if q_starts.shape[0] != kv_starts.shape[0]:
        raise ValueError(f"cu_seqlens_k: {kv_starts.shape[0]} entries, but cu_seqlens_q has {q_starts.shape[0]}")


def sequence_rows(name: str, starts: Any, rows: int, longest: int | None) -> list[slice]:
    """The rows of each sequence; raises `ValueError` for starts outside of a tensor of `rows` rows.

    Reads the values: for arrays and CPU tensors. On a GPU, the kernel clamps starts to the tensor's rows.
    """
    values = starts.tolist()
    if values[0] < 0 or any(end < start for start, end in pairwise(values)):
        raise ValueError(f"{name}: {values} is not allowed; allowed: starts that do not decrease, from 0 on")
    if values[-1] > rows:
        raise ValueError(f"{name}: {values} ends at row {values[-1]}, but the tensor has {rows} rows")
    sequences = [slice(start, end) for start, end in pairwise(values)]
    found = max((part.stop - part.start for part in sequences), default=0)
    if longest is not None and found > longest:
        raise ValueError(f"max_seqlen_{name[-1]}: {longest} is not allowed; a sequence of {name} has {found} rows")
    return sequences
