"""Which configs a search considers: all combinations of a family's knobs, less what its rules remove."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashwright.choice.problem import TuningProblem
from flashwright.kernels.family import DEFAULT_SPACE, SPACES, ConsideredConfigs, KernelConfig, SearchSpace
from flashwright.kernels.registry import families, family_with_prefix


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

    name: str
    """Of the default or the full space."""
    enumerated: int
    removals: tuple[Removal, ...]
    kept: int
    configs: tuple[KernelConfig, ...]
    """What is tried of those kept, the promising first."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "enumerated": self.enumerated,
            "removed": [asdict(removal) for removal in self.removals],
            "kept": self.kept,
            "tried": len(self.configs),
        }


def space_of(family: str) -> SearchSpace:
    """What there is to search in a family; raises `ValueError` for one that has nothing to search."""
    space = family_with_prefix(family).space
    if space is None:
        raise ValueError(f"family: {family!r} has no search space")
    return space


def considered_configs(family: str, name: str) -> ConsideredConfigs:
    """The default or the full space of a family; raises `ValueError` for one that it does not have."""
    space = space_of(family)
    if name not in SPACES:
        raise ValueError(f"space: {name!r} is not known; allowed: {', '.join(SPACES)}")
    if name == DEFAULT_SPACE:
        return space.configs
    if space.full is None:
        others = ", ".join(each.name for each in families() if each.space is not None and each.space.full is not None)
        raise ValueError(f"space: the {family} family has no full space; those that have one: {others}")
    return space.full.configs


def enumerate_space(
    problem: TuningProblem, *, name: str = DEFAULT_SPACE, quick: bool = False, limit: int | None = None
) -> Space:
    """The configs of a space to try for a problem: all, only the promising (`quick`), or only the first so many
    (`limit`)."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit: {limit} is not allowed; allowed: 1 or more")
    family = space_of(problem.family)
    configs = considered_configs(problem.family, name)
    reasons: dict[str, list[str]] = {rule: [] for rule in family.rules}
    kept = []
    enumerated = 0
    for config, reason in configs(problem.dtype, problem.d_head):
        enumerated += 1
        if reason is None:
            kept.append(config)
        else:
            reasons.setdefault(reason.partition(":")[0], []).append(reason)
    removals = [Removal(rule, len(found), "".join(found[:1]).partition(": ")[2]) for rule, found in reasons.items()]
    tried = [config for config in kept if family.is_promising(config)]
    if not quick:
        tried += [config for config in kept if not family.is_promising(config)]
    return Space(name, enumerated, tuple(removals), len(kept), tuple(tried[:limit]))
