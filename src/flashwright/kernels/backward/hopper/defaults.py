"""What the Hopper backward uses where nobody has tuned."""

from __future__ import annotations

from typing import Any

from flashwright.kernels.backward.hopper.config import HopperBackwardKernelConfig
from flashwright.kernels.family import Occasion


def hopper_backward_default(occasion: Occasion) -> HopperBackwardKernelConfig:
    """What was fastest on an H200 among those that were tried (docs/performance.md)."""
    return HopperBackwardKernelConfig(
        occasion.dtype, occasion.d_head, ordered=occasion.ordered, **_KNOBS[occasion.d_head](occasion)
    )


def _of_64_columns(occasion: Occasion) -> dict[str, Any]:
    """The copy engine adds to dQ soon enough where nobody waits for a turn."""
    return {"B_r": 128, "B_c": 128, "bulk_dQ": not occasion.ordered, "persistent": True, "keys_ahead": True}


def _of_128_columns(occasion: Occasion) -> dict[str, Any]:
    """Without a mask two steps of Q and dO ahead are enough, and leave room for the next keys."""
    blocks = {"B_r": 64, "B_c": 128, "persistent": True}
    if occasion.ordered or occasion.causal:
        return blocks | {"Q_stages": 3, "dO_stages": 3, "skips_masked": not occasion.ordered}
    return blocks | {"keys_ahead": True}


def _of_256_columns(occasion: Occasion) -> dict[str, Any]:
    """Pairs of thread blocks, which take their tiles from the common count where no order is requested."""
    blocks = {"B_r": 64, "B_c": 64, "P_in_registers": False}
    return blocks | {"dO_stages": 1, "paired": True, "persistent": not occasion.ordered}


_KNOBS = {64: _of_64_columns, 128: _of_128_columns, 256: _of_256_columns}
