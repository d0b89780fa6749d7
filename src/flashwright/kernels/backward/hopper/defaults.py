"""What the Hopper backward uses where nobody has tuned."""

from __future__ import annotations

from typing import Any

from flashwright.kernels.backward.hopper.config import HopperBackwardKernelConfig
from flashwright.kernels.family import Occasion
from flashwright.problem.lengths import LONG, LONGEST


def hopper_backward_default(occasion: Occasion) -> HopperBackwardKernelConfig:
    """What was fastest on an H200 among those that were tried (docs/performance.md). Where few blocks of keys add to
    dQ, their order costs less than the kernel that it saves: the last of them finishes it. Pairs of thread blocks save
    it without an order, too."""
    in_order = occasion.ordered or occasion.kv_bucket not in (LONG, LONGEST)
    return HopperBackwardKernelConfig(
        occasion.dtype,
        occasion.d_head,
        ordered=in_order,
        finishes_dQ=in_order or occasion.d_head == 256,
        **{"persistent": True} | _KNOBS[occasion.d_head](occasion, in_order),
    )


def _of_64_columns(occasion: Occasion, in_order: bool) -> dict[str, Any]:
    """A causal mask leaves long sequences blocks of keys with very many steps: there a third stage of Q gains more than
    copies of the next keys do."""
    blocks = {"B_r": 128, "B_c": 128}
    if not in_order and occasion.causal and occasion.kv_bucket == LONGEST:
        return blocks | {"Q_stages": 3, "persistent": False}
    return blocks | {"keys_ahead": True}


def _of_128_columns(occasion: Occasion, in_order: bool) -> dict[str, Any]:
    """Copies run two steps ahead: of Q and dO where turns or a mask make steps uneven, of Q elsewhere."""
    blocks = {"B_r": 64, "B_c": 128, "Q_stages": 3}
    if in_order or occasion.causal:
        return blocks | {"dO_stages": 3, "skips_masked": occasion.causal}
    return blocks


def _of_256_columns(occasion: Occasion, in_order: bool) -> dict[str, Any]:
    """Pairs of thread blocks."""
    return {"B_r": 64, "B_c": 64, "P_in_registers": False, "dO_stages": 1, "paired": True}


_KNOBS = {64: _of_64_columns, 128: _of_128_columns, 256: _of_256_columns}
