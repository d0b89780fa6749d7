"""One bulk tensor copy, on the simulator or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashwright.hardware.tensor_map import TensorMap
from flashwright.simulator.gpu import SimulatedGPU

from .hopper_tools import run_cuda

# Copies a box to shared memory, shows shared memory as it is in `out`, and stores the box back by `target`.
COPY = r"""
#define OFFSET 0
extern "C" __global__ void k(const __grid_constant__ Map source, const __grid_constant__ Map target, uint4 *out,
                             int x, int y, int z, int w, int bytes, int stores) {
  extern __shared__ __align__(1024) char shared_memory[];
  __shared__ u64 bar;
  char *const s = shared_memory + OFFSET;
  const u32 b = addr(&bar), tile = addr(s);
  if (threadIdx.x == 0) { init(b, 1); init_fence(); }
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(b, bytes);
    asm volatile("cp.async.bulk.tensor.RANKd.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {COORDINATES}], [%2];"
                 :: "r"(tile), "l"(&source), "r"(b), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
  }
  wait(b, 0);
  for (int i = threadIdx.x; i < bytes / 16; i += 32) out[i] = ((uint4 *)s)[i];
  if (stores && threadIdx.x == 0) {
    asm volatile("cp.async.bulk.tensor.RANKd.global.shared::cta.tile.bulk_group [%1, {COORDINATES}], [%0];"
                 :: "r"(tile), "l"(&target), "r"(b), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
    bulk_commit();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
"""


def copy_source(rank: int) -> str:
    return COPY.replace("RANK", str(rank)).replace("COORDINATES", ", ".join(f"%{3 + axis}" for axis in range(rank)))


def tensor_map(array: np.ndarray, address: int, box: tuple[int, ...], **options: Any) -> TensorMap:
    """The tensor map of a C-ordered array; ``box`` is innermost first."""
    return TensorMap(address, array.dtype, array.shape[::-1], array.strides[-2::-1], box, **options)


def run_copy(
    array: np.ndarray,
    start: tuple[int, ...],
    box: tuple[int, ...],
    *,
    stores: bool = False,
    gpu: SimulatedGPU | None = None,
    change: tuple[str, str] = ("", ""),
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Shared memory after the copy, what a store of it left in a tensor of sevens, and the run."""
    gpu = gpu or SimulatedGPU("sm_90a")
    source = tensor_map(array, gpu.to_device(array), box, **options)
    sevens = np.full_like(array, 7)
    target_address = gpu.to_device(sevens)
    target = tensor_map(array, target_address, box, **options)
    out = gpu.to_device(np.zeros(source.box_bytes, np.uint8))
    coordinates = [np.int32(value) for value in (*start, 0, 0, 0)[:4]]
    args = [source, target, out, *coordinates, np.int32(source.box_bytes), np.int32(stores)]
    kernel = copy_source(array.ndim).replace(*change)
    run = run_cuda(kernel, 32, args, gpu, shared_bytes=source.box_bytes + 1024)
    return gpu.to_host(out), gpu.to_host(target_address), run


CASES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    # shape (C order), coordinates and box (innermost first)
    ((24, 64), (0, 0), (64, 16)),
    ((24, 64), (0, 16), (64, 16)),  # rows beyond the end
    ((24, 40), (16, -4), (64, 16)),  # columns beyond the end, rows before the start
    ((24, 40), (-8, 20), (32, 8)),
    ((3, 10, 64), (0, 6, 1), (64, 8, 2)),
    ((3, 10, 32), (0, 6, 2), (32, 4, 4)),
    ((2, 3, 9, 64), (0, 5, 2, 1), (64, 8, 1, 1)),
    ((2, 3, 9, 96), (64, 5, 1, 1), (64, 4, 2, 2)),
]
