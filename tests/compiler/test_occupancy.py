"""Resident blocks per SM, against values computed by hand from the CUDA Programming Guide's limits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from flashwright import compile_kernel, occupancy

KIB = 1024


@dataclass(frozen=True)
class Use:
    registers: int
    shared_bytes: int
    threads: int


@pytest.mark.parametrize(
    ("arch", "use", "blocks", "limited_by"),
    [
        # Shared memory: 48 KiB and 1 KiB reserved, of 164, 100, 228 KiB.
        ("sm_80", Use(128, 48 * KIB, 128), 3, "shared memory"),
        ("sm_86", Use(128, 48 * KIB, 128), 2, "shared memory"),
        ("sm_89", Use(128, 48 * KIB, 128), 2, "shared memory"),
        ("sm_90", Use(96, 48 * KIB, 128), 4, "shared memory"),
        ("sm_100", Use(96, 48 * KIB, 128), 4, "shared memory"),
        ("sm_120", Use(128, 48 * KIB, 128), 2, "shared memory"),
        # A single block may take all but the reserved KiB.
        ("sm_80", Use(64, 163 * KIB, 128), 1, "shared memory"),
        ("sm_86", Use(64, 99 * KIB, 128), 1, "shared memory"),
        ("sm_90", Use(64, 227 * KIB, 128), 1, "shared memory"),
        # Registers: 255 round up to 256 per thread, 8192 per warp, so 8 warps.
        ("sm_80", Use(255, 16 * KIB, 128), 2, "registers"),
        ("sm_89", Use(255, 16 * KIB, 128), 2, "registers"),
        ("sm_80", Use(255, 16 * KIB, 256), 1, "registers"),
        # 168 registers are 5376 per warp: 12 warps. 169 round up to 5632: 11 warps, given out by fours: 8.
        ("sm_90", Use(168, 48 * KIB, 128), 3, "registers"),
        ("sm_90", Use(169, 48 * KIB, 128), 2, "registers"),
        ("sm_90", Use(169, 16 * KIB, 64), 4, "registers"),
        # Threads: 2048 or 1536 per SM.
        ("sm_100", Use(16, 1 * KIB, 512), 4, "threads"),
        ("sm_120", Use(16, 1 * KIB, 512), 3, "threads"),
        # Blocks: 32, 16 or 24 per SM.
        ("sm_80", Use(32, 0, 32), 32, "blocks"),
        ("sm_86", Use(32, 0, 32), 16, "blocks"),
        ("sm_89", Use(32, 0, 32), 24, "blocks"),
        ("sm_90", Use(32, 0, 32), 32, "blocks"),
        ("sm_120", Use(32, 0, 32), 24, "blocks"),
        # sm_90a has the limits of sm_90.
        ("sm_90a", Use(168, 48 * KIB, 128), 3, "registers"),
    ],
)
def test_resident_blocks_and_what_limits_them(arch, use, blocks, limited_by):
    found = occupancy(use, arch)
    assert (found.blocks_per_sm, found.limited_by) == (blocks, limited_by)
    assert found.limits[limited_by] == blocks == min(found.limits.values())


@pytest.mark.parametrize(
    ("arch", "most"),
    [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90", 227), ("sm_103", 227), ("sm_120", 99), ("sm_121", 99)],
)
def test_a_block_that_asks_for_too_much_shared_memory_is_resident_nowhere(arch, most):
    found = occupancy(Use(64, most * KIB + 16, 128), arch)
    assert (found.blocks_per_sm, found.limited_by, found.warps_per_sm, found.fraction) == (0, "shared memory", 0, 0)


@pytest.mark.parametrize(
    ("arch", "warps", "fraction"), [("sm_80", 12, 12 / 64), ("sm_86", 8, 8 / 48), ("sm_90", 16, 16 / 64)]
)
def test_warps_and_fraction_follow_from_the_blocks(arch, warps, fraction):
    found = occupancy(Use(128, 48 * KIB, 128), arch)
    assert (found.warps_per_sm, found.fraction) == (warps, pytest.approx(fraction))


def test_the_occupancy_of_a_compiled_kernel_is_that_of_its_resources(small_config):
    kernel = compile_kernel(small_config, "sm_80")
    assert occupancy(kernel, "sm_90") == occupancy(Use(kernel.registers, 16 * KIB, 128), "sm_90")


@pytest.mark.parametrize("arch", ["sm_70", "sm_8", "hopper", ""])
def test_an_unknown_architecture_is_refused_with_those_that_are_known(arch):
    with pytest.raises(ValueError, match=f"{arch!r} is not known; known: sm_80, .*sm_103, sm_120, sm_121"):
        occupancy(Use(64, 0, 128), arch)
