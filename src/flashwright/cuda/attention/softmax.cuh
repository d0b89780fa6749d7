// The online softmax of one warp's rows.
//
// How it is computed is a policy, a struct of constants:
//   dtype             of the exponentials when they are an operand of the next product.
//   optimized         exp2, with the scale folded into one fused multiply-add; otherwise exp of scaled scores.
//   lazy_rescale      O is rescaled only when a row has outgrown its maximum, or a key dominates it.
//   mma_row_sum       The tensor cores add up the rows. They add exponentials that were rounded to 16 bits: right for
//                     dividing a product of the same by the sum, but too coarse for a log-sum-exp that others will use.
//   spreads_chains    Where registers allow it, dependent instructions are kept apart: two chains of maxima a row
//                     instead of one, reduced over the lanes when all are found, and exponentials added two tiles after
//                     they were requested.
//   rows_may_be_empty With a mask, a row may have no score yet, or none at all.
#pragma once
#include "attention/rescaling.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shuffle.cuh"
#include "tile/accumulator.cuh"

// Per row: the reference, which is the maximum score so far, and the sum of the exponentials relative to it. If lazy, the
// reference may be an earlier maximum, or above the maximum. A thread has two rows of each 16-row tile, the halves of an
// accumulator.
template <class Policy, int row_tiles_> struct OnlineSoftmax {
    static constexpr int row_tiles = row_tiles_;

    float row_max[row_tiles][halves];
    // Of half h at 2h. A thread's part of the sum, to be added over the four lanes of a row at the end; or the sum
    // itself, in all columns of an accumulator, if the tensor cores add.
    float row_sum[row_tiles][accumulator_values] = {};
    // What a score is multiplied by: log2(e)·scale for exp2, or the scale alone for exp.
    float scale;

    DEVICE explicit OnlineSoftmax(float softmax_scale)
        : scale(Policy::optimized ? softmax_scale * log2_e : softmax_scale) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
            row_max[m][0] = row_max[m][1] = negative_infinity;
    }

    // Turns the scores S into exponentials relative to the row maxima, to which O and the sums are rescaled. In the
    // first step there is nothing yet to rescale.
    template <bool first, int S_column_tiles, int O_column_tiles>
    DEVICE void step(float (&S)[row_tiles][S_column_tiles][4], float (&O)[row_tiles][O_column_tiles][4]) {
        float maximum[row_tiles][halves];
        find_maxima<first>(S, maximum);
        if constexpr (!first) {
            if (must_rescale(maximum))
                rescale(maximum, O);
        }
        exponentiate(S);
    }

    // The same while O is still being computed: returns what to multiply it by afterwards.
    template <bool first, int S_column_tiles>
    DEVICE Shrinkage<row_tiles> step(float (&S)[row_tiles][S_column_tiles][4]) {
        float maximum[row_tiles][halves];
        find_maxima<first>(S, maximum);
        Shrinkage<row_tiles> shrinkage{};
        if constexpr (!first) {
            shrinkage.needed = must_rescale(maximum);
            if (shrinkage.needed)
#pragma unroll
                for (int m = 0; m < row_tiles; ++m)
#pragma unroll
                    for (int half = 0; half < halves; ++half)
                        shrinkage.factor[m][half] = shrink_factor(m, half, maximum[m][half]);
        }
        exponentiate(S);
        return shrinkage;
    }

    // Adds the rows of P to the sums on the tensor cores, as P times a matrix of ones.
    template <class PFragments> DEVICE void add_row_sums(PFragments &P) {
        const uint32 one = pack_16bit<Policy::dtype>(1, 1), ones[2] = {one, one};
#pragma unroll
        for (int tile = 0; tile < PFragments::tiles; ++tile)
#pragma unroll
            for (int step = 0; step < PFragments::steps_per_tile; ++step)
#pragma unroll
                for (int m = 0; m < row_tiles; ++m)
                    mma_m16n8k16<Policy::dtype>(row_sum[m], P.block(tile, step, m), ones);
    }

    // Divides O by the row sums. Afterwards `row_sum` holds the sum over the whole row.
    template <int O_column_tiles> DEVICE void normalize(float (&O)[row_tiles][O_column_tiles][4]) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                float &sum = row_sum[m][2 * half];
                if constexpr (!Policy::mma_row_sum)
                    sum = quad_sum(sum);
                // A row that attends to no key is zero.
                scale_row(O[m], half, Policy::rows_may_be_empty && sum == 0 ? 0 : reciprocal_approx(sum));
            }
    }

    // log(sum of exp of the scaled scores) of a row, after `normalize`.
    DEVICE float log_sum_exp(int m, int half) const {
        float maximum = Policy::optimized ? row_max[m][half] * scale * ln_2 : row_max[m][half];
        return maximum + log2_approx(row_sum[m][2 * half]) * ln_2;
    }

  private:
    // How far above the maximum the reference of a row is put that has outgrown one: its scores rise in the order of
    // visiting, and will go on rising. Exponentials of bf16 may be so small, and where they are added as they were
    // rounded, none has to be one. A row's first reference is its maximum.
    static constexpr float log2_headroom =
        Policy::lazy_rescale && Policy::mma_row_sum && Policy::dtype == DType::BF16 ? 60 : 0;

    // By what differences of scores are multiplied in the exponent of 2; they are scaled already if not optimised.
    DEVICE float unit() const { return Policy::optimized ? scale : log2_e; }

    // What exponentials are relative to: the reference, or zero if all scores so far are minus infinity, for the
    // difference of two infinities is not a number.
    static DEVICE float finite(float maximum) {
        return Policy::rows_may_be_empty && maximum == negative_infinity ? 0 : maximum;
    }

    // Whether O has to be rescaled to the new maxima of the warp's rows: always; or, if lazy, only when one has outgrown
    // the old. Few do, so that maxima are reduced over the lanes only then; and the others stay as they are, so that no
    // row depends on its neighbours.
    DEVICE bool must_rescale(float (&maximum)[row_tiles][halves]) const {
        if constexpr (!Policy::lazy_rescale)
            return true;
        bool any = false;
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                any |= outgrown(m, half, maximum[m][half]);
        if (!__any_sync(all_lanes, any))
            return false;
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                // What dominates is for each thread to tell; of maxima that of the row will do.
                const float of_row = quad_max(maximum[m][half]);
                const bool grows = Policy::mma_row_sum ? outgrown(m, half, of_row)
                                                       : quad_any(outgrown(m, half, maximum[m][half]));
                maximum[m][half] = grows ? of_row : row_max[m][half];
            }
        return true;
    }

    // Whether one of a thread's scores is so far above what its row's exponentials are relative to that it might
    // overflow: fp16 itself, or fp32 when V is large, whose exponents bf16 has. Until then the old reference serves as
    // well: the final division cancels it. But where the sum is of exponentials before rounding, that of a key that
    // dominates the row should be exactly one, or its rounding shows in O: one that exceeds the thread's part of the
    // sum.
    DEVICE bool outgrown(int m, int half, float score) const {
        constexpr float log2_most = Policy::dtype == DType::BF16 ? 40 : 15;
        const float difference = (score - row_max[m][half]) * unit();
        const bool dominates =
            !Policy::mma_row_sum && difference > 0 && exp2_approx(difference) > row_sum[m][2 * half];
        return difference > log2_most || dominates;
    }

    template <int O_column_tiles>
    DEVICE void rescale(const float (&maximum)[row_tiles][halves], float (&O)[row_tiles][O_column_tiles][4]) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                scale_row(O[m], half, shrink_factor(m, half, maximum[m][half]));
    }

    // What makes values that are relative to a row's reference relative to the larger of it and `maximum`, which becomes
    // the reference. The row's sum is multiplied by it here.
    DEVICE float shrink_factor(int m, int half, float maximum) {
        float grown = fmaxf(maximum, row_max[m][half]);
        // Exactly one where nothing grows: the assembler fuses a product and the difference of it and another, which then
        // differ by a rounding. (The simulator executes PTX, which has them apart.)
        const bool stays = Policy::lazy_rescale && grown == row_max[m][half];
        if constexpr (log2_headroom > 0)
            if (!stays && row_max[m][half] != negative_infinity)
                grown += log2_headroom * reciprocal_approx(computed_from_here(unit()));
        const float shrink = stays ? 1 : exponential(row_max[m][half], finite(grown), finite(grown) * scale);
        row_sum[m][2 * half] *= shrink;
        row_max[m][half] = grown;
        return shrink;
    }

    // Of whole rows; or, if lazy, of a thread's scores, which may well be enough.
    template <bool first, int column_tiles>
    DEVICE void find_maxima(float (&S)[row_tiles][column_tiles][4], float (&maximum)[row_tiles][halves]) {
        constexpr bool of_whole_rows = first || !Policy::lazy_rescale;
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                maximum[m][half] = scaled_maximum(S[m], half);
                if constexpr (of_whole_rows && !Policy::spreads_chains)
                    maximum[m][half] = quad_max(maximum[m][half]);
            }
        if constexpr (of_whole_rows && Policy::spreads_chains)
            reduce_over_lanes(maximum);
        if constexpr (first)
#pragma unroll
            for (int m = 0; m < row_tiles; ++m)
#pragma unroll
                for (int half = 0; half < halves; ++half)
                    row_max[m][half] = maximum[m][half];
    }

    static DEVICE void reduce_over_lanes(float (&maximum)[row_tiles][halves]) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                maximum[m][half] = quad_max(maximum[m][half]);
    }

    // The maximum of a thread's scores of a row; without the optimised softmax, scales them on the way.
    template <int column_tiles> DEVICE float scaled_maximum(float (&S)[column_tiles][4], int half) const {
        constexpr int chains = Policy::spreads_chains ? 2 : 1;
        float maximum[chains];
#pragma unroll
        for (int chain = 0; chain < chains; ++chain)
            maximum[chain] = negative_infinity;
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
            for (int i = 0; i < half_values; ++i) {
                float &score = S[n][2 * half + i];
                if constexpr (!Policy::optimized)
                    score *= scale;
                maximum[i % chains] = fmaxf(maximum[i % chains], score);
            }
        return chains == 2 ? fmaxf(maximum[0], maximum[chains - 1]) : maximum[0];
    }

    // exp of a score relative to the row's maximum: one fused multiply-add and one exp2, if optimised.
    DEVICE float exponential(float score, float maximum, float maximum_times_scale) const {
        return Policy::optimized ? exp2_approx(score * scale - maximum_times_scale) : expf(score - maximum);
    }

    template <int column_tiles> DEVICE void exponentiate(float (&S)[row_tiles][column_tiles][4]) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                exponentiate_row(S[m], half, finite(row_max[m][half]), row_sum[m][2 * half]);
    }

    template <int column_tiles>
    DEVICE void exponentiate_row(float (&S)[column_tiles][4], int half, float maximum, float &sum) const {
        constexpr int delay = Policy::spreads_chains ? 2 : 0;
#pragma unroll
        for (int n = 0; n < column_tiles + delay; ++n) {
            if (n < column_tiles)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i)
                    S[n][i] = exponential(S[n][i], maximum, maximum * scale);
            if (!Policy::mma_row_sum && n >= delay)
                sum += S[n - delay][2 * half] + S[n - delay][2 * half + 1];
        }
    }
};
