// Parts of results: of the warps of a thread block, of the segments of an item, and what becomes of them.
#pragma once
#include "decode/copies.cuh"
#include "ptx/atomics.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

// Four columns of a row of O before it is divided by its sum, and the row's maximum, in powers of two, and sum.
struct RowPart {
    static constexpr int columns = 4, of_row = cfg::d_head / columns;

    float maximum = negative_infinity, sum = 0;
    float O[columns] = {};

    // Adds another part of the same row. Both become relative to the larger maximum.
    DEVICE void add(Pair terms, const Vector16B &values) {
        const float grown = fmaxf(maximum, terms.values[0]);
        const float reference = grown == negative_infinity ? 0 : grown;
        const float own = exp2_approx(maximum - reference), other = exp2_approx(terms.values[0] - reference);
        sum = sum * own + terms.values[1] * other;
#pragma unroll
        for (int i = 0; i < columns; ++i)
            O[i] = O[i] * own + __int_as_float(values.words[i]) * other;
        maximum = grown;
    }
};

// Where the parts of a segment that is not its whole item go.
struct Partials {
    const DecodeArguments &args;

    DEVICE float *O(uint32 slot, int row, int index) const {
        return args.partial_O + ((int64)slot * cfg::B_r + row) * cfg::d_head + index * RowPart::columns;
    }
    DEVICE Pair *terms(uint32 slot, int row) const { return (Pair *)args.partial_terms + (int64)slot * cfg::B_r + row; }

    DEVICE void store(uint32 slot, int row, int index, const RowPart &part) const {
        Vector16B values;
#pragma unroll
        for (int i = 0; i < RowPart::columns; ++i)
            values.words[i] = __float_as_int(part.O[i]);
        store_global_16B(O(slot, row, index), values);
        if (index == 0)
            *terms(slot, row) = {part.maximum, part.sum};
    }
};

// A part of a result, rounded.
DEVICE void store_result(const DecodeArguments &args, const Item &item, int row, int index, const RowPart &part) {
    const float factor = part.sum == 0 ? 0 : 1 / part.sum; // a row that attends to no key is zero
    struct alignas(8) Rounded {
        uint32 words[RowPart::columns / 2];
    } rounded;
#pragma unroll
    for (int i = 0; i < RowPart::columns / 2; ++i)
        rounded.words[i] = pack_16bit<cfg::dtype>(part.O[2 * i] * factor, part.O[2 * i + 1] * factor);
    if (index < value_columns / RowPart::columns)
        *((Rounded *)item.row_of(args, args.forward.O, row) + index) = rounded;
    if (variant::returns_lse && index == 0) {
        const int64 place = (variant::variable_lengths ? 0 : item.batch(args)) * args.forward.lse_batch_stride +
                            item.q_head(args, row) * args.forward.lse_head_stride + item.sequence.q_start +
                            item.query(args, row);
        args.forward.lse[place] =
            part.sum == 0 ? negative_infinity : (part.maximum + log2_approx(part.sum)) * ln_2;
    }
}

// Calls `function(row, index)` for one of `threads` threads' parts of the rows that exist.
template <int threads, class Function> DEVICE void for_each_part(const Item &item, const Function &function) {
#pragma unroll 1
    for (int i = threadIdx.x; i < item.tile_rows() * RowPart::of_row; i += threads)
        function(i / RowPart::of_row, i % RowPart::of_row);
}

// Counts a segment as arrived. True in all threads of the last one, which then sees the parts of all others. Threads
// come with their parts stored; `barrier` waits for all of them.
template <class Barrier>
DEVICE bool arrives_last(const DecodeArguments &args, const Item &item, int segments, bool &is_last,
                         const Barrier &barrier) {
    barrier(); // all threads have stored
    if (threadIdx.x == 0) {
        int *arrivals = args.arrivals + item.pair * args.kv_heads + item.head;
        is_last = add_one_acq_rel(arrivals) == segments - 1;
        if (is_last)
            *arrivals = 0; // for the next launch
    }
    barrier(); // one thread knows whether it is the last
    return is_last;
}

// The results of an item from the parts of all its segments, added in the order of the keys. Loads of several parts and
// segments are on their way at a time.
template <int threads>
DEVICE void combine(const DecodeArguments &args, const Item &item, const Segments &segments, const Partials &partials) {
    constexpr int most_parts = cfg::B_r * RowPart::of_row / threads; // of a thread
    constexpr int parts = most_parts >= 4 ? 4 : most_parts >= 2 ? 2 : 1, batch = parts == 4 ? 4 : 8;
    const int count = item.tile_rows() * RowPart::of_row;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += parts * threads) {
        RowPart part[parts];
#pragma unroll 1
        for (int first = 0; first < segments.count; first += batch) {
            Pair terms[batch][parts];
            Vector16B values[batch][parts];
            // Behind the last there is none: the last again, which is not added.
#pragma unroll
            for (int s = 0; s < batch; ++s)
#pragma unroll
                for (int p = 0; p < parts; ++p) {
                    const uint32 slot = segments.slot(min(first + s, segments.count - 1));
                    const int place = min(i + p * threads, count - 1), row = place / RowPart::of_row;
                    terms[s][p] = *partials.terms(slot, row);
                    values[s][p] = load_global_16B(partials.O(slot, row, place % RowPart::of_row));
                }
#pragma unroll
            for (int s = 0; s < batch; ++s)
                if (first + s < segments.count)
#pragma unroll
                    for (int p = 0; p < parts; ++p)
                        part[p].add(terms[s][p], values[s][p]);
        }
#pragma unroll
        for (int p = 0; p < parts; ++p) {
            const int place = i + p * threads;
            if (place < count)
                store_result(args, item, place / RowPart::of_row, place % RowPart::of_row, part[p]);
        }
    }
}
