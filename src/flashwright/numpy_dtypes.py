"""The element types as NumPy knows them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from flashwright.kernel_configs import DType

NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    DType.FP16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
}
