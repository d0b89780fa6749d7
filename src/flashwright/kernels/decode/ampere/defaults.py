"""What the Ampere decode uses where nobody has tuned, and why a config is not worth timing."""

from __future__ import annotations

from flashwright.kernels.decode.ampere.config import AmpereDecodeKernelConfig
from flashwright.kernels.decode.ampere.shapes import AmpereDecodeShapes
from flashwright.kernels.family import Occasion

_SHARED_BYTES = {"large": 160 * 1024, "small": 98 * 1024}
"""That a thread block may have, on GPUs whose multiprocessors have more or less than 128 KiB."""


# (n_warps, keys_per_warp, stages), of which the first that fits is used: the more keys are under way, the better.
_PREFERENCES = ((8, 32, 3), (8, 32, 2), (8, 16, 3), (8, 16, 2), (4, 16, 2), (2, 16, 2))


def ampere_decode_default(occasion: Occasion) -> AmpereDecodeKernelConfig:
    """As many warps along the rows as there are tiles of 16 packed rows, up to four; the others along the keys."""
    row_warps = next((n for n in (1, 2) if occasion.packed_rows <= 16 * n), 4)
    size = "large" if occasion.gpu is None or occasion.gpu.shared_bytes_per_sm > 128 * 1024 else "small"
    configs = [
        AmpereDecodeKernelConfig(
            occasion.dtype, occasion.d_head, 16 * row_warps, keys_per_warp, n_warps, row_warps, stages
        )
        for n_warps, keys_per_warp, stages in _PREFERENCES
    ]
    return next((config for config in configs if _fits(config, _SHARED_BYTES[size])), configs[-1])


def _fits(config: AmpereDecodeKernelConfig, shared_bytes: int) -> bool:
    try:
        return AmpereDecodeShapes(config).shared_bytes <= shared_bytes
    except ValueError:
        return False


def ampere_decode_rejection_reason(config: AmpereDecodeKernelConfig) -> str | None:
    """Why a config is not worth timing; None if it is."""
    try:
        AmpereDecodeShapes(config)
    except ValueError as error:
        return str(error)
    return None if config.swizzled else "swizzle: without it, reads of shared memory meet in the same banks"
