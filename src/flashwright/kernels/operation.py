"""An operation: what a kernel computes as a whole. Families are ways of computing one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operation:
    name: str
    launch: Callable[..., Any]
    """How to compute with a config: of a family's launch rules, a config, tensors and options."""
