"""Which configs of the Hopper backward are worth timing: every combination of the knobs, less what the rules remove."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from flashwright.kernels.backward.hopper.config import MAX_STAGES, HopperBackwardKernelConfig
from flashwright.kernels.backward.hopper.shapes import HopperBackwardShapes
from flashwright.kernels.family import SearchSpace
from flashwright.problem.dtypes import DType

RULES = (
    "warpgroups",
    "P in registers",
    "paired",
    "skips masked",
    "persistent",
    "finishes dQ",
    "shared memory",
    "registers",
    "consumers",
    "ahead",
)
"""The first that a config breaks rejects it."""

_B_R = (64, 128)
_B_C = (64, 128, 192)
_CONSUMERS = (1, 2, 3)
_STAGES = tuple(range(1, MAX_STAGES + 1))
_TILES = ((False, False, False), (True, False, False), (True, True, False), (True, True, True))
"""Whether thread blocks are persistent, whether the last of them to add to a block of dQ finishes it, and whether they
add in order."""
_BYTES_AHEAD = 64 * 1024
"""Q and dO on the way to one multiprocessor: twice what an H200's memory delivers to it within a latency."""


def hopper_backward_space(dtype: DType, d_head: int) -> Iterator[tuple[HopperBackwardKernelConfig, str | None]]:
    """Every combination of the knobs' values, with why it is not worth timing, or None if it is. An order that saves
    nothing is no choice of the search: callers request it."""
    switch = (False, True)
    for values in product(_B_R, _B_C, _CONSUMERS, _STAGES, _STAGES, switch, switch, switch):
        config = HopperBackwardKernelConfig(dtype, d_head, *values)
        for (persistent, finishes, ordered), keys_ahead, skips in product(_TILES, switch, switch):
            found = replace(
                config,
                ordered=ordered,
                persistent=persistent,
                keys_ahead=keys_ahead,
                skips_masked=skips,
                finishes_dQ=finishes,
            )
            yield found, hopper_backward_rejection_reason(found)


def hopper_backward_rejection_reason(config: HopperBackwardKernelConfig) -> str | None:
    """Why a config is not worth timing: "rule: reason" with its numbers; None if it is kept."""
    try:
        shapes = HopperBackwardShapes(config)
    except ValueError as error:
        return str(error)
    if config.n_consumers == 1:
        return "consumers: 1 warpgroup; while it differentiates scores and adds to dQ, nobody issues products"
    ahead = (config.Q_stages + config.dO_stages - 2) * shapes.query_bytes
    if config.Q_stages + config.dO_stages > 4 and ahead > _BYTES_AHEAD:
        return (
            f"ahead: Q and dO have {ahead // 1024} KiB on the way while a step is computed; {_BYTES_AHEAD // 1024} KiB "
            "hide the latency of memory"
        )
    return None


def is_promising(config: HopperBackwardKernelConfig) -> bool:
    """Whether a config keeps P in registers where every warpgroup has keys of its own, and copies a step or two ahead.
    A pair of thread blocks has no room for a second stage of dO."""
    alone = HopperBackwardShapes(config).parts == 1
    stages = ((2, 2), (3, 2), (3, 3)) if alone else ((2, 1 if config.paired else 2),)
    return (config.Q_stages, config.dO_stages) in stages and config.P_in_registers == alone


# dK, dV and dQ of 256 columns fill the registers of a thread, and a persistent one keeps more between its tiles: values
# are spilled around the loop.
SPACE = SearchSpace(hopper_backward_space, is_promising, RULES, bearable_spill_bytes=320)
