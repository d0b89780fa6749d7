"""What all tests share: one cache of compiled kernels per run, and skipping what needs a GPU where there is none."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from flashwright import (
    AttentionVariant,
    FlashForwardKernelConfig,
    Kernel,
    compile_kernel,
    parse_kernel_name_into_config,
)
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE, ProgramCache

# `make test` generates the same examples in every run, so that a red run can be seen again; plain pytest and
# `make test-all` explore.
settings.register_profile("repeatable", derandomize=True)


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would the commands that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def why_no_gpu() -> str | None:
    """What keeps this machine from running the kernels; None if it can."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver on this machine"
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, below 8.0"
    return None


GPU_TEST_SECONDS = 300


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A kernel that hangs ends its test: a signal would wait for it, but a thread ends the process."""
    for item in items:
        if item.get_closest_marker("gpu") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(GPU_TEST_SECONDS, method="thread"))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = in_order_of_their_start(items)


def in_order_of_their_start(items: list[pytest.Item]) -> list[pytest.Item]:
    """As processes that share a GPU take them, one after the other. Long tests begin first, so that none is left for
    the end; those that use the GPU alone come last, when no other test waits for them. The rest is mixed: some tests
    mostly compile, others mostly compute."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    random.Random(0).shuffle(on_gpu)

    def place(item: pytest.Item) -> int:
        return 2 if item.get_closest_marker("alone") else 0 if item.get_closest_marker("long") else 1

    return [*(item for item in items if not item.get_closest_marker("gpu")), *sorted(on_gpu, key=place)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def program_cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this run's own, shared by its worker processes: each kernel is compiled once per run."""
    directory = run_directory(tmp_path_factory) / "flashwright-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_DIRECTORY_VARIABLE, str(directory))
        yield directory


def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all worker processes of a run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True)
def turn_on_the_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests of several processes share the GPU; while one marked `alone` uses it, the others wait."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    alone = request.node.get_closest_marker("alone") is not None
    with gpu_turn(run_directory(tmp_path_factory), alone=alone):
        yield


@contextmanager
def gpu_turn(directory: Path, *, alone: bool) -> Iterator[None]:
    """Holds the GPU together with others, or alone. Whoever wants it alone closes the gate first, so that nobody
    enters while it waits for the others to leave."""
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with (directory / "gpu-gate").open("w") as gate, (directory / "gpu-room").open("w") as room:
        fcntl.flock(gate, kind)
        fcntl.flock(room, kind)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.fixture
def empty_cache(tmp_path: Path) -> ProgramCache:
    """A program cache in a directory of the test's own."""
    return ProgramCache(tmp_path / "cache")


@pytest.fixture(scope="session")
def small_config() -> FlashForwardKernelConfig:
    """A kernel that compiles fast, for tests in which any kernel serves."""
    return parse_kernel_name_into_config("(BF16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax")


@pytest.fixture(scope="session")
def compiled() -> Callable[..., Kernel]:
    """`compiled(short form, field=value, …)`: the kernel for sm_80, compiled once per process and run."""

    @cache
    def compile_once(config: FlashForwardKernelConfig, variant: AttentionVariant) -> Kernel:
        return compile_kernel(config, "sm_80", variant)

    def compiled(short_form: str, *, returns_lse: bool = False, **changes: Any) -> Kernel:
        config = replace(parse_kernel_name_into_config(short_form), **changes)
        return compile_once(config, AttentionVariant(returns_lse=returns_lse))

    return compiled
