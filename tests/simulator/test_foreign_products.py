"""Products and sums that Triton compiled, with an instruction family each: right results, and no false alarm."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright.simulator import SimulatedGPU, SimulationError

from .hopper_tools import HEADER_90A
from .test_foreign_attention import ptx

M, N, K = 128, 128, 192
INTEGER = np.dtype(np.int32)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("name", "inputs", "output", "shared_bytes", "opcode"),
    [
        ("f16", F16, F16, 49152, "wgmma.mma_async.sync.aligned.m64n64k16.f16.f16.f16"),
        ("e4m3", E4M3, F32, 24576, "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"),
        ("s8", np.dtype(np.int8), INTEGER, 24576, "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8"),
        ("tf32", F32, F32, 98304, "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32"),
        ("cluster", F16, F32, 73728, "barrier.cluster.wait"),
        ("descriptors", F16, F32, 49176, "tensormap.replace.tile.box_dim.shared::cta.b1024.b32"),
    ],
)
def test_triton_products(name: str, inputs: np.dtype, output: np.dtype, shared_bytes: int, opcode: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(inputs) for shape in ((M, K), (N, K)))
    gpu = SimulatedGPU("sm_90a")
    module = gpu.load(ptx(f"triton_product_{name}"))
    c = gpu.to_device(np.zeros((M, N), output))
    block, blocks_of_cluster = (128, 2) if name == "cluster" else (64, 1)
    grid = (M // block * blocks_of_cluster, N // block)
    scratch = gpu.allocate(384 * grid[0] * grid[1])  # for three tensor maps of each block
    arguments: list[Any] = [gpu.to_device(a), gpu.to_device(b), c, *map(np.int32, (M, N, K)), scratch, 0]
    run = module.launch(module.kernels[0], grid, 128, shared_bytes, arguments, cluster=blocks_of_cluster)
    assert all(finding.kind == "mbarrier-fence" for finding in run.findings)
    assert any(executed.startswith(opcode) for executed in run.counters.instructions)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_array_equal(gpu.to_host(c).astype(np.float64), expected)


def test_triton_adds_vectors_atomically() -> None:
    x = np.random.default_rng(1).integers(-4, 5, (3, 512)).astype(F16)
    gpu = SimulatedGPU("sm_90a")
    module = gpu.load(ptx("triton_vector_atomics"))
    out = gpu.to_device(np.zeros(512, F16))
    run = module.launch(module.kernels[0], 3, 128, 0, [gpu.to_device(x), out, 0, 0])
    np.testing.assert_array_equal(gpu.to_host(out), x.sum(axis=0))
    assert any(".add.noftz.v4.f16" in opcode for opcode in run.counters.instructions)


HALVES = (
    HEADER_90A
    + """
.visible .entry k(.param .u64 out) {
.shared .align 1024 .b8 s[4096]; .reg .b64 %o, %d; .reg .b32 %t, %r<4>, %x; .reg .b16 %h<2>;
ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; mad.wide.u32 %o, %t, 4, %o;
mov.u32 %x, s; mad.lo.u32 %r3, %t, 16, %x; mov.b32 %r2, 0x3c003c00;
st.shared.v4.b32 [%r3], {%r2, %r2, %r2, %r2}; st.shared.v4.b32 [%r3+2048], {%r2, %r2, %r2, %r2};
shr.u32 %x, %x, 4; cvt.u64.u32 %d, %x; add.u64 %d, %d, 0x0000001000080000; mov.b32 %r0, 0; mov.b32 %r1, 0;
fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%r0, %r1}, %d, %d, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
mov.b32 {%h0, %h1}, %r0;
BEFORE
wgmma.wait_group.sync.aligned 0;
add.f16 %h0, %h0, %h1; cvt.u32.u16 %r3, %h0; st.global.b32 [%o], %r3; ret; }
"""
)


def test_pairs_of_accumulators_may_be_taken_apart_in_flight_but_not_used() -> None:
    """What Triton does before the wait; the assembler makes nothing of it."""

    def run(before: str) -> np.ndarray:
        gpu = SimulatedGPU("sm_90a")
        out = gpu.to_device(np.zeros(128, np.uint32))
        gpu.load(HALVES.replace("BEFORE", before)).launch("k", 1, 128, 0, [out])
        return gpu.to_host(out).astype(np.uint16).view(np.float16)

    assert (run("") == 32).all()  # two sums of sixteen ones
    with pytest.raises(SimulationError, match="has not been waited for") as caught:
        run("add.f16 %h0, %h0, %h1;")
    assert caught.value.kind == "wgmma"
