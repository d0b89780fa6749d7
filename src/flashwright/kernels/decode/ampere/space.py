"""Which configs of the Ampere decode are worth timing: every combination of the knobs, less what the rules remove."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flashwright.kernels.decode.ampere.config import AmpereDecodeKernelConfig
from flashwright.kernels.decode.ampere.defaults import ampere_decode_rejection_reason
from flashwright.kernels.family import SearchSpace
from flashwright.problem.dtypes import DType

RULES = ("warps", "shared memory", "registers", "swizzle")
"""The first that a config breaks rejects it."""

_B_R = (16, 32, 64, 128)
_KEYS_PER_WARP = (16, 32, 64)
_WARPS = (2, 4, 8, 16)
_ROW_WARPS = (1, 2, 4, 8)
_STAGES = (2, 3, 4)
_BLOCKS = (1, 2)


def ampere_decode_space(dtype: DType, d_head: int) -> Iterator[tuple[AmpereDecodeKernelConfig, str | None]]:
    """Every combination of the knobs' values, with why it is not worth timing, or None if it is."""
    for values in product(_B_R, _KEYS_PER_WARP, _WARPS, _ROW_WARPS, _STAGES, _BLOCKS, (False, True)):
        config = AmpereDecodeKernelConfig(dtype, d_head, *values)
        yield config, ampere_decode_rejection_reason(config)


def is_promising(config: AmpereDecodeKernelConfig) -> bool:
    """Whether a config has enough warps to keep copies under way, and one tile of 16 rows for each along the rows."""
    return (
        config.n_warps * config.blocks_per_sm == 8
        and config.B_r == 16 * config.row_warps
        and config.keys_per_warp <= 32
    )


SPACE = SearchSpace(ampere_decode_space, is_promising, RULES)
