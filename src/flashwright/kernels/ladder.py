"""The climb from a family's plainest kernel to its fastest, one idea a rung."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic

from flashwright.kernels.naming import ConfigT


@dataclass(frozen=True)
class LadderRung(Generic[ConfigT]):
    """One step from the plainest kernel to the fastest: a config, and what it changes in the one before."""

    number: int
    change: str
    config: ConfigT


def climbed(
    base: ConfigT,
    changes: Iterable[tuple[str, dict[str, Any]]],
    *,
    is_possible: Callable[[ConfigT], bool] = lambda config: True,
) -> list[LadderRung[ConfigT]]:
    """The rungs from a base on, each with some fields of the one before changed. A change to what is not possible is
    left out; those after it are made all the same."""
    rungs: list[LadderRung[ConfigT]] = []
    config = base
    for change, values in changes:
        changed = replace(config, **values)  # type: ignore[type-var]
        if is_possible(changed):
            config = changed
            rungs.append(LadderRung(len(rungs) + 1, change, config))
    return rungs
