"""Launching kernels on a GPU, with PyTorch's tensors and streams."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from flashwright.compiler import Kernel, compile_kernel
from flashwright.families import ForwardKernelConfig, family_of
from flashwright.kernel_configs import DType
from flashwright.launch_arguments import (
    DeviceTensor,
    ForwardArguments,
    ForwardLaunch,
    PackedSequences,
)
from flashwright.numpy_dtypes import NUMPY_DTYPES
from flashwright.tensor_map import Swizzle, TensorMap
from flashwright.tile_shapes import VECTOR_BYTES
from flashwright.variant import AttentionVariant, Window

if TYPE_CHECKING:
    import torch

OLDEST_COMPUTE_CAPABILITY = (8, 0)


class GPUError(RuntimeError):
    """There is no GPU to run on, or it cannot run what was asked."""


# --- Running a forward pass --------------------------------------------------------------------------------------


class ForwardPlan:
    """A launch whose every argument but the addresses is decided: for all tensors of the same kind as those it was
    made for, that is of their shapes, strides, dtypes and device."""

    def __init__(self, kernel: LoadedKernel, launch: ForwardLaunch, device_index: int) -> None:
        import torch

        self._kernel = kernel
        self._grid = launch.grid
        self._parameters = PackedParameters(launch)
        self._returns_lse = launch.variant.returns_lse
        self._device_index = device_index
        self._torch = torch

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        starts: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queues the launch on the current stream; returns the output and, if it is computed, the log-sum-exp."""
        torch = self._torch
        o = torch.empty_like(q) if out is None else out
        parameters = self._parameters
        words = parameters.words[:]
        words[parameters.q] = q_address = q.data_ptr()
        words[parameters.k] = k_address = k.data_ptr()
        words[parameters.v] = v_address = v.data_ptr()
        words[parameters.o] = o_address = o.data_ptr()
        if (q_address | k_address | v_address | o_address) % VECTOR_BYTES:
            raise ValueError(f"q, k, v and out must begin at multiples of {VECTOR_BYTES} bytes")
        lse = None
        if self._returns_lse:
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
            words[parameters.lse] = lse.data_ptr()
        if starts is not None:
            words[parameters.q_starts], words[parameters.kv_starts] = starts[0].data_ptr(), starts[1].data_ptr()
        index = self._device_index
        # What torch.cuda.current_stream(index).cuda_stream gives, without building the Stream object.
        stream = torch._C._cuda_getCurrentRawStream(index)
        addresses = parameters.addresses(words)
        if index == torch.cuda.current_device():
            self._kernel.launch(self._grid, addresses, stream)
        else:
            with torch.cuda.device(index):
                self._kernel.launch(self._grid, addresses, stream)
        return o, lse


class PackedParameters:
    """A launch's parameters one after the other in 8-byte words, cheap to copy, and where tensors' addresses go."""

    def __init__(self, launch: ForwardLaunch) -> None:
        self.words = array("Q")
        self._offsets: list[int] = []
        first_words: list[int] = []
        for parameter in launch.parameters:
            first_words.append(len(self.words))
            self._offsets.append(len(self.words) * self.words.itemsize)
            self.words.frombytes(_parameter_bytes(parameter))
        maps = len(launch.tensor_maps)
        arguments = first_words[maps]
        self.q, self.k, self.v, self.o, self.lse, self.q_starts, self.kv_starts = (
            arguments + getattr(ForwardArguments, name).offset // self.words.itemsize
            for name in ("Q", "K", "V", "O", "lse", "q_starts", "kv_starts")
        )
        if launch.tensor_maps:  # the kernel finds its inputs by their tensor maps instead
            self.q, self.k, self.v = (
                first_word + _address_word(self.words, first_word, tensor_map)
                for first_word, tensor_map in zip(first_words, launch.tensor_maps, strict=False)
            )

    def addresses(self, words: array[int]) -> array[int]:
        """Where a copy of the words holds each parameter."""
        base = words.buffer_info()[0]
        return array("Q", [base + offset for offset in self._offsets])


def _parameter_bytes(parameter: TensorMap | ctypes.Structure) -> bytes:
    """Padded to whole words; the driver copies only what the kernel declares."""
    data = encoded_tensor_map(parameter) if isinstance(parameter, TensorMap) else bytes(parameter)
    return data + bytes(-len(data) % 8)


def _address_word(words: array[int], first: int, tensor_map: TensorMap) -> int:
    """Which word of an encoded tensor map is the address. Found by encoding the same map for another address, since the
    encoding is the driver's secret; making it anew for every launch would take longer than the launch."""
    moved = array("Q", encoded_tensor_map(replace(tensor_map, address=tensor_map.address ^ (1 << 20))))
    places = [i for i, word in enumerate(moved) if word != words[first + i]]
    if len(places) != 1 or words[first + places[0]] != tensor_map.address:
        raise GPUError("this driver encodes tensor maps in a way that is not known; use an Ampere-family config")
    return places[0]


def encoded_tensor_map(tensor_map: TensorMap) -> bytes:
    """The 128 bytes that the copy engine reads (CUDA Driver API: cuTensorMapEncodeTiled)."""
    from cuda.bindings import driver

    swizzle = {
        Swizzle.NONE: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle.B32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle.B64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle.B128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
    }[tensor_map.swizzle]
    dtype = {
        NUMPY_DTYPES[DType.FP16]: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        NUMPY_DTYPES[DType.BF16]: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[tensor_map.dtype]
    encoded = _driver_checked(
        driver.cuTensorMapEncodeTiled(
            dtype,
            tensor_map.rank,
            tensor_map.address,
            [driver.cuuint64_t(size) for size in tensor_map.shape],
            [driver.cuuint64_t(stride) for stride in tensor_map.strides],
            [driver.cuuint32_t(size) for size in tensor_map.box],
            [driver.cuuint32_t(stride) for stride in tensor_map.element_strides],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return b"".join(int(word).to_bytes(8, "little") for word in encoded.opaque)


class PlanCache(dict[tuple[Any, ...], ForwardPlan]):
    """Plans by what they depend on; emptied when it has grown beyond what any program has use for."""

    MOST = 4096

    def remember(self, key: tuple[Any, ...], plan: ForwardPlan) -> ForwardPlan:
        if len(self) >= self.MOST:
            self.clear()
        self[key] = plan
        return plan


_plans = PlanCache()


def run_on_gpu(
    config: ForwardKernelConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    window: Window,
    softcap: float,
    return_lse: bool,
    out: torch.Tensor | None,
    starts: tuple[torch.Tensor, torch.Tensor] | None,
    max_lengths: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A forward pass on the tensors' GPU and current stream. `starts` are cu_seqlens of q and k."""
    try:
        import torch
    except ImportError as error:
        raise GPUError("running on a GPU needs PyTorch; install it with: pip install 'flashwright[torch]'") from error

    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    key = (
        config, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, window, scale, softcap, return_lse,
        out is not None and (out.shape, out.stride(), out.dtype, out.device),
        starts is not None and (starts[0].shape, starts[0].device, starts[1].device, max_lengths),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = make_plan(
            config, q, k, v, scale=scale, window=window, softcap=softcap, return_lse=return_lse, out=out,
            starts=starts, max_lengths=max_lengths,
        )  # fmt: skip
        _plans.remember(key, plan)
    return plan.run(q, k, v, out, starts)


def make_plan(
    config: ForwardKernelConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    window: Window,
    softcap: float,
    return_lse: bool,
    out: torch.Tensor | None = None,
    starts: tuple[torch.Tensor, torch.Tensor] | None = None,
    max_lengths: tuple[int, int] = (0, 0),
) -> ForwardPlan:
    """The plan for tensors of this kind, everything checked; raises `ValueError` or `GPUError`."""
    import torch

    o = torch.empty_like(q) if out is None else out
    _check_tensors(q, k, v, o, starts)
    packed = None
    if starts is not None:
        packed = PackedSequences(len(starts[0]) - 1, starts[0].data_ptr(), starts[1].data_ptr(), *max_lengths)
    index = q.device.index
    launch = family_of(config).launch(
        config,
        *(device_tensor(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v), ("out", o))),
        lse_address=int(return_lse),  # any address: the real one is filled in at every run
        scale=scale,
        window=window,
        softcap=softcap,
        packed=packed,
        multiprocessors=torch.cuda.get_device_properties(index).multi_processor_count,
    )
    return ForwardPlan(loaded_kernel(config, launch.variant, index), launch, index)


def device_tensor(name: str, tensor: torch.Tensor) -> DeviceTensor:
    """The view that a launch needs of a PyTorch tensor."""
    return DeviceTensor(
        name, tensor.data_ptr(), DType.parse(str(tensor.dtype)), tuple(tensor.shape), tuple(tensor.stride())
    )


def _check_tensors(q: Any, k: Any, v: Any, o: Any, starts: tuple[Any, Any] | None) -> None:
    import torch

    tensors = {"q": q, "k": k, "v": v, "out": o}
    if starts is not None:
        tensors |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    if q.device.type != "cuda":
        missing = "" if torch.cuda.is_available() else ", and PyTorch sees no CUDA GPU on this machine"
        raise GPUError(f"q is on {q.device}, not on a GPU{missing}")
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}; all tensors must be on one GPU")
    if o.shape != q.shape or o.dtype != q.dtype:
        raise ValueError(f"out: {tuple(o.shape)} of {o.dtype} does not match q: {tuple(q.shape)} of {q.dtype}")


def gpu_available() -> bool:
    """Whether PyTorch is there and sees a GPU that the kernels run on."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= OLDEST_COMPUTE_CAPABILITY


# --- Loaded kernels ----------------------------------------------------------------------------------------------


class LoadedKernel:
    """A kernel in the memory of one GPU, ready to be launched."""

    def __init__(self, kernel: Kernel, device_index: int) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self._code = ObjectCode.from_cubin(kernel.cubin)
        handle = self._code.get_kernel(kernel.name).handle
        self._handle = int(handle)
        self._launch = driver.cuLaunchKernel
        self.kernel = kernel
        self._threads, self._shared_bytes = kernel.threads, kernel.shared_bytes
        device = _driver_checked(driver.cuDeviceGet(device_index))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _driver_checked(driver.cuKernelSetAttribute(attribute, kernel.shared_bytes, handle, device))

    def launch(self, grid: tuple[int, int, int], parameters: array[int], stream: int) -> None:
        """Queues one launch with the parameters at these addresses; they are copied before this returns."""
        (status,) = self._launch(
            self._handle, *grid, self._threads, 1, 1, self._shared_bytes, stream, parameters.buffer_info()[0], 0
        )
        if status:
            raise GPUError(f"launching {self.kernel.config} with grid {grid} failed: {_error_text(status)}")


@cache
def loaded_kernel(config: ForwardKernelConfig, variant: AttentionVariant, device_index: int) -> LoadedKernel:
    """The kernel of a config on a GPU, compiled and loaded on first use."""
    import torch

    properties = torch.cuda.get_device_properties(device_index)
    major, minor = capability = (properties.major, properties.minor)
    if capability < OLDEST_COMPUTE_CAPABILITY:
        raise GPUError(
            f"{properties.name} has compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or later"
        )
    shared_bytes, most = family_of(config).shapes(config).shared_bytes, properties.shared_memory_per_block_optin
    if shared_bytes > most:
        raise GPUError(
            f"{config} needs {shared_bytes} bytes of shared memory per block; {properties.name} has {most}. "
            "Choose a smaller B_r or B_c."
        )
    kernel = compile_kernel(config, f"sm_{major}{minor}", variant)
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
