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

// Of each half of the rows: what sums keep of themselves, and what they get of the accumulators.
struct Shares {
    float kept[halves] = {1, 1}, added[halves] = {1, 1};
};

// Adds 16 rows of accumulators to fp32 sums in global memory: the first `rows` of them and the first `columns` of their
// columns. A quad has 32 contiguous bytes of a row at a time; `at_once` pairs of a thread are under way together. The
// shares are found while the first are: sums of which nothing is kept may be anything.
template <int at_once, int column_tiles>
DEVICE void add_rows(char *sums, int64 row_stride_bytes, const float (&c)[column_tiles][4], int rows, int columns,
                     auto find_shares) {
    constexpr int pairs = halves * column_tiles;
    Shares shares;
#pragma unroll
    for (int begin = 0; begin < pairs; begin += at_once) {
        Pair known[at_once];
        const auto place = [&](int i) {
            return (float *)(sums + accumulator_row(0, i / column_tiles) * row_stride_bytes) + accumulator_column() +
                   mma_columns * (i % column_tiles);
        };
        const auto exists = [&](int i) {
            return i < pairs && accumulator_row(0, i / column_tiles) < rows && mma_columns * (i % column_tiles) < columns;
        };
#pragma unroll
        for (int i = 0; i < at_once; ++i)
            known[i] = exists(begin + i) ? load_global_8B(place(begin + i)) : Pair{};
        if (begin == 0)
            shares = find_shares();
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            if (!exists(begin + i))
                continue;
            const int half = (begin + i) / column_tiles, n = (begin + i) % column_tiles;
            const float kept = shares.kept[half], added = shares.added[half];
            Pair sum;
#pragma unroll
            for (int j = 0; j < 2; ++j)
                sum.values[j] = (kept == 0 ? 0 : kept * known[i].values[j]) + added * c[n][2 * half + j];
            store_global_8B(place(begin + i), sum);
        }
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

// Adds rows to fp32 sums or rounds and stores them, as a kernel `accumulates` or not.
template <DType dtype, bool accumulates, int at_once, int column_tiles>
DEVICE void write_rows(char *tensor, int64 row_stride_bytes, const float (&c)[column_tiles][4], int rows, int columns) {
    if constexpr (accumulates)
        add_rows<at_once>(tensor, row_stride_bytes, c, rows, columns, [] { return Shares{}; });
    else
        store_rows<dtype>(tensor, row_stride_bytes, c, rows, columns);
}
