"""What all tests share: one cache of compiled kernels per run, and skipping what needs a GPU where there is none."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flashwright import (
    AttentionVariant,
    FlashForwardKernelConfig,
    Kernel,
    compile_kernel,
    parse_kernel_name_into_config,
)
from flashwright.program_cache import CACHE_DIRECTORY_VARIABLE, ProgramCache


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


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def program_cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this run's own, shared by its worker processes: each kernel is compiled once per run."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "flashwright-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_DIRECTORY_VARIABLE, str(directory))
        yield directory


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
