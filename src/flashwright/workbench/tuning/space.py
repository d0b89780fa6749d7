"""Which configs a search considers: all combinations of a family's knobs, less what its rules remove."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashwright.choice.problem import TuningProblem
from flashwright.kernels.family import KernelConfig, SearchSpace
from flashwright.kernels.registry import family_named


@dataclass(frozen=True)
class Removal:
    """What one rule removes from the space."""

    rule: str
    count: int
    example: str
    """The rule's reason against the first config that it removes; empty if it removes none."""


@dataclass(frozen=True)
class Space:
    """All combinations of the knobs' values, less what the rules remove."""

    enumerated: int
    removals: tuple[Removal, ...]
    kept: int
    configs: tuple[KernelConfig, ...]
    """What is tried of those kept, the promising first."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "enumerated": self.enumerated,
            "removed": [asdict(removal) for removal in self.removals],
            "kept": self.kept,
            "tried": len(self.configs),
        }


def space_of(family: str) -> SearchSpace:
    """What there is to search in a family; raises `ValueError` for one that has nothing to search."""
    space = family_named(family).space
    if space is None:
        raise ValueError(f"family: {family!r} has no search space")
    return space


def enumerate_space(problem: TuningProblem, *, quick: bool = False, limit: int | None = None) -> Space:
    """The configs to try for a problem: all, only the promising (`quick`), or only the first so many (`limit`)."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit: {limit} is not allowed; allowed: 1 or more")
    family = space_of(problem.family)
    reasons: dict[str, list[str]] = {rule: [] for rule in family.rules}
    kept = []
    enumerated = 0
    for config, reason in family.configs(problem.dtype, problem.d_head):
        enumerated += 1
        if reason is None:
            kept.append(config)
        else:
            reasons.setdefault(reason.partition(":")[0], []).append(reason)
    removals = [Removal(rule, len(found), "".join(found[:1]).partition(": ")[2]) for rule, found in reasons.items()]
    tried = [config for config in kept if family.is_promising(config)]
    if not quick:
        tried += [config for config in kept if not family.is_promising(config)]
    return Space(enumerated, tuple(removals), len(kept), tuple(tried[:limit]))
