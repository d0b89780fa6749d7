"""Predefined, read-only registers: thread, warp and block indices, sizes, lane masks, clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .architecture import WARP_SIZE
from .ptx.types import TYPES, PtxType

if TYPE_CHECKING:
    from .wave import Wave


@dataclass(frozen=True)
class SpecialRegister:
    type: PtxType
    value: Callable[[Wave], np.ndarray | int]


def _indices(axis: int, what: str) -> Callable[[Wave], np.ndarray | int]:
    return lambda wave: getattr(wave, what)[axis]


def _lane_mask(compare: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Wave], np.ndarray]:
    lanes = np.arange(WARP_SIZE)
    bits = np.uint64(1) << lanes.astype(np.uint64)
    masks = np.array([int(bits[compare(lanes, np.array(lane))].sum()) for lane in lanes], np.uint32)
    return lambda wave: masks[wave.lane]


def _registers() -> dict[str, SpecialRegister]:
    u32, u64 = TYPES["u32"], TYPES["u64"]
    registers: dict[str, SpecialRegister] = {}
    for axis, letter in enumerate("xyz"):
        registers[f"%tid.{letter}"] = SpecialRegister(u32, _indices(axis, "thread_index"))
        registers[f"%ntid.{letter}"] = SpecialRegister(u32, _indices(axis, "block_shape"))
        registers[f"%ctaid.{letter}"] = SpecialRegister(u32, _indices(axis, "block_index"))
        registers[f"%nctaid.{letter}"] = SpecialRegister(u32, _indices(axis, "grid_shape"))
        registers[f"%clusterid.{letter}"] = SpecialRegister(u32, _indices(axis, "cluster_index"))
        registers[f"%nclusterid.{letter}"] = SpecialRegister(u32, _indices(axis, "cluster_grid_shape"))
        registers[f"%cluster_ctaid.{letter}"] = SpecialRegister(u32, _indices(axis, "index_in_cluster"))
        registers[f"%cluster_nctaid.{letter}"] = SpecialRegister(u32, _indices(axis, "cluster_shape"))
    registers["%laneid"] = SpecialRegister(u32, lambda wave: wave.lane)
    registers["%warpid"] = SpecialRegister(u32, lambda wave: wave.warp_in_block)
    registers["%nwarpid"] = SpecialRegister(u32, lambda wave: wave.warps_per_block)
    registers["%cluster_ctarank"] = SpecialRegister(u32, lambda wave: wave.clusters.rank_of_thread)
    registers["%cluster_nctarank"] = SpecialRegister(u32, lambda wave: wave.clusters.size)
    registers["%is_explicit_cluster"] = SpecialRegister(TYPES["pred"], lambda wave: wave.clusters.size > 1)
    registers["%dynamic_smem_size"] = SpecialRegister(u32, lambda wave: wave.dynamic_shared_bytes)
    registers["%total_smem_size"] = SpecialRegister(u32, lambda wave: wave.shared.size)
    for name, compare in (
        ("eq", np.equal),
        ("le", np.less_equal),
        ("lt", np.less),
        ("ge", np.greater_equal),
        ("gt", np.greater),
    ):
        registers[f"%lanemask_{name}"] = SpecialRegister(u32, _lane_mask(compare))
    # There is one multiprocessor and no time: these are constant (see docs/simulator.md).
    for name in ("%smid", "%gridid", "%clock", "%clock_hi", "%globaltimer_lo", "%globaltimer_hi"):
        registers[name] = SpecialRegister(u32, lambda wave: 0)
    registers["%nsmid"] = SpecialRegister(u32, lambda wave: 1)
    registers["%clock64"] = SpecialRegister(u64, lambda wave: 0)
    registers["%globaltimer"] = SpecialRegister(u64, lambda wave: 0)
    for index in range(32):
        registers[f"%envreg{index}"] = SpecialRegister(u32, lambda wave: 0)
    return registers


SPECIAL_REGISTERS = _registers()
