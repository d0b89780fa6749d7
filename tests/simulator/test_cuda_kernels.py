"""Small CUDA C kernels, compiled by NVRTC, compute what they say."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from flashwright.simulator.errors import SimulationError
from flashwright.simulator.gpu import SimulatedGPU

from .tools import compile_cuda, launch


def test_vector_sum_with_a_partial_last_block() -> None:
    ptx = compile_cuda("""
    extern "C" __global__ void add(float *out, const float *a, const float *b, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = a[i] + b[i];
    }""")
    a, b = np.random.default_rng(0).standard_normal((2, 1000)).astype(np.float32)
    outputs = {"out": np.zeros(1000, np.float32)}
    launch(ptx, 96, outputs, a, b, np.int32(1000), grid=11)
    assert (outputs["out"] == a + b).all()


def test_block_reduction_with_shuffles_and_shared_memory() -> None:
    ptx = compile_cuda("""
    extern "C" __global__ void reduce(float *out, const float *in) {
        __shared__ float partial[8];
        float v = in[blockIdx.x * blockDim.x + threadIdx.x];
        for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
        __syncthreads();
        if (threadIdx.x < 32) {
            v = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0.f;
            for (int d = 4; d; d >>= 1) v += __shfl_down_sync(~0u, v, d);
            if (threadIdx.x == 0) out[blockIdx.x] = v;
        }
    }""")
    data = np.arange(5 * 256, dtype=np.float32)
    outputs = {"out": np.zeros(5, np.float32)}
    run = launch(ptx, 256, outputs, data, grid=5)
    assert (outputs["out"] == data.reshape(5, 256).sum(axis=1)).all()
    assert run.counters.barriers == 5


def test_divergent_loops_and_branches() -> None:
    ptx = compile_cuda("""
    extern "C" __global__ void collatz(int *out) {
        int start = blockIdx.x * blockDim.x + threadIdx.x + 1, n = start, steps = 0;
        while (n != 1) {
            if (n % 2) n = 3 * n + 1; else n /= 2;
            ++steps;
            if (steps > 300) break;
        }
        out[start - 1] = steps;
    }""")
    outputs = {"out": np.zeros(256, np.int32)}
    launch(ptx, 64, outputs, grid=4)

    def steps(n: int) -> int:
        count = 0
        while n != 1:
            n = 3 * n + 1 if n % 2 else n // 2
            count += 1
        return count

    assert outputs["out"].tolist() == [steps(n) for n in range(1, 257)]


def test_branches_meet_again_after_both_sides() -> None:
    ptx = compile_cuda("""
    extern "C" __global__ void meet(int *out, const int *in) {
        int v = in[threadIdx.x], r;
        if (v % 2) { r = 1; for (int i = 0; i < v; ++i) r = r * 3 + i; } else { r = v; while (r > 10) r -= 7; }
        unsigned together = __activemask();
        out[threadIdx.x] = together == ~0u ? r : -1;
    }""")
    outputs = {"out": np.zeros(32, np.int32)}
    launch(ptx, 32, outputs, np.arange(32, dtype=np.int32))
    assert -1 not in outputs["out"]


def test_switch_through_a_jump_table() -> None:
    ptx = """.version 8.0
    .target sm_80
    .address_size 64
    .visible .entry k(.param .u64 out) {
        .reg .b32 %r<4>; .reg .b64 %rd<3>;
        mov.u32 %r1, %tid.x;
        and.b32 %r2, %r1, 3;
        ts: .branchtargets A, B, C, A;
        brx.idx %r2, ts;
        A: mov.u32 %r3, 10; bra END;
        B: mov.u32 %r3, 20; bra END;
        C: mov.u32 %r3, 30;
        END: ld.param.u64 %rd1, [out]; mad.wide.u32 %rd2, %r1, 4, %rd1; st.global.u32 [%rd2], %r3;
        ret;
    }"""
    outputs = {"out": np.zeros(8, np.uint32)}
    launch(ptx, 8, outputs)
    assert outputs["out"].tolist() == [10, 20, 30, 10] * 2


def test_device_function_calls_and_local_arrays() -> None:
    ptx = compile_cuda("""
    __device__ __noinline__ float weighted(const float *values, int n, float w) {
        float r = 0; for (int i = 0; i < n; ++i) r += values[i] * w; return r;
    }
    extern "C" __global__ void k(float *out, int n) {
        float local[6];
        for (int i = 0; i < 6; ++i) local[i] = threadIdx.x + i;
        float r = -1.f;
        if (threadIdx.x % 3) r = weighted(local, threadIdx.x % n, 2.f) + weighted(local, 1, 1.f);
        out[threadIdx.x] = r;
    }""")
    assert "call" in ptx and ".local" in ptx
    outputs = {"out": np.zeros(40, np.float32)}
    run = launch(ptx, 40, outputs, np.int32(6))
    expected = [2.0 * sum(t + i for i in range(t % 6)) + t if t % 3 else -1.0 for t in range(40)]
    assert outputs["out"].tolist() == expected
    assert run.counters.bytes_registers_to_local > 0


def test_predicated_call_skips_the_callee() -> None:
    ptx = """.version 8.0
    .target sm_80
    .address_size 64
    .func (.param .b32 result) twice(.param .b32 value) {
        .reg .b32 %r<3>;
        ld.param.b32 %r1, [value]; add.u32 %r2, %r1, %r1; st.param.b32 [result], %r2; ret;
    }
    .visible .entry k(.param .u64 out) {
        .reg .b32 %r<4>; .reg .b64 %rd<3>; .reg .pred %p<3>;
        mov.u32 %r1, %tid.x;
        setp.gt.u32 %p1, %r1, 4; setp.gt.u32 %p2, %r1, 1000;
        { .param .b32 a; .param .b32 b;
          st.param.b32 [a], %r1; st.param.b32 [b], 7;
          @%p1 call (b), twice, (a);
          @%p2 call (b), twice, (a);
          ld.param.b32 %r2, [b]; }
        ld.param.u64 %rd1, [out]; mad.wide.u32 %rd2, %r1, 4, %rd1; st.global.u32 [%rd2], %r2;
        ret;
    }"""
    outputs = {"out": np.zeros(8, np.uint32)}
    launch(ptx, 8, outputs)
    assert outputs["out"].tolist() == [7] * 5 + [10, 12, 14]


def test_constants_module_variables_and_structures_by_value() -> None:
    ptx = compile_cuda("""
    struct Arguments { float *out; int n; float scale; short pair[2]; };
    __constant__ float table[4] = {1.f, 2.f, 4.f, 8.f};
    __device__ int counter = 5;
    __device__ float *pointer_to_nowhere;
    extern "C" __global__ void k(const __grid_constant__ Arguments a, double d) {
        a.out[threadIdx.x] = table[threadIdx.x % 4] * a.scale + a.pair[threadIdx.x % 2] + counter + (float)d + a.n;
        if (threadIdx.x == 0) counter = 9;
    }""")
    gpu = SimulatedGPU()
    module = gpu.load(ptx)
    out = gpu.to_device(np.zeros(8, np.float32))
    arguments = struct.pack("<Qifhh4x", out, 3, 0.5, -7, 11)
    run = module.launch("k", 1, 8, 0, [arguments, np.float64(0.25)])
    expected = [2.0 ** (t % 4) * 0.5 + (-7, 11)[t % 2] + 5 + 0.25 + 3 for t in range(8)]
    assert gpu.to_host(out).tolist() == expected
    assert gpu.memory.read(module.address_of("counter"), 4) == struct.pack("<i", 9)
    assert run.kernel == "k"


def test_generic_addresses_reach_every_space() -> None:
    ptx = compile_cuda("""
    __constant__ int constant_value[2] = {100, 200};
    __device__ __noinline__ int through(const int *p) { return *p + 1; }
    extern "C" __global__ void k(int *out, const int *in) {
        __shared__ int shared_value[32];
        int local_value[4] = {(int)threadIdx.x, 1, 2, 3};
        shared_value[threadIdx.x] = 1000 + threadIdx.x;
        const int *p;
        switch (threadIdx.x % 4) {
        case 0: p = &shared_value[threadIdx.x]; break;
        case 1: p = &in[threadIdx.x]; break;
        case 2: p = &local_value[in[0] + threadIdx.x % 4]; break;
        default: p = &constant_value[threadIdx.x & 1]; break;
        }
        out[threadIdx.x] = through(p);
    }""")
    outputs = {"out": np.zeros(32, np.int32)}
    launch(ptx, 32, outputs, np.arange(0, 320, 10, dtype=np.int32))
    expected = [(1000 + t, 10 * t, 2, 200)[t % 4] + 1 for t in range(32)]
    assert outputs["out"].tolist() == expected


def test_histogram_with_shared_and_global_atomics() -> None:
    ptx = compile_cuda("""
    extern "C" __global__ void histogram(int *out, int *order, const int *in) {
        __shared__ int bins[16];
        if (threadIdx.x < 16) bins[threadIdx.x] = 0;
        __syncthreads();
        order[blockIdx.x * blockDim.x + threadIdx.x] =
            atomicAdd(&bins[in[blockIdx.x * blockDim.x + threadIdx.x]], 1);
        __syncthreads();
        if (threadIdx.x < 16) atomicAdd(&out[threadIdx.x], bins[threadIdx.x]);
    }""")
    data = np.random.default_rng(3).integers(0, 16, 512).astype(np.int32)
    outputs = {"out": np.zeros(16, np.int32), "order": np.zeros(512, np.int32)}
    launch(ptx, 128, outputs, data, grid=4)
    assert (outputs["out"] == np.bincount(data, minlength=16)).all()
    first = data[:128]
    assert outputs["order"][:128].tolist() == [int((first[:i] == first[i]).sum()) for i in range(128)]


@pytest.mark.parametrize(
    ("call", "reference"),
    [
        ("atomicMax(&out[0], (int)threadIdx.x * 3 % 50)", max(t * 3 % 50 for t in range(64))),
        ("atomicMin(&out[0], -(int)threadIdx.x)", -63),
        ("atomicXor(&out[0], (int)threadIdx.x)", 0),
        ("atomicOr(&out[0], (int)threadIdx.x)", 63),
        ("atomicExch(&out[0], (int)threadIdx.x)", 63),
        ("atomicInc((unsigned *)&out[0], 9u)", 64 % 10),
        ("atomicCAS(&out[0], (int)threadIdx.x, (int)threadIdx.x + 1)", 64),
    ],
)
def test_atomics_in_thread_order(call: str, reference: int) -> None:
    ptx = compile_cuda(f'extern "C" __global__ void k(int *out) {{ {call}; }}')
    outputs = {"out": np.zeros(1, np.int32)}
    launch(ptx, 64, outputs)
    assert outputs["out"][0] == reference


def test_floating_point_atomics() -> None:
    ptx = compile_cuda("""extern "C" __global__ void k(float *f, double *d) {
        atomicAdd(f, 0.5f); atomicAdd(d, 0.25); }""")
    outputs = {"f": np.zeros(1, np.float32), "d": np.zeros(1)}
    launch(ptx, 96, outputs, grid=2)
    assert outputs["f"][0] == 96 and outputs["d"][0] == 48


def test_a_spin_lock_makes_progress() -> None:
    ptx = compile_cuda("""
    extern "C" __global__ void k(int *count, int *lock) {
        bool done = false;
        while (!done) {
            if (atomicCAS(lock, 0, 1) == 0) {
                *(volatile int *)count += 1; __threadfence(); atomicExch(lock, 0); done = true;
            }
        }
    }""")
    outputs = {"count": np.zeros(1, np.int32), "lock": np.zeros(1, np.int32)}
    launch(ptx, 40, outputs)
    assert outputs["count"][0] == 40


def test_threads_that_spin_let_others_run() -> None:
    # The waiting warps stand at lower addresses than the one they wait for, in a chain.
    ptx = compile_cuda("""
    extern "C" __global__ void k(int *out, volatile int *flags) {
        int warp = threadIdx.x / 32;
        if (warp == 0) while (flags[1] == 0);
        if (warp == 1) while (flags[2] == 0);
        if (warp == 2) { __threadfence(); }
        flags[warp] = 1;
        out[threadIdx.x] = warp;
    }""")
    outputs = {"out": np.full(96, -1, np.int32), "flags": np.zeros(3, np.int32)}
    launch(ptx, 96, outputs)
    assert outputs["out"].tolist() == [t // 32 for t in range(96)]


def test_blocks_with_different_trip_counts_and_barriers() -> None:
    ptx = compile_cuda("""
    extern "C" __global__ void k(int *out) {
        __shared__ int s[64];
        int v = threadIdx.x;
        for (int i = 0; i < blockIdx.x + 1; ++i) {
            s[threadIdx.x] = v; __syncthreads(); v = s[(threadIdx.x + 1) % 64]; __syncthreads();
        }
        out[blockIdx.x * 64 + threadIdx.x] = v; }""")
    outputs = {"out": np.zeros(4 * 64, np.int32)}
    run = launch(ptx, 64, outputs, grid=4)
    assert outputs["out"].tolist() == [(t + b + 1) % 64 for b in range(4) for t in range(64)]
    assert run.counters.barriers == 2 * (1 + 2 + 3 + 4)


def test_early_exit_before_a_barrier() -> None:
    ptx = compile_cuda("""
    extern "C" __global__ void k(int *out, int n) {
        __shared__ int s[128];
        if (threadIdx.x >= n) return;
        s[threadIdx.x] = threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = s[(threadIdx.x + 1) % n];
    }""")
    outputs = {"out": np.zeros(128, np.int32)}
    launch(ptx, 128, outputs, np.int32(64))
    assert outputs["out"][:64].tolist() == [(t + 1) % 64 for t in range(64)]


def test_wide_integers_and_doubles() -> None:
    ptx = compile_cuda("""
    extern "C" __global__ void k(unsigned long long *out, double *d, unsigned long long m, long long n) {
        unsigned long long x = threadIdx.x * 0x123456789abcdefull + 77;
        out[threadIdx.x] = x % m + __umul64hi(x, m) + (unsigned long long)((long long)x / n);
        d[threadIdx.x] = sqrt((double)x) / 3.0 + (double)(x >> 3);
    }""")
    outputs = {"out": np.zeros(32, np.uint64), "d": np.zeros(32)}
    m, n = 1_000_003, -12345
    launch(ptx, 32, outputs, np.uint64(m), np.int64(n))
    for t in range(32):
        x = (t * 0x123456789ABCDEF + 77) % 2**64
        signed = x - 2**64 if x >> 63 else x
        quotient = abs(signed) // abs(n) * (1 if (signed < 0) == (n < 0) else -1)
        assert int(outputs["out"][t]) == (x % m + (x * m >> 64) + quotient) % 2**64
        assert math.isclose(outputs["d"][t], math.sqrt(x) / 3 + float(x >> 3), rel_tol=1e-15)


def test_three_dimensional_grids_and_blocks() -> None:
    ptx = compile_cuda("""
    extern "C" __global__ void k(int *out) {
        int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        out[b * blockDim.x * blockDim.y * blockDim.z + t] = b * 1000 + t;
    }""")
    gpu = SimulatedGPU()
    out = gpu.to_device(np.zeros((2 * 3 * 4, 60), np.int32))
    gpu.load(ptx).launch("k", (4, 3, 2), (5, 4, 3), 0, [out])
    expected = np.arange(24)[:, None] * 1000 + np.arange(60)
    assert (gpu.to_host(out) == expected).all()


def test_many_blocks_run_in_several_waves() -> None:
    ptx = compile_cuda('extern "C" __global__ void k(int *out) { if (threadIdx.x == 5) out[blockIdx.x] = blockIdx.x; }')
    outputs = {"out": np.zeros(200, np.int32)}
    run = launch(ptx, 128, outputs, grid=200)
    assert outputs["out"].tolist() == list(range(200))
    assert run.counters.instructions["ret"] == 200 * 4


def test_trap_stops_the_run() -> None:
    ptx = compile_cuda('extern "C" __global__ void k(int *out) { if (threadIdx.x == 37) __trap(); out[0] = 1; }')
    with pytest.raises(SimulationError) as caught:
        launch(ptx, 64, {"out": np.zeros(1, np.int32)})
    assert caught.value.kind == "trap"
    assert (caught.value.warp, caught.value.lane) == (1, 5)


def test_an_endless_loop_is_reported() -> None:
    ptx = compile_cuda('extern "C" __global__ void k(volatile int *flag) { while (*flag == 0); }')
    gpu = SimulatedGPU()
    with pytest.raises(SimulationError) as caught:
        gpu.load(ptx).launch("k", 1, 32, 0, [gpu.to_device(np.zeros(1, np.int32))], step_limit=20_000)
    assert caught.value.kind == "deadlock"
