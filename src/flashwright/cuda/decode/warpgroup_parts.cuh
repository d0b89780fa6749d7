// Parts of results that lie in the accumulators of warpgroup products.
#pragma once
#include "decode/parts.cuh"
#include "ptx/shuffle.cuh"
#include "tile/accumulator.cuh"

// The maximum of a row, in powers of two, and its sum.
template <class Softmax> DEVICE Pair terms_of_row(const Softmax &softmax, int half) {
    const float sum = quad_sum(softmax.row_sum[0][2 * half]);
    return {softmax.row_max[0][half] * softmax.scale, sum};
}

// Calls `function(row, index, part)` for the parts of a warp's rows that a lane has after an exchange. `terms(half)` are
// those of a row; the warp's rows of the tile begin with `first_row`, its columns of the rows with `first_column`.
//
// Two lanes that are neighbours in a quad have two columns each of two tiles. They exchange: each has four of one.
template <int column_tiles, class Terms, class Function>
DEVICE void for_each_part(const float (&O)[column_tiles][accumulator_values], const Terms &terms, int first_row,
                          int first_column, const Function &function) {
    const bool odd = lane_index() % 2;
#pragma unroll
    for (int half = 0; half < halves; ++half) {
        const Pair of_row = terms(half);
        RowPart part;
        part.maximum = of_row.values[0];
        part.sum = of_row.values[1];
#pragma unroll
        for (int n = 0; n < column_tiles; n += 2) {
#pragma unroll
            for (int i = 0; i < half_values; ++i) {
                const float of_first = O[n][2 * half + i], of_second = O[n + 1][2 * half + i];
                const float received = __shfl_xor_sync(all_lanes, odd ? of_first : of_second, 1);
                part.O[i] = odd ? received : of_first;
                part.O[half_values + i] = odd ? of_second : received;
            }
            const int column = first_column + mma_columns * (n + odd) + lane_index() % 4 / 2 * RowPart::columns;
            function(first_row + accumulator_row(0, half), column / RowPart::columns, part);
        }
    }
}
