"""The climb from a family's plainest kernel to its fastest, one idea a rung."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic

from flashwright.kernels.naming import ConfigT


@dataclass(frozen=True)
class LadderRung(Generic[ConfigT]):
    """One step from the plainest kernel to the fastest: a config, and what it changes in the one before."""

    number: int
    change: str
    config: ConfigT


def climbed(base: ConfigT, changes: Iterable[tuple[str, dict[str, Any]]]) -> list[LadderRung[ConfigT]]:
    """The rungs from a base on, each with some fields of the one before changed."""
    rungs, config = [], base
    for number, (change, values) in enumerate(changes, start=1):
        config = replace(config, **values)  # type: ignore[type-var]
        rungs.append(LadderRung(number, change, config))
    return rungs
