"""Fixtures of the tests on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from flashwright.attention import forget_kinds
from flashwright.compiler import nvrtc
from flashwright.kernels.family import KernelFamily
from flashwright.kernels.registry import family_named, family_names
from flashwright.runtime import backward, forward, loaded


@pytest.fixture(scope="session", autouse=True)
def share_of_the_cores() -> None:
    """What PyTorch computes on the CPU: processes that share a GPU share the cores, too."""
    torch = pytest.importorskip("torch")
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))


@pytest.fixture(scope="module")
def arch() -> str:
    """Of this machine's GPU."""
    torch = pytest.importorskip("torch")
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@pytest.fixture(scope="module", params=family_names())
def family(request: pytest.FixtureRequest, arch: str) -> str:
    """Each kernel family that this GPU runs."""
    name: str = request.param
    if not family_named(name).runs_on(arch):
        pytest.skip(f"the {name} family does not run on {arch}")
    return name


@pytest.fixture(scope="module", params=family_names("backward"))
def backward_family(request: pytest.FixtureRequest, arch: str) -> KernelFamily:
    """Each kernel family of the backward that this GPU runs."""
    family = family_named(request.param, "backward")
    if not family.runs_on(arch):
        pytest.skip(f"the {family.name} family does not run on {arch}")
    return family


@dataclass
class KernelCounts:
    """How many kernels were made since the last reset."""

    compiled: int = 0
    """Runs of NVRTC."""
    loaded: int = 0

    def reset(self) -> None:
        self.compiled = self.loaded = 0


def forget_kernels() -> None:
    """The next calls choose, plan and load their kernels as in a new process; programs on disk stay."""
    import torch

    torch.cuda.synchronize()
    forget_kinds()
    forward._call_kind.cache_clear()
    backward._kind.cache_clear()
    loaded._loaded.clear()


@pytest.fixture
def kernel_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelCounts]:
    """What is compiled and loaded from here on, in a process that has loaded no kernel yet."""
    counts = KernelCounts()
    nvrtc.compiler_build()  # compiles an empty kernel, once a process
    run_nvrtc, LoadedKernel = nvrtc._run_nvrtc, loaded.LoadedKernel

    def counted_run(*arguments: Any, **options: Any) -> Any:
        counts.compiled += 1
        return run_nvrtc(*arguments, **options)

    class CountedKernel(LoadedKernel):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            counts.loaded += 1
            super().__init__(*arguments, **options)

    forget_kernels()
    monkeypatch.setattr(nvrtc, "_run_nvrtc", counted_run)
    monkeypatch.setattr(loaded, "LoadedKernel", CountedKernel)
    yield counts
    forget_kernels()
