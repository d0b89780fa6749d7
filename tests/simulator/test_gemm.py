"""A tiled, pipelined tensor-core GEMM: right and hazard-free as written, and every mutation of it is found."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from flashwright.simulator.errors import SimulationError
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.run import Run

from .tools import compile_cuda

# C[64×64] per block of 4 warps; tiles of A (64×32, row-major) and B (64×32, rows are columns of C), two stages.
GEMM = r"""
typedef unsigned u32;
#define SWIZZLE_STORE(row, chunk) ((row) * 64 + (((chunk) ^ (((row) >> 1) & 3)) * 16))
#define SWIZZLE_LOAD(row, chunk) SWIZZLE_STORE(row, chunk)
__device__ __forceinline__ void copy(u32 dst, const void *src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(dst), "l"(src) : "memory"); }
__device__ __forceinline__ void load4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory"); }
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); }
__device__ __forceinline__ void load_tile(u32 shared, const char *source, int row_bytes) {
    for (int i = 0; i < 2; ++i) {
        int chunk = threadIdx.x + 128 * i, row = chunk / 4, column = chunk % 4;
        copy(shared + SWIZZLE_STORE(row, column), source + row * row_bytes + column * 16);
    } }
extern "C" __global__ void gemm(float *C, const char *A, const char *B, int K, int N) {
    extern __shared__ __align__(128) char shared[];
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const char *a_rows = A + blockIdx.y * 64 * K * 2, *b_rows = B + blockIdx.x * 64 * K * 2;
    float acc[8][4] = {};
    load_tile(base, a_rows, K * 2); load_tile(base + 4096, b_rows, K * 2);
    asm volatile("cp.async.commit_group;" ::: "memory");
    #pragma unroll 1
    for (int k = 0; k < K / 32; ++k) {
        const u32 stage = base + (k & 1) * 8192, next = base + (~k & 1) * 8192;
        if (k + 1 < K / 32) {
            load_tile(next, a_rows + (k + 1) * 64, K * 2); load_tile(next + 4096, b_rows + (k + 1) * 64, K * 2);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group 1;" ::: "memory"); // K LOOP WAIT
        __syncthreads(); // TILES HAVE ARRIVED
        for (int kk = 0; kk < 2; ++kk) {
            u32 a[4], b[4][4];
            load4(a, stage + SWIZZLE_LOAD(warp * 16 + lane % 16, kk * 2 + lane / 16));
            for (int n = 0; n < 4; ++n)
                load4(b[n], stage + 4096 + SWIZZLE_LOAD(n * 16 + lane % 8 + lane / 16 * 8, kk * 2 + lane / 8 % 2));
            for (int n = 0; n < 8; ++n) mma(acc[n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
        __syncthreads(); // TILES ARE READ
    }
    for (int n = 0; n < 8; ++n)
        for (int i = 0; i < 4; ++i)
            C[(blockIdx.y * 64 + warp * 16 + lane / 4 + i / 2 * 8) * N + blockIdx.x * 64 + n * 8 + lane % 4 * 2 + i % 2]
                = acc[n][i];
}"""
M, N, K = 128, 64, 128


def multiply(source: str = GEMM, ptx: str | None = None, **options: object) -> tuple[np.ndarray, np.ndarray, Run]:
    """The kernel's result, the reference, and the run."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((M, K), (N, K)))
    gpu = SimulatedGPU()
    module = gpu.load(ptx or compile_cuda(source))
    c = gpu.to_device(np.zeros((M, N), np.float32))
    arguments = [c, gpu.to_device(a), gpu.to_device(b), np.int32(K), np.int32(N)]
    run = module.launch("gemm", (N // 64, M // 64), 128, 16384, arguments, **options)
    return gpu.to_host(c), a.astype(np.float64) @ b.astype(np.float64).T, run


def test_gemm_is_right_free_of_hazards_and_of_bank_conflicts() -> None:
    found, reference, run = multiply()
    np.testing.assert_allclose(found, reference, atol=1e-4)
    assert run.counters.bank_conflicts == 0
    assert run.counters.tensor_flops == 2 * M * N * K
    assert run.counters.max_async_groups_in_flight == 2
    assert run.counters.bytes_global_to_shared == 2 * (64 + 64) * K * 2
    assert run.counters.barriers == 2 * 2 * (K // 32)


def test_hazard_checks_do_not_change_the_result() -> None:
    checked, _, with_checks = multiply()
    unchecked, _, without = multiply(check_hazards=False)
    assert (checked == unchecked).all()
    assert with_checks.to_dict() == without.to_dict()


def test_without_swizzle_there_are_conflicts_but_no_hazards() -> None:
    source = GEMM.replace("(((chunk) ^ (((row) >> 1) & 3)) * 16)", "((chunk) * 16)")
    found, reference, run = multiply(source)
    np.testing.assert_allclose(found, reference, atol=1e-4)
    assert run.counters.bank_conflicts > 0


def mutated(pattern: str, replacement: str) -> str:
    source, count = re.subn(re.escape(pattern), replacement.replace("\\", r"\\"), GEMM)
    assert count == 1
    return source


@pytest.mark.parametrize(
    ("pattern", "replacement", "kind", "other"),
    [
        ('asm volatile("cp.async.wait_group 1;" ::: "memory"); // K LOOP WAIT', "", "async-copy", "cp.async"),
        ("cp.async.wait_group 1;", "cp.async.wait_group 2;", "async-copy", "cp.async"),
        ("__syncthreads(); // TILES HAVE ARRIVED", "", "async-copy", "cp.async"),
        ("__syncthreads(); // TILES ARE READ", "", "race", "ldmatrix"),
        ("a_rows + (k + 1) * 64", "a_rows + (k + 1) * 64 + 64 * 128 * 2", "out-of-bounds", None),
        ("a_rows + (k + 1) * 64", "a_rows + (k + 1) * 64 + 8", "misaligned", None),
        ("stage + 4096 + SWIZZLE_LOAD", "next + 4096 + SWIZZLE_LOAD", "async-copy", "cp.async"),
        ("chunk = threadIdx.x + 128 * i", "chunk = threadIdx.x + 64 * i", "async-copy", "cp.async"),
        ("i < 2; ++i) {\n        int chunk", "i < 1; ++i) {\n        int chunk", "uninitialised-shared", None),
        ("stage = base + (k & 1) * 8192", "stage = base + (k & 1) * 8192 + 4 * (k & 2)", "misaligned", None),
    ],
)  # fmt: skip
def test_mutations_of_the_source_are_named(pattern: str, replacement: str, kind: str, other: str | None) -> None:
    with pytest.raises(SimulationError) as caught:
        multiply(mutated(pattern, replacement))
    error = caught.value
    assert error.kind == kind
    assert error.source_line is not None and error.ptx_line is not None
    assert (error.other is None) == (other is None)
    if other is not None and error.other is not None:
        assert error.other.instruction.startswith(other)


@pytest.mark.parametrize("opcode", ["bar.sync", "cp.async.wait_group"])
def test_removing_any_synchronisation_from_the_ptx_is_found(opcode: str) -> None:
    lines = compile_cuda(GEMM).splitlines()
    places = [i for i, line in enumerate(lines) if line.strip().startswith(opcode)]
    assert places
    for place in places:
        with pytest.raises(SimulationError):
            multiply(ptx="\n".join([*lines[:place], "", *lines[place + 1 :]]))


def test_swizzle_on_one_side_only_is_wrong_and_conflicts() -> None:
    source = mutated(
        "#define SWIZZLE_LOAD(row, chunk) SWIZZLE_STORE(row, chunk)",
        "#define SWIZZLE_LOAD(row, chunk) ((row) * 64 + (chunk) * 16)",
    )
    found, reference, run = multiply(source)
    assert np.abs(found - reference).max() > 1
    conflicting = {item.opcode.split(".")[0] for item in run.per_instruction if item.counts.bank_conflicts}
    assert conflicting == {"ldmatrix"}
