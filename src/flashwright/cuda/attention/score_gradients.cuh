// The gradients of scores, from scores and the gradients of probabilities. Both are transposed: rows are keys, columns
// are queries, so that what belongs to a query belongs to a column.
//
// The probabilities follow from the scores and the log-sum-exp that the forward found: no maximum is searched for.
#pragma once
#include "attention/ranges.cuh"
#include "attention/rescaling.cuh"
#include "attention/soft_cap.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

// What is known of a block's query rows, in shared memory: log-sum-exps, and dot products of O and dO.
template <int rows> struct RowTerms {
    static constexpr int array_bytes = rows * sizeof(float), bytes = 2 * array_bytes;

    uint32 shared;

    DEVICE Pair lse(int row) const { return load_shared_8B(shared + row * sizeof(float)); }
    DEVICE Pair dot(int row) const { return load_shared_8B(shared + array_bytes + row * sizeof(float)); }
};

// `scale_log2` turns scores into powers of two; `capping_scale` is that of `Scores`.
struct ScoreGradients {
    // Turns scores S into probabilities. The columns' queries begin with row `first_row` of the terms. Capped scores stay
    // as they are: the slope of the cap is needed beside them.
    template <int rows, int row_tiles, int column_tiles>
    static DEVICE void exponentiate(float (&S)[row_tiles][column_tiles][4], const RowTerms<rows> &terms, int first_row,
                                    float scale_log2) {
        if constexpr (!variant::softcaps)
#pragma unroll
            for (int n = 0; n < column_tiles; ++n) {
                const Pair lse = terms.lse(first_row + mma_columns * n + accumulator_column());
#pragma unroll
                for (int m = 0; m < row_tiles; ++m)
                    exponentiate(S[m][n], lse, scale_log2);
            }
    }
    // The same of one tile.
    static DEVICE void exponentiate(float (&S)[accumulator_values], const Pair &lse, float scale_log2) {
#pragma unroll
        for (int i = 0; i < accumulator_values; ++i)
            S[i] = exp2_approx(S[i] * scale_log2 - lse.values[i % 2]);
    }

    // Turns gradients of probabilities into those of scores, but for the scale.
    template <int rows, int row_tiles, int column_tiles>
    static DEVICE void differentiate(float (&P)[row_tiles][column_tiles][4], float (&dP)[row_tiles][column_tiles][4],
                                     const RowTerms<rows> &terms, int first_row, float scale_log2,
                                     float capping_scale) {
#pragma unroll
        for (int n = 0; n < column_tiles; ++n) {
            const int row = first_row + mma_columns * n + accumulator_column();
            const Pair dot = terms.dot(row), lse = variant::softcaps ? terms.lse(row) : Pair{};
#pragma unroll
            for (int m = 0; m < row_tiles; ++m)
                differentiate(P[m][n], dP[m][n], lse, dot, scale_log2, capping_scale);
        }
    }
    // The same of one tile. The log-sum-exp is needed if scores are capped.
    static DEVICE void differentiate(float (&P)[accumulator_values], float (&dP)[accumulator_values], const Pair &lse,
                                     const Pair &dot, float scale_log2, float capping_scale) {
#pragma unroll
        for (int i = 0; i < accumulator_values; ++i) {
            float slope = 1;
            if constexpr (variant::softcaps) {
                slope = cap(P[i], capping_scale);
                P[i] = exp2_approx(P[i] * scale_log2 - lse.values[i % 2]);
            }
            dP[i] = P[i] * (dP[i] - dot.values[i % 2]) * slope;
        }
    }

    // Sets P and dS to zero where a query does not attend to a key, in the warps that have any such. A warp's rows start
    // at `first_key`, its columns at `first_query`.
    template <int row_tiles, int column_tiles>
    static DEVICE void mask(float (&P)[row_tiles][column_tiles][4], float (&dS)[row_tiles][column_tiles][4],
                            const Window &window, int first_key, int first_query) {
        constexpr int keys = mma_rows * row_tiles, queries = mma_columns * column_tiles;
        const bool cut_right = first_query < first_row(window, first_key + keys - 1);
        const bool cut_left = variant::masks_left && first_query + queries - 1 > first_key - window.left;
        if (!cut_right && !cut_left)
            return;
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                const int key = first_key + accumulator_row(m, half);
                // Relative to this lane's first column, so that comparisons are with constants.
                const int first = first_row(window, key) - first_query - accumulator_column();
                const int last = key - window.left - first_query - accumulator_column();
#pragma unroll
                for (int n = 0; n < column_tiles; ++n)
#pragma unroll
                    for (int i = 0; i < half_values; ++i) {
                        const int column = mma_columns * n + i;
                        if (column < first || (variant::masks_left && column > last))
                            P[m][n][2 * half + i] = dS[m][n][2 * half + i] = 0;
                    }
            }
    }

  private:
    // The first row that attends to a key; none does to keys behind the last.
    static DEVICE int first_row(const Window &window, int key) {
        constexpr int none = 0x7fffffff / 2;
        return key >= window.kv_length ? none : variant::masks_right ? key - window.right : -none;
    }

    // Caps a score, as the forward did; returns the slope of the cap there, 1 - tanh².
    static DEVICE float cap(float &score, float capping_scale) {
        score = soft_capped(score, capping_scale);
        return 1 - score * score;
    }
};
