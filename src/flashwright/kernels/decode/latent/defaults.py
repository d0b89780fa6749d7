"""What the latent decode uses where nobody has tuned, and when it is chosen."""

from __future__ import annotations

from flashwright.kernels.decode.latent.config import LatentDecodeKernelConfig
from flashwright.kernels.decode.latent.shapes import LatentDecodeShapes
from flashwright.kernels.family import Occasion
from flashwright.problem.shapes import MAX_D_HEAD


def latent_decode_default(occasion: Occasion) -> LatentDecodeKernelConfig:
    """As many keys as two stages hold: products of 64 columns read no more of Q than of the keys."""
    return LatentDecodeKernelConfig(occasion.dtype, occasion.d_head, B_c=64, stages=2)


def suits_latent_decode(occasion: Occasion) -> bool:
    """Up to MAX_D_HEAD columns, other kernels read keys and values in pieces of any size."""
    return occasion.d_head > MAX_D_HEAD


def latent_decode_rejection_reason(config: LatentDecodeKernelConfig) -> str | None:
    """Why a config is not worth timing; None if it is."""
    try:
        LatentDecodeShapes(config)
    except ValueError as error:
        return str(error)
    return None
