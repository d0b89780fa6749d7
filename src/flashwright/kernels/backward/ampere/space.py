"""Which configs of the Ampere backward are worth timing: every combination of the knobs, less what the rules remove."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.backward.ampere.shapes import AmpereBackwardShapes
from flashwright.kernels.family import SearchSpace
from flashwright.problem.dtypes import DType

RULES = ("warps", "columns", "shared memory", "registers", "swizzle", "slices", "late dQ")
"""The first that a config breaks rejects it."""

_B_R = (32, 64, 128)
_B_C = (32, 64, 128)
_WARPS = (4, 8)
_STAGES = (1, 2)
_COUNTS = (1, 2, 4)
SCHEDULERS = 4
"""Of a multiprocessor: the fifth warp of a thread block shares one with the first."""
FEW_ACCUMULATORS = 192
"""Registers of a thread for sums of products that leave room for operands and addresses."""


def ampere_backward_space(dtype: DType, d_head: int) -> Iterator[tuple[AmpereBackwardKernelConfig, str | None]]:
    """Every combination of the knobs' values, with why it is not worth timing, or None if it is. `ordered` is no choice
    of the search: callers request it."""
    for values in product(_B_R, _B_C, _WARPS, _STAGES, _STAGES, _COUNTS, _COUNTS, (False, True), (False, True)):
        config = AmpereBackwardKernelConfig(dtype, d_head, *values)
        yield config, ampere_backward_rejection_reason(config)


def ampere_backward_rejection_reason(config: AmpereBackwardKernelConfig) -> str | None:
    """Why a config is not worth timing: "rule: reason" with its numbers; None if it is kept."""
    try:
        shapes = AmpereBackwardShapes(config)
    except ValueError as error:
        return str(error)
    if not config.swizzled:
        return "swizzle: without it, reads of shared memory meet in the same banks"
    if shapes.row_tiles > 2:
        return f"warps: {shapes.keys_per_warp} keys of a warp leave too few registers"
    if config.late_dQ and config.n_warps <= SCHEDULERS:
        return f"late dQ: of {config.n_warps} warps, none shares a scheduler with another"
    unsliced = 2 * (shapes.gradient_registers + config.slices * shapes.score_registers)
    if config.slices > 1 and unsliced <= FEW_ACCUMULATORS:
        return f"slices: without them, dK, dV, S and dP take {unsliced} registers of a thread, which fit"
    return None


def is_promising(config: AmpereBackwardKernelConfig) -> bool:
    """Whether a config has large blocks, and 32 keys for a warp where dK and dV divide so."""
    shapes = AmpereBackwardShapes(config)
    large = config.B_c >= 64 and config.B_r >= 64
    return large and (shapes.row_tiles == 2 or config.d_head not in (32, 64, 128))


# dK, dV, S and dP of the largest blocks fill a thread's registers, and the compiler spills some values around the loop.
# That may still be faster than smaller blocks: timing decides.
SPACE = SearchSpace(ampere_backward_space, is_promising, RULES, bearable_spill_bytes=64)
