"""What the Ampere backward uses where nobody has tuned."""

from __future__ import annotations

from flashwright.hardware.architectures import KIB
from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.backward.ampere.shapes import AmpereBackwardShapes
from flashwright.kernels.family import Occasion

# By head dimension: (B_r, B_c, n_warps, Q_stages, dO_stages, parts, slices), of which the first that fits is used.
_SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    32: ((128, 128, 4, 1, 1, 1, 2),),
    64: ((64, 128, 4, 1, 1, 1, 2),),
    96: ((64, 128, 8, 2, 1), (64, 64, 4, 2, 1)),
    128: ((64, 128, 8, 2, 2, 2), (64, 64, 4, 1, 1, 2)),
    192: ((64, 64, 8, 2, 1, 2), (32, 64, 8, 1, 1, 2)),
    256: ((64, 64, 8, 2, 2, 4), (64, 64, 8, 1, 1, 4), (32, 32, 4, 2, 1, 2)),
}
_SHARED_BYTES_OF_LARGE_GPUS = 164 * KIB
"""Of a multiprocessor of an A100. A thread block has 1 KiB less."""


def ampere_backward_default(occasion: Occasion) -> AmpereBackwardKernelConfig:
    per_sm = _SHARED_BYTES_OF_LARGE_GPUS if occasion.gpu is None else occasion.gpu.shared_bytes_per_sm
    configs = [_config(occasion, *shape) for shape in _SHAPES[occasion.d_head]]
    fitting = [config for config in configs if AmpereBackwardShapes(config).shared_bytes <= per_sm - KIB]
    return fitting[0] if fitting else configs[-1]


def _config(
    occasion: Occasion, B_r: int, B_c: int, n_warps: int, Q_stages: int, dO_stages: int, parts: int = 1, slices: int = 1
) -> AmpereBackwardKernelConfig:
    return AmpereBackwardKernelConfig(
        occasion.dtype, occasion.d_head, B_r, B_c, n_warps, Q_stages, dO_stages, parts, slices
    )
