"""`flashwright cache`: what is kept on disk, how much of it, and its removal."""

from __future__ import annotations

import json

import pytest
from command_line import flashwright
from tuning_fakes import a_result

from flashwright import compile_kernel
from flashwright.choice.database import TuningDatabase
from flashwright.compiler.nvrtc import compile_source
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE, ProgramCache
from flashwright.kernels.source import KernelSource

FOREIGN = KernelSource('extern "C" __global__ void nothing() {}\n', (), "nothing", "nothing.cu")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def document(*arguments: str) -> dict:
    code, out, error = flashwright("cache", *arguments, "--json")
    assert code == 0, error
    return json.loads(out)


def test_a_cache_that_was_never_used_is_empty_and_stays_unmade(directory):
    assert [part["files"] for part in document()["parts"]] == [0, 0, 0]
    assert document("list")["programs"] == []
    assert flashwright("cache", "clear")[0] == 0
    assert not directory.exists()


def test_programs_are_listed_by_config_and_cleared_while_tuning_results_stay(directory, small_config):
    kernel = compile_kernel(small_config, "sm_80")
    compile_source(FOREIGN, "sm_90")
    TuningDatabase().store([a_result()])

    listed = {(each["kernel"], each["arch"]): each for each in document("list")["programs"]}
    assert listed.keys() == {(str(small_config), "sm_80"), ("nothing", "sm_90")}
    assert listed[str(small_config), "sm_80"]["registers"] == kernel.registers
    sizes = {part["kind"]: part for part in document()["parts"]}
    assert sizes["compiled programs"]["files"] == 2
    assert sizes["compiled programs"]["bytes"] == sum(each["bytes"] for each in listed.values())

    code, out, error = flashwright("cache", "clear")
    assert code == 0, error
    assert out.startswith("removed 2 compiled programs")
    assert document("list")["count"] == 0
    assert len(TuningDatabase().results()) == 1


def test_a_process_at_work_goes_on_after_its_programs_are_cleared(directory, small_config):
    cache = ProgramCache()
    assert not compile_kernel(small_config, cache=cache).program.from_cache
    flashwright("cache", "clear")
    assert not compile_kernel(small_config, cache=cache).program.from_cache
    assert compile_kernel(small_config, cache=cache).program.from_cache


def test_the_table_shows_at_most_as_many_programs_as_requested(directory, small_config):
    for arch in ("sm_80", "sm_90"):
        compile_source(FOREIGN, arch)
    _, out, _ = flashwright("cache", "list", "--limit", "1")
    assert "1 of 2 compiled programs" in out
    assert out.count("nothing") == 1
    assert str(directory) in flashwright("cache")[1]
