// Parts of results: of the warps of a thread block, of the segments of an item, and what becomes of them.
#pragma once
#include "decode/copies.cuh"
#include "ptx/atomics.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/opaque.cuh"

// Four columns of a row of O before it is divided by its sum, and the row's maximum, in powers of two, and sum.
struct RowPart {
    static constexpr int columns = 4, of_row = cfg::d_value / columns;

    float maximum = negative_infinity, sum = 0;
    float O[columns] = {};

    DEVICE Pair terms() const { return {maximum, sum}; }
    DEVICE Vector16B values() const {
        Vector16B vector;
#pragma unroll
        for (int i = 0; i < columns; ++i)
            vector.words[i] = __float_as_int(O[i]);
        return vector;
    }
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
        return args.partial_O + ((int64)slot * cfg::B_r + row) * cfg::d_value + index * RowPart::columns;
    }
    DEVICE Pair *terms(uint32 slot, int row) const { return (Pair *)args.partial_terms + (int64)slot * cfg::B_r + row; }

    DEVICE void store(uint32 slot, int row, int index, const RowPart &part) const {
        store_global_16B(O(slot, row, index), part.values());
        if (index == 0)
            *terms(slot, row) = part.terms();
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

// What becomes of a segment that is not its whole item: found while its first keys are on their way.
struct Destination {
    Segments segments;
    uint32 slot; // of its parts

    Destination() = default;
    DEVICE Destination(const DecodeArguments &args, const Share &share) {
        if (cfg::deals_items && share.is_whole_item())
            return;
        segments = Segments(args, share.line, computed_from_here(share.first_split), share.item_end);
        slot = share.slot(args);
    }
};

// How far the segments of an item are, in one word that is zero before and after a launch: how many have arrived, which
// parts of the results somebody has begun to combine, and how many thread blocks are done with the word.
//
// The rows of an item are combined in chunks. Whoever arrives last needs nobody's help; but others that have nothing else
// to do wait for a while, and take a chunk each. Nobody waits for long: a thread block that is not running yet may need
// the place of one that waits for it.
struct Progress {
    static constexpr uint64 arrival = 1, claim = 1ull << 16, departure = 1ull << 32;
    static constexpr int chunk_rows = cfg::d_value > 256 ? 4 : 16, most_looks = 32;

    uint64 *word;
    int segments, chunks;

    DEVICE Progress(const DecodeArguments &args, const Item &item, int segments)
        : word(args.progress + item.pair * args.kv_heads + item.head), segments(segments),
          chunks(segments > 1 && segments < 1 << 15 ? ceil_div(item.tile_rows(), chunk_rows) : 1) {}

    // Counts a segment as arrived. Returns the first chunk to combine; `chunks` or more: none.
    DEVICE int arrive(bool stays) const {
        if (arrivals(add_acq_rel(word, arrival)) == segments - 1) {
            if (chunks == 1)
                store_relaxed(word, 0); // whoever is last has no help
            return 0;
        }
        if (chunks == 1)
            return chunks;
#pragma unroll 1
        for (int look = 0; stays && look < most_looks; ++look)
            if (arrivals(load_acquire(word)) == segments)
                return next();
        end(add_relaxed(word, departure) + departure);
        return chunks;
    }
    // Another chunk. The first is that of the last to arrive.
    DEVICE int next() const {
        if (chunks == 1)
            return chunks;
        const uint64 before = add_relaxed(word, claim);
        const int chunk = claims(before) + 1;
        if (chunk >= chunks)
            end(before + claim);
        return chunk;
    }

  private:
    static DEVICE int arrivals(uint64 word) { return word & 0xffff; }
    static DEVICE int claims(uint64 word) { return word >> 16 & 0xffff; }
    static DEVICE int departures(uint64 word) { return word >> 32; }

    // After this thread block has departed, or claimed more than there is: the last to do so clears the word.
    DEVICE void end(uint64 after) const {
        if (departures(after) + claims(after) - (chunks - 1) == segments)
            store_relaxed(word, 0); // the last to leave
    }
};

// The results of some rows of an item from the parts of all its segments, added in the order of the keys. Loads of several
// parts and segments are on their way at a time.
template <int threads, int parts>
DEVICE void combine(const DecodeArguments &args, const Item &item, const Segments &segments, int first_row, int rows) {
    const Partials partials{args};
    constexpr int batch = 8;
    const int begin = first_row * RowPart::of_row, end = begin + rows * RowPart::of_row;
#pragma unroll 1
    for (int i = begin + threadIdx.x; i < end; i += parts * threads) {
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
                    const int place = min(i + p * threads, end - 1), row = place / RowPart::of_row;
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
            if (place < end)
                store_result(args, item, place / RowPart::of_row, place % RowPart::of_row, part[p]);
        }
    }
}

// Counts a segment whose parts all threads have stored, and combines what this thread block has to of its item's. `chunk`
// is in shared memory; `barrier` waits for all threads.
template <int threads, int parts, class Barrier>
DEVICE void arrive_and_combine(const DecodeArguments &args, const Share &share, const Segments &segments, int &chunk,
                               const Barrier &barrier) {
    const Progress progress(args, share.item, segments.count);
    barrier(); // all threads have stored
    int claimed = 0;
    if (threadIdx.x == 0)
        chunk = progress.arrive(share.is_last());
    barrier(); // one thread knows what there is to do
    const int rows = share.item.tile_rows();
#pragma unroll 1
    for (int own = chunk; own < progress.chunks; own = chunk) {
        if (threadIdx.x == 0)
            claimed = progress.next(); // on its way while this one is combined
        const int first_row = own * Progress::chunk_rows;
        combine<threads, parts>(args, share.item, segments, first_row,
                         progress.chunks == 1 ? rows : min(Progress::chunk_rows, rows - first_row));
        barrier(); // all threads have read which
        if (threadIdx.x == 0)
            chunk = claimed;
        barrier(); // the next is known
    }
}
