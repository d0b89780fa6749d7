"""The climb from the plainest Hopper decode to the fastest, one idea a rung: of the kernel, or of how it is used."""

from __future__ import annotations

from typing import Any

from flashwright.kernels.cache_use import WHOLE, CacheUse
from flashwright.kernels.decode.hopper.config import HopperDecodeKernelConfig
from flashwright.kernels.decode.hopper.defaults import hopper_decode_rejection_reason
from flashwright.kernels.family import FamilyLadder
from flashwright.kernels.ladder import USE, LadderRung, RungProblem, climbed
from flashwright.problem.dtypes import DType


def get_hopper_decode_progression(
    dtype: DType | str = DType.BF16, d_head: int = 128
) -> list[LadderRung[HopperDecodeKernelConfig]]:
    """The ladder, each rung one idea above the last; without those that d_head leaves no shared memory for. The last
    rung is no faster: it shows what pages cost."""
    base = HopperDecodeKernelConfig(DType.parse(dtype), d_head, B_r=64, B_c=32, stages=2)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("base: a thread block for each tile of 64 rows", {USE: CacheUse(split_units=WHOLE)}),
        ("two consumer warpgroups: 128 rows share the keys", {"B_r": 128}),
        ("split: an equal share of all keys for every thread block", {USE: CacheUse()}),
        ("64 keys a step", {"B_c": 64}),
        ("three stages: the producers run further ahead", {"stages": 3}),
        ("five stages", {"stages": 5}),
        ("pages of 64 keys, in any order", {USE: CacheUse(page_rows=64)}),
    ]
    return climbed(base, changes, is_possible=lambda config: hopper_decode_rejection_reason(config) is None)


LADDER = FamilyLadder(
    get_hopper_decode_progression,
    ("sm_90a",),
    peers=("sdpa-fa2", "sdpa-cudnn"),
    simulated=RungProblem(batch=1, heads=128, kv_heads=1, rows=1, keys=512),
    timed=RungProblem(batch=16, heads=128, kv_heads=1, rows=1, keys=8192),
)
