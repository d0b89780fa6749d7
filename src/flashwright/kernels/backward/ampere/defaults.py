"""What the Ampere backward uses where nobody has tuned."""

from __future__ import annotations

from typing import NamedTuple

from flashwright.hardware.architectures import KIB
from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.backward.ampere.shapes import AmpereBackwardShapes
from flashwright.kernels.family import Occasion
from flashwright.problem.lengths import LONGEST


class _Knobs(NamedTuple):
    """The fields of a config but for the dtype and the head dimension, in their order."""

    B_r: int
    B_c: int
    n_warps: int
    Q_stages: int
    dO_stages: int
    parts: int = 1
    slices: int = 1
    swizzled: bool = True
    late_dQ: bool = False


# By head dimension: the first that fits is used. Those of 64, 128 and 256 columns that come first were the fastest of
# those tried on an H200, or within 1% of it (docs/performance.md); the others, for GPUs with less shared memory, were
# not timed.
_FULL = {
    32: (_Knobs(128, 128, 4, 1, 1, slices=2),),
    64: (_Knobs(64, 128, 4, 1, 1, slices=2), _Knobs(64, 64, 4, 1, 1)),
    96: (_Knobs(64, 128, 8, 2, 1), _Knobs(64, 64, 4, 2, 1)),
    128: (_Knobs(64, 128, 8, 2, 2, parts=2), _Knobs(64, 64, 8, 1, 1, parts=2)),
    192: (_Knobs(64, 64, 8, 2, 1, parts=2), _Knobs(32, 64, 8, 1, 1, parts=2)),
    256: (
        _Knobs(64, 64, 8, 2, 2, parts=4, late_dQ=True),
        _Knobs(64, 64, 8, 1, 1, parts=4, late_dQ=True),
        _Knobs(32, 32, 4, 2, 1, parts=2),
    ),
}
# Half as many keys leave half as much of a causal tile masked; over many blocks of queries that matters less.
_CAUSAL = _FULL | {128: (_Knobs(64, 64, 4, 2, 2, parts=2), *_FULL[128])}
_LONG_CAUSAL = _FULL | {128: (_Knobs(128, 128, 8, 1, 1, parts=2, slices=2, late_dQ=True), *_FULL[128])}
_WARPS = 8
"""Of a multiprocessor, whose registers they fill: of smaller thread blocks several share one."""
_SHARED_BYTES_OF_LARGE_GPUS = 164 * KIB
"""Of a multiprocessor of an A100."""


def ampere_backward_default(occasion: Occasion) -> AmpereBackwardKernelConfig:
    table = _FULL if not occasion.causal else _LONG_CAUSAL if occasion.kv_bucket == LONGEST else _CAUSAL
    per_sm = _SHARED_BYTES_OF_LARGE_GPUS if occasion.gpu is None else occasion.gpu.shared_bytes_per_sm
    configs = [AmpereBackwardKernelConfig(occasion.dtype, occasion.d_head, *knobs) for knobs in table[occasion.d_head]]
    return next((config for config in configs if _fits(config, per_sm)), configs[-1])


def _fits(config: AmpereBackwardKernelConfig, shared_bytes_per_sm: int) -> bool:
    """Whether as many thread blocks fit a multiprocessor as fill its registers; each takes 1 KiB more than it needs."""
    blocks = max(1, _WARPS // config.n_warps)
    return blocks * (AmpereBackwardShapes(config).shared_bytes + KIB) <= shared_bytes_per_sm
