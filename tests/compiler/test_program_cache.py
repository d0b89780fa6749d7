"""Compiled programs on disk: verified before use, private to the user, never the reason for a failure."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright import compile_kernel
from flashwright.compiler.nvrtc import compile_source
from flashwright.compiler.program_cache import (
    CACHE_DIRECTORY_VARIABLE,
    CachedProgram,
    FileStreamProgramCache,
    ProgramCache,
    cache_directory,
)
from flashwright.kernels.source import KernelSource

TINY = KernelSource("__global__ void kernel(int *p) { *p = 1; }\n", (), "kernel", "tiny.cu")
PROGRAM = CachedProgram({"cubin": b"\x7fELF\n\0machine code\n", "ptx": b"// ptx\n"}, {"name": "kernel", "registers": 8})
STORED = PROGRAM.to_bytes()


def entries(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


# --- Entries -------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.text(min_size=1), st.binary()),
    st.dictionaries(st.text(), st.integers() | st.text() | st.none()),
)
def test_a_program_is_read_back_as_it_was_stored(outputs, facts):
    program = CachedProgram(outputs, facts)
    assert CachedProgram.from_bytes(program.to_bytes()) == program


@given(st.integers(0, len(STORED) - 1), st.integers(1, 255))
def test_an_entry_with_any_byte_changed_is_no_entry(position, flipped_bits):
    damaged = bytearray(STORED)
    damaged[position] ^= flipped_bits
    assert CachedProgram.from_bytes(bytes(damaged)) is None


@given(st.integers(0, len(STORED) - 1))
def test_an_entry_cut_short_is_no_entry(length):
    assert CachedProgram.from_bytes(STORED[:length]) is None


@given(st.binary(min_size=1))
def test_an_entry_with_anything_appended_is_no_entry(more):
    assert CachedProgram.from_bytes(STORED + more) is None


@given(st.binary())
def test_arbitrary_bytes_are_no_entry(data):
    assert CachedProgram.from_bytes(data) is None


# --- On disk -------------------------------------------------------------------------------------------------


def flip_last_byte(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[: len(data) // 2], flip_last_byte, lambda data: os.urandom(len(data))],
    ids=["emptied", "truncated", "one bit", "garbage"],
)
def test_a_damaged_file_is_compiled_anew_and_repaired(tmp_path, damage):
    def compile_tiny():
        return compile_source(TINY, "sm_80", cache=ProgramCache(tmp_path))

    original = compile_tiny()
    (entry,) = entries(tmp_path)
    intact = entry.read_bytes()
    entry.write_bytes(damage(intact))
    recompiled = compile_tiny()
    assert not recompiled.from_cache
    assert (recompiled.cubin, recompiled.ptx) == (original.cubin, original.ptx)
    assert CachedProgram.from_bytes(entry.read_bytes()) is not None
    assert compile_tiny().from_cache


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("existed", [None, 0o700, 0o755, 0o1777], ids=lambda mode: "new" if mode is None else oct(mode))
def test_what_is_made_is_the_users_alone_and_a_directory_that_was_there_keeps_its_mode(tmp_path, existed):
    directory = tmp_path / "parent" / "cache"
    if existed is not None:
        directory.mkdir(parents=True)
        directory.chmod(existed)
    compile_source(TINY, "sm_80", cache=ProgramCache(directory))
    assert mode(directory) == (0o700 if existed is None else existed)
    assert {path.name: mode(path) for path in directory.iterdir()} == {"programs": 0o700, "locks": 0o700}
    (entry,) = entries(directory)
    assert mode(entry) & 0o077 == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_source(TINY, "sm_80", cache=ProgramCache(directory)).from_cache
    assert mode(directory) == (0o700 if existed is None else existed)


def test_a_cache_from_before_there_were_locks_is_used(tmp_path):
    """Its directory was private, and what was in it as open as the user's umask made it."""
    directory = tmp_path / "cache"
    compile_source(TINY, "sm_80", cache=ProgramCache(directory))
    (directory / "locks").rmdir()
    (directory / "programs").chmod(0o775)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_source(TINY, "sm_80", cache=ProgramCache(directory)).from_cache


def test_the_directory_is_chosen_by_variable_or_lies_in_the_platforms_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"
    monkeypatch.delenv(CACHE_DIRECTORY_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "flashwright"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "flashwright"


# --- Trouble -------------------------------------------------------------------------------------------------


def assert_compiles_with_warning(directory: Path, what_is_said: str) -> None:
    with pytest.warns(RuntimeWarning, match=what_is_said) as caught:
        program = compile_source(TINY, "sm_80", cache=ProgramCache(directory))
    assert program.cubin.startswith(b"\x7fELF")
    assert not program.from_cache
    assert str(directory) in str(caught[0].message)
    assert CACHE_DIRECTORY_VARIABLE in str(caught[0].message)


def test_a_directory_that_cannot_be_made_means_compiling_with_a_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert_compiles_with_warning(tmp_path / "file" / "cache", "cannot be opened")
    assert_compiles_with_warning(tmp_path / "file", "cannot be opened")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no user ids on this platform")
def test_a_directory_of_another_user_is_not_trusted(tmp_path, monkeypatch):
    compile_source(TINY, "sm_80", cache=ProgramCache(tmp_path))
    another_user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another_user)
    assert_compiles_with_warning(tmp_path, "belongs to another user")


@pytest.mark.skipif(os.name != "posix", reason="permission bits are POSIX's")
@pytest.mark.parametrize("name", ["programs", "locks"])
@pytest.mark.parametrize("open_to_others", [0o777, 0o770])
def test_a_directory_that_others_may_write_to_is_not_trusted(tmp_path, name, open_to_others):
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(0o755)
    (directory / name).mkdir()
    (directory / name).chmod(open_to_others)
    assert_compiles_with_warning(directory, f"others may write to .*{name}")
    assert entries(directory) == []
    assert mode(directory / name) == open_to_others


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_unwritable_disk_means_compiling_with_a_warning(tmp_path, monkeypatch, number):
    def fail(*_args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileStreamProgramCache, "__setitem__", fail)
    assert_compiles_with_warning(tmp_path, f"cannot be written .*{os.strerror(number)}")


def test_an_unreadable_entry_means_compiling_with_a_warning(tmp_path, monkeypatch):
    def fail(*_args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(FileStreamProgramCache, "__getitem__", fail)
    assert_compiles_with_warning(tmp_path, "cannot be read")


def test_a_working_cache_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            compile_source(TINY, "sm_80", cache=ProgramCache(tmp_path))


def test_processes_that_request_one_kernel_at_once_compile_it_once(tmp_path, small_config):
    directory = tmp_path / "cache"
    go = tmp_path / "go"
    program = f"""
import hashlib, json, time, pathlib
from flashwright import compile_kernel, parse_kernel_name_into_config
from flashwright.compiler import nvrtc
run_nvrtc, runs = nvrtc._run_nvrtc, []
nvrtc._run_nvrtc = lambda *arguments: runs.append(1) or run_nvrtc(*arguments)
nvrtc.compiler_build()
config = parse_kernel_name_into_config({str(small_config)!r})
print("ready", flush=True)
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.001)
kernel = compile_kernel(config)
body = kernel.ptx[kernel.ptx.index(".entry") : kernel.ptx.index("\\n}}")]
print(json.dumps([len(runs), kernel.name, kernel.registers, hashlib.sha256(body.encode()).hexdigest()]))
"""
    environment = os.environ | {CACHE_DIRECTORY_VARIABLE: str(directory)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    go.touch()
    results = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(runs for runs, *_ in results) == [0, 0, 1]
    assert len({tuple(kernel) for _, *kernel in results}) == 1
    assert len(entries(directory)) == 1
    assert compile_kernel(small_config, cache=ProgramCache(directory)).program.from_cache
