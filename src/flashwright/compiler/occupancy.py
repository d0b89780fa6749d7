"""How many thread blocks of a kernel an SM holds at once, and what stops it from holding one more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flashwright.hardware.architectures import architecture
from flashwright.hardware.residency import resident_blocks, warps_of
from flashwright.hardware.units import WARP_THREADS


@runtime_checkable
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
    if not isinstance(kernel, ResourceUse):
        raise TypeError(f"kernel: expected a compiled kernel, got {type(kernel).__name__}; compile_kernel() makes one")
    sm = architecture(arch)
    limits = resident_blocks(sm, threads=kernel.threads, registers=kernel.registers, shared_bytes=kernel.shared_bytes)
    blocks, limited_by = min((count, name) for name, count in limits.items())
    warps = blocks * warps_of(kernel.threads)
    return Occupancy(
        blocks_per_sm=blocks,
        limited_by=limited_by,
        warps_per_sm=warps,
        fraction=warps * WARP_THREADS / sm.threads_per_sm,
        limits=limits,
    )
