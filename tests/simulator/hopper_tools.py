"""What the tests of Hopper instructions share: PTX around one wgmma, and CUDA wrappers of one instruction each."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from flashwright.hardware.tensor_map import Swizzle
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.run import Run

from .tools import compile_cuda

HEADER_90A = ".version 8.5\n.target sm_90a\n.address_size 64\n"
THREADS = 128
BF16 = np.dtype(ml_dtypes.bfloat16)


def descriptor(start: int, leading: int, stride: int, swizzle: Swizzle, base_offset: int = 0) -> int:
    """A matrix descriptor, written down from the PTX ISA's table."""
    mode = {Swizzle.NONE: 0, Swizzle.B128: 1, Swizzle.B64: 2, Swizzle.B32: 3}[swizzle]
    return (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | base_offset << 49 | mode << 62


def swizzled(address: int, swizzle: Swizzle) -> int:
    """CUTLASS's Swizzle<b, 4, 3> of a byte address."""
    bits = {Swizzle.NONE: 0, Swizzle.B32: 1, Swizzle.B64: 2, Swizzle.B128: 3}[swizzle]
    return address ^ ((address >> 3) & (((1 << bits) - 1) << 4))


def place(
    image: np.ndarray, matrix: np.ndarray, start: int, leading: int, stride: int, swizzle: Swizzle, is_mn_major: bool
) -> None:
    """Write a [rows, k] matrix of 16-bit elements into a shared-memory image in one of CUTLASS's canonical layouts."""
    atom = max(swizzle.value, 16) // 2  # elements of a row of the pattern
    for (row, k), value in np.ndenumerate(matrix.view(np.uint16)):
        if not is_mn_major:
            line, along = row, k
            offset = line % 8 * 2 * atom + line // 8 * stride + along % atom * 2 + along // atom * leading
        elif swizzle is Swizzle.NONE:
            offset = k % 8 * 16 + k // 8 * leading + row % 8 * 2 + row // 8 * stride
        else:
            offset = k % 8 * 2 * atom + k // 8 * stride + row % atom * 2 + row // atom * leading
        address = swizzled(start + int(offset), swizzle)
        image[address // 2] = value


def wgmma_ptx(
    columns: int,
    dtype: str,
    image_bytes: int,
    *,
    a_in_registers: bool = False,
    options: str = "p, 1, 1, 0, 0",
    repeats: int = 1,
    scale_d: int = 0,
) -> str:
    """A kernel of one warpgroup: fills shared memory, multiplies, stores accumulator r of thread t at out[r][t].

    Accumulators start as 1000 + their number. Parameters: out, image, A's registers, descriptors of A and B.
    """
    count = columns // 2
    d = "{" + ", ".join(f"%d{i}" for i in range(count)) + "}"
    a = "{%a0, %a1, %a2, %a3}" if a_in_registers else "%desc_a"
    copies = [
        f"ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%image+{offset}];\n"
        f"st.shared.v4.b32 [%place+{offset}], {{%v0, %v1, %v2, %v3}};"
        for offset in range(0, image_bytes, THREADS * 16)
    ]
    lines = [
        ".visible .entry k(.param .u64 out, .param .u64 image, .param .u64 a, .param .u64 desc_a, .param .u64 desc_b)",
        "{",
        f".shared .align 1024 .b8 memory[{image_bytes}];",
        ".reg .b32 %v<4>, %a<4>, %t, %place; .reg .b64 %image, %out, %pa, %desc_a, %desc_b, %off; .reg .pred p;",
        f".reg .f32 %d<{count}>, %e<{count}>;",
        "ld.param.u64 %out, [out]; ld.param.u64 %image, [image]; ld.param.u64 %pa, [a];",
        "ld.param.u64 %desc_a, [desc_a]; ld.param.u64 %desc_b, [desc_b];",
        # Descriptors count from where shared memory begins, which is not at 0 on every GPU.
        "mov.u32 %place, memory; shr.u32 %place, %place, 4; cvt.u64.u32 %off, %place;",
        "add.u64 %desc_a, %desc_a, %off; add.u64 %desc_b, %desc_b, %off;",
        "mov.u32 %t, %tid.x; mul.wide.u32 %off, %t, 16; add.u64 %image, %image, %off; add.u64 %pa, %pa, %off;",
        "mov.u32 %place, memory; mad.lo.u32 %place, %t, 16, %place;",
        *copies,
        "ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%pa];",
        *(f"mov.f32 %d{i}, 0f{np.float32(1000 + i).view(np.uint32):08x};" for i in range(count)),
        "fence.proxy.async.shared::cta; bar.sync 0;",
        "wgmma.fence.sync.aligned;",
        f"mov.u32 %v0, {scale_d}; setp.ne.s32 p, %v0, 0;",
    ]
    product = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} {d}, {a}, %desc_b, {options};"
    lines += [product] * repeats
    lines += [
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        "mul.wide.u32 %off, %t, 4; add.u64 %out, %out, %off;",
        *(f"st.global.f32 [%out+{4 * THREADS * i}], %d{i};" for i in range(count)),
        "ret; }",
    ]
    return HEADER_90A + "\n".join(lines)


def run_wgmma(
    ptx: str,
    image: np.ndarray,
    columns: int,
    desc_a: int,
    desc_b: int,
    a: np.ndarray | None = None,
    gpu: SimulatedGPU | None = None,
) -> np.ndarray:
    """The [64, columns] accumulator after the kernel of `wgmma_ptx`."""
    gpu = gpu or SimulatedGPU("sm_90a")
    out = gpu.to_device(np.zeros((columns // 2, THREADS), np.float32))
    fragments = gpu.to_device(np.zeros((THREADS, 4), np.uint32) if a is None else a)
    gpu.load(ptx).launch("k", 1, THREADS, 0, [out, gpu.to_device(image), fragments, desc_a, desc_b])
    return matrix_of(gpu.to_host(out))


def matrix_of(registers: np.ndarray) -> np.ndarray:
    """Accumulators [register, thread] as the [64, N] matrix they stand for, element by element."""
    matrix = np.zeros((64, registers.shape[0] * 2), np.float32)
    for (register, thread), value in np.ndenumerate(registers):
        warp, lane = divmod(thread, 32)
        row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
        matrix[row, 8 * (register // 4) + 2 * (lane % 4) + register % 2] = value
    return matrix


def fragments_of(a: np.ndarray) -> np.ndarray:
    """A [64, 16] matrix of 16-bit elements as the four registers of each of 128 threads."""
    bits = a.view(np.uint16).astype(np.uint32)
    registers = np.zeros((THREADS, 4), np.uint32)
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        for register in range(4):
            row, column = 16 * warp + lane // 4 + 8 * (register % 2), 8 * (register // 2) + 2 * (lane % 4)
            registers[thread, register] = bits[row, column] | bits[row, column + 1] << 16
    return registers


CLUSTER_DESCRIPTORS = r"""
// Two blocks of a cluster multiply the same matrices of 16 bytes a row and core matrix; MASK is for their addresses.
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(float *out, const u32 *image) {
  __shared__ __align__(1024) u32 memory[1024];
  const u32 t = threadIdx.x;
  for (u32 i = t; i < 1024; i += 128) memory[i] = image[i];
  proxy_fence(); __syncthreads();
  const u64 layout = (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
  const u64 a = (u64)((addr(memory) & MASK) >> 4) | layout, b = (u64)((addr(memory + 512) & MASK) >> 4) | layout;
  float d[4] = {0, 0, 0, 0};
  fence(); mma(d, a, b, 0); commit(); finish<0>();
  for (int i = 0; i < 4; ++i) out[(blockIdx.x * 4 + i) * 128 + t] = d[i];
}
"""


def run_cluster_descriptors(image: np.ndarray, mask: int, gpu: SimulatedGPU | None = None) -> np.ndarray:
    """[rank, 64, 8] products of A at the start of 4096 bytes of bf16 and B in their middle."""
    gpu = gpu or SimulatedGPU("sm_90a")
    out = gpu.to_device(np.zeros((2, 4, THREADS), np.float32))
    module = gpu.load(compile_hopper(CLUSTER_DESCRIPTORS.replace("MASK", f"{mask:#x}u")))
    module.launch("k", 2, THREADS, 0, [out, gpu.to_device(image)])
    return np.array([matrix_of(registers) for registers in gpu.to_host(out)])


# CUDA: one wrapper per instruction -----------------------------------------------------------------------------
PRELUDE = r"""
typedef unsigned long long u64; typedef unsigned u32;
struct alignas(64) Map { char opaque[128]; };
#define D __device__ __forceinline__
D u32 addr(const void *p) { return (u32)__cvta_generic_to_shared(p); }
D void init(u32 b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(n) : "memory"); }
D void init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
D void arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory"); }
D void expect(u32 b, u32 n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(n) : "memory");
}
D void wait(u32 b, u32 parity) {
  asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@done bra DONE;\nbra AGAIN;\nDONE:\n}" :: "r"(b), "r"(parity) : "memory");
}
D void load2(u32 s, const Map &m, u32 b, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4}], [%2];"
               :: "r"(s), "l"(&m), "r"(b), "r"(x), "r"(y) : "memory");
}
D void store2(u32 s, const Map &m, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%1, {%2, %3}], [%0];"
               :: "r"(s), "l"(&m), "r"(x), "r"(y) : "memory");
}
D void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
D void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
D void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
D void bar(int id, int n) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory"); }
D void bar_arrive(int id, int n) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(n) : "memory"); }
D void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
D void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int n> D void finish() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(n) : "memory"); }
// Rows of 128 swizzled bytes.
D u64 desc(u32 s) { return (u64)(s >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
// 64×8 accumulators: four registers.
D void mma(float (&d)[4], u64 a, u64 b, int keep) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "r"(keep));
}
D void mma_registers(float (&d)[4], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
D bool elect() {
  u32 p;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(p));
  return p;
}
"""


def compile_hopper(source: str) -> str:
    return compile_cuda(PRELUDE + source, "sm_90a")


def run_cuda(
    source: str,
    block: int,
    args: list[object],
    gpu: SimulatedGPU,
    *,
    grid: int = 1,
    shared_bytes: int = 0,
    **options: object,
) -> Run:
    """Compile and launch the only kernel of a source."""
    module = gpu.load(compile_hopper(source))
    return module.launch(module.kernels[0], grid, block, shared_bytes, args, **options)  # type: ignore[arg-type]
