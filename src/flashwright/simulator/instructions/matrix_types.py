"""Types of the elements that mma and wgmma multiply, and how they lie in registers of 32 bits (f64: of 64)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..numerics import F16, F32, F64

_U8, _U16, _U32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32)


@dataclass(frozen=True)
class MatrixType:
    """``numbers`` turns a contiguous array of words into the numbers in them, along the last axis, lowest first."""

    name: str
    bits: int
    numbers: Callable[[np.ndarray], np.ndarray]

    @property
    def elements(self) -> int:
        """Elements in a register."""
        return max(32 // self.bits, 1)

    @property
    def is_integer(self) -> bool:
        return self.name[0] in "su" or self.name == "b1"


def _bf16(words: np.ndarray) -> np.ndarray:
    return (words.view(_U16).astype(_U32) << np.uint32(16)).view(F32)


def _tf32(words: np.ndarray) -> np.ndarray:
    """The lowest 13 bits are ignored."""
    return (words.view(_U32) & np.uint32(0xFFFFE000)).view(F32)


def _from_table(dtype: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    table = np.arange(256, dtype=np.uint8).view(dtype).astype(F32)
    return lambda words: table.take(words.view(_U8))


def _nibbles(is_signed: bool) -> Callable[[np.ndarray], np.ndarray]:
    table = np.array([[value & 15, value >> 4] for value in range(256)], np.int8)
    if is_signed:
        table = np.where(table > 7, table - 16, table).astype(np.int8)
    return lambda words: table[words.view(_U8)].reshape(*words.shape[:-1], -1)


def _bits(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.view(_U8), axis=-1, bitorder="little")


def _view(dtype: type) -> Callable[[np.ndarray], np.ndarray]:
    return lambda words: words.view(dtype)


MATRIX_TYPES = {
    matrix_type.name: matrix_type
    for matrix_type in (
        MatrixType("f16", 16, _view(F16.type)),
        MatrixType("bf16", 16, _bf16),
        MatrixType("tf32", 32, _tf32),
        MatrixType("f64", 64, _view(F64.type)),
        MatrixType("e4m3", 8, _from_table(np.dtype(ml_dtypes.float8_e4m3fn))),
        MatrixType("e5m2", 8, _from_table(np.dtype(ml_dtypes.float8_e5m2))),
        MatrixType("s8", 8, _view(np.int8)),
        MatrixType("u8", 8, _view(np.uint8)),
        MatrixType("s4", 4, _nibbles(is_signed=True)),
        MatrixType("u4", 4, _nibbles(is_signed=False)),
        MatrixType("b1", 1, _bits),
    )
}
