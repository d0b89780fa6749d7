"""Head dimensions that the kernels do not have, as columns of zeros: they change no score, and no other column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashwright.problem.shapes import HEAD_DIM_STEP

if TYPE_CHECKING:
    import torch


def kernel_columns(*head_dims: int) -> int:
    """The head dimension of a kernel's tensors that hold such ones: one for all of them."""
    return -(-max(head_dims) // HEAD_DIM_STEP) * HEAD_DIM_STEP


def with_columns(x: Any, columns: int) -> Any:
    """The tensor or array itself, or a copy that is padded to so many columns."""
    missing = columns - x.shape[-1]
    if not missing:
        return x
    if isinstance(x, np.ndarray):
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    import torch

    return torch.nn.functional.pad(x, (0, missing))


def in_kernel_columns(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float | None]:
    """With one head dimension, that the kernels have, and the scale of the one that was given."""
    head_dim = q.shape[-1]
    columns = kernel_columns(head_dim, v.shape[-1])
    if columns == head_dim == v.shape[-1]:
        return q, k, v, scale
    padded = (with_columns(x, columns) for x in (q, k, v))
    return *padded, head_dim**-0.5 if scale is None else scale
