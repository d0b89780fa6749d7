"""The climb from the plainest decode to the fastest, one idea a rung: of the kernel, or of how it meets the cache."""

from __future__ import annotations

from typing import Any

from flashwright.hardware.architectures import architecture
from flashwright.kernels.cache_use import WHOLE, CacheUse
from flashwright.kernels.decode.ampere.config import AmpereDecodeKernelConfig
from flashwright.kernels.decode.ampere.shapes import AmpereDecodeShapes
from flashwright.kernels.family import FamilyLadder
from flashwright.kernels.ladder import USE, LadderRung, RungProblem, climbed
from flashwright.problem.dtypes import DType

ARCHITECTURES = ("sm_80", "sm_90")
SPLIT_UNITS = 8


def get_ampere_decode_progression(
    dtype: DType | str = DType.BF16, d_head: int = 128
) -> list[LadderRung[AmpereDecodeKernelConfig]]:
    """The ladder, each rung one idea above the last; without those that d_head leaves no shared memory for. The last
    rung is no faster: it shows what pages cost."""
    base = AmpereDecodeKernelConfig(
        DType.parse(dtype), d_head, B_r=16, keys_per_warp=16, n_warps=4, stages=2, swizzled=False
    )
    changes: list[tuple[str, dict[str, Any]]] = [
        ("base: a thread block for each head", {USE: CacheUse(packs_heads=False, split_units=WHOLE)}),
        ("swizzled shared memory", {"swizzled": True}),
        ("pack: heads that share K and V are rows of one tile", {USE: CacheUse(split_units=WHOLE)}),
        (
            f"split and combine: {SPLIT_UNITS} units of keys a thread block, the last to arrive adds up",
            {USE: CacheUse(split_units=SPLIT_UNITS)},
        ),
        ("balance: an equal share of all keys for every thread block", {USE: CacheUse()}),
        ("8 warps: more keys under way", {"n_warps": 8}),
        ("32 keys of a unit for each warp", {"keys_per_warp": 32}),
        ("three stages: copies run further ahead", {"stages": 3}),
        ("pages of 64 keys, in any order", {USE: CacheUse(page_rows=64)}),
    ]
    return climbed(base, changes, is_possible=_fits)


def _fits(config: AmpereDecodeKernelConfig) -> bool:
    """Whether every architecture of the ladder runs such a kernel."""
    try:
        shapes = AmpereDecodeShapes(config)
    except ValueError:
        return False
    return shapes.shared_bytes <= min(architecture(arch).shared_bytes_per_block for arch in ARCHITECTURES)


LADDER = FamilyLadder(
    get_ampere_decode_progression,
    ARCHITECTURES,
    peers=("sdpa-cudnn", "sdpa-fa2"),
    simulated=RungProblem(batch=1, heads=8, kv_heads=2, rows=1, keys=1024),
    timed=RungProblem(batch=8, heads=32, kv_heads=8, rows=1, keys=16384),
)
