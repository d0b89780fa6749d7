// Scores: what a product q·k becomes before the softmax, element by element: capped, then masked. The scale is applied
// by the softmax, in the same instruction as its exponential.
//
// A user's function of (score, row, key) belongs between the cap and the mask, and its derivative, by which the
// backward multiplies the gradient of a score, beside the cap's.
#pragma once
#include "attention/ranges.cuh"
#include "attention/soft_cap.cuh"
#include "ptx/special_registers.cuh"
#include "tile/accumulator.cuh"

struct Scores {
    const Window &window;
    float capping_scale;

    // A warp's rows start at `first_query`, the block's keys at `first_key`.
    template <bool masked, int row_tiles, int column_tiles>
    DEVICE void finish(float (&S)[row_tiles][column_tiles][4], int first_query, int first_key) const {
        cap(S);
        if constexpr (masked)
            mask(S, first_query, first_key);
    }

    template <int row_tiles, int column_tiles> DEVICE void cap(float (&S)[row_tiles][column_tiles][4]) const {
        if constexpr (variant::softcaps)
#pragma unroll
            for (int m = 0; m < row_tiles; ++m)
#pragma unroll
                for (int n = 0; n < column_tiles; ++n)
#pragma unroll
                    for (int i = 0; i < accumulator_values; ++i)
                        S[m][n][i] = soft_capped(S[m][n][i], capping_scale);
    }

    // Sets the scores outside each row's window to minus infinity, in the warps that have any.
    template <int row_tiles, int column_tiles>
    DEVICE void mask(float (&S)[row_tiles][column_tiles][4], int first_query, int first_key) const {
        constexpr int rows = mma_rows * row_tiles, columns = mma_columns * column_tiles;
        const bool cut_right = first_key + columns - 1 > window.last_key(first_query);
        const bool cut_left = variant::masks_left && first_key < window.first_key(first_query + rows - 1);
        if (!cut_right && !cut_left)
            return;
        const uint32 lane = thread_index_again() % warp_threads;
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                const int row = first_query + accumulator_row(m, half, lane);
                // Relative to this lane's first column, so that comparisons are with constants.
                const int first = window.first_key(row) - first_key - accumulator_column(lane);
                const int last = window.last_key(row) - first_key - accumulator_column(lane);
#pragma unroll
                for (int n = 0; n < column_tiles; ++n)
#pragma unroll
                    for (int i = 0; i < half_values; ++i) {
                        const int column = mma_columns * n + i;
                        if (column > last || (variant::masks_left && column < first))
                            S[m][n][2 * half + i] = negative_infinity;
                    }
            }
    }
};
