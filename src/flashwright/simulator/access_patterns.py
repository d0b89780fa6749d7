"""How a warp's addresses map to shared-memory wavefronts and global sectors.

Shared memory has 32 banks of 4 bytes: one wavefront moves at most one word per bank. Accesses of 8 bytes are
served per half-warp and of 16 bytes per quarter-warp (a *phase*: as many lanes as fill 128 bytes). Within a
phase lanes that touch the same word share it; distinct words of one bank need one wavefront each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .architecture import WARP_SIZE

BANK_BYTES = 4
WAVEFRONT_BYTES = 128
SECTOR_BYTES = 32
_INACTIVE = np.int64(-1)


@dataclass(frozen=True)
class SharedCost:
    """Warp requests of one instruction, the wavefronts they need, and the fewest they could need."""

    requests: int
    wavefronts: int
    ideal: int


@dataclass(frozen=True)
class GlobalCost:
    requests: int
    sectors: int
    ideal: int


class AccessPatterns:
    """Costs of address patterns, remembered: loops repeat the same pattern at shifted addresses."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._shared: dict[tuple[int, bytes, bytes], SharedCost] = {}
        self._global: dict[tuple[int, bytes, bytes], GlobalCost] = {}

    def shared(self, addresses: np.ndarray, lanes: np.ndarray | None, width: int) -> SharedCost:
        """Cost of the active threads' accesses of ``width`` bytes at these shared-memory offsets."""
        # Moving everything by a multiple of 128 bytes changes no bank.
        relative = addresses - (int(addresses.min()) & -WAVEFRONT_BYTES)
        key = (width, relative.tobytes(), b"" if lanes is None else lanes.tobytes())
        cost = self._shared.get(key)
        if cost is None:
            cost = self._shared[key] = shared_cost(self._by_warp(relative, lanes), width)
        return cost

    def global_(self, addresses: np.ndarray, lanes: np.ndarray | None, width: int) -> GlobalCost:
        """Cost of the active threads' accesses of ``width`` bytes at these global addresses."""
        relative = addresses - (int(addresses.min()) & -WAVEFRONT_BYTES)
        key = (width, relative.tobytes(), b"" if lanes is None else lanes.tobytes())
        cost = self._global.get(key)
        if cost is None:
            cost = self._global[key] = global_cost(self._by_warp(relative, lanes), width)
        return cost

    def _by_warp(self, addresses: np.ndarray, lanes: np.ndarray | None) -> np.ndarray:
        if lanes is None:
            return addresses.reshape(-1, WARP_SIZE)
        spread = np.full(self._threads, _INACTIVE)
        spread[lanes] = addresses
        return spread.reshape(-1, WARP_SIZE)


def shared_cost(addresses: np.ndarray, width: int) -> SharedCost:
    """``addresses``: [warps, 32], -1 for inactive lanes."""
    unit = max(width, BANK_BYTES)
    lanes_per_phase = max(WAVEFRONT_BYTES // unit, 1)
    units = np.where(addresses < 0, _INACTIVE, addresses // unit).reshape(-1, lanes_per_phase)
    units = np.sort(units, axis=1)
    distinct = units >= 0
    distinct[:, 1:] &= units[:, 1:] != units[:, :-1]
    phase = np.broadcast_to(np.arange(units.shape[0])[:, None], units.shape)
    bank = units % lanes_per_phase
    load = np.bincount((phase * lanes_per_phase + bank)[distinct], minlength=units.shape[0] * lanes_per_phase)
    per_phase = load.reshape(-1, lanes_per_phase).max(axis=1)
    requests = int(np.count_nonzero((addresses >= 0).any(axis=1)))
    # A phase is at most 128 bytes, so without conflicts each active one is a single wavefront.
    return SharedCost(requests, int(per_phase.sum()), int(np.count_nonzero(per_phase)))


def global_cost(addresses: np.ndarray, width: int) -> GlobalCost:
    """``addresses``: [warps, 32], -1 for inactive lanes. Accesses are aligned to their width."""
    active = addresses >= 0
    # An access of at most 32 aligned bytes lies in one sector.
    sectors = np.sort(np.where(active, addresses // SECTOR_BYTES, _INACTIVE), axis=1)
    items = np.sort(np.where(active, addresses, _INACTIVE), axis=1)
    distinct_bytes = _distinct_per_row(items) * width
    ideal = -(-distinct_bytes // SECTOR_BYTES)
    requests = int(np.count_nonzero(active.any(axis=1)))
    return GlobalCost(requests, int(_distinct_per_row(sectors).sum()), int(ideal.sum()))


def _distinct_per_row(ordered: np.ndarray) -> np.ndarray:
    distinct = ordered >= 0
    distinct[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return np.count_nonzero(distinct, axis=1)
