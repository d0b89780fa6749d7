"""What the Ampere decode uses where nobody has tuned, and why a config is not worth timing."""

from __future__ import annotations

from flashwright.kernels.decode.ampere.config import AmpereDecodeKernelConfig
from flashwright.kernels.decode.ampere.shapes import AmpereDecodeShapes
from flashwright.kernels.family import Occasion


def ampere_decode_default(occasion: Occasion) -> AmpereDecodeKernelConfig:
    """For as many rows as one tensor-core instruction has: those of up to 16 heads that share a head of K and V."""
    wide = occasion.d_head > 128
    return AmpereDecodeKernelConfig(occasion.dtype, occasion.d_head, 16, 16, 4 if wide else 8, stages=2)


def ampere_decode_rejection_reason(config: AmpereDecodeKernelConfig) -> str | None:
    """Why a config is not worth timing; None if it is."""
    try:
        AmpereDecodeShapes(config)
    except ValueError as error:
        return str(error)
    return None if config.swizzled else "swizzle: without it, reads of shared memory meet in the same banks"
