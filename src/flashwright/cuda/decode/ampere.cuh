// Decoding with mma.sync tensor cores: few query rows on long caches of keys and values.
//
// A thread block computes segments of items, one after the other (see items.cuh). In each step its warps stand along the
// rows and along the keys of a unit: every warp copies keys of its own, or shares them with the warps of other rows, and
// keeps a softmax of its own. At the end of a segment the warps' results are combined in shared memory; those of several
// segments in global memory, in fp32, by the last thread block to arrive.
#pragma once
#include "attention/softmax.cuh"
#include "decode/items.cuh"
#include "ptx/atomics.cuh"
#include "ptx/special_registers.cuh"
#include "tile/copy.cuh"
#include "tile/products.cuh"

constexpr int tensor_columns = variant::pads_columns ? variant::head_dim : cfg::d_head;
constexpr int row_vectors = cfg::d_head / vector_elements;

using QFragments = Fragments<cfg::d_head / mma_depth, 1, shape::row_tiles, 1>;
using KFragments = Fragments<cfg::d_head / mma_depth, 1, cfg::keys_per_warp / mma_depth, 1>;
using PFragments = Fragments<cfg::keys_per_warp / mma_depth, 1, shape::row_tiles, cfg::keys_per_warp / mma_depth>;
using VFragments = Fragments<cfg::keys_per_warp / mma_depth, 1, cfg::d_head / mma_depth, 1>;

struct SoftmaxPolicy {
    static constexpr DType dtype = cfg::dtype;
    static constexpr bool optimized = true, lazy_rescale = true, mma_row_sum = false, spreads_chains = false;
    static constexpr bool rows_may_be_empty = true; // all keys of a warp's part of a unit may be masked
};

struct SharedMemory {
    uint32 base;

    DEVICE uint32 Q() const { return base; }
    // The keys of one warp, and its values, in a stage.
    DEVICE uint32 K(int stage, int key_warp) const {
        return base + shape::stages_offset + (stage * shape::key_warps + key_warp) * shape::chunk_bytes;
    }
    DEVICE uint32 V(int stage, int key_warp) const { return K(stage, key_warp) + shape::chunk_bytes / 2; }
    // Of a segment's end, when stages are not read any more: rows of O, and terms, of each warp along the keys.
    DEVICE uint32 O(int key_warp, int row) const {
        return base + shape::stages_offset + (key_warp * cfg::B_r + row) * (cfg::d_head * sizeof(float));
    }
    DEVICE uint32 terms(int key_warp, int row) const {
        return base + shape::terms_offset + (key_warp * cfg::B_r + row) * sizeof(Pair);
    }
};

// Rows of O before they are divided by their sums: a vector of 8 columns of one row, and the row's maximum, in powers of
// two, and sum.
struct RowPart {
    float maximum = negative_infinity, sum = 0;
    float O[vector_elements] = {};

    // Adds another part of the same row. Both become relative to the larger maximum.
    DEVICE void add(Pair terms, const float (&values)[vector_elements]) {
        const float grown = fmaxf(maximum, terms.values[0]);
        const float reference = grown == negative_infinity ? 0 : grown;
        const float own = exp2_approx(maximum - reference), other = exp2_approx(terms.values[0] - reference);
        sum = sum * own + terms.values[1] * other;
#pragma unroll
        for (int i = 0; i < vector_elements; ++i)
            O[i] = O[i] * own + values[i] * other;
        maximum = grown;
    }
};

// One segment of an item: the units [first, last) of it.
struct Segment {
    const DecodeArguments &args;
    const Item &item;
    SharedMemory shared;
    int first, last;

    // A warp's place.
    const int warp = threadIdx.x / warp_threads;
    const int row_warp = warp / shape::key_warps, key_warp = warp % shape::key_warps;

    DEVICE int first_key(int unit) const {
        return (item.first_unit + unit) * shape::unit_keys + key_warp * cfg::keys_per_warp;
    }

    // --- Copies ---

    // The packed rows of Q. What does not exist becomes zero.
    DEVICE void start_Q_copy() const {
        for (int i = threadIdx.x; i < cfg::B_r * row_vectors; i += shape::threads) {
            const int row = i / row_vectors, vector = i % row_vectors;
            const bool exists = row < item.rows && vector < tensor_columns / vector_elements;
            const char *source = item.row_of(args, args.forward.Q, exists ? row : 0) + (exists ? vector : 0) * vector_bytes;
            cp_async_16B_or_zero(shared.Q() + vector_offset<cfg::B_r>(row, vector), source, exists); // @operand Q
        }
    }

    // A unit's keys and values. Rows come in groups that lie in one page. The warps that share keys share the copying.
    DEVICE void start_copy(int unit, int stage) const {
        if (unit < last) {
            constexpr int groups = cfg::keys_per_warp / page_step;
#pragma unroll
            for (int group = 0; group < groups; ++group)
                if (group % cfg::row_warps == row_warp)
                    start_group_copy(first_key(unit) + group * page_step, group * page_step, stage);
        }
        cp_async_commit_group(); // also where there is none, so that waiting counts steps
    }
    static constexpr int page_step = 16; // keys: pages have a multiple of it

    DEVICE void start_group_copy(int key, int row, int stage) const {
        // Keys without a page are zero: no other sequence's are read in their place.
        const bool exists = key < item.sequence.kv_end && item.sequence.has_page(args, key);
        const int exist = exists ? item.sequence.kv_end - key : 0;
        const int known = exists ? key : 0; // an address to take in the place of none
        const char *K = item.sequence.row(args, args.forward.K, item.head, known);
        const char *V = item.sequence.row(args, args.forward.V, item.head, known);
        copy_rows(shared.K(stage, key_warp), K, args.forward.K.row_stride, row, exist); // @operand K
        copy_rows(shared.V(stage, key_warp), V, args.forward.V.row_stride, row, exist); // @operand V
    }
    DEVICE void copy_rows(uint32 chunk, const char *source, int64 row_stride, int first_row, int exist) const {
#pragma unroll
        for (int i = 0; i < page_step * row_vectors; i += warp_threads) {
            const int place = i + lane_index(), row = place / row_vectors, vector = place % row_vectors;
            const bool exists = row < exist && vector < tensor_columns / vector_elements;
            const char *from = source + (exists ? row * row_stride * element_bytes + vector * vector_bytes : 0);
            cp_async_16B_or_zero(chunk + vector_offset<cfg::keys_per_warp>(first_row + row, vector), from, exists);
        }
    }

    // Waits until the copies of a unit have arrived: this warp's, or those of all warps that share its keys. All of these
    // have finished with the unit before.
    DEVICE void wait_for_copies() const {
        cp_async_wait_group<cfg::stages - 2>();
        if constexpr (cfg::row_warps == 1)
            __syncwarp();
        else
            __syncthreads();
    }

    // --- A segment ---

    DEVICE void compute() const {
        OnlineSoftmax<SoftmaxPolicy, shape::row_tiles> softmax(args.forward.softmax_scale);
        float O[shape::row_tiles][cfg::d_head / mma_columns][accumulator_values] = {};
        start_Q_copy();
#pragma unroll
        for (int stage = 0; stage + 1 < cfg::stages; ++stage)
            start_copy(first + stage, stage);
        // Q arrived with the first unit, copied by all threads.
        cp_async_wait_group<cfg::stages - 2>();
        __syncthreads();
        int stage = 0;
#pragma unroll 1
        for (int unit = first; unit < last; ++unit) {
            wait_for_copies();
            // The stage of the step before is free.
            start_copy(unit + cfg::stages - 1, stage == 0 ? cfg::stages - 1 : stage - 1);
            step(softmax, O, unit, stage);
            stage = stage + 1 == cfg::stages ? 0 : stage + 1;
        }
        cp_async_wait_group<0>(); // of units that do not exist: nothing
        __syncthreads();          // nobody reads stages any more
        store_warp(softmax, O);
        __syncthreads(); // all warps' results are there
    }

    DEVICE void step(auto &softmax, auto &O, int unit, int stage) const {
        const uint32 lane = lane_index();
        float S[shape::row_tiles][cfg::keys_per_warp / mma_columns][accumulator_values] = {};
        SharedOperand<QFragments, cfg::B_r, Role::A> Q(
            shared.Q() + row_warp * shape::row_tiles * mma_rows * layout::row_bytes, lane);
        SharedOperand<KFragments, cfg::keys_per_warp, Role::B> K(shared.K(stage, key_warp), lane);
        matmul<cfg::dtype, Place::shared, Place::shared, false, false>(Q, K, S); // @product S
        cap_and_mask(S, first_key(unit));
        softmax.template step<false>(S, O); // @phase softmax
        PFragments P;
        round_to_operand<cfg::dtype>(P, S);
        SharedOperand<VFragments, cfg::keys_per_warp, Role::B_transposed> V(shared.V(stage, key_warp), lane);
        matmul<cfg::dtype, Place::registers, Place::shared, false, false>(P, V, O); // @product O
    }

    // As `Scores`, of packed rows and keys counted from the beginning of the cache.
    template <int row_tiles, int column_tiles>
    DEVICE void cap_and_mask(float (&S)[row_tiles][column_tiles][4], int key) const {
        const CachedSequence &sequence = item.sequence;
        const Window &window = item.window;
        const int last_row = min(cfg::B_r, item.rows) - 1;
        const bool cut = key < sequence.kv_begin + window.first_key(item.query(args, last_row)) ||
                         key + cfg::keys_per_warp - 1 > sequence.kv_begin + window.last_key(item.query(args, 0));
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                const int row = row_warp * shape::row_tiles * mma_rows + accumulator_row(m, half);
                int first = 0, last = cfg::keys_per_warp;
                if (cut) {
                    const int query = item.query(args, row);
                    first = sequence.kv_begin + window.first_key(query) - key;
                    last = sequence.kv_begin + window.last_key(query) - key;
                }
#pragma unroll
                for (int n = 0; n < column_tiles; ++n)
#pragma unroll
                    for (int i = 0; i < half_values; ++i) {
                        float &score = S[m][n][2 * half + i];
                        if constexpr (variant::softcaps)
                            score = 1 - 2 * reciprocal_approx(1 + exp2_approx(score * args.forward.capping_scale));
                        const int column = mma_columns * n + accumulator_column() + i;
                        if (column < first || column > last)
                            score = negative_infinity;
                    }
            }
    }

    // A warp's rows of O, maxima and sums, for the others.
    DEVICE void store_warp(auto &softmax, auto &O) const {
#pragma unroll
        for (int m = 0; m < shape::row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                const int row = row_warp * shape::row_tiles * mma_rows + accumulator_row(m, half);
                const float sum = quad_sum(softmax.row_sum[m][2 * half]);
                const float maximum = softmax.row_max[m][half] * softmax.scale;
                if (leads_quad())
                    store_shared_8B(shared.terms(key_warp, row), {maximum, sum});
#pragma unroll
                for (int n = 0; n < cfg::d_head / mma_columns; ++n)
                    store_shared_8B(shared.O(key_warp, row) + (mma_columns * n + accumulator_column()) * sizeof(float),
                                    {O[m][n][2 * half], O[m][n][2 * half + 1]});
            }
    }

    // A vector of a row, over all warps along the keys.
    DEVICE RowPart combined(int row, int vector) const {
        RowPart part;
#pragma unroll
        for (int warp = 0; warp < shape::key_warps; ++warp) {
            float values[vector_elements];
#pragma unroll
            for (int i = 0; i < vector_elements; i += 2) {
                const Pair pair =
                    load_shared_8B(shared.O(warp, row) + (vector * vector_elements + i) * sizeof(float));
                values[i] = pair.values[0];
                values[i + 1] = pair.values[1];
            }
            part.add(load_shared_8B(shared.terms(warp, row)), values);
        }
        return part;
    }
};

// Where the parts of a segment that is not its whole item go.
struct Partials {
    const DecodeArguments &args;

    DEVICE float *O(int slot, int row, int vector) const {
        return args.partial_O + ((int64)slot * cfg::B_r + row) * cfg::d_head + vector * vector_elements;
    }
    DEVICE Pair *terms(int slot, int row) const { return (Pair *)args.partial_terms + (int64)slot * cfg::B_r + row; }

    DEVICE void store(int slot, int row, int vector, const RowPart &part) const {
        Vector16B halves_[2];
#pragma unroll
        for (int i = 0; i < vector_elements; ++i)
            halves_[i / 4].words[i % 4] = __float_as_int(part.O[i]);
        store_global_16B(O(slot, row, vector), halves_[0]);
        store_global_16B(O(slot, row, vector) + 4, halves_[1]);
        if (vector == 0)
            *terms(slot, row) = {part.maximum, part.sum};
    }
    DEVICE void add(RowPart &part, int slot, int row, int vector) const {
        const Vector16B low = load_global_16B(O(slot, row, vector)), high = load_global_16B(O(slot, row, vector) + 4);
        float values[vector_elements];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[i] = __int_as_float(low.words[i]);
            values[4 + i] = __int_as_float(high.words[i]);
        }
        part.add(*terms(slot, row), values);
    }
};

// The result of a row, rounded.
DEVICE void store_result(const DecodeArguments &args, const Item &item, int row, int vector, const RowPart &part) {
    if (row >= item.rows)
        return;
    const float factor = part.sum == 0 ? 0 : 1 / part.sum; // a row that attends to no key is zero
    Vector16B v;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        v.words[i] = pack_16bit<cfg::dtype>(part.O[2 * i] * factor, part.O[2 * i + 1] * factor);
    if (vector < tensor_columns / vector_elements)
        store_global_16B(item.row_of(args, args.forward.O, row) + vector * vector_bytes, v);
    if (variant::returns_lse && vector == 0) {
        const int64 place = (variant::variable_lengths ? 0 : item.batch(args)) * args.forward.lse_batch_stride +
                            item.q_head(args, row) * args.forward.lse_head_stride + item.sequence.q_start +
                            item.query(args, row);
        args.forward.lse[place] =
            part.sum == 0 ? negative_infinity : (part.maximum + log2_approx(part.sum)) * ln_2;
    }
}

// Calls `function(row, vector)` for this thread's part of a tile.
template <class Function> DEVICE void for_each_vector(const Function &function) {
    for (int i = threadIdx.x; i < cfg::B_r * row_vectors; i += shape::threads)
        function(i / row_vectors, i % row_vectors);
}

// The segments of an item, which begins with `first_split` of the line and has so many splits: where their parts lie, in
// the order of their keys.
struct Segments {
    const DecodeArguments &args;
    Line line;
    int64 first_split;
    int splits;

    DEVICE int count() const {
        if (args.split_units || line.total < gridDim.x)
            return splits;
        return line.block_of(first_split + splits - 1) - line.block_of(first_split) + 1;
    }
    // Of the one that holds a split. A thread block has parts of two items at most: of its first and its last.
    DEVICE int slot_of(int64 split) const {
        if (args.split_units)
            return split;
        const int block = line.block_of(split);
        return 2 * block + (line.begin(block) < first_split);
    }
    // The first split behind the segment that holds one.
    DEVICE int64 end_of(int64 split) const {
        const int64 item_end = first_split + splits;
        return args.split_units ? split + 1 : min(item_end, line.begin(line.block_of(split) + 1));
    }
};

template <AmpereDecodeKernelConfig>
__global__ void __launch_bounds__(shape::threads)
    ampere_decode_kernel(const __grid_constant__ DecodeArguments args) {
    extern __shared__ __align__(bank_line_bytes) char shared_memory[];
    const SharedMemory shared{shared_address(shared_memory)};
    __shared__ bool is_last;
    const Start start = find_start<shape::threads>(args);
    const Line &line = start.line;
    const int heads = args.forward.q_heads / args.forward.q_heads_per_kv_head;
    const int split_units = max(1, args.split_units);
    const Partials partials{args};
    int pair = start.pair;
    int64 first_of_pair = start.first_split;

#pragma unroll 1
    for (int64 split = line.begin(blockIdx.x); split < line.begin(blockIdx.x + 1);) {
        int per_head = Item(args, pair, 0).splits(args);
        while (split >= first_of_pair + (int64)per_head * heads) { // pairs without rows have no splits
            first_of_pair += (int64)per_head * heads;
            per_head = Item(args, ++pair, 0).splits(args);
        }
        const int head = (split - first_of_pair) / per_head;
        const Item item(args, pair, head);
        const Segments segments{args, line, first_of_pair + (int64)head * per_head, per_head};
        const int64 end = segments.end_of(split);
        const int first = split - segments.first_split, behind = end - segments.first_split;
        __syncthreads(); // the segment before is not read any more
        const Segment segment{args, item, shared, first * split_units, min(behind * split_units, item.units)};
        segment.compute();

        if (end - split == per_head) { // the whole item
            for_each_vector([&](int row, int vector) {
                store_result(args, item, row, vector, segment.combined(row, vector));
            });
        } else {
            const int slot = segments.slot_of(split);
            for_each_vector([&](int row, int vector) { partials.store(slot, row, vector, segment.combined(row, vector)); });
            __syncthreads(); // all threads have stored
            if (threadIdx.x == 0) {
                int *arrivals = args.arrivals + (int64)pair * heads + head;
                is_last = add_one_acq_rel(arrivals) == segments.count() - 1;
                if (is_last)
                    *arrivals = 0; // for the next launch
            }
            __syncthreads(); // one thread knows whether it is the last
            if (is_last)
                for_each_vector([&](int row, int vector) {
                    RowPart part;
                    for (int64 s = segments.first_split; s < segments.first_split + per_head; s = segments.end_of(s))
                        partials.add(part, segments.slot_of(s), row, vector);
                    store_result(args, item, row, vector, part);
                });
        }
        split = end;
    }
}
