// A forward kernel of the seed system's final shape: B_r = B_c = 64, four warps, d_head = 128, bf16, cp.async with eager
// loading of K and V, swizzled shared memory, Q kept in registers, softmax in base 2, O through shared memory and out in
// 128-bit stores with a cache hint.
#include <cuda_bf16.h>
#include <cstdint>

constexpr int kRows = 64, kHead = 128, kThreads = 128, kChunks = kHead / 8;

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Where a chunk of 8 elements lies: chunks of a row are permuted by the row's number.
__device__ __forceinline__ int place(int row, int chunk) { return (row * kChunks + (chunk ^ (row & 7))) * 8; }

__device__ __forceinline__ void load_async(const __nv_bfloat16 *global, __nv_bfloat16 *shared, int stride) {
#pragma unroll
  for (int i = 0; i < kRows * kChunks / kThreads; ++i) {
    const int row = (threadIdx.x + i * kThreads) / kChunks, chunk = threadIdx.x % kChunks;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(shared + place(row, chunk))),
                 "l"(global + row * stride + chunk * 8)
                 : "memory");
  }
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int n>
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory"); }

template <bool transposed>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const __nv_bfloat16 *p) {
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t packed(float low, float high) {
  const __nv_bfloat162 pair = __float22bfloat162_rn({low, high});
  return *reinterpret_cast<const uint32_t *>(&pair);
}

__device__ __forceinline__ void store_128_bits(__nv_bfloat16 *global, uint4 value) {
  const uint64_t low = value.x | uint64_t(value.y) << 32, high = value.z | uint64_t(value.w) << 32;
  asm volatile("{\n.reg .b128 whole;\nmov.b128 whole, {%1, %2};\n"
               "st.relaxed.sys.global.L1::no_allocate.b128 [%0], whole;\n}" ::"l"(global), "l"(low), "l"(high) : "memory");
}

// q, k, v, o: [heads, length, 128]; grid (length / 64, heads).
extern "C" __global__ void __launch_bounds__(kThreads) seed_forward(
    const __nv_bfloat16 *q, const __nv_bfloat16 *k, const __nv_bfloat16 *v, __nv_bfloat16 *o, int length, float scale) {
  extern __shared__ __align__(128) __nv_bfloat16 memory[];
  __nv_bfloat16 *const q_shared = memory, *const k_shared = memory + kRows * kHead, *const v_shared = k_shared + kRows * kHead;
  const int64_t head = int64_t(blockIdx.y) * length * kHead, first = int64_t(blockIdx.x) * kRows * kHead;
  q += head + first, o += head + first, k += head, v += head;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = length / kRows;

  load_async(q, q_shared, kHead), commit();
  load_async(k, k_shared, kHead), commit();
  wait<1>();
  __syncthreads();  // Q is there
  uint32_t q_fragments[kHead / 16][4];
#pragma unroll
  for (int i = 0; i < kHead / 16; ++i)
    ldmatrix<false>(q_fragments[i], q_shared + place(16 * warp + lane % 16, 2 * i + lane / 16));

  float out[kHead / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  const float factor = scale * 1.4426950408889634f;
  for (int step = 0; step < steps; ++step) {
    load_async(v + int64_t(step) * kRows * kHead, v_shared, kHead), commit();
    wait<1>();
    __syncthreads();  // K is there
    float scores[kRows / 8][4] = {};
#pragma unroll
    for (int i = 0; i < kHead / 16; ++i)
#pragma unroll
      for (int j = 0; j < kRows / 16; ++j) {
        uint32_t b[4];
        ldmatrix<false>(b, k_shared + place(16 * j + lane % 8 + 8 * (lane / 16), 2 * i + lane / 8 % 2));
        mma(scores[2 * j], q_fragments[i], b[0], b[1]);
        mma(scores[2 * j + 1], q_fragments[i], b[2], b[3]);
      }
    __syncthreads();  // everybody has read K: the next one may come
    if (step + 1 < steps) load_async(k + int64_t(step + 1) * kRows * kHead, k_shared, kHead);
    commit();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float maximum = largest[half];
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) maximum = fmaxf(maximum, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, 2));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, 1));
      const float correction = exp2f((largest[half] - maximum) * factor);
      largest[half] = maximum;
      total[half] *= correction;
#pragma unroll
      for (int j = 0; j < kHead / 8; ++j) out[j][2 * half] *= correction, out[j][2 * half + 1] *= correction;
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          scores[j][c] = exp2f(scores[j][c] * factor - maximum * factor);
          total[half] += scores[j][c];
        }
    }
    wait<1>();
    __syncthreads();  // V is there
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const uint32_t p[4] = {packed(scores[2 * i][0], scores[2 * i][1]), packed(scores[2 * i][2], scores[2 * i][3]),
                             packed(scores[2 * i + 1][0], scores[2 * i + 1][1]),
                             packed(scores[2 * i + 1][2], scores[2 * i + 1][3])};
#pragma unroll
      for (int j = 0; j < kHead / 16; ++j) {
        uint32_t b[4];
        ldmatrix<true>(b, v_shared + place(16 * i + lane % 16, 2 * j + lane / 16));
        mma(out[2 * j], p, b[0], b[1]);
        mma(out[2 * j + 1], p, b[2], b[3]);
      }
    }
    __syncthreads();  // everybody has read V: the next one may come
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] += __shfl_xor_sync(0xffffffff, total[half], 2);
    total[half] += __shfl_xor_sync(0xffffffff, total[half], 1);
#pragma unroll
    for (int j = 0; j < kHead / 8; ++j)
      *reinterpret_cast<uint32_t *>(q_shared + place(16 * warp + lane / 4 + 8 * half, j) + lane % 4 * 2) =
          packed(out[j][2 * half] / total[half], out[j][2 * half + 1] / total[half]);
  }
  __syncwarp();  // a warp stores the rows it has written itself
#pragma unroll
  for (int i = 0; i < 16 * kChunks / 32; ++i) {
    const int row = 16 * warp + (lane + i * 32) / kChunks, chunk = lane % kChunks;
    store_128_bits(o + row * kHead + chunk * 8, *reinterpret_cast<const uint4 *>(q_shared + place(row, chunk)));
  }
}
