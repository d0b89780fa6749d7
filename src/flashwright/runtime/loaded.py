"""Kernels in the memory of a GPU."""

from __future__ import annotations

from typing import Any

from flashwright.compiler.kernel import Kernel
from flashwright.compiler.shared_work import SharedWork
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.launch import Grid
from flashwright.kernels.registry import tile_shapes
from flashwright.problem.variant import AttentionVariant
from flashwright.runtime.compiling import compile_one
from flashwright.runtime.devices import (
    OLDEST_COMPUTE_CAPABILITY,
    GPUError,
    driver_checked,
    driver_error_text,
    make_context_current,
)

WAITS_FOR_GRIDS_BEFORE = "griddepcontrol.wait"
"""The instruction by which a kernel may be started while the grids before it still run."""


class LoadedKernel:
    """A kernel in the memory of one GPU, ready to be launched."""

    MOST_CONFIGS = 1024

    def __init__(self, kernel: Kernel[Any], device_index: int) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self._code = ObjectCode.from_cubin(kernel.cubin)
        handle = self._code.get_kernel(kernel.name).handle
        self._function = driver.CUfunction(int(handle))  # of an integer, one would be made at every launch
        self._driver = driver
        self._launch = driver.cuLaunchKernel
        self._launch_early = driver.cuLaunchKernelEx
        self._no_context = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
        self._device_index = device_index
        self.kernel = kernel
        self._threads, self._shared_bytes = kernel.threads, kernel.shared_bytes
        self._starts_early = WAITS_FOR_GRIDS_BEFORE in kernel.ptx
        self._configs: dict[tuple[Grid, int], Any] = {}
        device = driver_checked(driver.cuDeviceGet(device_index))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver_checked(driver.cuKernelSetAttribute(attribute, kernel.shared_bytes, handle, device))

    def launch(self, grid: Grid, parameters: int, stream: int, again: bool = False) -> None:
        """Queues one launch; `parameters` is where the addresses of its parameters lie one after the other. What they
        point to is copied before this returns."""
        if self._starts_early:
            config = self._configs.get((grid, stream)) or self._early_config(grid, stream)
            (status,) = self._launch_early(config, self._function, parameters, 0)
        else:
            x, y, z = grid
            (status,) = self._launch(
                self._function, x, y, z, self._threads, 1, 1, self._shared_bytes, stream, parameters, 0
            )  # fmt: skip
        if not status:
            return
        if status != self._no_context or again:
            raise GPUError(f"launching {self.kernel.config} with grid {grid} failed: {driver_error_text(status)}")
        make_context_current(self._device_index)  # the first use of CUDA in this thread
        self.launch(grid, parameters, stream, again=True)

    def _early_config(self, grid: Grid, stream: int) -> Any:
        """Of launches that may start while the grids before still run ("programmatic stream serialization")."""
        driver = self._driver
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = driver.CUstream(stream)
        config.attrs = [attribute]
        config.numAttrs = 1
        if len(self._configs) >= self.MOST_CONFIGS:
            self._configs.clear()
        self._configs[grid, stream] = config
        return config


_loaded: dict[tuple[KernelConfig, AttentionVariant, int, str | None], LoadedKernel] = {}
_loading = SharedWork()


def loaded_kernel(
    config: KernelConfig, variant: AttentionVariant, device_index: int, companion: str | None = None
) -> LoadedKernel:
    """The kernel of a config on a GPU, or a companion of it, compiled and loaded on first use, once for all threads."""
    key = (config, variant, device_index, companion)
    if key not in _loaded:
        _loaded[key] = _loading.once(key, lambda: _load(*key))
    return _loaded[key]


def _load(config: KernelConfig, variant: AttentionVariant, device_index: int, companion: str | None) -> LoadedKernel:
    import torch

    properties = torch.cuda.get_device_properties(device_index)
    major, minor = capability = (properties.major, properties.minor)
    if capability < OLDEST_COMPUTE_CAPABILITY:
        raise GPUError(
            f"{properties.name} has compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or later"
        )
    shared_bytes, most = tile_shapes(config).shared_bytes, properties.shared_memory_per_block_optin
    if shared_bytes > most:
        raise GPUError(
            f"{config} needs {shared_bytes} bytes of shared memory per block; {properties.name} has {most}. "
            "Choose a smaller B_r or B_c."
        )
    kernel = compile_one(config, variant, companion, arch=f"sm_{major}{minor}")
    with torch.cuda.device(device_index):
        make_context_current(device_index)
        return LoadedKernel(kernel, device_index)
