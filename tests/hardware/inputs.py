"""The inputs of the cases, the same on a GPU and in the simulator."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .cases import ELEMENTS, MMA_REPEATS, ArithmeticCase


def small_kernel_input() -> np.ndarray:
    return np.random.default_rng(1).standard_normal(ELEMENTS).astype(np.float32)


def arithmetic_input(case: ArithmeticCase) -> np.ndarray:
    """The words that an arithmetic case reads."""
    generator = np.random.default_rng(2)
    if case.inputs == "floats":
        magnitudes = np.concatenate([np.linspace(-20, 20, 2048), np.logspace(-30, 30, 2048)])
        return magnitudes.astype(np.float32).view(np.uint32)
    dtype = np.dtype(np.float16 if case.name == "mma_f16" else ml_dtypes.bfloat16)
    words = np.empty((MMA_REPEATS, 32, 10), np.uint32)
    # Magnitudes spread over 2^-8 … 2^8, so that sums lose low bits and rounding shows.
    operands = generator.standard_normal((MMA_REPEATS, 32, 12)) * 2.0 ** generator.integers(
        -4, 5, (MMA_REPEATS, 32, 12)
    )
    words[..., :6] = operands.astype(dtype).view(np.uint16).view(np.uint32)
    words[..., 6:] = (generator.standard_normal((MMA_REPEATS, 32, 4)) * 16).astype(np.float32).view(np.uint32)
    return words.reshape(-1)
