"""What the Hopper backward uses where nobody has tuned."""

from __future__ import annotations

from flashwright.kernels.backward.hopper.config import HopperBackwardKernelConfig
from flashwright.kernels.family import Occasion

# By head dimension: (B_r, B_c, n_consumers, Q_stages, dO_stages, P_in_registers, bulk_dQ, paired).
_SHAPES = {
    64: (128, 128, 2, 2, 2, True, False, False),
    128: (64, 128, 2, 3, 3, True, False, False),
    256: (64, 64, 2, 2, 1, False, False, True),
}


def hopper_backward_default(occasion: Occasion) -> HopperBackwardKernelConfig:
    return HopperBackwardKernelConfig(occasion.dtype, occasion.d_head, *_SHAPES[occasion.d_head])
