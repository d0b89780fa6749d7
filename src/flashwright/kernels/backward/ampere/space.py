"""Which configs of the Ampere backward are worth timing: every combination of the knobs, less what the rules remove."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.backward.ampere.shapes import AmpereBackwardShapes
from flashwright.kernels.family import SearchSpace
from flashwright.problem.dtypes import DType

RULES = ("warps", "columns", "shared memory", "registers", "swizzle")
"""The first that a config breaks rejects it."""

_B_R = (16, 32, 64, 128)
_B_C = (32, 64, 128, 256)
_WARPS = (4, 8, 16)
_STAGES = (1, 2)


def ampere_backward_space(dtype: DType, d_head: int) -> Iterator[tuple[AmpereBackwardKernelConfig, str | None]]:
    """Every combination of the knobs' values, with why it is not worth timing, or None if it is. `ordered` is no choice
    of the search: callers request it."""
    for B_r, B_c, n_warps, Q_stages, dO_stages, swizzled in product(
        _B_R, _B_C, _WARPS, _STAGES, _STAGES, (False, True)
    ):
        config = AmpereBackwardKernelConfig(dtype, d_head, B_r, B_c, n_warps, Q_stages, dO_stages, swizzled)
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
    return None


def is_promising(config: AmpereBackwardKernelConfig) -> bool:
    """Whether a config has large blocks, a warp for every 16 keys, and copies Q ahead where dK and dV leave room."""
    shapes = AmpereBackwardShapes(config)
    large = config.B_c >= 64 and config.B_r >= 64 and config.n_warps == 8
    return large and shapes.row_tiles == 1 and (config.Q_stages == 2 or config.d_head > 128)


# dK, dV, S and dP of the largest blocks fill a thread's registers, and the compiler spills some values around the loop.
# That may still be faster than smaller blocks: timing decides.
SPACE = SearchSpace(ampere_backward_space, is_promising, RULES, bearable_spill_bytes=64)
