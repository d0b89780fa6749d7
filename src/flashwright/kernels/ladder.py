"""The climb from a family's plainest kernel to its fastest, one idea a rung."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic

from flashwright.kernels.cache_use import CacheUse
from flashwright.kernels.naming import ConfigT


@dataclass(frozen=True)
class RungProblem:
    """Sizes of what rungs are simulated on, or timed on."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int

    def to_dict(self) -> dict[str, int]:
        """Without what follows from the rest: as many heads of k and v as of q, as many keys as rows."""
        same = {
            name
            for name, like in (("kv_heads", "heads"), ("keys", "rows"))
            if getattr(self, name) == getattr(self, like)
        }
        return {name: value for name, value in asdict(self).items() if name not in same}


SMALL_SELF_ATTENTION = RungProblem(batch=1, heads=2, kv_heads=2, rows=256, keys=256)
USUAL_SELF_ATTENTION = RungProblem(batch=4, heads=16, kv_heads=16, rows=4096, keys=4096)
"""16k tokens of hidden size 2048 at d_head 128."""


@dataclass(frozen=True)
class LadderRung(Generic[ConfigT]):
    """One step from the plainest kernel to the fastest: a config, and what it changes in the one before."""

    number: int
    change: str
    config: ConfigT
    use: CacheUse | None = None
    """How the kernel meets a cache of keys and values, of an operation that reads one."""


USE = "use"


def climbed(
    base: ConfigT,
    changes: Iterable[tuple[str, dict[str, Any]]],
    *,
    is_possible: Callable[[ConfigT], bool] = lambda config: True,
) -> list[LadderRung[ConfigT]]:
    """The rungs from a base on, each with some fields of the one before changed. A change to what is not possible is
    left out; those after it are made all the same. Changes of the field `use` are of how the kernel meets a cache."""
    rungs: list[LadderRung[ConfigT]] = []
    config, use = base, None
    for change, values in changes:
        use = values.get(USE, use)
        changed = replace(config, **{name: value for name, value in values.items() if name != USE})  # type: ignore[type-var]
        if is_possible(changed):
            config = changed
            rungs.append(LadderRung(len(rungs) + 1, change, config, use))
    return rungs
