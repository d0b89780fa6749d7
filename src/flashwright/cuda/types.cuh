// Short names for the types that device code is written in, and the sizes that every GPU's instructions come in. No
// toolkit header is included anywhere.
#pragma once

using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

#define DEVICE __device__ __forceinline__

constexpr int warp_threads = 32;
constexpr uint32 all_lanes = 0xffffffff;
constexpr int warpgroup_threads = 128;

// Elements of the tensors have 16 bits; a register holds two of them.
constexpr int element_bytes = 2, register_bytes = 4;
// 32 banks of 4 bytes: what one access to shared memory moves.
constexpr int bank_line_bytes = 128;
// What one thread moves at a time between memories.
constexpr int vector_bytes = 16, vector_elements = vector_bytes / element_bytes;

// Tensor cores: `ldmatrix` moves 8×8 matrices; `mma` adds 16×16 · 16×8 to 16×8; `wgmma` has 64 rows.
constexpr int fragment = 8;
constexpr int mma_rows = 16, mma_columns = 8, mma_depth = 16;
constexpr int warpgroup_rows = 64;

struct alignas(vector_bytes) Vector16B {
    uint32 words[vector_bytes / register_bytes];
};

struct Pair {
    float values[2];
};

constexpr float negative_infinity = __builtin_bit_cast(float, 0xff800000);

// This thread's number in its warp.
DEVICE uint32 lane_index() { return threadIdx.x % warp_threads; }

constexpr DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
