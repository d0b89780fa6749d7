"""What this machine is: its GPUs, driver and package versions, found without PyTorch where that is possible.

Result files carry the record, so that a number can be traced to what it was measured on; `doctor` judges the parts.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from flashwright.version import __version__

_DRIVER_VERSION_FILE = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class GPU:
    """A GPU as the driver describes it."""

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int


def package_version(distribution: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def flashwright_version() -> str:
    return __version__


def nvrtc_version_text() -> str | None:
    """The version of the compiler that is loaded, e.g. "13.0"; None if there is none."""
    from flashwright.compiler.nvrtc import nvrtc_version

    try:
        return ".".join(map(str, nvrtc_version()))
    except RuntimeError:
        return None


def driver_version() -> str | None:
    """The kernel driver's version, e.g. "580.65.06"; None without a driver."""
    try:
        return _DRIVER_VERSION_FILE.read_text().strip()
    except OSError:
        pass
    try:
        from cuda.core import system

        return ".".join(map(str, system.get_kernel_mode_driver_version()))
    except Exception:  # no driver library: every binding has its own way of saying so
        return None


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports, e.g. (13, 0); None without a driver."""
    from cuda.bindings import driver

    try:
        status, number = driver.cuDriverGetVersion()
    except Exception:  # as above
        return None
    return None if status else (number // 1000, number % 1000 // 10)


def gpus() -> tuple[GPU, ...]:
    """The GPUs that the driver shows to this process, in its order; none without a driver."""
    from cuda.bindings import driver

    try:
        (status,) = driver.cuInit(0)
        if status:
            return ()
        return tuple(_gpu(driver, index) for index in range(_value(driver.cuDeviceGetCount())))
    except Exception:  # as above
        return ()


def _gpu(driver: Any, index: int) -> GPU:
    device = _value(driver.cuDeviceGet(index))
    attribute = driver.CUdevice_attribute
    major, minor = (
        _value(driver.cuDeviceGetAttribute(which, device))
        for which in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    name = _value(driver.cuDeviceGetName(256, device)).split(b"\0", 1)[0].decode()
    return GPU(name, (major, minor), _value(driver.cuDeviceTotalMem(device)))


def _value(result: tuple[Any, ...]) -> Any:
    status, value = result
    if status:
        raise RuntimeError(f"the CUDA driver reports {status}")
    return value


def environment_record() -> dict[str, Any]:
    """What a result file records about where its numbers come from. Imports PyTorch only if it is installed."""
    found = gpus()
    record: dict[str, Any] = {
        "gpu": found[0].name if found else None,
        "compute_capability": ".".join(map(str, found[0].compute_capability)) if found else None,
        "driver": driver_version(),
        "nvrtc": nvrtc_version_text(),
        "flashwright": flashwright_version(),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    try:
        import torch
    except ImportError:
        return record | {"torch": None, "cuda": None, "cudnn": None}
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return record | {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": cudnn}
