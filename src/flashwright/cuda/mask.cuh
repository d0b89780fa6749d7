// Scores that a query row may not look at.
#pragma once
#include "sequence.cuh"
#include "softmax.cuh"

// Sets the scores outside each row's window to minus infinity, in the blocks that have any. A warp's rows start at
// `warp_row`, the block's keys at `kv_row`.
template <int row_tiles, int column_tiles>
DEVICE void apply_mask(float (&S)[row_tiles][column_tiles][4], const Window &window, int warp_row, int kv_row) {
    constexpr int rows = 16 * row_tiles, columns = 8 * column_tiles;
    const bool cut_right = (variant::masks_right || variant::ragged_kv) && kv_row + columns - 1 > window.last_key(warp_row);
    const bool cut_left = variant::masks_left && kv_row < window.first_key(warp_row + rows - 1);
    if (!cut_right && !cut_left)
        return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + 16 * m + 8 * half + lane / 4;
            // Relative to this lane's first column, so that comparisons are with constants.
            const int first = window.first_key(row) - kv_row - lane % 4 * 2;
            const int last = window.last_key(row) - kv_row - lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < column_tiles; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (8 * n + i > last || (variant::masks_left && 8 * n + i < first))
                        S[m][n][2 * half + i] = negative_infinity;
        }
}

// Soft-capping: the scores' hyperbolic tangent. tanh(x) = 1 - 2/(exp(2x) + 1), and the scale turns exp(2x) into exp2.
template <int row_tiles, int column_tiles>
DEVICE void cap_scores(float (&S)[row_tiles][column_tiles][4], float capping_scale) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                S[m][n][i] = 1 - 2 * reciprocal_approx(1 + exp2_approx(S[m][n][i] * capping_scale));
}
