"""Kernels on the simulated GPU: the same kernels and arguments as on a real one, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashwright.compiler.kernel import Kernel
from flashwright.hardware.tensor_map import TensorMap
from flashwright.kernels.backward.launch import DQ, ROWS, BackwardLaunch, scratch_for
from flashwright.kernels.decode.launch import CacheView, DecodeLaunch, decode_scratch
from flashwright.kernels.family import OLDEST, KernelConfig
from flashwright.kernels.forward.launch import PackedSequences
from flashwright.kernels.launch import Grid
from flashwright.kernels.registry import as_config, family_of
from flashwright.kernels.tensors import DeviceTensor
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import FULL, Window
from flashwright.runtime.compiling import Edit, compile_companion, compile_kernel

if TYPE_CHECKING:
    from flashwright.simulator.findings import HazardChecks
    from flashwright.simulator.gpu import SimulatedGPU
    from flashwright.simulator.run import Run
SIMULATED_MULTIPROCESSORS = 4
"""Few, so that the thread blocks of a persistent kernel have several tiles each even of a small problem."""


@dataclass(frozen=True)
class ForwardSimulation:
    """A simulated forward pass: its results, and all that was counted on the way."""

    output: np.ndarray
    lse: np.ndarray | None
    run: Run


def simulate_forward(
    config: KernelConfig,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    window: Window = FULL,
    softcap: float = 0.0,
    options: AttentionOptions | None = None,
    return_lse: bool = False,
    starts: tuple[np.ndarray, np.ndarray] | None = None,
    max_lengths: tuple[int, int] = (0, 0),
    sums: tuple[np.ndarray, np.ndarray] | None = None,
    arch: str = OLDEST,
    edit: Edit | None = None,
    check_hazards: HazardChecks = True,
    **launch_options: Any,
) -> ForwardSimulation:
    """What `run_forward` computes, of (batch, heads, rows, head_dim) arrays. `starts` are cu_seqlens of q and k.

    `options` may stand for `scale`, `window` and `softcap`. `edit` changes the kernel's source before it is compiled.
    With `sums`, output and log-sum-exp of other keys in fp32, results are mixed into them, in place.
    """
    from flashwright.simulator.gpu import SimulatedGPU

    config = as_config(config)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, np.ndarray):
            raise TypeError(
                f"{name}: expected a NumPy array, got {type(x).__name__}; run_forward(…, device='simulator') takes "
                "PyTorch's tensors too"
            )
    arch = family_of(config).target_for(config, arch)
    gpu = SimulatedGPU(arch)
    lse: np.ndarray | None
    lse_strides = None
    if sums is not None:
        output, lse = sums[0].view(q.dtype), sums[1]
        lse_strides = (lse.strides[0] // lse.itemsize, lse.strides[1] // lse.itemsize)
    else:
        output = _nans_like(q)  # what the kernel does not write stays visible
        lse = np.full(q.shape[:3], np.nan, np.float32) if return_lse else None
    tensors = [_upload(gpu, name, array) for name, array in (("q", q), ("k", k), ("v", v), ("out", output))]
    lse_address = 0 if lse is None else gpu.to_device(_memory_of(lse))
    packed = None
    if starts is not None:
        packed = PackedSequences(len(starts[0]) - 1, gpu.to_device(starts[0]), gpu.to_device(starts[1]), *max_lengths)
    launch = family_of(config).launch(
        config,
        *tensors,
        multiprocessors=SIMULATED_MULTIPROCESSORS,
        lse_address=lse_address,
        options=options or AttentionOptions(window, scale, softcap),
        packed=packed,
        lse_strides=lse_strides,
    )

    kernel = compile_kernel(config, arch, launch.variant, edit=edit)
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
    if lse is not None:
        _memory_of(lse)[...] = gpu.to_host(lse_address)
    return ForwardSimulation(output if sums is None else sums[0], lse, run)


@dataclass(frozen=True)
class BackwardSimulation:
    """A simulated backward pass: its results, and what was counted in each of its kernels."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    run: Run
    """Of the family's own kernel."""
    companions: dict[str, Run]


def simulate_backward(
    config: KernelConfig | str,
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    dlse: np.ndarray | None = None,
    options: AttentionOptions | None = None,
    starts: tuple[np.ndarray, np.ndarray] | None = None,
    max_lengths: tuple[int, int] = (0, 0),
    sums: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    arch: str = OLDEST,
    check_hazards: HazardChecks = True,
    multiprocessors: int = SIMULATED_MULTIPROCESSORS,
    **launch_options: Any,
) -> BackwardSimulation:
    """The gradients of q, k and v, from that of the output, and from the forward's output and log-sum-exp.

    With `sums`, gradients of other parts of a problem in fp32, results are added to them, in place. `launch_options`
    are of the family's own kernel.
    """
    from flashwright.simulator.gpu import SimulatedGPU

    known = as_config(config)
    family = family_of(known)
    arch = family.target_for(known, arch)
    gpu = SimulatedGPU(arch)
    gradients = [_nans_like(x) for x in (q, k, v)] if sums is None else [x.view(q.dtype) for x in sums]
    names = ("q", "k", "v", "out", "do", "dq", "dk", "dv")
    tensors = [_upload(gpu, name, x) for name, x in zip(names, (q, k, v, out, do, *gradients), strict=True)]
    packed = None
    if starts is not None:
        packed = PackedSequences(len(starts[0]) - 1, gpu.to_device(starts[0]), gpu.to_device(starts[1]), *max_lengths)
    scratch = scratch_for(known, tensors[0], tensors[1], packed)
    launch: BackwardLaunch = family.launch(
        known,
        *tensors,
        lse_address=gpu.to_device(np.ascontiguousarray(lse, np.float32)),
        dlse_address=0 if dlse is None else gpu.to_device(np.ascontiguousarray(dlse, np.float32)),
        scratch_address=gpu.to_device(np.full(scratch.total // 4, np.nan, np.float32)),
        multiprocessors=multiprocessors,
        options=options or AttentionOptions(),
        packed=packed,
        accumulates=sums is not None,
    )

    def run(kernel: Kernel[Any], grid: Grid, parameters: Sequence[Any], **more: Any) -> Run:
        return gpu.load(kernel.ptx).launch(
            kernel.name,
            grid=grid,
            block=(kernel.threads, 1, 1),
            shared_bytes=kernel.shared_bytes,
            args=[p if isinstance(p, TensorMap) else bytes(p) for p in parameters],
            registers=kernel.registers,
            check_hazards=check_hazards,
            **more,
        )

    def run_companion(name: str) -> Run:
        return run(compile_companion(known, name, arch, launch.variant), launch.rows_grid, (launch.arguments,))

    before = run_companion(ROWS)
    own = run(compile_kernel(known, arch, launch.variant), launch.grid, launch.parameters, **launch_options)
    companions = {ROWS: before} if launch.finishes_dq else {ROWS: before, DQ: run_companion(DQ)}
    for array, tensor in zip(gradients, tensors[5:], strict=True):
        memory = gpu.to_host(tensor.address)
        if sums is None:
            _memory_of(array)[...] = memory
        else:  # sums may lie between those of another
            array[...] = np.lib.stride_tricks.as_strided(memory, array.shape, array.strides)
    dq, dk, dv = gradients if sums is None else sums
    return BackwardSimulation(dq, dk, dv, own, companions)


def simulate_decode(
    config: KernelConfig | str,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    kv_lengths: np.ndarray | None = None,
    kv_begins: np.ndarray | None = None,
    cache_index: np.ndarray | None = None,
    page_table: np.ndarray | None = None,
    q_starts: np.ndarray | None = None,
    max_q_length: int = 0,
    options: AttentionOptions | None = None,
    return_lse: bool = False,
    split_units: int = 0,
    multiprocessors: int = SIMULATED_MULTIPROCESSORS,
    arch: str = OLDEST,
    check_hazards: HazardChecks = True,
    launches: int = 1,
    **launch_options: Any,
) -> ForwardSimulation:
    """Attention of (batch, heads, rows, head_dim) queries to a cache of keys and values; of the last of so many equal
    launches."""
    from flashwright.simulator.gpu import SimulatedGPU

    known = as_config(config)
    family = family_of(known)
    if family.launch_rules.values_in_keys and not np.array_equal(v, k[..., : v.shape[3]]):
        raise ValueError(f"v: {known} takes the first columns of k for values, which these are not")
    arch = family.target_for(known, arch)
    gpu = SimulatedGPU(arch)
    output = _nans_like(q) if q.shape[3] == v.shape[3] else np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
    lse = np.full(q.shape[:3], np.nan, np.float32) if return_lse else None
    tensors = [_upload(gpu, name, x) for name, x in (("q", q), ("k", k), ("v", v), ("out", output))]

    def place(numbers: np.ndarray | None) -> int:
        return 0 if numbers is None else gpu.to_device(np.ascontiguousarray(numbers, np.int32))

    if q_starts is not None:
        sequences = len(q_starts) - 1
    else:
        sequences = q.shape[0]
    cache = CacheView(
        sequences,
        kv_lengths=place(kv_lengths),
        kv_begins=place(kv_begins),
        cache_index=place(cache_index),
        page_table=place(page_table),
        pages_per_sequence=0 if page_table is None else page_table.shape[1],
        page_table_stride=0 if page_table is None else page_table.shape[1],
        q_starts=place(q_starts),
        max_q_length=max_q_length,
    )
    scratch = decode_scratch(
        known, tensors[0], tensors[1], cache, multiprocessors=multiprocessors, split_units=split_units
    )
    lse_address = 0 if lse is None else gpu.to_device(lse)
    zeros_address = gpu.to_device(np.zeros(scratch.zeros, np.int32))
    launch: DecodeLaunch = family.launch(
        known,
        *tensors,
        cache=cache,
        partials_address=gpu.to_device(np.full(scratch.partial_bytes // 4, np.nan, np.float32)),
        zeros_address=zeros_address,
        multiprocessors=multiprocessors,
        options=options or AttentionOptions(),
        lse_address=lse_address,
        split_units=split_units,
    )
    kernel = compile_kernel(known, arch, launch.variant)
    module = gpu.load(kernel.ptx)
    for _ in range(launches):
        gpu.write(tensors[3].address, _memory_of(output))  # nothing of a launch before is left
        run = module.launch(
            kernel.name,
            grid=launch.grid,
            block=(kernel.threads, 1, 1),
            shared_bytes=kernel.shared_bytes,
            args=[bytes(p) for p in launch.parameters],
            registers=kernel.registers,
            check_hazards=check_hazards,
            **launch_options,
        )
        if count := np.count_nonzero(gpu.to_host(zeros_address)):
            raise RuntimeError(f"{known} left {count} words that are not zero; the next launch needs all of them to be")
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
