// A warp's rows from registers to global memory, without shared memory in between.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "tile/accumulator.cuh"

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
                const uint32 received = __shfl_xor_sync(all_lanes, upper ? low : high, distance);
                (upper ? low : high) = received;
            }
}

// Rounds 16 rows of accumulators and stores the first `rows` of them and the first `columns` of their columns: 16 bytes
// a lane, 64 contiguous bytes a row at a time. `tensor` is the first row's first column.
template <DType dtype, int column_tiles>
DEVICE void store_rows(char *tensor, int64 row_stride_bytes, const float (&c)[column_tiles][4], int rows, int columns) {
    constexpr int tiles_per_store = 4; // one for each lane of a quad
    static_assert(column_tiles % tiles_per_store == 0);
#pragma unroll
    for (int half = 0; half < halves; ++half) {
        const int row = accumulator_row(0, half);
        const bool row_exists = row < rows;
#pragma unroll
        for (int n = 0; n < column_tiles; n += tiles_per_store) {
            Vector16B v;
#pragma unroll
            for (int i = 0; i < tiles_per_store; ++i)
                v.words[i] = pack_16bit<dtype>(c[n + i][2 * half], c[n + i][2 * half + 1]);
            transpose_in_quad(v.words);
            const int column = mma_columns * (n + lane_index() % tiles_per_store);
            if (row_exists && column < columns)
                store_global_16B(tensor + row * row_stride_bytes + column * element_bytes, v);
        }
    }
}
