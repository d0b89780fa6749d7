"""Tensor maps: where a tensor lies in device memory, and which box of it one bulk copy moves.

A pure description, checked against the rules of the hardware (CUDA Driver API, "Tensor Map Object Management").
The GPU runtime encodes it as a `CUtensorMap`; the simulator takes it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

TENSOR_MAP_BYTES = 128
"""Size of the opaque object a kernel receives, as a `__grid_constant__` parameter aligned to 64 bytes."""
MAX_RANK = 5
_MAX_BOX = 256
_MAX_SIZE = 2**32
_MAX_STRIDE = 2**40
_MAX_ELEMENT_STRIDE = 8
_NUMPY_DTYPES = ("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")
ELEMENT_DTYPES: tuple[np.dtype[Any], ...] = (
    *(np.dtype(name) for name in _NUMPY_DTYPES),
    np.dtype(ml_dtypes.bfloat16),
)
"""What the elements of a tensor can be."""


class Swizzle(Enum):
    """How 16-byte chunks of a box are permuted in shared memory; the value is the span in bytes."""

    NONE = 0
    B32 = 32
    B64 = 64
    B128 = 128

    @property
    def repeat_bytes(self) -> int:
        """The pattern repeats after this many bytes: eight rows of the span."""
        return 8 * self.value

    def apply(self, addresses: Any) -> Any:
        """Where bytes at these unswizzled shared-memory addresses lie (an involution).

        The chunk index within the span (address bits 4 and up) is combined with address bits 7 and up by XOR.
        """
        chunks = self.value // 16
        return addresses if chunks < 2 else addresses ^ (((addresses >> 7) & (chunks - 1)) << 4)


class Fill(Enum):
    """What elements of a box outside the tensor become in shared memory."""

    ZERO = "zero"
    NAN = "nan"


@dataclass(frozen=True)
class TensorMap:
    """A tensor of up to five dimensions, innermost first, and the box that a bulk tensor copy moves.

    ``strides`` are the bytes between neighbours in dimensions 1, 2, …: one fewer than ``shape`` has, because the
    innermost dimension is contiguous. With ``element_strides`` above 1, a copy visits every n-th element of a
    dimension: ceil(box / element stride) of them.
    """

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: Swizzle = Swizzle.NONE
    fill: Fill = Fill.ZERO

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        for name in ("shape", "strides", "box", "element_strides"):
            object.__setattr__(self, name, tuple(int(value) for value in getattr(self, name)))
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.shape))
        self._check_tensor()
        self._check_box()

    def _check_tensor(self) -> None:
        if self.dtype not in ELEMENT_DTYPES:
            allowed = ", ".join(str(dtype) for dtype in ELEMENT_DTYPES)
            raise ValueError(f"tensor map: dtype {self.dtype} is not allowed; allowed: {allowed}")
        if not 1 <= self.rank <= MAX_RANK:
            raise ValueError(f"tensor map: shape {self.shape} has {self.rank} dimensions; allowed: 1 to {MAX_RANK}")
        expected = {"strides": self.rank - 1, "box": self.rank, "element_strides": self.rank}
        for name, count in expected.items():
            if len(getattr(self, name)) != count:
                raise ValueError(
                    f"tensor map: {name} {getattr(self, name)} has {len(getattr(self, name))} entries; "
                    f"shape {self.shape} needs {count}"
                )
        if self.address % 16 or self.address < 0:
            raise ValueError(f"tensor map: address {self.address:#x} is not a multiple of 16 bytes")
        if not all(0 < size <= _MAX_SIZE for size in self.shape):
            raise ValueError(f"tensor map: shape {self.shape}; sizes must be 1 to 2**32")
        if not all(stride % 16 == 0 and 0 <= stride < _MAX_STRIDE for stride in self.strides):
            raise ValueError(
                f"tensor map: strides {self.strides} (bytes); each must be a multiple of 16 and less than 2**40"
            )

    def _check_box(self) -> None:
        if not all(0 < size <= _MAX_BOX for size in self.box):
            raise ValueError(f"tensor map: box {self.box}; each size must be 1 to {_MAX_BOX}")
        if not all(0 < stride <= _MAX_ELEMENT_STRIDE for stride in self.element_strides):
            raise ValueError(f"tensor map: element_strides {self.element_strides}; each must be 1 to 8")
        if self.element_strides[0] != 1:
            raise ValueError(
                f"tensor map: element_strides {self.element_strides}; the innermost must be 1, the hardware ignores it"
            )
        if self.row_bytes % 16:
            raise ValueError(f"tensor map: a row of the box has {self.row_bytes} bytes; a multiple of 16 is needed")
        if self.swizzle is not Swizzle.NONE and self.row_bytes > self.swizzle.value:
            raise ValueError(
                f"tensor map: a row of the box has {self.row_bytes} bytes; swizzle {self.swizzle.name} allows at most "
                f"{self.swizzle.value}"
            )
        if self.fill is Fill.NAN and self.dtype.kind in "iu":
            raise ValueError(f"tensor map: fill NAN needs a floating-point dtype, not {self.dtype}")

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def box_elements(self) -> tuple[int, ...]:
        """Elements of a box that reach shared memory, innermost first."""
        return tuple(-(-size // stride) for size, stride in zip(self.box, self.element_strides, strict=True))

    @property
    def row_bytes(self) -> int:
        """Bytes of the innermost dimension of a box."""
        return self.box[0] * self.dtype.itemsize

    @property
    def box_bytes(self) -> int:
        """Bytes one copy writes to shared memory (out-of-bounds elements included), and reports to its mbarrier."""
        return prod(self.box_elements) * self.dtype.itemsize
