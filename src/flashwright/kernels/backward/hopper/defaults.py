"""What the Hopper backward uses where nobody has tuned."""

from __future__ import annotations

from flashwright.kernels.backward.hopper.config import HopperBackwardKernelConfig
from flashwright.kernels.family import Occasion

# By head dimension: (B_r, B_c, n_consumers, Q_stages, dO_stages, P_in_registers, bulk_dQ).
_SHAPES = {
    64: (128, 128, 2, 3, 2, True, False),
    128: (64, 128, 2, 3, 2, True, True),
    256: (64, 64, 2, 2, 2, False, False),
}


def hopper_backward_default(occasion: Occasion) -> HopperBackwardKernelConfig:
    return HopperBackwardKernelConfig(occasion.dtype, occasion.d_head, *_SHAPES[occasion.d_head])
