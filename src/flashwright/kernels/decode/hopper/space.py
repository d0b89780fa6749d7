"""Which configs of the Hopper decode are worth timing: every combination of the knobs, less what the rules remove."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flashwright.kernels.decode.hopper.config import HopperDecodeKernelConfig
from flashwright.kernels.decode.hopper.defaults import hopper_decode_rejection_reason
from flashwright.kernels.family import SearchSpace
from flashwright.problem.dtypes import DType

RULES = ("shared memory", "registers")
"""The first that a config breaks rejects it."""

_B_R = (64, 128)
_B_C = (16, 32, 48, 64, 80, 96, 128)
_STAGES = (2, 3, 4, 5, 6, 8)


def hopper_decode_space(dtype: DType, d_head: int) -> Iterator[tuple[HopperDecodeKernelConfig, str | None]]:
    """Every combination of the knobs' values, with why it is not worth timing, or None if it is."""
    for B_r, B_c, stages in product(_B_R, _B_C, _STAGES):
        config = HopperDecodeKernelConfig(dtype, d_head, B_r, B_c, stages)
        yield config, hopper_decode_rejection_reason(config)


def is_promising(config: HopperDecodeKernelConfig) -> bool:
    """Whether a config keeps many keys under way, in steps that are not short."""
    return config.B_c >= 32 and config.B_c * config.stages * config.d_head >= 128 * 128


SPACE = SearchSpace(hopper_decode_space, is_promising, RULES)
