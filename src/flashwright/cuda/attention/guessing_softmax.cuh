// The online softmax of one warp's 16 rows, with exponentials relative to a reference that is guessed to serve.
//
// Any reference serves from which no exponential overflows, for the final division cancels it. So most steps take
// exponentials relative to what was found in the first steps of a row, and search for no maxima. What they add up, which
// they must anyway, shows what the guess was worth:
//   up to `most`        Nothing is to be done.
//   up to `overflowing` The next step's reference is larger, by a power of two in the exponential; the sum, and O when
//                       this step is in it, are multiplied by its inverse, exactly.
//   above               The exponentials are lost. The scores are computed again, with care.
// A step with care searches for the maxima of its scores before it takes exponentials. It raises the references of rows
// that have none, of rows in their first blocks, and of those whose exponentials would overflow.
//
// What happens to a row depends on its own scores and its own position: where others make a warp do something, the row
// is multiplied by one.
//
// The sum is of exponentials before rounding, and divides a product of rounded ones. Where one key dominates a row, its
// rounding would remain in O, but for a reference that makes it exactly one. So where a step adds more than twice the
// sum so far, nearly all of it in every other tile of eight keys, what rounding adds to its largest exponential is added
// up too. The sum so far is a thread's part of the row's, or the largest part that one of its four threads had when a key
// dominated in its first blocks. The log-sum-exp is of the sum without.
//
// The policy, a struct of constants:
//   dtype             of the exponentials when they are an operand of the next product.
//   spreads_chains    Exponentials are added two tiles after they were requested, where registers allow it.
//   shares_dominance  The four threads of a row tell each other that a key dominates its first blocks.
//   rows_may_be_empty With a mask, a row may have no score yet, or none at all.
#pragma once
#include "attention/rescaling.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shuffle.cuh"
#include "tile/accumulator.cuh"

template <class Policy> struct GuessingSoftmax {
    static constexpr int row_tiles = 1;
    // Sums of a thread. In fp16 each exponential must fit in; in bf16 V needs exponents of fp32 too, and a reference may
    // lie above the scores by some, for scores that rise from block to block.
    static constexpr bool wide = Policy::dtype == DType::BF16;
    static constexpr float most = wide ? 0x1p40f : 0x1p6f, overflowing = wide ? 0x1p96f : 0x1p15f;
    static constexpr float log2_overflowing = wide ? 96 : 15;
    static constexpr int headroom = wide ? 24 : 0;

    // What a thread's exponentials of a row add up to in a step, of even and of odd tiles. Where the ones have so much more
    // of it than the others, one exponential may dominate the step.
    static constexpr float peak_ratio = 16;
    struct StepSum {
        float of_tiles[2];

        DEVICE float sum() const { return of_tiles[0] + of_tiles[1]; }
        DEVICE bool has_peak() const {
            return of_tiles[0] > peak_ratio * of_tiles[1] || of_tiles[1] > peak_ratio * of_tiles[0];
        }
    };
    struct StepSums {
        StepSum of[halves];
    };

    float reference[halves];     // in units of log2(e)·scale; minus infinity: no key so far
    float row_sum[halves] = {};  // of exponentials, before rounding: a thread's part
    float rounding[halves] = {}; // what rounding adds to it
    float largest_part[halves] = {}; // of a row's sum, of its four threads, when a key dominated in its first blocks
    float O_factor[halves] = {1, 1}; // what O, when the product under way has been added, is to be multiplied by
    bool rescales_O = false;     // whether any of a warp's rows is
    float scale;                 // log2(e)·scale: what turns exp into exp2

    DEVICE explicit GuessingSoftmax(float softmax_scale) : scale(softmax_scale * log2_e) {
        reference[0] = reference[1] = negative_infinity;
    }

    // Turns the scores of a row's first step into exponentials relative to their maximum, and adds them up.
    template <int column_tiles> DEVICE void first_step(float (&S)[1][column_tiles][4]) {
        bool dominant[halves];
#pragma unroll
        for (int half = 0; half < halves; ++half) {
            const float maximum = thread_maximum(S[0], half);
            reference[half] = quad_max(maximum) * scale;
            dominant[half] = add_with_care(exponentiate(S[0], half), half, maximum);
        }
        tell_rows(dominant);
    }

    // The same with care in further steps. Returns whether what has grown should be made small again.
    template <int column_tiles>
    DEVICE bool step_with_care(float (&S)[1][column_tiles][4], const bool (&in_first_blocks)[halves]) {
        bool any_raised = false, dominant[halves];
#pragma unroll
        for (int half = 0; half < halves; ++half) {
            const float maximum = thread_maximum(S[0], half);
            any_raised |= raise_reference(half, quad_max(maximum) * scale, in_first_blocks[half]);
            dominant[half] = add_with_care(exponentiate(S[0], half), half, maximum) && in_first_blocks[half];
        }
        tell_rows(dominant);
        rescales_O |= (bool)__any_sync(all_lanes, any_raised);
        return __any_sync(all_lanes, exceeds_most());
    }

    // Without care, and without adding them up.
    template <int column_tiles> DEVICE StepSums exponentiate(float (&S)[1][column_tiles][4]) const {
        return {exponentiate(S[0], 0), exponentiate(S[0], 1)};
    }
    static DEVICE bool overflows(const StepSums &sums) {
        return sums.of[0].sum() >= overflowing || sums.of[1].sum() >= overflowing;
    }

    // Adds them up, and returns the same. Few steps outweigh those before: only of these it matters whether an exponential
    // dominates, and largest ones are found without a branch for each row, in chains that do not wait for each other.
    template <int column_tiles> DEVICE bool accept(const StepSums &sums, const float (&S)[1][column_tiles][4]) {
        const bool outweigh[halves] = {outweighs(sums.of[0], 0), outweighs(sums.of[1], 1)};
        row_sum[0] += sums.of[0].sum();
        row_sum[1] += sums.of[1].sum();
        if (!__any_sync(all_lanes, outweigh[0] || outweigh[1] || exceeds_most()))
            return false;
        const bool any_grown = __any_sync(all_lanes, exceeds_most());
        const float largest[halves] = {largest_exponential(S[0], 0), largest_exponential(S[0], 1)};
#pragma unroll
        for (int half = 0; half < halves; ++half) {
            const float added = computed_from_here(rounding_of(largest[half]));
            rounding[half] += outweigh[half] && sums.of[half].has_peak() ? added : 0;
        }
        return any_grown;
    }

    // When the product that was under way is in O.
    template <int O_column_tiles> DEVICE void rescale(float (&O)[1][O_column_tiles][4]) {
        if (rescales_O)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                scale_row(O[0], half, O_factor[half]);
                O_factor[half] = 1;
            }
        rescales_O = false;
    }

    // From the next step on, what has grown is small again. All that O is to be multiplied by until then has been done.
    DEVICE void lift_references() {
#pragma unroll
        for (int half = 0; half < halves; ++half) {
            constexpr int bias = 127, mantissa_bits = 23;
            const float largest = quad_max(row_sum[half]);
            const int exponent = (__float_as_int(largest) >> mantissa_bits) - bias + headroom;
            if (largest > most) {
                shrink(half, __int_as_float((bias - exponent) << mantissa_bits)); // 2^-exponent
                reference[half] += exponent;
            }
        }
        rescales_O = true;
    }

    // Divides O by the row sums. Afterwards `row_sum` holds the sum over the whole row.
    template <int O_column_tiles> DEVICE void normalize(float (&O)[1][O_column_tiles][4]) {
#pragma unroll
        for (int half = 0; half < halves; ++half) {
            const float rounded_sum = quad_sum(row_sum[half] + rounding[half]);
            row_sum[half] = quad_sum(row_sum[half]);
            // A row that attends to no key is zero.
            scale_row(O[0], half, Policy::rows_may_be_empty && rounded_sum == 0 ? 0 : reciprocal_approx(rounded_sum));
        }
    }

    // log(sum of exp of the scaled scores) of a row, after `normalize`.
    DEVICE float log_sum_exp(int, int half) const { return (reference[half] + log2_approx(row_sum[half])) * ln_2; }

  private:
    // What exponentials are relative to while a row has no key: the difference of two infinities is not a number.
    static DEVICE float finite(float reference) {
        return Policy::rows_may_be_empty && reference == negative_infinity ? 0 : reference;
    }
    DEVICE float exponential(float score, float relative_to) const { return exp2_approx(score * scale - relative_to); }
    static DEVICE float rounding_of(float exponential) { return rounded<Policy::dtype>(exponential) - exponential; }
    // Whether a step adds more than twice the sum so far.
    DEVICE bool outweighs(const StepSum &found, int half) const {
        const float so_far = Policy::shares_dominance ? fmaxf(row_sum[half], largest_part[half]) : row_sum[half];
        return found.sum() > 2 * so_far;
    }
    DEVICE bool dominates(const StepSum &found, int half) const { return outweighs(found, half) && found.has_peak(); }
    // Of a thread's maximum and what its exponentials are. Returns whether the largest dominates.
    DEVICE bool add_with_care(const StepSum &found, int half, float maximum) {
        const bool dominant = dominates(found, half);
        rounding[half] += dominant ? rounding_of(exponential(maximum, finite(reference[half]))) : 0;
        row_sum[half] += found.sum();
        return dominant;
    }
    // The other threads of a row in whose first blocks a key dominates learn of it: a key that the row attends to alone,
    // such as its own, is near its end. Later ones are worth no exchange, as each thread of a row may have one anyway.
    DEVICE void tell_rows(const bool (&dominant)[halves]) {
        if (!Policy::shares_dominance || !__any_sync(all_lanes, dominant[0] || dominant[1]))
            return;
#pragma unroll
        for (int half = 0; half < halves; ++half) {
            const float part = quad_max(row_sum[half]);
            largest_part[half] = quad_any(dominant[half]) ? part : largest_part[half];
        }
    }
    DEVICE bool exceeds_most() const { return row_sum[0] > most || row_sum[1] > most; }
    // Whether the row had a smaller reference.
    DEVICE bool raise_reference(int half, float maximum, bool in_first_blocks) {
        const bool has_none = reference[half] == negative_infinity;
        const bool overflows = maximum - finite(reference[half]) >= log2_overflowing;
        const bool raises = maximum > reference[half] && (has_none || in_first_blocks || overflows);
        shrink(half, raises && !has_none ? exp2_approx(reference[half] - maximum) : 1);
        reference[half] = raises ? maximum : reference[half];
        return raises && !has_none;
    }
    template <int column_tiles> DEVICE StepSum exponentiate(float (&S)[column_tiles][4], int half) const {
        constexpr int delay = Policy::spreads_chains ? 2 : 0;
        const float relative_to = finite(reference[half]);
        StepSum found;
#pragma unroll
        for (int n = 0; n < column_tiles + delay; ++n) {
            if (n < column_tiles)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i)
                    S[n][i] = exponential(S[n][i], relative_to);
            if (n >= delay) {
                const float sum = S[n - delay][2 * half] + S[n - delay][2 * half + 1];
                found.of_tiles[n % 2] = n - delay < 2 ? sum : found.of_tiles[n % 2] + sum;
            }
        }
        return found;
    }
    DEVICE void shrink(int half, float factor) {
        row_sum[half] *= factor;
        rounding[half] *= factor;
        largest_part[half] *= factor;
        O_factor[half] *= factor;
    }
    // Of two chains: exponentials wait for it.
    template <int column_tiles> static DEVICE float thread_maximum(const float (&S)[column_tiles][4], int half) {
        float maximum[2] = {negative_infinity, negative_infinity};
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
            maximum[n % 2] = fmaxf(maximum[n % 2], fmaxf(S[n][2 * half], S[n][2 * half + 1]));
        return fmaxf(maximum[0], maximum[1]);
    }
    // Floats that are not negative are in the order of their bits, and integers have a maximum of three in one
    // instruction.
    template <int column_tiles> static DEVICE float largest_exponential(const float (&S)[column_tiles][4], int half) {
        int largest[2] = {0, 0};
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
            largest[n % 2] =
                max(max(largest[n % 2], __float_as_int(S[n][2 * half])), __float_as_int(S[n][2 * half + 1]));
        return __int_as_float(max(largest[0], largest[1]));
    }
};
