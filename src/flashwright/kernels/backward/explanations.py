"""What the explanations of both families of the backward share: words for common knobs, and changes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ORDERED = (
    "blocks of keys add to dQ in a fixed order, each when it is its turn: the same bits in every run",
    "blocks of keys add to dQ as they come: its last bits may differ from run to run",
)
"""What the switch does on, and off."""


def common_meanings(config: Any) -> dict[str, str]:
    """Of the fields that configs of both families have, but for their switches."""
    ahead = {1: "one block of {0} in shared memory: the next is copied when all have read this one"}
    several = "{1} blocks of {0} in shared memory: the next is copied while this one is computed with"
    return {
        "dtype": "element type of Q, K, V, dO and the gradients; products are summed in fp32",
        "d_head": "columns of all tensors",
        "B_r": "rows of Q and dO per step of the loop",
        "B_c": "rows of K and V, and of dK and dV, per thread block",
        **{
            f"{name}_stages": ahead.get(stages, several).format(name, stages)
            for name, stages in (("Q", config.Q_stages), ("dO", config.dO_stages))
        },
    }


def stage_changes(config: Any, most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("Q_stages", "dO_stages"):
        value = getattr(config, name)
        for other in (value - 1, value + 1):
            if 1 <= other <= most:
                yield f"{name}: {value} → {other}", {name: other}
