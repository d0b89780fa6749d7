"""What the Ampere decode uses where nobody has tuned, and why a config is not worth timing."""

from __future__ import annotations

from flashwright.kernels.decode.ampere.config import AmpereDecodeKernelConfig
from flashwright.kernels.decode.ampere.shapes import AmpereDecodeShapes
from flashwright.kernels.family import Occasion

_SHARED_BYTES = {"large": 224 * 1024, "medium": 160 * 1024, "small": 99 * 1024}
"""That the thread blocks of a multiprocessor may have together."""
_STATIC_BYTES = 1536
"""Of a thread block, beside what a config asks for: the kernel's own and the driver's."""

# (row_warps, n_warps, keys_per_warp, stages, blocks_per_sm), of which the first that fits is used: the more keys are
# under way, the better; and what one thread block waits for at the ends of its segments, another hides.
_PREFERENCES = {
    1: ((1, 4, 32, 3, 2), (1, 8, 16, 3, 1), (1, 8, 16, 2, 1), (1, 4, 16, 2, 1), (1, 2, 16, 2, 1)),
    2: ((2, 8, 32, 3, 1), (2, 8, 16, 3, 1), (2, 8, 16, 2, 1), (2, 4, 16, 2, 1), (2, 2, 16, 2, 1)),
    4: ((4, 8, 32, 3, 1), (4, 8, 32, 2, 1), (4, 8, 16, 2, 1), (4, 4, 16, 2, 1), (2, 2, 16, 2, 1)),
}


def ampere_decode_default(occasion: Occasion) -> AmpereDecodeKernelConfig:
    """As many warps along the rows as there are tiles of 16 packed rows, up to four; the others along the keys."""
    row_warps = next((n for n in (1, 2) if occasion.packed_rows <= 16 * n), 4)
    available = _SHARED_BYTES[_size(occasion)]
    configs = [
        AmpereDecodeKernelConfig(
            occasion.dtype, occasion.d_head, 16 * rows, keys_per_warp, n_warps, rows, stages, blocks
        )
        for rows, n_warps, keys_per_warp, stages, blocks in _PREFERENCES[row_warps]
    ]
    return next((config for config in configs if _fits(config, available)), configs[-1])


def _size(occasion: Occasion) -> str:
    if occasion.gpu is None or occasion.gpu.shared_bytes_per_sm > 200 * 1024:
        return "large"
    return "medium" if occasion.gpu.shared_bytes_per_sm > 128 * 1024 else "small"


def _fits(config: AmpereDecodeKernelConfig, shared_bytes: int) -> bool:
    try:
        return config.blocks_per_sm * (AmpereDecodeShapes(config).shared_bytes + _STATIC_BYTES) <= shared_bytes
    except ValueError:
        return False


def ampere_decode_rejection_reason(config: AmpereDecodeKernelConfig) -> str | None:
    """Why a config is not worth timing; None if it is."""
    try:
        AmpereDecodeShapes(config)
    except ValueError as error:
        return str(error)
    return None if config.swizzled else "swizzle: without it, reads of shared memory meet in the same banks"
