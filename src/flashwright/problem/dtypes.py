"""The element types of Q, K, V and O, and their NumPy dtypes."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np


class DType(IntEnum):
    """Element type of Q, K, V and O. The numbers are PyTorch's `c10::ScalarType` codes."""

    FP16 = 5
    BF16 = 15

    @classmethod
    def parse(cls, value: Any) -> DType:
        """The dtype named by a member, its code, a dtype of PyTorch or NumPy, or a text such as `BF16`, `bfloat16` or
        `torch.float16`."""
        if isinstance(value, str | np.dtype) or _is_torch_dtype(value):
            name = str(value).strip().lower().removeprefix("torch.")
            if name in _DTYPE_NAMES:
                return _DTYPE_NAMES[name]
        elif not isinstance(value, bool) and value in tuple(cls):
            return cls(value)
        raise ValueError(f"dtype: {value!r} is not a known element type; allowed: FP16, BF16")

    def to_cpp(self) -> str:
        return f"DType::{self.name}"


def _is_torch_dtype(value: Any) -> bool:
    """Without importing PyTorch, which need not be installed."""
    kind = type(value)
    return (kind.__module__, kind.__qualname__) == ("torch", "dtype")


_DTYPE_NAMES = {
    "fp16": DType.FP16,
    "float16": DType.FP16,
    "half": DType.FP16,
    "bf16": DType.BF16,
    "bfloat16": DType.BF16,
}

NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    DType.FP16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
}
