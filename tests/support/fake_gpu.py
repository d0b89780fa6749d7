"""A GPU that launches nothing and records everything: plans and launches on CPU tensors."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from flashwright.hardware.tensor_map import TensorMap
from flashwright.kernels.backward.launch import BackwardArguments
from flashwright.kernels.forward.launch import ForwardArguments
from flashwright.kernels.registry import family_of
from flashwright.runtime import backward_plans, call_kinds, plans, tensor_maps
from flashwright.runtime.tensor_maps import WORDS, MapTemplate

MULTIPROCESSORS = 4


def scattered(tensor_map: TensorMap) -> list[int]:
    """An encoding of tensor maps like the driver's: sizes and strides cut into pieces, over several words."""
    words = [0] * WORDS
    words[0] = tensor_map.address
    words[1] = 0x9B | tensor_map.box[1] << 40
    for axis, stride in enumerate(tensor_map.strides):
        units = stride // 16
        words[2 + axis // 2] |= (units & 0xFFFFFFFF) << 32 * (axis % 2)
        words[4] |= (units >> 32) << 4 * axis
    for axis, size in enumerate(tensor_map.shape):
        words[5 + axis // 2] |= (size - 1) << 32 * (axis % 2)
    return words


class RecordingKernel:
    """In the place of a loaded kernel: what each launch was given."""

    def __init__(self, config: Any, variant: Any, companion: str | None = None) -> None:
        self.config, self.variant, self.companion = config, variant, companion
        self.launches: list[tuple[tuple[int, int, int], list[bytes]]] = []

    def _sizes(self) -> list[int]:
        """Bytes of the parameters."""
        family = family_of(self.config)
        copies_by_maps = family.launch_rules.boxes is not None and self.companion is None
        if family.operation.name == "backward":
            return [*copies_by_maps * 4 * [128], ctypes.sizeof(BackwardArguments)]
        return (
            [128, 128, 128, ctypes.sizeof(ForwardArguments), 16]
            if copies_by_maps
            else [ctypes.sizeof(ForwardArguments)]
        )

    def launch(self, grid: tuple[int, int, int], parameters_at: int, stream: int) -> None:
        sizes = self._sizes()
        addresses = (ctypes.c_uint64 * len(sizes)).from_address(parameters_at)
        parameters = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        self.launches.append((grid, parameters))


class FakeGPU:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        self.kernels: list[RecordingKernel] = []
        self.allocated: list[Any] = []
        """Memory for backwards to work in."""
        templates = cache(lambda kind: MapTemplate(kind, scattered))
        for module in (plans, backward_plans):
            monkeypatch.setattr(module, "loaded_kernel", self._load)
            monkeypatch.setattr(module, "map_template", templates)
        for module in (call_kinds, plans, backward_plans):
            monkeypatch.setattr(module, "multiprocessors", lambda index: MULTIPROCESSORS)
        monkeypatch.setattr(tensor_maps, "encoded_words", scattered)
        monkeypatch.setattr(backward_plans, "allocator", lambda device_type: self._allocate)
        self.torch = SimpleNamespace(
            empty_like=torch.empty_like,
            float32=torch.float32,
            uint8=torch.uint8,
            _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 0, _cuda_getDevice=lambda: 0),
            cuda=SimpleNamespace(device=lambda index: contextlib.nullcontext()),
        )

    def _allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        import torch

        self.allocated.append(torch.empty_strided(shape, strides, dtype=dtype))
        return self.allocated[-1]

    def _load(self, config: Any, variant: Any, device_index: int, companion: str | None = None) -> RecordingKernel:
        self.kernels.append(RecordingKernel(config, variant, companion))
        return self.kernels[-1]

    def backward_kind(self, options: Any, choose: Any) -> backward_plans.BackwardKind:
        kind = backward_plans.BackwardKind(options, choose, device_index=0)
        kind.torch = self.torch
        return kind

    def kind(self, options: Any, choose: Any, *, returns_lse: bool = False) -> call_kinds.CallKind:
        kind = call_kinds.CallKind(options, choose, returns_lse=returns_lse, device_index=0)
        kind.torch = self.torch
        return kind
