"""An operation: what a kernel computes as a whole. Families are ways of computing one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Steps:
    """How the kernels of an operation share the scores: a thread block has some rows of one side, and a loop over those
    of the other."""

    name: str
    """As in "KV step"."""
    tile: str
    """The field of a config that has a thread block's rows."""
    step: str
    """The field of a config that has the rows of a step."""

    def tile_rows(self, config: Any) -> int:
        return int(getattr(config, self.tile))

    def step_rows(self, config: Any) -> int:
        return int(getattr(config, self.step))


OVER_KEYS = Steps("KV", tile="B_r", step="B_c")
OVER_QUERIES = Steps("query", tile="B_c", step="B_r")


@dataclass(frozen=True)
class Operation:
    name: str
    launch: Callable[..., Any]
    """How to compute with a config: of a family's launch rules, a config, tensors and options."""
    steps: Steps = OVER_KEYS
    reads_cache: bool = False
    """Few rows of queries attend to a cache of keys and values: what is read takes the time, not what is multiplied.
    Heads of queries that share a head of keys are rows of one tile."""
    one_tile: Mapping[str, Any] = field(default_factory=dict)
    """Options of a simulated launch by which one thread block computes a tile with all of its steps."""
