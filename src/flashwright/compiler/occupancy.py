"""How many thread blocks of a kernel an SM holds at once, and what stops it from holding one more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flashwright.hardware.architectures import RESERVED_SHARED_BYTES, Architecture, architecture
from flashwright.hardware.units import WARP_THREADS


class ResourceUse(Protocol):
    """What a compiled kernel takes per thread and per block."""

    @property
    def registers(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def threads(self) -> int: ...


@dataclass(frozen=True)
class Occupancy:
    blocks_per_sm: int
    limited_by: str
    """`registers`, `shared memory`, `threads` or `blocks`."""
    warps_per_sm: int
    fraction: float
    """Resident warps over the most the SM can hold."""
    limits: dict[str, int]
    """Resident blocks that each resource alone would allow."""


def occupancy(kernel: ResourceUse, arch: str) -> Occupancy:
    """Occupancy of a kernel on an architecture, which may be another than it was compiled for."""
    sm = architecture(arch)
    warps = -(-kernel.threads // WARP_THREADS)
    limits = {
        "registers": _blocks_by_registers(kernel, sm, warps),
        "shared memory": _blocks_by_shared_memory(kernel, sm),
        "threads": sm.threads_per_sm // kernel.threads,
        "blocks": sm.blocks_per_sm,
    }
    blocks, limited_by = min((count, name) for name, count in limits.items())
    return Occupancy(
        blocks_per_sm=blocks,
        limited_by=limited_by,
        warps_per_sm=blocks * warps,
        fraction=blocks * warps * WARP_THREADS / sm.threads_per_sm,
        limits=limits,
    )


def _blocks_by_registers(kernel: ResourceUse, sm: Architecture, warps: int) -> int:
    unit = sm.register_allocation_unit
    per_warp = -(-kernel.registers * WARP_THREADS // unit) * unit
    resident = sm.registers_per_sm // per_warp
    return resident // sm.warp_allocation_unit * sm.warp_allocation_unit // warps


def _blocks_by_shared_memory(kernel: ResourceUse, sm: Architecture) -> int:
    if kernel.shared_bytes > sm.shared_bytes_per_block:
        return 0
    return sm.shared_bytes_per_sm // (kernel.shared_bytes + RESERVED_SHARED_BYTES)
