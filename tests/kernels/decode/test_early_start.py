"""Decode kernels that start while the grid before still runs."""

from __future__ import annotations

import re

import pytest

from flashwright.runtime.compiling import compile_kernel
from flashwright.runtime.loaded import WAITS_FOR_GRIDS_BEFORE

AMPERE = "ampere decode (BF16, 64, 16, 16, 4): rows_1+stages_2+blocks_1+swizzled"
HOPPER = "hopper decode (BF16, 64, 64, 32): stages_2"


@pytest.mark.parametrize("config", (AMPERE, HOPPER))
def test_kernels_for_hopper_wait_before_they_touch_memory(config):
    ptx = compile_kernel(config, "sm_90").ptx
    first_access = re.search(r"\b(ld\.global|st\.global|cp\.async\.c|atom|ld\.acquire|ld\.relaxed)", ptx)
    assert first_access is not None
    assert 0 <= ptx.find("griddepcontrol.launch_dependents") < ptx.find(WAITS_FOR_GRIDS_BEFORE) < first_access.start()


@pytest.mark.parametrize("config", (AMPERE, HOPPER))
def test_numbers_of_pages_are_fetched_when_the_grids_before_have_ended(config):
    ptx = compile_kernel(config, "sm_90").ptx
    assert 0 <= ptx.find(WAITS_FOR_GRIDS_BEFORE) < ptx.find("prefetch.global.L2")


def test_kernels_for_older_gpus_know_no_grids():
    assert "griddepcontrol" not in compile_kernel(AMPERE, "sm_80").ptx
