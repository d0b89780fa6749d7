"""What the Ampere backward uses where nobody has tuned."""

from __future__ import annotations

from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.backward.ampere.shapes import AmpereBackwardShapes
from flashwright.kernels.family import Occasion

# By head dimension: (B_r, B_c, n_warps, Q_stages, dO_stages), of which the first that fits is used. Large GPUs have
# 163 KiB of shared memory a thread block and more, small ones 99 KiB.
_SHAPES = {
    32: ((128, 128, 8, 2, 2), (64, 128, 8, 2, 2)),
    64: ((64, 128, 8, 2, 2), (64, 128, 8, 2, 1)),
    96: ((64, 128, 8, 2, 1), (64, 64, 4, 2, 1)),
    128: ((64, 128, 8, 2, 1), (64, 64, 4, 1, 1)),
    192: ((64, 64, 8, 2, 1), (32, 64, 8, 1, 1)),
    256: ((64, 64, 8, 1, 1), (32, 32, 4, 2, 1)),
}
_SHARED_BYTES_OF_SMALL_GPUS = 99 * 1024


def ampere_backward_default(occasion: Occasion) -> AmpereBackwardKernelConfig:
    most = _SHARED_BYTES_OF_SMALL_GPUS
    if occasion.gpu is None or occasion.gpu.shared_bytes_per_sm > 128 * 1024:
        most = 163 * 1024
    configs = [
        AmpereBackwardKernelConfig(occasion.dtype, occasion.d_head, *shape) for shape in _SHAPES[occasion.d_head]
    ]
    fitting = [config for config in configs if AmpereBackwardShapes(config).shared_bytes <= most]
    return fitting[0] if fitting else configs[-1]
