"""Which configs of the latent decode are worth timing: every combination of the knobs, less what the rules remove."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flashwright.kernels.decode.latent.config import LatentDecodeKernelConfig
from flashwright.kernels.decode.latent.defaults import latent_decode_rejection_reason
from flashwright.kernels.family import SearchSpace
from flashwright.problem.dtypes import DType

RULES = ("shared memory",)
"""The first that a config breaks rejects it."""

_B_C = (32, 64)
_STAGES = (2, 3, 4, 5)


def latent_decode_space(dtype: DType, d_head: int) -> Iterator[tuple[LatentDecodeKernelConfig, str | None]]:
    """Every combination of the knobs' values, with why it is not worth timing, or None if it is."""
    for B_c, stages in product(_B_C, _STAGES):
        config = LatentDecodeKernelConfig(dtype, d_head, B_c=B_c, stages=stages)
        yield config, latent_decode_rejection_reason(config)


def is_promising(config: LatentDecodeKernelConfig) -> bool:
    """Whether a config has as many keys under way as shared memory holds."""
    return config.B_c * config.stages == 128


SPACE = SearchSpace(latent_decode_space, is_promising, RULES)
