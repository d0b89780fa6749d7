// Decoding with mma.sync tensor cores: few query rows on long caches of keys and values.
//
// A thread block computes segments of items, one after the other (see items.cuh). In each step its warps stand along the
// rows and along the keys of a unit: every warp copies keys of its own, or shares them with the warps of other rows, and
// keeps a softmax of its own. At the end of a segment the warps' results are combined in shared memory; those of several
// segments in global memory, in fp32, by the last thread block to arrive.
#pragma once
#include "attention/softmax.cuh"
#include "decode/copies.cuh"
#include "decode/parts.cuh"
#include "decode/scores.cuh"
#include "tile/products.cuh"

// Q stays in registers where a warp has few rows.
constexpr bool Q_in_registers = shape::row_tiles * cfg::d_head <= 128;
using QFragments =
    Fragments<cfg::d_head / mma_depth, 1, shape::row_tiles, Q_in_registers ? cfg::d_head / mma_depth : 1>;
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

    // The rows of Q of a segment, as many of them as there are stages.
    DEVICE uint32 Q(int slot) const { return base + slot * shape::Q_bytes; }
    // The keys of one warp, and its values, in a stage.
    DEVICE uint32 K(int stage, int key_warp) const {
        return base + shape::stages_offset + (stage * shape::key_warps + key_warp) * shape::chunk_bytes;
    }
    DEVICE uint32 V(int stage, int key_warp) const { return K(stage, key_warp) + shape::chunk_bytes / 2; }
    // Four columns of O of a warp along the keys, at the end of a segment: in the stage that it has read last, where there
    // is room for all rows. Rows are swizzled: those of a fragment lie in different banks.
    DEVICE uint32 O(int stage, int key_warp, int row, int column) const {
        constexpr int row_bytes = cfg::d_head * sizeof(float), swizzle_rows = row_bytes % 256 == 0 ? 8 : 4;
        const uint32 rows = shape::results_in_stages ? K(stage, key_warp)
                                                     : base + shape::results_offset + key_warp * cfg::B_r * row_bytes;
        return rows + row * row_bytes + (column * (int)sizeof(float) ^ row % swizzle_rows * 32);
    }
    DEVICE uint32 terms(int key_warp, int row) const {
        return base + shape::terms_offset + (key_warp * cfg::B_r + row) * sizeof(Pair);
    }
};

// The copies of one warp, in the order in which it computes: the keys and values of a unit, and the rows of Q before the
// first unit of a segment. They run ahead of the computation, and into the next segments. Warps that share keys share the
// copying.
struct Copies {
    static constexpr int groups = cfg::keys_per_warp / key_group;
    using Places = KeyPlaces<groups, key_group>;

    const DecodeArguments &args;
    SharedMemory shared;
    int row_warp, key_warp;
    Share share;
    int unit, Q_slot = 0;
    Places places;

    DEVICE Copies(const DecodeArguments &args, SharedMemory shared, int row_warp, int key_warp, const Share &share)
        : args(args), shared(shared), row_warp(row_warp), key_warp(key_warp), share(share) {
        begin_segment();
    }

    // Starts the copies of a unit, if there is one left, as a group; also where there is none, so that waiting counts
    // steps.
    DEVICE void start(int stage) {
        if (share.is_some()) {
            const Item &item = share.item;
            if (unit == share.first) {
                copy_Q<cfg::B_r, shape::threads>(args, item, shared.Q(Q_slot), 0, threadIdx.x); // @operand Q
                Q_slot = Q_slot + 1 == cfg::stages ? 0 : Q_slot + 1;
            }
            const int first = first_key(item, unit, key_warp);
            places.move_on(args, item, first, share.last - unit);
#pragma unroll
            for (int group = 0; group < groups; ++group) {
                const KeyGroup keys = places.group(item, group, first);
                copy<tensor_columns>(keys.K, keys.exist, args.forward.K, shared.K(stage, key_warp), group); // @operand K
                copy<value_columns>(keys.V, keys.exist, args.forward.V, shared.V(stage, key_warp), group);  // @operand V
            }
            if (++unit == share.last) {
                share.next(args);
                begin_segment();
            }
        }
        cp_async_commit_group();
    }

    static DEVICE int first_key(const Item &item, int unit, int key_warp) {
        return (item.first_unit + unit) * shape::unit_keys + key_warp * cfg::keys_per_warp;
    }

  private:
    template <int columns>
    DEVICE void copy(const char *rows, int exist, const TensorView &tensor, uint32 chunk, int group) const {
        const int thread = (cfg::row_warps == 1 ? 0 : row_warp * warp_threads) + lane_index();
        copy_rows<cfg::keys_per_warp, cfg::row_warps * warp_threads, key_group, row_vectors, columns / vector_elements>(
            rows, exist, tensor, chunk, group * key_group, thread);
    }
    DEVICE void begin_segment() {
        unit = share.first;
        if (share.is_some())
            places.begin(args, share.item, first_key(share.item, unit, key_warp));
    }
};

// One warp, and what it has computed of a segment.
struct Warp {
    const DecodeArguments &args;
    SharedMemory shared;
    Share share;

    // A warp's place.
    const int row_warp = threadIdx.x / warp_threads / shape::key_warps;
    const int key_warp = threadIdx.x / warp_threads % shape::key_warps;
    const int first_row = row_warp * shape::row_tiles * mma_rows;

    using QOperand = SharedOperand<QFragments, cfg::B_r, Role::A>;
    using Softmax = OnlineSoftmax<SoftmaxPolicy, shape::row_tiles>;

    Copies copies{args, shared, row_warp, key_warp, share};
    int stage = cfg::stages - 1, Q_slot = 0; // of the last step; of the next segment

    Destination destination;
    QOperand Q{0, lane_index()};
    PackedScores scores{args, share.item};
    Softmax softmax{args.forward.softmax_scale};
    float O[shape::row_tiles][cfg::d_head / mma_columns][accumulator_values];

    // All segments of the thread block, unit by unit. Calls `finish` at the end of each, when the results of all warps are
    // in shared memory.
    template <class Finish> DEVICE void run(const Finish &finish) {
        int copied_stage = 0;
#pragma unroll 1
        for (; copied_stage < cfg::stages - 1; ++copied_stage) // before anything else is prepared
            copies.start(copied_stage);
#pragma unroll 1
        for (; share.is_some(); share.next(args)) {
            begin_segment();
#pragma unroll 1
            for (int unit = share.first; unit < share.last; ++unit) {
                const bool begins = unit == share.first;
                wait_for_others(begins); // the stage of the step before is free
                copies.start(copied_stage);
                copied_stage = copied_stage + 1 == cfg::stages ? 0 : copied_stage + 1;
                if (begins)
                    destination = Destination(args, share);
                cp_async_wait_group<cfg::stages - 1>();
                wait_for_others(begins); // what others copied has arrived too
                if (begins)
                    load_Q();
                stage = stage + 1 == cfg::stages ? 0 : stage + 1;
                step(Copies::first_key(share.item, unit, key_warp));
            }
            end_segment();
            finish();
        }
        // Groups that have not been waited for are of units that do not exist: they are empty.
    }

    // Waits for the lanes of this warp, or for all warps that share its keys. Q is copied by all threads, with the first
    // unit of a segment, and they all read the results of the segment before.
    DEVICE void wait_for_others(bool begins_segment) const {
        if (cfg::row_warps > 1 || begins_segment)
            __syncthreads();
        else
            __syncwarp();
    }

    // Nothing of the segment before is kept, which leaves its registers to whoever combines results.
    DEVICE void begin_segment() {
        Q = QOperand(shared.Q(Q_slot) + first_row * layout::row_bytes, lane_index());
        Q_slot = Q_slot + 1 == cfg::stages ? 0 : Q_slot + 1;
        scores = PackedScores(args, share.item);
        softmax = Softmax(args.forward.softmax_scale);
#pragma unroll
        for (int m = 0; m < shape::row_tiles; ++m)
#pragma unroll
            for (int n = 0; n < cfg::d_head / mma_columns; ++n)
#pragma unroll
                for (float &value : O[m][n])
                    value = 0;
    }

    DEVICE void load_Q() {
        if constexpr (Q_in_registers)
            Q.load_entire_block();
    }

    DEVICE void end_segment() {
        if constexpr (shape::results_in_stages) {
            if constexpr (cfg::row_warps == 1)
                __syncwarp();
            else
                __syncthreads(); // nobody reads the last stage any more
        }
        store_warp();
        __syncthreads(); // all warps' results are there
    }

    DEVICE void step(int key) {
        float S[shape::row_tiles][cfg::keys_per_warp / mma_columns][accumulator_values] = {};
        SharedOperand<KFragments, cfg::keys_per_warp, Role::B> K(shared.K(stage, key_warp), lane_index());
        constexpr Place Q_place = Q_in_registers ? Place::registers : Place::shared;
        matmul<cfg::dtype, Q_place, Place::shared, false, false>(Q, K, S); // @product S
        scores.finish(args, share.item, S, first_row, key);
        softmax.template step<false>(S, O); // @phase softmax
        PFragments P;
        round_to_operand<cfg::dtype>(P, S);
        SharedOperand<VFragments, cfg::keys_per_warp, Role::B_transposed> V(shared.V(stage, key_warp), lane_index());
        matmul<cfg::dtype, Place::registers, Place::shared, false, false>(P, V, O); // @product O
    }

    // A warp's rows of O that exist, maxima and sums, for the others.
    DEVICE void store_warp() const {
#pragma unroll
        for (int m = 0; m < shape::row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                const int row = first_row + accumulator_row(m, half);
                const float sum = quad_sum(softmax.row_sum[m][2 * half]);
                const float maximum = softmax.row_max[m][half] * softmax.scale;
                if (row >= share.item.rows)
                    continue;
                if (leads_quad())
                    store_shared_8B(shared.terms(key_warp, row), {maximum, sum});
#pragma unroll
                for (int n = 0; n < cfg::d_head / mma_columns; ++n)
                    store_shared_8B(shared.O(stage, key_warp, row, mma_columns * n + accumulator_column()),
                                    {O[m][n][2 * half], O[m][n][2 * half + 1]});
            }
    }

    // A part of a row, over all warps along the keys.
    DEVICE RowPart combined(int row, int index) const {
        RowPart part;
#pragma unroll
        for (int warp = 0; warp < shape::key_warps; ++warp)
            part.add(load_shared_8B(shared.terms(warp, row)),
                     load_shared_16B(shared.O(stage, warp, row, index * RowPart::columns)));
        return part;
    }
};

template <AmpereDecodeKernelConfig>
__global__ void __launch_bounds__(shape::threads, cfg::blocks_per_sm)
    ampere_decode_kernel(const __grid_constant__ DecodeArguments args) {
    extern __shared__ __align__(bank_line_bytes) char shared_memory[];
    const SharedMemory shared{shared_address(shared_memory)};
    __shared__ int chunk;
    allow_next_grid();
    const Share share(args, find_start<shape::threads>(args));
    wait_for_grids_before();
    Warp warp{args, shared, share};
    warp.run([&] {
        const Share &share = warp.share;
        const bool is_whole = share.is_whole_item();
        for_each_part<shape::threads>(share.item, [&](int row, int index) {
            const RowPart part = warp.combined(row, index);
            if (is_whole)
                store_result(args, share.item, row, index, part);
            else
                Partials{args}.store(warp.destination.slot, row, index, part);
        });
        if (!is_whole)
            arrive_and_combine<shape::threads, 1>(args, share, warp.destination.segments, chunk, [] { __syncthreads(); });
    });
}
