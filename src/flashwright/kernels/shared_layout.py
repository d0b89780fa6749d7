"""How blocks of rows lie in shared memory where threads copy them: panels of columns, swizzled."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.hardware.architectures import ARCHITECTURES
from flashwright.hardware.units import BANK_LINE_BYTES, ELEMENT_BYTES, VECTOR_BYTES

MOST_SHARED_BYTES = max(architecture.shared_bytes_per_block for architecture in ARCHITECTURES.values())
"""Of a thread block, on any GPU."""
MOST_PANEL_COLUMNS = BANK_LINE_BYTES // ELEMENT_BYTES


@dataclass(frozen=True)
class SharedLayout:
    """How a block of rows × d_head elements lies in shared memory.

    The block is cut into panels of up to 64 columns, so that a row of a panel is at most one bank line
    (128 bytes); panels follow one another. Within a panel, the swizzle XORs the 16-byte column index with the
    bank line's index: `offset ^ ((offset & swizzle_mask) >> swizzle_shift)`.
    """

    columns: int
    panel_columns: int
    swizzle_mask: int
    swizzle_shift: int

    @classmethod
    def of(cls, columns: int, *others: int, swizzled: bool) -> SharedLayout:
        """Of the widest panels that divide the columns, and all `others`."""
        panel = next(c for c in (MOST_PANEL_COLUMNS, 32, 16) if all(width % c == 0 for width in (columns, *others)))
        # 2^bits vectors fill a panel row; as many bits of the bank line's index are XORed onto them.
        vectors = panel * ELEMENT_BYTES // VECTOR_BYTES
        line_bit = BANK_LINE_BYTES.bit_length() - 1
        vector_bit = VECTOR_BYTES.bit_length() - 1
        return cls(columns, panel, (vectors - 1) << line_bit if swizzled else 0, line_bit - vector_bit)

    @property
    def row_bytes(self) -> int:
        return self.panel_columns * ELEMENT_BYTES

    @property
    def segment_vectors(self) -> int:
        """16-byte vectors of a row that are copied together: the largest power of two that divides the row."""
        vectors = self.columns * ELEMENT_BYTES // VECTOR_BYTES
        return vectors & -vectors

    @property
    def segments(self) -> int:
        return self.columns * ELEMENT_BYTES // VECTOR_BYTES // self.segment_vectors

    @property
    def swizzle_period_rows(self) -> int:
        """Rows after which the pattern repeats, so that moving on by as many is a plain addition."""
        return (1 << self.swizzle_mask.bit_length()) // self.row_bytes if self.swizzle_mask else 1

    def offset(self, row: int, column: int, rows: int) -> int:
        """Byte offset of an element in a block of `rows` rows."""
        panel, column = divmod(column, self.panel_columns)
        offset = row * self.row_bytes + column * ELEMENT_BYTES
        return panel * rows * self.row_bytes + (offset ^ ((offset & self.swizzle_mask) >> self.swizzle_shift))

    def constants(self) -> dict[str, int]:
        """What device code reads of it."""
        return {
            "row_bytes": self.row_bytes,
            "panel_vectors": self.row_bytes // VECTOR_BYTES,
            "segment_vectors": self.segment_vectors,
            "segments": self.segments,
            "swizzle_mask": self.swizzle_mask,
            "swizzle_shift": self.swizzle_shift,
            "swizzle_period_rows": self.swizzle_period_rows,
        }
