"""How many thread blocks a multiprocessor holds at once, by each of its resources."""

from __future__ import annotations

from flashwright.hardware.architectures import RESERVED_SHARED_BYTES, Architecture
from flashwright.hardware.units import WARP_THREADS


def resident_blocks(sm: Architecture, *, threads: int, registers: int, shared_bytes: int) -> dict[str, int]:
    """Blocks that registers (given per thread), shared memory, threads and the number of blocks alone would allow."""
    return {
        "registers": _by_registers(sm, threads, registers),
        "shared memory": _by_shared_memory(sm, shared_bytes),
        "threads": sm.threads_per_sm // threads,
        "blocks": sm.blocks_per_sm,
    }


def _by_registers(sm: Architecture, threads: int, registers: int) -> int:
    unit = sm.register_allocation_unit
    per_warp = -(-registers * WARP_THREADS // unit) * unit
    resident = sm.registers_per_sm // per_warp
    return resident // sm.warp_allocation_unit * sm.warp_allocation_unit // warps_of(threads)


def _by_shared_memory(sm: Architecture, shared_bytes: int) -> int:
    if shared_bytes > sm.shared_bytes_per_block:
        return 0
    return sm.shared_bytes_per_sm // (shared_bytes + RESERVED_SHARED_BYTES)


def warps_of(threads: int) -> int:
    return -(-threads // WARP_THREADS)
