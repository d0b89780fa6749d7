"""Running a config's kernel: on a GPU, with PyTorch's tensors and streams, or on the simulated one."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flashwright.compiler import Kernel, compile_kernel
from flashwright.kernel_configs import DType, FlashForwardKernelConfig
from flashwright.launch_arguments import DeviceTensor, forward_launch
from flashwright.simulation import NUMPY_DTYPES, simulate_forward
from flashwright.tile_shapes import ForwardKernelTileShapes
from flashwright.variant import AttentionVariant

if TYPE_CHECKING:
    import torch

OLDEST_COMPUTE_CAPABILITY = (8, 0)


class GPUError(RuntimeError):
    """There is no GPU to run on, or it cannot run what was asked."""


def run_forward(
    config: FlashForwardKernelConfig,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    out: Any = None,
    device: str | None = None,
) -> Any:
    """softmax(q·kᵀ·scale)·v by the kernel of one config.

    Tensors are (batch, heads, rows, d_head) with any strides over contiguous, 16-byte aligned rows. With
    `return_lse`, also the log-sum-exp of each row's scaled scores, (batch, heads, rows) in fp32. PyTorch tensors
    run on their GPU and its current stream; with `device="simulator"`, NumPy arrays and CPU tensors run on the
    simulated GPU, hazards checked.
    """
    if device == "simulator":
        return _run_on_simulator(config, q, k, v, scale=scale, return_lse=return_lse, out=out)
    if device not in (None, "gpu"):
        raise ValueError(f"device: {device!r} is not known; allowed: 'gpu', 'simulator'")
    return _run_on_gpu(config, q, k, v, scale=scale, return_lse=return_lse, out=out)


def _run_on_simulator(
    config: FlashForwardKernelConfig, q: Any, k: Any, v: Any, *, scale: float | None, return_lse: bool, out: Any
) -> Any:
    arrays = [_as_numpy(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v))]
    simulated = simulate_forward(config, *arrays, scale=scale, return_lse=return_lse)
    output, lse = simulated.output, simulated.lse
    if not isinstance(q, np.ndarray):
        output, lse = _as_torch(output, q.dtype), None if lse is None else _as_torch(lse)
    if out is not None:
        out[...] = output
        output = out
    return (output, lse) if return_lse else output


def _as_numpy(name: str, tensor: Any) -> np.ndarray:
    """A view of a CPU tensor, or the array itself. NumPy has no bfloat16 of its own, so bits are passed on."""
    if isinstance(tensor, np.ndarray):
        return tensor
    torch = _require_torch()
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a NumPy array or a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; the simulator takes NumPy arrays and CPU tensors")
    dtype = DType.parse(str(tensor.dtype))
    return tensor.detach().view(torch.int16).numpy().view(NUMPY_DTYPES[dtype])


def _as_torch(array: np.ndarray, dtype: Any = None) -> Any:
    torch = _require_torch()
    return torch.from_numpy(array) if dtype is None else torch.from_numpy(array.view(np.int16)).view(dtype)


def _run_on_gpu(
    config: FlashForwardKernelConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    return_lse: bool,
    out: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    torch = _require_torch()
    _check_devices(torch, q, k, v, out)
    device = q.device
    o = torch.empty_like(q) if out is None else out
    if o.shape != q.shape or o.dtype != q.dtype:
        raise ValueError(f"out: {tuple(o.shape)} of {o.dtype} does not match q: {tuple(q.shape)} of {q.dtype}")
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=device) if return_lse else None
    launch = forward_launch(
        config,
        *(device_tensor(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v), ("out", o))),
        lse_address=0 if lse is None else lse.data_ptr(),
        scale=scale,
    )
    kernel = loaded_kernel(config, AttentionVariant(returns_lse=return_lse), device.index)
    with torch.cuda.device(device):
        kernel.launch(launch.grid, launch.arguments, torch.cuda.current_stream(device).cuda_stream)
    return o if lse is None else (o, lse)


def device_tensor(name: str, tensor: torch.Tensor) -> DeviceTensor:
    """The view that a launch needs of a PyTorch tensor."""
    return DeviceTensor(
        name, tensor.data_ptr(), DType.parse(str(tensor.dtype)), tuple(tensor.shape), tuple(tensor.stride())
    )


def _require_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise GPUError("running on a GPU needs PyTorch; install it with: pip install 'flashwright[torch]'") from error
    return torch


def _check_devices(torch: Any, q: Any, k: Any, v: Any, out: Any) -> None:
    tensors = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device.type != "cuda":
            missing = "" if torch.cuda.is_available() else ", and PyTorch sees no CUDA GPU on this machine"
            raise GPUError(f"{name} is on {tensor.device}, not on a GPU{missing}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}; all tensors must be on one GPU")


# --- Loaded kernels --------------------------------------------------------------------------------------------


class LoadedKernel:
    """A kernel in the memory of one GPU, ready to be launched."""

    def __init__(self, kernel: Kernel, device_index: int) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self._driver = driver
        self._code = ObjectCode.from_cubin(kernel.cubin)
        self._handle = self._code.get_kernel(kernel.name).handle
        self.kernel = kernel
        device = _driver_checked(driver.cuDeviceGet(device_index))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _driver_checked(driver.cuKernelSetAttribute(attribute, kernel.shared_bytes, self._handle, device))

    def launch(self, grid: tuple[int, int, int], arguments: ctypes.Structure, stream: int) -> None:
        """Queues one launch; the arguments are copied before this returns."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        kernel = self.kernel
        (status,) = self._driver.cuLaunchKernel(
            int(self._handle),
            *grid,
            kernel.threads,
            1,
            1,
            kernel.shared_bytes,
            stream,
            ctypes.addressof(parameters),
            0,
        )
        if status:
            raise GPUError(f"launching {kernel.config} with grid {grid} failed: {_error_text(status)}")


@cache
def loaded_kernel(config: FlashForwardKernelConfig, variant: AttentionVariant, device_index: int) -> LoadedKernel:
    """The kernel of a config on a GPU, compiled and loaded on first use."""
    torch = _require_torch()
    properties = torch.cuda.get_device_properties(device_index)
    capability = (properties.major, properties.minor)
    if capability < OLDEST_COMPUTE_CAPABILITY:
        raise GPUError(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 (Ampere) "
            "or later"
        )
    shared_bytes, most = (
        ForwardKernelTileShapes(config).shared_bytes,
        properties.shared_memory_per_block_optin,
    )
    if shared_bytes > most:
        raise GPUError(
            f"{config} needs {shared_bytes} bytes of shared memory per block; {properties.name} has {most}. "
            "Choose a smaller B_r or B_c."
        )
    kernel = compile_kernel(config, f"sm_{capability[0]}{capability[1]}", variant)
    with torch.cuda.device(device_index):
        torch.cuda.current_stream(device_index)  # makes sure that the device's context exists
        return LoadedKernel(kernel, device_index)


def _driver_checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status:
        raise GPUError(f"the CUDA driver says: {_error_text(status)}")
    return values[0] if values else None


def _error_text(status: Any) -> str:
    from cuda.bindings import driver

    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    return f"{name.decode()}: {text.decode()}" if name else str(status)
