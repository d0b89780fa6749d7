"""Whether a result was measured with the kernels of the installed package.

A result carries a digest of its kernel's source. Results without one, from before there were digests, stay valid: they
are of unknown source.
"""

from __future__ import annotations

from datetime import datetime, timezone
from enum import Enum
from functools import cache

from flashwright.choice.results import TunedResult
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of
from flashwright.problem.variant import PLAIN

DIGEST = "kernels"
"""In a result's `versions`: the digest of the winner's kernel source."""


class Currency(Enum):
    """How the kernel that was measured relates to the one that the installed package makes of the same config."""

    CURRENT = "current"
    """It is the same."""
    OTHER = "other"
    """It was made of another source."""
    UNKNOWN = "unknown"


@cache
def kernel_digest(config: KernelConfig) -> str:
    """A short hash of what the installed package compiles for a config: device headers, constants and options."""
    return family_of(config).source(config, PLAIN).digest()


def currency(result: TunedResult) -> Currency:
    measured = result.versions.get(DIGEST)
    if measured is None:
        return Currency.UNKNOWN
    return Currency.CURRENT if measured == kernel_digest(result.config) else Currency.OTHER


def is_current(result: TunedResult) -> bool:
    return currency(result) is Currency.CURRENT


def measured_at(result: TunedResult) -> datetime:
    """When a result was measured; long ago if its date is not one."""
    try:
        date = datetime.fromisoformat(result.date)
    except ValueError:
        return datetime.min.replace(tzinfo=timezone.utc)
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)
