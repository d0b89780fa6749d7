"""The GPUs that PyTorch sees, their contexts, and what kernels are chosen by."""

from __future__ import annotations

from functools import cache
from typing import Any

from flashwright.hardware.architectures import GPUModel

OLDEST_COMPUTE_CAPABILITY = (8, 0)


class GPUError(RuntimeError):
    """There is no GPU to run on, or it cannot run what was requested."""


def require_torch(purpose: str) -> Any:
    """PyTorch; raises `GPUError` where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise GPUError(f"{purpose} needs PyTorch; install it with: pip install 'flashwright[torch]'") from error
    return torch


def gpu_available() -> bool:
    """Whether PyTorch is installed and sees a GPU that the kernels run on."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= OLDEST_COMPUTE_CAPABILITY


@cache
def gpu_model(device_index: int) -> GPUModel:
    """What there is to know of a GPU when a kernel is chosen for it."""
    import torch

    properties = torch.cuda.get_device_properties(device_index)
    return GPUModel(properties.name, (properties.major, properties.minor), properties.shared_memory_per_multiprocessor)


def this_gpu() -> GPUModel:
    """The current GPU of this machine; raises `GPUError` where there is none that the kernels run on."""
    if not gpu_available():
        raise GPUError(
            "there is no GPU here to choose a kernel for; name one: gpu='h200' or 'sm_90', on the command line --gpu"
        )
    import torch

    return gpu_model(torch.cuda.current_device())


@cache
def multiprocessors(device_index: int) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


# --- The CUDA driver -----------------------------------------------------------------------------------------------


def make_context_current(device_index: int) -> None:
    """Makes a GPU's primary context, which PyTorch uses, current in this thread if none is.

    A thread that has called nothing of CUDA's yet has none, and the driver refuses its launches.
    """
    from cuda.bindings import driver

    if int(driver_checked(driver.cuCtxGetCurrent())):
        return
    device = driver_checked(driver.cuDeviceGet(device_index))
    driver_checked(driver.cuCtxSetCurrent(_primary_context(device_index, device)))


@cache
def _primary_context(device_index: int, device: Any) -> Any:
    """Retained once a process: PyTorch keeps it as long as the process lives."""
    from cuda.bindings import driver

    return driver_checked(driver.cuDevicePrimaryCtxRetain(device))


def driver_checked(result: tuple[Any, ...]) -> Any:
    """What a function of the driver returned; raises `GPUError` with the driver's text if it failed."""
    status, *values = result
    if status:
        raise GPUError(f"the CUDA driver reports: {driver_error_text(status)}")
    return values[0] if values else None


def driver_error_text(status: Any) -> str:
    from cuda.bindings import driver

    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    return f"{name.decode()}: {text.decode()}" if name else str(status)
