"""Quantities as people read them, in tables, pictures and messages."""

from __future__ import annotations

KIB = 1024


def counted(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `1,024 blocks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def kib(size_bytes: int) -> str:
    """A size in KiB to four digits: 48, 144.2."""
    return f"{size_bytes / KIB:.4g}"


def per_thousand(count: int, scores: int) -> float:
    """A count per 1,000 scores: whole from ten on, else to one decimal."""
    rate = 1000 * count / scores
    return round(rate) if rate >= 10 else round(rate, 1)
