"""Making `attention()` use what was tuned."""

from __future__ import annotations

from flashwright.attention import forget_kinds
from flashwright.choice.choose import forget_choices


def reload() -> None:
    """Makes `attention()` choose anew, by the results that are stored now."""
    forget_choices()
    forget_kinds()
