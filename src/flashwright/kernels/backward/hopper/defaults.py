"""What the Hopper backward uses where nobody has tuned."""

from __future__ import annotations

from dataclasses import replace

from flashwright.kernels.backward.hopper.config import HopperBackwardKernelConfig
from flashwright.kernels.family import Occasion
from flashwright.problem.lengths import LONG, LONGEST


def hopper_backward_default(occasion: Occasion) -> HopperBackwardKernelConfig:
    """What was fastest on an H200 among those that were tried (docs/performance.md)."""
    config = _BY_D_HEAD[occasion.d_head](HopperBackwardKernelConfig(occasion.dtype, occasion.d_head, 64, 64), occasion)
    return replace(config, ordered=occasion.ordered)


def _of_64_columns(config: HopperBackwardKernelConfig, occasion: Occasion) -> HopperBackwardKernelConfig:
    """Behind many steps the copy engine's additions to dQ are late."""
    config = replace(config, B_r=128, B_c=128, persistent=True, keys_ahead=True)
    return replace(config, bulk_dQ=not occasion.ordered and occasion.q_bucket != LONGEST)


def _of_128_columns(config: HopperBackwardKernelConfig, occasion: Occasion) -> HopperBackwardKernelConfig:
    """A tile of few steps ends soon: the keys of the next one are copied ahead, and with a causal mask one step less is
    much of it. Without a mask two steps of Q and dO ahead are enough."""
    config = replace(config, B_c=128, persistent=True)
    if not occasion.ordered and (not occasion.causal or not _has_many_steps(occasion)):
        return replace(config, keys_ahead=True, skips_masked=occasion.causal)
    return replace(config, Q_stages=3, dO_stages=3)


def _of_256_columns(config: HopperBackwardKernelConfig, occasion: Occasion) -> HopperBackwardKernelConfig:
    """A pair of thread blocks begins and ends together, which many steps make up for."""
    if not occasion.ordered and not _has_many_steps(occasion):
        return replace(config, P_in_registers=False, persistent=True)
    return replace(config, P_in_registers=False, dO_stages=1, paired=True)


def _has_many_steps(occasion: Occasion) -> bool:
    return occasion.q_bucket in (LONG, LONGEST)


_BY_D_HEAD = {64: _of_64_columns, 128: _of_128_columns, 256: _of_256_columns}
