"""Your own PTX on the simulated GPU: results, counters, and an error that names a fault's place.

python examples/own_ptx.py

PTX of nvcc (`nvcc -ptx -lineinfo`), Triton or NVRTC will do. `flashwright simulate saxpy.ptx --grid 8 …` does
the same on the command line.
"""

from __future__ import annotations

import numpy as np

from flashwright.simulator import SimulatedGPU, SimulationError

SAXPY = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry saxpy(.param .u64 y, .param .u64 x, .param .f32 a)
{
    .reg .b32 %r<5>;
    .reg .b64 %rd<6>;
    .reg .f32 %f<5>;
    ld.param.u64 %rd1, [y];
    ld.param.u64 %rd2, [x];
    ld.param.f32 %f1, [a];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f2, [%rd5];
    ld.global.f32 %f3, [%rd4];
    fma.rn.f32 %f4, %f1, %f2, %f3;
    st.global.f32 [%rd4], %f4;
    ret;
}
"""


def main() -> None:
    n = 1024
    gpu = SimulatedGPU("sm_80")
    module = gpu.load(SAXPY)
    x, y = np.arange(n, dtype=np.float32), np.ones(n, np.float32)
    at_x, at_y = gpu.to_device(x), gpu.to_device(y)

    run = module.launch("saxpy", grid=n // 128, block=128, args=[at_y, at_x, np.float32(2)])
    assert np.array_equal(gpu.to_host(at_y), 2 * x + y)
    counters = run.counters
    print(f"right; {counters.executed} warp instructions, {counters.global_sectors} sectors of 32 bytes")

    try:  # one block too many
        module.launch("saxpy", grid=n // 128 + 1, block=128, args=[at_y, at_x, np.float32(2)])
    except SimulationError as error:
        print(f"{error.kind} in thread block {error.thread_block}, PTX line {error.ptx_line}")


if __name__ == "__main__":
    main()
