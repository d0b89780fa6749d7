"""Head dimensions that the kernels do not have, as columns of zeros: they change no score, and no other column."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashwright.problem.shapes import HEAD_DIM_STEP


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
