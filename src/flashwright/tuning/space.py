"""Which configs a search considers: all combinations of a family's knobs, less what its rules remove."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from flashwright.families import ForwardKernelConfig
from flashwright.hopper import space as hopper_space
from flashwright.kernel_configs import DType, FlashForwardKernelConfig, search_space
from flashwright.tuning.problem import TuningProblem

SMALLEST_PROMISING_B_C = 64
WIDEST_CHEAP_D_HEAD = 128


def is_promising(config: FlashForwardKernelConfig) -> bool:
    """Whether a config has what the fastest had on an H200: the later optimisations, and large blocks.

    Of the ways to load the operands of wide heads, only the one that leaves most registers; and there a second stage
    makes up for small blocks.
    """
    if not config.lazy_rescale:
        return False
    if config.d_head <= WIDEST_CHEAP_D_HEAD:
        return config.B_c >= SMALLEST_PROMISING_B_C
    in_small_tiles = config.K_mma_load_K_tiles == config.V_mma_load_K_tiles == 2
    return in_small_tiles and (config.B_c >= SMALLEST_PROMISING_B_C or config.two_kv_stages)


@dataclass(frozen=True)
class FamilySpace:
    """What there is to search in one family of kernels."""

    configs: Callable[[DType, int], Iterator[tuple[Any, str | None]]]
    """Every config of a dtype and head dimension, with "rule: why it is not worth timing", or None."""
    is_promising: Callable[[Any], bool]
    rules: tuple[str, ...]
    """Those that are listed even if they remove nothing."""
    bearable_spill_bytes: int = 0
    """What a kernel may spill and still be timed."""


SPACES = {
    "ampere": FamilySpace(search_space, is_promising, tuple(f"rule {number}" for number in range(1, 7))),
    # The largest tiles that fit leave a thread so few registers that a few values are spilled around the loop, which
    # need not be slower than smaller tiles: timing decides.
    "hopper": FamilySpace(
        hopper_space.hopper_search_space, hopper_space.is_promising, hopper_space.RULES, bearable_spill_bytes=64
    ),
}


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
    configs: tuple[ForwardKernelConfig, ...]
    """What is tried of those kept, the promising first."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "enumerated": self.enumerated,
            "removed": [asdict(removal) for removal in self.removals],
            "kept": self.kept,
            "tried": len(self.configs),
        }


def enumerate_space(problem: TuningProblem, *, quick: bool = False, limit: int | None = None) -> Space:
    """The configs to try for a problem: all, only the promising (`quick`), or only the first so many (`limit`)."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit: {limit} is not allowed; allowed: 1 or more")
    family = SPACES[problem.family]
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
