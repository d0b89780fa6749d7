// A warp's rows of O from registers to global memory, without shared memory in between.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "types.cuh"

// Four lanes hold four words each; afterwards lane i has word i of each of the four, in their order.
DEVICE void transpose_in_quad(uint32 (&words)[4]) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (!(i & distance)) {
                uint32 &low = words[i], &high = words[i | distance];
                const bool upper = lane & distance;
                const uint32 received = __shfl_xor_sync(0xffffffff, upper ? low : high, distance);
                (upper ? low : high) = received;
            }
}

// Rounds 16 rows of accumulators and stores those of them that exist, 16 bytes a lane and 64 contiguous bytes a row at a
// time. `tensor` is the first row's first column.
template <int column_tiles>
DEVICE void store_rows(char *tensor, int64 row_stride_bytes, const float (&c)[column_tiles][4], int rows) {
    static_assert(column_tiles % 4 == 0);
    const int lane = threadIdx.x % 32;
    constexpr int columns = variant::pads_columns ? variant::head_dim : 8 * column_tiles;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        const bool row_exists = !variant::ragged_q || row < rows;
#pragma unroll
        for (int n = 0; n < column_tiles; n += 4) {
            Vector16B v;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                v.words[i] = pack_16bit<cfg::dtype>(c[n + i][2 * half], c[n + i][2 * half + 1]);
            transpose_in_quad(v.words);
            const int column = 8 * (n + lane % 4);
            if (row_exists && column < columns)
                store_global_16B(tensor + row * row_stride_bytes + 2 * column, v);
        }
    }
}
