"""What a kernel computes, apart from how: the part of attention's meaning that is fixed at compile time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionVariant:
    """A feature that is off costs nothing: its code does not exist in the kernel."""

    returns_lse: bool = False
    """Also write the log-sum-exp of each row's scaled scores."""


PLAIN = AttentionVariant()
