"""Shared-memory matrix descriptors of wgmma: 64 bits that say where the rows of an operand are.

PTX ISA, "Matrix Descriptor Format" and "Strides". In units of 16-byte chunks (8 elements of 16 bits) an operand of
one wgmma is `mn` rows of two chunks (K-major), or 16 rows of mn/8 chunks (MN-major, "transposed"). With a swizzle
span of S bytes, a chunk lies at

    K-major   no swizzle   16·(row % 8) + SBO·(row / 8) + LBO·(k chunk)
              swizzled      S·(row % 8) + SBO·(row / 8) + 16·(k chunk)
    MN-major  no swizzle   16·(k % 8) + LBO·(k / 8) + SBO·(mn chunk)
              swizzled      S·(k % 8) + SBO·(k / 8) + 16·(mn chunk % (S/16)) + LBO·(mn chunk / (S/16))

from the start address. Swizzling then combines address bits 4… with bits 7… by XOR, so that a start address that is
moved inside a row of the pattern still finds its chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from flashwright.hardware.tensor_map import Swizzle

CHUNK_BYTES = 16
DEPTH_BYTES = 32  # K of one wgmma, whatever its elements
DEPTH = DEPTH_BYTES // 2  # in 16-bit elements; only those can be MN-major
_SWIZZLES = (Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32)


@dataclass(frozen=True)
class MatrixDescriptor:
    start: int
    leading_bytes: int
    stride_bytes: int
    base_offset: int
    swizzle: Swizzle

    @classmethod
    def decode(cls, bits: int) -> MatrixDescriptor:
        def field(first: int) -> int:
            return (bits >> first & 0x3FFF) << 4

        return cls(field(0), field(16), field(32), bits >> 49 & 7, _SWIZZLES[bits >> 62 & 3])

    def encode(self) -> int:
        fields = ((self.start, 0), (self.leading_bytes, 16), (self.stride_bytes, 32))
        bits = sum(((value & 0x3FFFF) >> 4) << first for value, first in fields)
        return bits | self.base_offset << 49 | _SWIZZLES.index(self.swizzle) << 62

    def problem(self, rows: int, is_mn_major: bool) -> str | None:
        """Why hardware would not read what the layout says; None: it would."""
        if self.swizzle is Swizzle.NONE:
            return None
        phase = (self.start >> 7) & (self.swizzle.value // CHUNK_BYTES - 1)
        if phase != self.base_offset & (self.swizzle.value // CHUNK_BYTES - 1):
            return (
                f"start address {self.start:#x} lies {phase} rows of 128 bytes after the last multiple of "
                f"{self.swizzle.repeat_bytes}, where the pattern of swizzle {self.swizzle.name} begins, and the base "
                f"offset is {self.base_offset}"
            )
        span = self.swizzle.value
        needed = min(2 * rows, span) if is_mn_major else DEPTH_BYTES
        if self.start % span + needed > span:
            return (
                f"start address {self.start:#x} lies {self.start % span} bytes into a row of {span}, and the operand "
                f"needs {needed} bytes of each row"
            )
        return None

    def chunk_addresses(self, rows: int, is_mn_major: bool) -> np.ndarray:
        """Shared-memory addresses of the chunks: [rows, 2] K-major, or [16, rows / 8] MN-major."""
        offsets = _offsets(rows, is_mn_major, self.swizzle, self.leading_bytes, self.stride_bytes)
        addresses = self.start + offsets
        if self.swizzle is Swizzle.NONE:
            return addresses
        # The pattern starts base_offset rows of 128 bytes after a multiple of its length.
        shift = self.base_offset << 7
        return self.swizzle.apply(addresses - shift) + shift


@cache
def _offsets(rows: int, is_mn_major: bool, swizzle: Swizzle, leading: int, stride: int) -> np.ndarray:
    """Offsets from the start address, before swizzling."""
    span = max(swizzle.value, CHUNK_BYTES)
    if not is_mn_major:
        row, chunk = np.arange(rows)[:, None], np.arange(2)
        step = leading if swizzle is Swizzle.NONE else CHUNK_BYTES
        return span * (row % 8) + stride * (row // 8) + step * chunk
    k, chunk = np.arange(DEPTH)[:, None], np.arange(rows // 8)
    per_span = span // CHUNK_BYTES
    between_k, between_spans = (leading, stride) if swizzle is Swizzle.NONE else (stride, leading)
    return (
        span * (k % 8) + between_k * (k // 8) + CHUNK_BYTES * (chunk % per_span) + between_spans * (chunk // per_span)
    )
