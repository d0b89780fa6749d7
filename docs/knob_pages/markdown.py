"""Markdown's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int) -> str:
    """Columns from a number on are aligned to the right."""
    rule = ["---" if column < numbers_from else "---:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))
