"""A GPU that launches nothing and records everything: plans and launches on CPU tensors."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from flashwright.hardware.tensor_map import TensorMap
from flashwright.kernels.forward.launch import ForwardArguments
from flashwright.kernels.registry import family_of
from flashwright.runtime import plans, tensor_maps
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

    def __init__(self, config: Any, variant: Any, device_index: int) -> None:
        self.config, self.variant = config, variant
        self.launches: list[tuple[tuple[int, int, int], list[bytes]]] = []

    def launch(self, grid: tuple[int, int, int], parameters_at: int, stream: int) -> None:
        sizes = [ctypes.sizeof(ForwardArguments)]
        if family_of(self.config).launch_rules.boxes is not None:
            sizes = [128, 128, 128, *sizes, 16]
        addresses = (ctypes.c_uint64 * len(sizes)).from_address(parameters_at)
        parameters = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        self.launches.append((grid, parameters))


class FakeGPU:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        self.kernels: list[RecordingKernel] = []
        monkeypatch.setattr(plans, "loaded_kernel", self._load)
        monkeypatch.setattr(plans, "multiprocessors", lambda index: MULTIPROCESSORS)
        monkeypatch.setattr(plans, "map_template", cache(lambda kind: MapTemplate(kind, scattered)))
        monkeypatch.setattr(tensor_maps, "encoded_words", scattered)
        self.torch = SimpleNamespace(
            empty_like=torch.empty_like,
            empty=torch.empty,
            float32=torch.float32,
            _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 0, _cuda_getDevice=lambda: 0),
            cuda=SimpleNamespace(device=lambda index: contextlib.nullcontext()),
        )

    def _load(self, config: Any, variant: Any, device_index: int) -> RecordingKernel:
        self.kernels.append(RecordingKernel(config, variant, device_index))
        return self.kernels[-1]

    def kind(self, options: Any, choose: Any, *, returns_lse: bool = False) -> plans.CallKind:
        kind = plans.CallKind(options, choose, returns_lse=returns_lse, device_index=0)
        kind.torch = self.torch
        return kind
