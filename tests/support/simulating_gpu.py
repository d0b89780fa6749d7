"""A GPU whose memory is the host's: what plans launch on CPU tensors is executed by the simulator."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flashwright.kernels.backward.launch import BackwardArguments
from flashwright.kernels.decode.append import APPEND, AppendArguments
from flashwright.kernels.decode.launch import DecodeArguments
from flashwright.kernels.forward.launch import ForwardArguments
from flashwright.kernels.registry import family_of
from flashwright.kernels.tensors import TensorView
from flashwright.runtime import backward_plans, call_kinds, decode_plans, plans
from flashwright.runtime.compiling import compile_one
from flashwright.simulator.gpu import SimulatedGPU

MULTIPROCESSORS = 4
ARGUMENTS: dict[str, type[ctypes.Structure]] = {
    "forward": ForwardArguments,
    "backward": BackwardArguments,
    "decode": DecodeArguments,
    APPEND: AppendArguments,
}
"""By operation, or by companion where it takes others."""


class SimulatingKernel:
    """In the place of a loaded kernel, of a family whose kernels take arguments alone."""

    def __init__(self, gpu: SimulatingGPU, config: Any, variant: Any, companion: str | None) -> None:
        self._gpu = gpu
        self._arch = family_of(config).oldest_arch
        self._kernel = compile_one(config, variant, companion, arch=self._arch) if gpu.executes else None
        self._arguments = ARGUMENTS[companion if companion in ARGUMENTS else family_of(config).operation.name]
        self._name = (family_of(config).prefix, companion)

    def launch(self, grid: tuple[int, int, int], parameters_at: int, stream: int) -> None:
        self._gpu.launches.append(self._name)
        if self._gpu.executes:
            self._execute(grid, parameters_at)

    def _execute(self, grid: tuple[int, int, int], parameters_at: int) -> None:
        (address,) = (ctypes.c_uint64 * 1).from_address(parameters_at)
        arguments = self._arguments.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(self._arguments)))
        kernel, device = self._kernel, SimulatedGPU(self._arch)
        assert kernel is not None
        uploaded: dict[tuple[int, int], int] = {}
        _translate(arguments, device, uploaded, _storages())
        device.load(kernel.ptx).launch(
            kernel.name,
            grid=grid,
            block=(kernel.threads, 1, 1),
            shared_bytes=kernel.shared_bytes,
            args=[bytes(arguments)],
            registers=kernel.registers,
        )
        for (base, size), place in uploaded.items():
            ctypes.memmove(base, device.to_host(place).tobytes(), size)


def _storages() -> list[tuple[int, int]]:
    """(address, bytes) of what CPU tensors lie in."""
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.device.type == "cpu" and not x.is_sparse]
    return list({(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors})


def _translate(
    arguments: ctypes.Structure, device: SimulatedGPU, uploaded: dict[tuple[int, int], int], storages: Any
) -> None:
    """Copies what pointers point to, all of it, and makes them point to the copies."""
    for name, kind, *_ in arguments._fields_:
        value = getattr(arguments, name)
        if isinstance(value, ctypes.Structure):
            _translate(value, device, uploaded, storages)
        elif isinstance(value, ctypes.Array):
            for each in value:
                _translate(each, device, uploaded, storages)
        elif value and kind is ctypes.c_uint64 and (not isinstance(arguments, TensorView) or name == "data"):
            base, size = next((base, size) for base, size in storages if base <= value < base + size)
            if (base, size) not in uploaded:
                uploaded[base, size] = device.to_device(np.frombuffer(ctypes.string_at(base, size), np.uint8))
            setattr(arguments, name, uploaded[base, size] + value - base)


class SimulatingGPU:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, executes: bool = True) -> None:
        self.executes = executes
        """Otherwise launches are counted, and what they would write is undefined."""
        self.launches: list[tuple[str, str | None]] = []
        """(family, companion) of each, in their order."""
        self.current_device: int | None = 0
        """None is that of CPU tensors, which stand in for a GPU's."""
        for module in (plans, backward_plans, decode_plans):
            monkeypatch.setattr(module, "loaded_kernel", self._load)
        for module in (call_kinds, plans, backward_plans, decode_plans):
            monkeypatch.setattr(module, "multiprocessors", lambda index: MULTIPROCESSORS)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.current_device, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "device", self._device)

    @contextlib.contextmanager
    def _device(self, index: int | None) -> Iterator[None]:
        before, self.current_device = self.current_device, index
        yield
        self.current_device = before

    def _load(self, config: Any, variant: Any, device_index: int, companion: str | None = None) -> SimulatingKernel:
        return SimulatingKernel(self, config, variant, companion)
