"""Your own CUDA on the simulated GPU: NVRTC compiles it, the simulator finds the race, and the repair is right.

python examples/own_cuda.py

The kernel sums 128 numbers per thread block in shared memory. Its first version forgets the barrier between the steps.
"""

from __future__ import annotations

import numpy as np

from flashwright.compiler.nvrtc import compile_source
from flashwright.kernels.source import KernelSource
from flashwright.simulator import Run, SimulatedGPU, SimulationError

ROW_SUMS = """
extern "C" __global__ void row_sums(float *sums, const float *rows) {
    __shared__ float partial[128];
    partial[threadIdx.x] = rows[blockIdx.x * 128 + threadIdx.x];
    for (int stride = 64; stride > 0; stride /= 2) {
        BARRIER
        if (threadIdx.x < stride)
            partial[threadIdx.x] += partial[threadIdx.x + stride];
    }
    if (threadIdx.x == 0)
        sums[blockIdx.x] = partial[0];
}
"""


def simulate(text: str, rows: np.ndarray) -> tuple[np.ndarray, Run]:
    program = compile_source(KernelSource(text, (), "row_sums", "row_sums.cu"), "sm_80")
    print(f"compiled: {program.registers} registers, {program.spill_bytes} bytes spilled")
    gpu = SimulatedGPU("sm_80")
    sums = gpu.to_device(np.zeros(len(rows), np.float32))
    run = gpu.load(program.ptx).launch(program.name, grid=len(rows), block=128, args=[sums, gpu.to_device(rows)])
    return gpu.to_host(sums), run


def main() -> None:
    rows = np.random.default_rng(0).integers(0, 100, (4, 128)).astype(np.float32)
    try:
        simulate(ROW_SUMS.replace("BARRIER", ""), rows)
    except SimulationError as error:
        print(f"without the barrier: {str(error).splitlines()[0]}, {error.source_location}")
    sums, run = simulate(ROW_SUMS.replace("BARRIER", "__syncthreads();"), rows)
    assert np.array_equal(sums, rows.sum(axis=1))
    print(f"with it: right; {run.counters.barriers} barriers, {run.counters.bank_conflicts} bank conflicts")


if __name__ == "__main__":
    main()
