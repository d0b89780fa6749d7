"""What the Hopper decode uses where nobody has tuned, and when it is worth choosing."""

from __future__ import annotations

from flashwright.kernels.decode.hopper.config import HopperDecodeKernelConfig
from flashwright.kernels.decode.hopper.shapes import HopperDecodeShapes
from flashwright.kernels.family import Occasion

FEWEST_ROWS = 33
"""Of fewer packed rows, a tile of 64 is mostly empty, and `mma.sync` computes them while the memory is read."""
_KEYS = {64: 128, 128: 64, 192: 64, 256: 32}
"""Of a step, by d_head."""


def hopper_decode_default(occasion: Occasion) -> HopperDecodeKernelConfig:
    """As many stages as shared memory holds."""
    rows = 64 if occasion.packed_rows <= 64 else 128
    for stages in range(8, 2, -1):
        config = HopperDecodeKernelConfig(occasion.dtype, occasion.d_head, rows, _KEYS[occasion.d_head], stages)
        if hopper_decode_rejection_reason(config) is None:
            return config
    return HopperDecodeKernelConfig(occasion.dtype, occasion.d_head, rows, _KEYS[occasion.d_head], 2)


def suits_hopper_decode(occasion: Occasion) -> bool:
    return occasion.packed_rows >= FEWEST_ROWS


def hopper_decode_rejection_reason(config: HopperDecodeKernelConfig) -> str | None:
    """Why a config is not worth timing; None if it is."""
    try:
        HopperDecodeShapes(config)
    except ValueError as error:
        return str(error)
    return None
