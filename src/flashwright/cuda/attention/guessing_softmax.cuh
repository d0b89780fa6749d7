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
// rounding would remain in O, but for a reference that makes it exactly one. So where a step adds more than twice a
// thread's sum so far, what rounding adds to its largest exponential is added up too. The log-sum-exp is of the sum
// without.
//
// The policy, a struct of constants:
//   dtype             of the exponentials when they are an operand of the next product.
//   spreads_chains    Exponentials are added two tiles after they were requested, where registers allow it.
//   rows_may_be_empty With a mask, a row may have no score yet, or none at all.
#pragma once
#include "attention/rescaling.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/shuffle.cuh"
#include "tile/accumulator.cuh"

template <class Policy> struct GuessingSoftmax {
    static constexpr int row_tiles = 1;
    // Sums of a thread. In fp16 each exponential must fit in; in bf16 V needs exponents of fp32 too, and a reference may
    // lie above the scores by some, for scores that rise from block to block.
    static constexpr bool wide = Policy::dtype == DType::BF16;
    static constexpr float most = wide ? 0x1p40f : 0x1p6f, overflowing = wide ? 0x1p96f : 0x1p15f;
    static constexpr int headroom = wide ? 24 : 0;

    using StepSums = float[halves];

    float reference[halves];     // in units of log2(e)·scale; minus infinity: no key so far
    float row_sum[halves] = {};  // of exponentials, before rounding: a thread's part
    float rounding[halves] = {}; // what rounding adds to it
    float O_factor[halves] = {1, 1}; // what O, when the product under way has been added, is to be multiplied by
    bool rescales_O = false;     // whether any of a warp's rows is
    float scale;                 // log2(e)·scale: what turns exp into exp2

    DEVICE explicit GuessingSoftmax(float softmax_scale) : scale(softmax_scale * log2_e) {
        reference[0] = reference[1] = negative_infinity;
    }

    // Turns the scores of a row's first step into exponentials relative to their maximum, and adds them up.
    template <int column_tiles> DEVICE void first_step(float (&S)[1][column_tiles][4]) {
#pragma unroll
        for (int half = 0; half < halves; ++half) {
            const float maximum = thread_maximum(S[0], half);
            reference[half] = quad_max(maximum) * scale;
            row_sum[half] = exponentiate(S[0], half);
            rounding[half] = rounding_of(exponential(maximum, finite(reference[half])));
        }
    }

    // The same with care in further steps. Returns whether what has grown should be made small again.
    template <int column_tiles>
    DEVICE bool step_with_care(float (&S)[1][column_tiles][4], const bool (&in_first_blocks)[halves]) {
        bool any_raised = false;
#pragma unroll
        for (int half = 0; half < halves; ++half) {
            const float maximum = thread_maximum(S[0], half);
            any_raised |= raise_reference(half, quad_max(maximum) * scale, in_first_blocks[half]);
            const float sum = exponentiate(S[0], half);
            const float largest = exponential(maximum, finite(reference[half]));
            rounding[half] += dominates(sum, half) ? rounding_of(largest) : 0;
            row_sum[half] += sum;
        }
        rescales_O |= (bool)__any_sync(all_lanes, any_raised);
        return __any_sync(all_lanes, exceeds_most());
    }

    // Without care, and without adding them up.
    template <int column_tiles> DEVICE void exponentiate(float (&S)[1][column_tiles][4], StepSums &sums) const {
#pragma unroll
        for (int half = 0; half < halves; ++half)
            sums[half] = exponentiate(S[0], half);
    }
    static DEVICE bool overflows(const StepSums &sums) { return sums[0] >= overflowing || sums[1] >= overflowing; }

    // Adds them up, and returns the same.
    template <int column_tiles> DEVICE bool accept(const StepSums &sums, const float (&S)[1][column_tiles][4]) {
        const bool dominant[halves] = {dominates(sums[0], 0), dominates(sums[1], 1)};
        row_sum[0] += sums[0];
        row_sum[1] += sums[1];
        if (!__any_sync(all_lanes, dominant[0] || dominant[1] || exceeds_most()))
            return false;
#pragma unroll
        for (int half = 0; half < halves; ++half)
            rounding[half] += dominant[half] ? rounding_of(largest_exponential(S[0], half)) : 0;
        return __any_sync(all_lanes, exceeds_most());
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
    DEVICE bool dominates(float sum, int half) const { return sum > 2 * row_sum[half]; }
    DEVICE bool exceeds_most() const { return row_sum[0] > most || row_sum[1] > most; }
    // Whether the row had a smaller reference.
    DEVICE bool raise_reference(int half, float maximum, bool in_first_blocks) {
        const bool has_none = reference[half] == negative_infinity;
        const bool overflows = exp2_approx(maximum - finite(reference[half])) >= overflowing;
        const bool raises = maximum > reference[half] && (has_none || in_first_blocks || overflows);
        shrink(half, raises && !has_none ? exp2_approx(reference[half] - maximum) : 1);
        reference[half] = raises ? maximum : reference[half];
        return raises && !has_none;
    }
    template <int column_tiles> DEVICE float exponentiate(float (&S)[column_tiles][4], int half) const {
        constexpr int delay = Policy::spreads_chains ? 2 : 0;
        const float relative_to = finite(reference[half]);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < column_tiles + delay; ++n) {
            if (n < column_tiles)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i)
                    S[n][i] = exponential(S[n][i], relative_to);
            if (n >= delay)
                sum += S[n - delay][2 * half] + S[n - delay][2 * half + 1];
        }
        return sum;
    }
    DEVICE void shrink(int half, float factor) {
        row_sum[half] *= factor;
        rounding[half] *= factor;
        O_factor[half] *= factor;
    }
    template <int column_tiles> static DEVICE float thread_maximum(const float (&S)[column_tiles][4], int half) {
        float maximum = negative_infinity;
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
            maximum = fmaxf(maximum, fmaxf(S[n][2 * half], S[n][2 * half + 1]));
        return maximum;
    }
    // Floats that are not negative are in the order of their bits, and integers have a maximum of three in one
    // instruction.
    template <int column_tiles> static DEVICE float largest_exponential(const float (&S)[column_tiles][4], int half) {
        int largest = 0;
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
            largest = max(max(largest, __float_as_int(S[n][2 * half])), __float_as_int(S[n][2 * half + 1]));
        return __int_as_float(largest);
    }
};
