"""Decode kernels that start while the grid before still runs."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

from decode_cases import decoded

from flashwright.kernels.source import device_headers
from flashwright.runtime.compiling import compile_kernel
from flashwright.runtime.loaded import WAITS_FOR_GRIDS_BEFORE

AMPERE = "ampere decode (BF16, 64, 16, 16, 4): rows_1+stages_2+blocks_1+swizzled"
HOPPER = "hopper decode (BF16, 64, 64, 32): stages_2"
BEGIN = "decode/early_start.cuh"


@pytest.mark.parametrize("config", (AMPERE, HOPPER))
def test_kernels_for_hopper_wait_before_they_touch_memory(config):
    ptx = compile_kernel(config, "sm_90").ptx
    first_access = re.search(r"\b(ld\.global|st\.global|cp\.async\.c|atom|ld\.acquire|ld\.relaxed)", ptx)
    assert first_access is not None
    assert 0 <= ptx.find("griddepcontrol.launch_dependents") < ptx.find(WAITS_FOR_GRIDS_BEFORE) < first_access.start()


@pytest.mark.parametrize("config", (f"{AMPERE}+prefetch", f"{HOPPER}+prefetch"))
def test_only_guesses_and_prefetches_come_before_the_wait(config):
    before, wait, after = compile_kernel(config, "sm_90").ptx.partition(WAITS_FOR_GRIDS_BEFORE)
    assert wait
    assert "prefetch.global.L2" in before and "ld.relaxed.gpu.global" in before
    assert not re.search(r"\b(ld\.global|st\.global|cp\.async\.c|atom)", before)
    assert re.search(r"\bcp\.async\.c", after)


@pytest.mark.parametrize("lengths", ((100, 1, 64), pytest.param((0, 5, 0), marks=pytest.mark.slow)))
def test_a_share_that_was_guessed_from_other_lengths_is_found_again(lengths, monkeypatch):
    guess = "Start start = find_start<threads>(args);"
    wrong = f"{guess} if (begins_early) {{ start.pair = 2; start.first_place = 3; start.summed += threadIdx.x == 1; }}"
    headers = dict(device_headers())
    assert headers[BEGIN].count(guess) == 1
    headers[BEGIN] = headers[BEGIN].replace(guess, wrong)
    monkeypatch.setattr("flashwright.kernels.decode.ampere.source.device_headers", lambda: tuple(headers.items()))
    decoded(f"{AMPERE}+prefetch", lengths=lengths, multiprocessors=3, arch="sm_90")


def test_kernels_for_older_gpus_know_no_grids():
    ptx = compile_kernel(f"{AMPERE}+prefetch", "sm_80").ptx
    assert "griddepcontrol" not in ptx and "prefetch.global" not in ptx
