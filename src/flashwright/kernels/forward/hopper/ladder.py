"""The climb from the plainest kernel of the Hopper family to its fastest, one idea a rung."""

from __future__ import annotations

from typing import Any

from flashwright.kernels.family import FamilyLadder
from flashwright.kernels.forward.hopper.config import HopperForwardKernelConfig
from flashwright.kernels.ladder import LadderRung, climbed
from flashwright.problem.dtypes import DType

_LARGE_TILES = {64: (192, 128), 96: (128, 128), 128: (128, 128), 192: (128, 96), 256: (128, 80)}
"""Rows of Q and keys of the upper rungs, by d_head: about what registers and shared memory have room for."""


def get_hopper_progression(
    dtype: DType | str = DType.BF16, d_head: int = 128
) -> list[LadderRung[HopperForwardKernelConfig]]:
    """The ladder, each rung one idea above the last."""
    base = HopperForwardKernelConfig(DType.parse(dtype), d_head, B_r=64, B_c=64)
    B_r, B_c = _LARGE_TILES[d_head]
    changes: list[tuple[str, dict[str, Any]]] = [
        ("base: bulk tensor copies and warpgroup products", {}),
        ("two K/V stages: the producer copies ahead", {"kv_stages": 2}),
        ("two consumer warpgroups: 128 rows of Q", {"B_r": 128}),
        ("softmax during the product before", {"overlaps_softmax": True}),
        (f"larger tiles: {B_r} rows of Q, {B_c} keys a step", {"B_r": B_r, "B_c": B_c}),
        ("ping-pong: warpgroups take turns at products", {"ping_pong": True}),
        ("persistent thread blocks", {"persistent": True}),
        ("lazy rescaling of O", {"lazy_rescale": True}),
        ("exponentials without maxima, as far as that goes well", {"guesses_maxima": True}),
    ]
    return climbed(base, changes)


def get_hopper_progression_configs(
    dtype: DType | str = DType.BF16, d_head: int = 128
) -> list[HopperForwardKernelConfig]:
    """The configs of the ladder, from the first rung to the last."""
    return [rung.config for rung in get_hopper_progression(dtype, d_head)]


LADDER = FamilyLadder(get_hopper_progression, architectures=("sm_90a",), peers=("sdpa-cudnn", "sdpa-fa2"))
