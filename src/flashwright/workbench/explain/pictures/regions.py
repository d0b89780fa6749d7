"""Colours of operands: a gradient has that of its tensor, and what is known of rows that of barriers."""

from __future__ import annotations

_DRAWN_LIKE = {
    "dQ": "Q", "dK": "K", "dV": "V", "dO": "O", "P": "S", "dS": "S", "dP": "O", "terms": "B", "notes": "B",
    "factors": "B",
}  # fmt: skip


def region_class(operand: str) -> str:
    """The class of an operand's bars in the style sheet."""
    return f"region-{_DRAWN_LIKE.get(operand, operand)}"
