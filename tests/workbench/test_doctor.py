"""`flashwright doctor`: what it finds in ordinary and in odd environments, what it advises, and its exit codes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from collections import namedtuple
from pathlib import Path

import pytest
from command_line import flashwright

from flashwright import __version__, compile_kernel
from flashwright.cli.doctor import doctor as doctor_command
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE, ProgramCache
from flashwright.workbench import doctor, environment
from flashwright.workbench.doctor import (
    Finding,
    Verdict,
    check_cache,
    check_disassembler,
    check_disk,
    check_driver,
    check_flashwright,
    check_gpu,
    check_headers,
    check_nvrtc,
    check_torch,
    check_transformers,
    check_tuning,
    findings,
)
from flashwright.workbench.environment import GPU

SUBJECTS = [
    "Python", "flashwright", "CUDA bindings", "NVRTC", "disassembler", "CUDA headers", "driver", "GPU", "PyTorch",
    "transformers", "program cache", "tuning database", "disk",
]  # fmt: skip
H200 = GPU("NVIDIA H200", (9, 0), 150 * 1024**3)


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(directory))
    return directory


def test_missing_headers_are_a_note_with_how_to_install_them(monkeypatch):
    monkeypatch.setattr(doctor, "toolkit_include_directories", list)
    finding = check_headers()
    assert finding.verdict is Verdict.NOTE and "pip install 'flashwright[headers]'" in (finding.advice or "")
    monkeypatch.setattr(doctor, "toolkit_include_directories", lambda: [Path("/opt/cuda/include")])
    assert check_headers().found == "/opt/cuda/include"


def test_a_missing_disassembler_is_a_note_with_how_to_install_it(monkeypatch):
    monkeypatch.setattr(doctor, "find_disassembler", lambda: None)
    finding = check_disassembler()
    assert finding.verdict is Verdict.NOTE
    assert "pip install nvidia-cuda-nvdisasm" in finding.advice
    monkeypatch.setattr(doctor, "find_disassembler", lambda: Path("/usr/bin/nvdisasm"))
    assert check_disassembler().found == "/usr/bin/nvdisasm"


# --- The command ---------------------------------------------------------------------------------------------------


def test_doctor_finds_that_this_machine_works(own_cache):
    code, out, error = flashwright("doctor")
    assert code == 0, error
    for subject in SUBJECTS:
        assert any(line[:1] in "✓!" and subject in line for line in out.splitlines())
    assert "✗" not in out
    assert "simulator" in out.splitlines()[-1]
    assert not own_cache.exists()  # looking changes nothing


def test_doctors_json_has_a_verdict_for_every_subject(own_cache):
    code, out, error = flashwright("doctor", "--json")
    assert code == 0, error
    document = json.loads(out)
    assert document["works"] is True
    assert [finding["subject"] for finding in document["findings"]] == SUBJECTS
    for finding in document["findings"]:
        assert finding.keys() == {"subject", "verdict", "found", "advice", "facts"}
        assert finding["verdict"] in ("ok", "note", "broken")
        assert finding["found"]


def test_a_cache_that_cannot_be_used_is_essential_and_exits_with_1(own_cache):
    own_cache.write_text("a file where the directory should be")
    code, out, _ = flashwright("doctor")
    assert code == 1
    assert "✗ program cache" in out
    assert f"export {CACHE_DIRECTORY_VARIABLE}=" in out
    assert "Broken: program cache" in out
    code, out, _ = flashwright("doctor", "--json")
    assert code == 1
    assert json.loads(out)["works"] is False


def test_a_check_that_fails_unexpectedly_is_a_finding_not_a_crash(monkeypatch):
    def explode() -> Finding:
        raise OverflowError("unheard of")

    monkeypatch.setattr(doctor, "check_gpu", explode)
    gpu = next(finding for finding in findings() if finding.subject == "GPU")
    assert gpu.verdict is Verdict.NOTE
    assert "OverflowError: unheard of" in gpu.found


def test_findings_are_printed_as_they_are_found(own_cache, monkeypatch, capsys):
    printed_before = []

    def slow() -> Finding:
        printed_before.append(capsys.readouterr().out)
        return Finding("disk", Verdict.OK, "enough")

    monkeypatch.setattr(doctor, "check_disk", slow)
    doctor_command()
    assert "NVRTC" in printed_before[0] and "tuning database" in printed_before[0]
    assert "disk: enough" in capsys.readouterr().out


# --- The compiler --------------------------------------------------------------------------------------------------


def test_nvrtc_is_tried_on_a_small_kernel():
    finding = check_nvrtc()
    assert finding.verdict is Verdict.OK
    assert 0 < finding.facts["compile_seconds"] < 30
    assert finding.facts["version"].startswith("13.")


def test_the_package_is_found_where_it_was_imported_from():
    finding = check_flashwright()
    assert finding.verdict is Verdict.OK
    assert finding.facts == {"version": __version__, "path": str(Path(compile_kernel.__code__.co_filename).parents[1])}


def test_a_missing_nvrtc_is_essential(monkeypatch):
    def missing() -> None:
        raise RuntimeError("NVRTC, NVIDIA's run-time compiler, cannot be loaded")

    monkeypatch.setattr(doctor, "nvrtc_version", missing)
    finding = check_nvrtc()
    assert finding.verdict is Verdict.BROKEN
    assert "pip install" in finding.advice
    assert "nvidia-cuda-nvrtc" in finding.advice


def test_an_nvrtc_that_does_not_compile_is_essential(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("libnvrtc-builtins is missing")

    monkeypatch.setattr(doctor, "compile_source", refuse)
    finding = check_nvrtc()
    assert finding.verdict is Verdict.BROKEN
    assert "libnvrtc-builtins is missing" in finding.found


# --- GPU, driver, PyTorch ------------------------------------------------------------------------------------------


def a_torch(*, cuda: str | None, sees_gpu: bool) -> types.ModuleType:
    torch = types.ModuleType("torch")
    torch.__version__ = "2.11.0"
    torch.version = types.SimpleNamespace(cuda=cuda)
    torch.cuda = types.SimpleNamespace(is_available=lambda: sees_gpu)
    return torch


@pytest.mark.parametrize(
    ("gpus", "verdict", "text"),
    [
        ((), Verdict.NOTE, "none visible"),
        ((H200,), Verdict.OK, "NVIDIA H200, compute capability 9.0, 150.0 GiB"),
        ((GPU("Tesla V100", (7, 0), 16 * 1024**3),), Verdict.NOTE, "Tesla V100"),
        ((GPU("Tesla V100", (7, 0), 16 * 1024**3), H200), Verdict.OK, "NVIDIA H200"),
    ],
)
def test_a_gpu_is_judged_by_its_compute_capability(gpus, verdict, text, monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda: gpus)
    finding = check_gpu()
    assert finding.verdict is verdict
    assert text in finding.found
    assert (finding.advice is None) == (verdict is Verdict.OK)


@pytest.mark.parametrize(
    ("version", "cuda", "verdict", "text"),
    [
        (None, None, Verdict.NOTE, "no CUDA driver"),
        ("580.65.06", (13, 0), Verdict.OK, "580.65.06, supports CUDA 13.0"),
        ("535.1", (12, 2), Verdict.NOTE, "supports CUDA 12.2"),
        ("580.65.06", None, Verdict.NOTE, "libcuda cannot be loaded"),
    ],
)
def test_a_driver_is_judged_by_the_cuda_it_supports(version, cuda, verdict, text, monkeypatch):
    monkeypatch.setattr(environment, "driver_version", lambda: version)
    monkeypatch.setattr(environment, "driver_cuda_version", lambda: cuda)
    finding = check_driver()
    assert finding.verdict is verdict
    assert text in finding.found


@pytest.mark.parametrize(
    ("torch", "gpus", "verdict", "text", "advice"),
    [
        (None, (), Verdict.NOTE, "not installed", "pip install 'flashwright[torch]'"),
        (a_torch(cuda="13.0", sees_gpu=True), (H200,), Verdict.OK, "CUDA 13.0 build, sees GPU", None),
        (a_torch(cuda=None, sees_gpu=False), (), Verdict.OK, "CPU build, sees no GPU", None),
        (a_torch(cuda=None, sees_gpu=False), (H200,), Verdict.NOTE, "CPU build", "--index-url"),
        (a_torch(cuda="13.0", sees_gpu=False), (H200,), Verdict.NOTE, "sees no GPU", "torch.cuda.init()"),
    ],
)
def test_pytorch_is_judged_by_whether_it_sees_the_gpu_that_is_there(torch, gpus, verdict, text, advice, monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda: gpus)
    if torch is None:  # to the import system, as if it were not installed
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.setattr(sys, "meta_path", [NoTorch(), *sys.meta_path])
    else:
        monkeypatch.setitem(sys.modules, "torch", torch)
    finding = check_torch()
    assert finding.verdict is verdict
    assert text in finding.found
    assert finding.advice is None if advice is None else advice in finding.advice


class NoTorch:
    """A finder in front of all others that knows there is no PyTorch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")


def test_transformers_is_optional(monkeypatch):
    monkeypatch.setattr(environment, "package_version", lambda name: None)
    finding = check_transformers()
    assert finding.verdict is Verdict.NOTE
    assert "flashwright[transformers]" in finding.advice


# --- On disk -------------------------------------------------------------------------------------------------------


def test_a_cache_that_is_not_there_yet_is_fine(own_cache):
    finding = check_cache()
    assert finding.verdict is Verdict.OK
    assert "first use" in finding.found
    assert not own_cache.exists()


def test_the_programs_in_the_cache_are_counted_and_the_damaged_ones_named(own_cache, small_config):
    compile_kernel(small_config, cache=ProgramCache(own_cache))
    finding = check_cache()
    assert finding.verdict is Verdict.OK
    assert finding.facts["entries"] == 1
    assert finding.facts["bytes"] > 10_000
    assert finding.facts["private"]
    (entry,) = (path for path in (own_cache / "programs" / "entries").rglob("*") if path.is_file())
    entry.write_bytes(entry.read_bytes()[:-1])
    finding = check_cache()
    assert finding.verdict is Verdict.NOTE
    assert finding.facts["corrupt"] == [str(entry)]
    assert "1 of them damaged" in finding.found


@pytest.mark.skipif(os.name != "posix", reason="permission bits are POSIX's")
def test_programs_that_others_may_read_are_noted_with_the_command_that_hides_them(own_cache):
    programs = own_cache / "programs"
    programs.mkdir(parents=True)
    own_cache.chmod(0o755)
    programs.chmod(0o755)
    finding = check_cache()
    assert finding.verdict is Verdict.NOTE
    assert finding.advice == f"chmod 700 {programs}"


@pytest.mark.skipif(os.name != "posix", reason="permission bits are POSIX's")
def test_a_shared_directory_is_fine_if_the_programs_in_it_are_private(own_cache, small_config):
    own_cache.mkdir()
    own_cache.chmod(0o1777)
    assert check_cache().verdict is Verdict.OK
    compile_kernel(small_config, cache=ProgramCache(own_cache))
    assert check_cache().verdict is Verdict.OK


@pytest.mark.skipif(os.name != "posix", reason="permission bits are POSIX's")
def test_programs_that_others_may_replace_are_essential_because_the_cache_is_not_used(own_cache):
    programs = own_cache / "programs"
    programs.mkdir(parents=True)
    own_cache.chmod(0o755)
    programs.chmod(0o777)
    finding = check_cache()
    assert finding.verdict is Verdict.BROKEN
    assert f"others may write to {programs}" in finding.found
    assert CACHE_DIRECTORY_VARIABLE in finding.advice


@pytest.mark.parametrize("exists", [False, True])
def test_a_cache_that_cannot_be_written_is_essential(exists, own_cache, monkeypatch):
    if exists:
        own_cache.mkdir(mode=0o700)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root may write everywhere, whatever the bits say
    finding = check_cache()
    assert finding.verdict is Verdict.BROKEN
    assert "Permission denied" in finding.found
    assert CACHE_DIRECTORY_VARIABLE in finding.advice


def test_a_cache_below_a_file_is_essential(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "file" / "cache"))
    assert check_cache().verdict is Verdict.BROKEN


@pytest.mark.parametrize(("free", "verdict"), [(50 * 1024**3, Verdict.OK), (1024**2, Verdict.NOTE)])
def test_little_disk_space_is_noted(free, verdict, own_cache, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage(free))
    assert check_disk().verdict is verdict


def test_a_tuning_database_that_is_not_there_yet_is_fine(own_cache):
    finding = check_tuning()
    assert finding.verdict is Verdict.OK
    assert str(own_cache) in finding.found


def test_a_damaged_tuning_database_is_noted_with_what_to_do(own_cache):
    path = Path(check_tuning().facts["path"])
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"this is no database, and long enough to be looked at" * 100)
    finding = check_tuning()
    assert finding.verdict is Verdict.NOTE
    assert "flashwright tune" in finding.advice
    assert path.exists()  # looking changes nothing
