"""The forward kernel on the simulated GPU: the same kernel and arguments as on a real one, on NumPy arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashwright.compiler import compile_kernel
from flashwright.families import OLDEST, ForwardKernelConfig, family_of
from flashwright.launch_arguments import DeviceTensor, PackedSequences
from flashwright.numpy_dtypes import NUMPY_DTYPES
from flashwright.tensor_map import TensorMap
from flashwright.variant import FULL, Window

if TYPE_CHECKING:
    from flashwright.simulator import Run, SimulatedGPU
SIMULATED_MULTIPROCESSORS = 4
"""Few, so that the thread blocks of a persistent kernel have several tiles each even of a small problem."""


@dataclass(frozen=True)
class ForwardSimulation:
    """A simulated forward pass: its results, and all that was counted on the way."""

    output: np.ndarray
    lse: np.ndarray | None
    run: Run


def simulate_forward(
    config: ForwardKernelConfig,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    window: Window = FULL,
    softcap: float = 0.0,
    return_lse: bool = False,
    starts: tuple[np.ndarray, np.ndarray] | None = None,
    max_lengths: tuple[int, int] = (0, 0),
    arch: str = OLDEST,
    check_hazards: bool = True,
    **launch_options: Any,
) -> ForwardSimulation:
    """What `run_forward` computes, of (batch, heads, rows, head_dim) arrays. `starts` are cu_seqlens of q and k."""
    from flashwright.simulator import SimulatedGPU

    arch = family_of(config).target(arch)
    gpu = SimulatedGPU(arch)
    output = _nans_like(q)  # what the kernel does not write stays visible
    lse = np.full(q.shape[:3], np.nan, np.float32) if return_lse else None
    tensors = [_upload(gpu, name, array) for name, array in (("q", q), ("k", k), ("v", v), ("out", output))]
    lse_address = 0 if lse is None else gpu.to_device(lse)
    packed = None
    if starts is not None:
        packed = PackedSequences(len(starts[0]) - 1, gpu.to_device(starts[0]), gpu.to_device(starts[1]), *max_lengths)
    launch = family_of(config).launch(
        config,
        *tensors,
        multiprocessors=SIMULATED_MULTIPROCESSORS,
        lse_address=lse_address,
        scale=scale,
        window=window,
        softcap=softcap,
        packed=packed,
    )

    kernel = compile_kernel(config, arch, launch.variant)
    run = gpu.load(kernel.ptx).launch(
        kernel.name,
        grid=launch.grid,
        block=(kernel.threads, 1, 1),
        shared_bytes=kernel.shared_bytes,
        args=[p if isinstance(p, TensorMap) else bytes(p) for p in launch.parameters],
        registers=kernel.registers,
        check_hazards=check_hazards,
        **launch_options,
    )
    _memory_of(output)[...] = gpu.to_host(tensors[3].address)
    return ForwardSimulation(output, None if lse is None else gpu.to_host(lse_address), run)


def _upload(gpu: SimulatedGPU, name: str, array: np.ndarray) -> DeviceTensor:
    dtypes = {dtype: member for member, dtype in NUMPY_DTYPES.items()}
    if array.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {array.dtype} is not allowed; allowed: {', '.join(map(str, dtypes))}")
    if any(stride < 0 for stride in array.strides):
        raise ValueError(f"{name}: strides {array.strides} are negative; copy the array first")
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return DeviceTensor(name, gpu.to_device(_memory_of(array)), dtypes[array.dtype], array.shape, strides)


def _nans_like(array: np.ndarray) -> np.ndarray:
    """NaNs with an array's strides, so that a kernel specialised for a row stride finds it in the output too."""
    if 0 in array.strides:  # of a broadcast array; an output needs memory of its own for every element
        return np.full_like(array, np.nan)
    memory = np.full(_memory_of(array).shape, np.nan, array.dtype)
    return np.lib.stride_tricks.as_strided(memory, array.shape, array.strides)


def _memory_of(array: np.ndarray) -> np.ndarray:
    """The stretch of memory that an array's elements lie in, gaps included, so that strides keep their meaning."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)) // array.itemsize
    return np.lib.stride_tricks.as_strided(array, (elements if array.size else 0,), (array.itemsize,))


def reference_forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    window: Window = FULL,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """The definition of attention in float64: the output, and the log-sum-exp of the scores."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    rows, keys = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
    position = rows + (k.shape[2] - q.shape[2] if window.bottom_right else 0)
    seen = np.ones(scores.shape[-2:], bool)
    if window.left is not None:
        seen &= keys >= position - window.left
    if window.right is not None:
        seen &= keys <= position + window.right
    scores = np.where(seen, scores, -np.inf)
    maximum = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(scores - np.where(np.isinf(maximum), 0, maximum))
    total = exponentials.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, maximum + np.log(total), -np.inf)[..., 0]
    return np.where(total > 0, exponentials / np.where(total > 0, total, 1), 0) @ v, lse


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """‖actual − expected‖ / ‖expected‖; NaN if anything is."""
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))


def random_inputs(
    config: ForwardKernelConfig, *, batch: int = 1, heads: int = 2, rows: int = 256, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Standard normal q, k and v of a config's dtype and head dimension, laid out (batch, rows, heads, d_head)."""
    generator = np.random.default_rng(seed)
    shape = (batch, rows, heads, config.d_head)
    q, k, v = (
        generator.standard_normal(shape).astype(NUMPY_DTYPES[config.dtype]).transpose(0, 2, 1, 3) for _ in range(3)
    )
    return q, k, v
