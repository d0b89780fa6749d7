"""Which strategy a call uses, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from flashwright.distributed.cost import Cost, Machine, Sizes, Strategy, cost_of
from flashwright.distributed.layouts import Holdings
from flashwright.distributed.links import Link, link_named
from flashwright.distributed.rounds import ALL_GATHER, RING, SEQUENCE_STRATEGIES
from flashwright.distributed.visibility import Mask

AUTO, ALL_TO_ALL = "auto", "all-to-all"
STRATEGIES = (*SEQUENCE_STRATEGIES, ALL_TO_ALL)
ALL_GATHER_STEPS = 4
"""At most: while the heads of one step are computed, those of the next travel."""
USUAL_MACHINE = Machine(600e12, 450e12)
"""What "auto" takes every GPU for. Which strategy is fastest hardly depends on it, and all ranks must agree."""


@dataclass(frozen=True)
class StrategyChoice:
    strategy: Strategy
    reason: str
    costs: tuple[Cost, ...] = ()
    """Of all strategies that were compared, the fastest first."""

    def __str__(self) -> str:
        return f"{self.strategy} ({self.reason})"


def named_strategy(strategy: str | Sequence[str], shape: Sequence[int], kv_heads: int) -> StrategyChoice:
    """What a call names, for ranks of a shape of one dimension or of two; raises `ValueError` for what is not known."""
    if len(shape) == 1:
        if not isinstance(strategy, str) or strategy not in STRATEGIES:
            raise ValueError(
                f"strategy: {strategy!r} is not known; allowed: {', '.join(map(repr, (AUTO, *STRATEGIES)))}"
            )
        return StrategyChoice(_strategy(str(strategy), shape[0], kv_heads), "the call names it")
    pair = tuple(strategy) if isinstance(strategy, Sequence) else ()
    if isinstance(strategy, str) or len(pair) != 2 or pair[0] not in SEQUENCE_STRATEGIES or pair[1] != ALL_TO_ALL:
        raise ValueError(
            f"strategy: {strategy!r} is not allowed for a mesh of two dimensions; allowed: {AUTO!r}, "
            f"({RING!r}, {ALL_TO_ALL!r}), ({ALL_GATHER!r}, {ALL_TO_ALL!r})"
        )
    return StrategyChoice(_strategy(pair[0], shape[0], kv_heads, head_ranks=shape[1]), "the call names it")


def strategies_for(shape: Sequence[int], q_heads: int, kv_heads: int, same_lengths: bool) -> list[Strategy]:
    """Those that may be compared: an exchange of heads needs a head for every rank, and as many keys as queries."""
    if len(shape) == 2:
        return [_strategy(name, shape[0], kv_heads, head_ranks=shape[1]) for name in SEQUENCE_STRATEGIES]
    found = [_strategy(name, shape[0], kv_heads) for name in SEQUENCE_STRATEGIES]
    if same_lengths and q_heads >= shape[0]:
        found.append(_strategy(ALL_TO_ALL, shape[0], kv_heads))
    return found


@lru_cache(maxsize=256)
def chosen_strategy(
    shape: tuple[int, ...],
    q_holdings: Holdings,
    kv_holdings: Holdings,
    mask: Mask,
    *,
    batch: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    element_bytes: int,
    link: str | Link,
) -> StrategyChoice:
    """The fastest by the cost model; the same on all ranks, as it depends on the whole problem only."""
    known = link_named(link)
    sizes = Sizes(batch, q_heads, kv_heads, head_dim, element_bytes)
    candidates = strategies_for(shape, q_heads, kv_heads, q_holdings == kv_holdings)
    if not q_heads:
        return StrategyChoice(candidates[0], "there are no heads, so nothing is computed")
    costs = sorted(
        (cost_of(strategy, q_holdings, kv_holdings, mask, sizes, USUAL_MACHINE, known) for strategy in candidates),
        key=lambda cost: cost.time_s,
    )
    best = costs[0]
    if len(q_holdings) == 1:
        return StrategyChoice(best.strategy, "there is one rank", tuple(costs))
    others = ", ".join(f"{cost.strategy} {1e3 * cost.time_s:.3g} ms" for cost in costs[1:])
    reason = (
        f"{1e3 * best.time_s:.3g} ms forward and backward by the cost model over {known.name}, "
        f"{best.forward.sent_bytes / 2**20:.3g} MiB sent by each rank in the forward"
    )
    return StrategyChoice(best.strategy, reason + (f"; {others}" if others else ""), tuple(costs))


def _strategy(name: str, ranks: int, kv_heads: int, *, head_ranks: int = 1) -> Strategy:
    if name == ALL_TO_ALL:
        return Strategy(None, 1, ranks)
    steps = min(ALL_GATHER_STEPS, max(1, kv_heads // head_ranks)) if name == ALL_GATHER else 1
    return Strategy(name, ranks, head_ranks, steps)
