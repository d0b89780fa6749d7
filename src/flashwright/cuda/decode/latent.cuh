// Decoding with warpgroup products (wgmma) where values are columns of the keys (multi-head latent attention: keys of 576
// columns, of which the first 512 are the values). A key is read once, for both products.
//
// A tile has 64 packed rows. Its rows of O are too wide for one warpgroup's registers: each of two has half of the columns.
// The scorer computes the scores, exponentiates them, and hands the weights P to the follower. Each multiplies P by its
// own columns of the keys.
//
// A producer warpgroup copies keys into a ring of stages, in the order of its thread block's segments (see items.cuh). A
// stage has three parts, which become full and empty apart: the columns that are no values are read by scores alone, and
// the follower is done with its half before the scorer is.
#pragma once
#include "attention/softmax.cuh"
#include "decode/copies.cuh"
#include "decode/scores.cuh"
#include "decode/warpgroup_parts.cuh"
#include "pipeline/ring.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/warpgroup_products.cuh"

constexpr int consumer_threads = 2 * warpgroup_threads;
constexpr int half_columns = cfg::d_value / 2; // of O, of each consumer

struct SoftmaxPolicy {
    static constexpr DType dtype = cfg::dtype;
    static constexpr bool optimized = true, lazy_rescale = true, mma_row_sum = false, spreads_chains = true;
    static constexpr bool rows_may_be_empty = true;
};

// Numbers of the named barriers; 0 is that of all threads. All of them are of both consumers.
namespace barriers {
constexpr int consumers = 1, Q = 2, P_full = 3, P_empty = 4;
}

// A part of a stage: columns of the keys.
template <int index_, int first_column_, int columns_> struct Part {
    static constexpr int index = index_, first_column = first_column_, columns = columns_;
    static constexpr int first_panel = first_column / panel_columns;
};
namespace parts {
constexpr int count = 3;
using Scorers = Part<0, 0, half_columns>;
using Followers = Part<1, half_columns, half_columns>;
using ScoredOnly = Part<2, cfg::d_value, cfg::d_head - cfg::d_value>;
} // namespace parts

using KeyPlace = RingPlace<cfg::stages>;

struct SharedMemory {
    uint32 base;

    DEVICE uint32 Q() const { return base; }
    template <class Part> DEVICE Slot keys(int stage) const {
        return Slot::at(base + shape::K_offset + stage * shape::K_bytes + Part::first_panel * panel_bytes<cfg::B_c>,
                        barriers(stage * parts::count + Part::index));
    }
    // What the scorer hands to the follower, from a thread to the one with the same place in its warpgroup, whose rows and
    // keys are the same: vectors of P, and the factors of its two rows.
    DEVICE uint32 P(int vector) const {
        return base + shape::P_offset + (vector * warpgroup_threads + threadIdx.x % warpgroup_threads) * vector_bytes;
    }
    DEVICE uint32 factors() const {
        return base + shape::factors_offset + threadIdx.x % warpgroup_threads * sizeof(Pair);
    }
    // The maximum and the sum of a row, at the end of a segment.
    DEVICE uint32 terms(int row) const { return base + shape::terms_offset + row * sizeof(Pair); }

    DEVICE void init_barriers() const {
        constexpr int consumer_warps = warpgroup_threads / warp_threads; // of the one that reads a part last
        for (int i = 0; i < cfg::stages * parts::count; ++i) {
            const Slot slot = Slot::at(0, barriers(i));
            mbarrier_init(slot.full, warpgroup_threads); // every producer thread's copies
            mbarrier_init(slot.empty, consumer_warps);
        }
    }

  private:
    DEVICE uint32 barriers(int pair) const { return base + shape::barriers_offset + Slot::barrier_pair_bytes * pair; }
};

// One producer warp: an equal part of the keys of a step, which lie in one page.
struct Producer {
    static constexpr int warps = warpgroup_threads / warp_threads, keys = cfg::B_c / warps;
    static_assert(key_group % keys == 0);
    using Places = KeyPlaces<1, key_group, false>;

    const DecodeArguments &args;
    const SharedMemory &shared;
    Share share;
    const int first_row = (threadIdx.x - consumer_threads) / warp_threads * keys;
    KeyPlace ring;

    DEVICE void run() {
        for (; share.is_some(); share.next(args)) {
            Places places;
            places.begin(args, share.item, first_key(share.first));
#pragma unroll 1
            for (int unit = share.first; unit < share.last; ++unit) {
                const int first = first_key(unit);
                places.move_on(args, share.item, first, share.last - unit);
                const KeyGroup group = places.group(share.item, 0, first);
                // In the order in which they are scored, and become empty.
                copy<parts::ScoredOnly>(group);
                copy<parts::Followers>(group);
                copy<parts::Scorers>(group);
                ring.advance();
            }
        }
        // The scorer waits for all copies before the consumers end.
    }

  private:
    DEVICE int first_key(int unit) const { return (share.item.first_unit + unit) * cfg::B_c + first_row; }

    template <class Part> DEVICE void copy(const KeyGroup &group) {
        const Slot slot = shared.keys<Part>(ring.stage);
        slot.wait_until_empty(ring.lap); // @operand K
        constexpr int tensor_vectors = (tensor_columns - Part::first_column) / vector_elements;
        copy_rows<cfg::B_c, warp_threads, keys, Part::columns / vector_elements, tensor_vectors>(
            group.K + Part::first_column * element_bytes, group.exist, args.forward.K, slot.data, first_row, lane_index());
        cp_async_mbarrier_arrive(slot.full);
    }
};

// What both consumers have: half of the columns of O, and the weights of a step.
struct Consumer {
    const DecodeArguments &args;
    const SharedMemory &shared;
    Share share;
    int &chunk;
    const int first_row = threadIdx.x % warpgroup_threads / warp_threads * mma_rows; // of the warp, in the tile
    KeyPlace place; // of the values that are multiplied next

    uint32 P[cfg::B_c / mma_depth][4];
    float O[1][half_columns / mma_columns][accumulator_values];

    // A lane's row of a half.
    DEVICE int row(int half) const { return first_row + accumulator_row(0, half); }

    // Both copy Q, which the scorer's products read.
    DEVICE void start_Q() const {
        // A warp of the scorer has waited for its own rows of the last product alone.
        named_barrier_sync(barriers::Q, consumer_threads);
        copy_Q<cfg::B_r, consumer_threads>(args, share.item, shared.Q(), 0, threadIdx.x); // @operand Q
        cp_async_commit_group();
    }
    DEVICE void finish_Q() const {
        cp_async_wait_group<0>();
        // All threads' rows are there. The fence that follows the wait for K is for Q, too.
        named_barrier_sync(barriers::Q, consumer_threads);
    }
    DEVICE void clear_output() {
#pragma unroll
        for (int n = 0; n < half_columns / mma_columns; ++n)
#pragma unroll
            for (int i = 0; i < accumulator_values; ++i)
                O[0][n][i] = 0;
    }
    template <class Part> DEVICE void start_output() {
        issue_registers_shared<cfg::B_c>(O[0], P, shared.keys<Part>(place.stage).data); // @product O
    }
    template <class Part> DEVICE void finish_output() {
        wgmma_wait_group<0>();
        pin_registers(O[0]);
        shared.keys<Part>(place.stage).release(); // @operand V
        place.advance();
    }

    // The results of a segment, whose rows have the maxima and sums `terms(half)`.
    template <class Terms> DEVICE void store(const Terms &terms, int first_column, const Destination &to) {
        const Item &item = share.item;
        const Partials partials{args};
        const bool whole = share.is_whole_item();
        for_each_part(O[0], terms, first_row, first_column, [&](int row, int index, const RowPart &part) {
            if (row >= item.rows)
                return;
            if (whole)
                store_result(args, item, row, index, part);
            else
                partials.store(to.slot, row, index, part);
        });
        if (whole)
            return;
        arrive_and_combine<consumer_threads, 2>(args, share, to.segments, chunk,
                                                [] { named_barrier_sync(barriers::consumers, consumer_threads); });
    }
};

// The warpgroup that computes scores and weights, and the first half of O.
struct Scorer : Consumer {
    KeyPlace scored; // the keys that are scored next
    float S[1][cfg::B_c / mma_columns][accumulator_values];

    DEVICE void run() {
        for (; share.is_some(); share.next(args)) {
            OnlineSoftmax<SoftmaxPolicy, 1> softmax(args.forward.softmax_scale);
            start_Q();
            const Destination to(args, share);
            finish_Q();
            compute(softmax);
            store([&](int half) { return terms_of_row(softmax, half); }, 0, to);
        }
    }

  private:
    // Each step's softmax runs while the product O += PV of the step before does.
    DEVICE void compute(auto &softmax) {
        const PackedScores scores(args, share.item);
        clear_output();
        start_scores();
        wgmma_wait_group<0>();
        finish_scores();
        scores.finish(args, share.item, S, first_row, first_key(share.first));
        softmax.template step<true>(S); // @phase softmax
        hand_over(softmax, {}, share.first);
        round_scores();
#pragma unroll 1
        for (int unit = share.first + 1; unit < share.last; ++unit) {
            start_scores();
            start_output<parts::Scorers>();
            wgmma_wait_group<1>();
            finish_scores();
            scores.finish(args, share.item, S, first_row, first_key(unit));
            const Shrinkage<1> shrinkage = softmax.template step<false>(S); // @phase softmax
            named_barrier_sync(barriers::P_empty, consumer_threads);        // the follower has read the last P
            hand_over(softmax, shrinkage, unit);
            finish_output<parts::Scorers>();
            apply(shrinkage, O); // @phase rescale O
            round_scores();
        }
        start_output<parts::Scorers>();
        finish_output<parts::Scorers>();
    }
    DEVICE int first_key(int unit) const { return (share.item.first_unit + unit) * cfg::B_c; }

    DEVICE void start_scores() {
        wgmma_fence();
        issue_scores<parts::ScoredOnly, true>();
        issue_scores<parts::Followers, false>();
        issue_scores<parts::Scorers, false>();
        wgmma_commit_group();
    }
    // The part's share of the scores.
    template <class Part, bool first> DEVICE void issue_scores() {
        const Slot K = shared.keys<Part>(scored.stage);
        K.wait_until_full(scored.lap); // @operand K
        fence_async_proxy();           // threads have copied what the product reads
        const uint64 a = operand_descriptor(shared.Q() + Part::first_panel * panel_bytes<cfg::B_r>,
                                            OperandLayout::summed_over_columns());
        const uint64 b = operand_descriptor(K.data, OperandLayout::summed_over_columns());
#pragma unroll
        for (int k = 0; k < Part::columns / mma_depth; ++k) {
            const uint64 a_k = a + descriptor_offset(depth_offset<cfg::B_r>(k));
            const uint64 b_k = b + descriptor_offset(depth_offset<cfg::B_c>(k));
            if (first && k == 0) {
                wgmma_columns_columns_first(S[0], a_k, b_k); // @product S
            } else {
                wgmma_columns_columns(S[0], a_k, b_k); // @product S
            }
        }
    }
    DEVICE void finish_scores() {
        pin_registers(S[0]);
        shared.keys<parts::ScoredOnly>(scored.stage).release(); // @operand K
        scored.advance();
    }

    DEVICE uint32 rounded(int n, int half) const {
        return pack_16bit<cfg::dtype>(S[0][n][2 * half], S[0][n][2 * half + 1]);
    }
    DEVICE void round_scores() {
#pragma unroll
        for (int n = 0; n < cfg::B_c / mma_columns; ++n)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                P[n / 2][n % 2 * 2 + half] = rounded(n, half);
    }

    // The weights of a step, what O shrinks by before they count, and behind the last step the terms of the rows. The
    // follower's product may begin while this warpgroup's of the step before still reads its own P.
    DEVICE void hand_over(auto &softmax, const Shrinkage<1> &shrinkage, int unit) const {
#pragma unroll
        for (int k = 0; k < cfg::B_c / mma_depth; ++k)
            store_shared_16B(shared.P(k), {rounded(2 * k, 0), rounded(2 * k, 1), rounded(2 * k + 1, 0),
                                           rounded(2 * k + 1, 1)});
        store_shared_8B(shared.factors(), shrinkage.needed
                                              ? Pair{shrinkage.factor[0][0], shrinkage.factor[0][1]}
                                              : Pair{1, 1});
        if (unit + 1 == share.last)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                const Pair terms = terms_of_row(softmax, half);
                if (leads_quad())
                    store_shared_8B(shared.terms(row(half)), terms);
            }
        named_barrier_arrive(barriers::P_full, consumer_threads);
    }
};

// The warpgroup that computes the second half of O.
struct Follower : Consumer {
    DEVICE void run() {
        for (; share.is_some(); share.next(args)) {
            start_Q();
            const Destination to(args, share);
            finish_Q();
            compute();
            store([&](int half) { return load_shared_8B(shared.terms(row(half))); }, half_columns, to);
        }
    }

  private:
    // The scorer has waited for the keys of a step before it hands over their weights.
    DEVICE void compute() {
        clear_output();
#pragma unroll 1
        for (int unit = share.first; unit < share.last; ++unit) {
            take_over(unit + 1 < share.last);
            start_output<parts::Followers>();
            finish_output<parts::Followers>();
        }
    }
    DEVICE void take_over(bool more_follow) {
        named_barrier_sync(barriers::P_full, consumer_threads); // the scorer has stored P
#pragma unroll
        for (int k = 0; k < cfg::B_c / mma_depth; ++k) {
            const Vector16B vector = load_shared_16B(shared.P(k));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                P[k][i] = vector.words[i];
        }
        const Pair factors = load_shared_8B(shared.factors());
        if (more_follow)
            named_barrier_arrive(barriers::P_empty, consumer_threads);
        const bool shrinks = factors.values[0] != 1 || factors.values[1] != 1;
        apply(Shrinkage<1>{__any_sync(all_lanes, shrinks) != 0, {{factors.values[0], factors.values[1]}}}, O);
    }
};

template <LatentDecodeKernelConfig>
__global__ void __launch_bounds__(consumer_threads + warpgroup_threads, 1)
    latent_decode_kernel(const __grid_constant__ DecodeArguments args) {
    extern __shared__ __align__(OperandLayout::swizzle_period_bytes) char shared_memory[];
    const SharedMemory shared{shared_address(shared_memory)};
    __shared__ int chunk;
    allow_next_grid();
    const Share share(args, find_start<consumer_threads + warpgroup_threads>(args));
    if (threadIdx.x == 0)
        shared.init_barriers();
    __syncthreads(); // the barriers are there
    wait_for_grids_before();

    // A warpgroup's registers are its own: the producers give some to the consumers.
    const int warpgroup = uniform(threadIdx.x / warpgroup_threads);
    if (warpgroup == 2) {
        give_registers_back<shape::producer_registers>();
        Producer{args, shared, share}.run();
    } else {
        take_registers<shape::consumer_registers>();
        if (warpgroup == 0)
            Scorer{args, shared, share, chunk}.run();
        else
            Follower{args, shared, share, chunk}.run();
    }
}
