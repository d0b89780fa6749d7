// Decoding with warpgroup products (wgmma): tiles of 64 or 128 packed rows, of wide groups of heads or of several queries.
//
// A producer warpgroup copies keys and values into a ring of stages, in the order of its thread block's segments (see
// items.cuh), and runs ahead of the consumers, which compute 64 rows each. A stage is `full` when its copies have arrived,
// and `empty` when every consumer warp has read it. Rows of caches lie anywhere, in pages or not: they are copied by
// threads (cp.async), into the layout that wgmma reads.
#pragma once
#include "attention/softmax.cuh"
#include "decode/copies.cuh"
#include "decode/parts.cuh"
#include "decode/scores.cuh"
#include "decode/warpgroup_parts.cuh"
#include "pipeline/ring.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/products.cuh"
#include "tile/warpgroup_products.cuh"

constexpr int consumer_threads = cfg::n_consumers * warpgroup_threads;

// Each warp's rows of Q are registers where there are enough: of what a product reads of shared memory, Q would be half.
using QFragments = Fragments<cfg::d_head / mma_depth, 1, 1, shape::Q_in_registers ? cfg::d_head / mma_depth : 1>;

struct SoftmaxPolicy {
    static constexpr DType dtype = cfg::dtype;
    static constexpr bool optimized = true, lazy_rescale = true, mma_row_sum = false, spreads_chains = true;
    static constexpr bool rows_may_be_empty = true;
};

// Numbers of the named barriers; 0 is that of all threads. Q has one for each warpgroup.
namespace barriers {
constexpr int consumers = 1, Q = 2;
}

using KVPlace = RingPlace<cfg::stages>;

struct SharedMemory {
    uint32 base;

    DEVICE uint32 Q(int warpgroup) const { return base + warpgroup * shape::Q_bytes; }
    DEVICE Slot K(int stage) const { return slot(shape::K_offset, stage, 2 * stage); }
    DEVICE Slot V(int stage) const { return slot(shape::V_offset, stage, 2 * stage + 1); }

    DEVICE void init_barriers() const {
        constexpr int consumer_warps = consumer_threads / warp_threads;
        for (int stage = 0; stage < 2 * cfg::stages; ++stage) {
            const Slot slot = stage % 2 ? V(stage / 2) : K(stage / 2);
            mbarrier_init(slot.full, warpgroup_threads); // every producer thread's copies
            mbarrier_init(slot.empty, consumer_warps);
        }
    }

  private:
    DEVICE Slot slot(uint32 offset, int stage, int index) const {
        return Slot::at(base + offset + stage * shape::KV_bytes,
                        base + shape::barriers_offset + Slot::barrier_pair_bytes * index);
    }
};

// One producer warp: every fourth group of keys.
struct Producer {
    static constexpr int warps = warpgroup_threads / warp_threads, groups = ceil_div(cfg::B_c / key_group, warps);
    using Places = KeyPlaces<groups, warps * key_group>;

    const DecodeArguments &args;
    const SharedMemory &shared;
    Share share;
    const int warp = (threadIdx.x - consumer_threads) / warp_threads;
    KVPlace ring;

    DEVICE void run() {
        for (; share.is_some(); share.next(args)) {
            const Item &item = share.item;
            Places places;
            places.begin(args, item, first_key(share.first));
#pragma unroll 1
            for (int unit = share.first; unit < share.last; ++unit) {
                const int first = first_key(unit);
                places.move_on(args, item, first, share.last - unit);
                const Slot K = shared.K(ring.stage), V = shared.V(ring.stage);
                K.wait_until_empty(ring.lap); // @operand K
#pragma unroll
                for (int group = 0; group < groups; ++group) {
                    const KeyGroup keys = places.group(item, group, first);
                    copy<tensor_columns>(keys.K, keys.exist, args.forward.K, K.data, group);
                }
                cp_async_mbarrier_arrive(K.full);
                V.wait_until_empty(ring.lap); // @operand V
#pragma unroll
                for (int group = 0; group < groups; ++group) {
                    const KeyGroup keys = places.group(item, group, first);
                    copy<value_columns>(keys.V, keys.exist, args.forward.V, V.data, group);
                }
                cp_async_mbarrier_arrive(V.full);
                ring.advance();
            }
        }
        // The consumers wait for all copies before they end.
    }

  private:
    // Of the warp's keys in a unit.
    DEVICE int first_key(int unit) const { return (share.item.first_unit + unit) * cfg::B_c + warp * key_group; }

    template <int columns>
    DEVICE void copy(const char *rows, int exist, const TensorView &tensor, uint32 tile, int group) const {
        const int first_row = (group * warps + warp) * key_group;
        if (first_row < cfg::B_c)
            copy_rows<cfg::B_c, warp_threads, key_group, row_vectors, columns / vector_elements>(rows, exist, tensor, tile,
                                                                                                 first_row, lane_index());
    }
};

// One consumer warp: 16 of its warpgroup's 64 rows.
struct Consumer {
    const DecodeArguments &args;
    const SharedMemory &shared;
    Share share;
    int &chunk;
    const int warpgroup = uniform(threadIdx.x / warpgroup_threads);
    const int first_row = threadIdx.x / warp_threads * mma_rows; // of the warp, in the tile
    KVPlace K_place, V_place;

    SharedOperand<QFragments, warpgroup_rows, Role::A> Q{0, lane_index()};
    float S[1][cfg::B_c / mma_columns][accumulator_values];
    uint32 P[cfg::B_c / mma_depth][4];
    float O[1][cfg::d_head / mma_columns][accumulator_values];

    DEVICE void run() {
        for (; share.is_some(); share.next(args)) {
            OnlineSoftmax<SoftmaxPolicy, 1> softmax(args.forward.softmax_scale);
            start_Q();
            const Destination to(args, share);
            finish_Q();
            compute(softmax);
            store(softmax, to);
        }
    }

    // --- Parts of a step ---

    DEVICE void start_Q() const {
        const int thread = threadIdx.x % warpgroup_threads;
        named_barrier_sync(barriers::Q + warpgroup, warpgroup_threads); // all warps have read Q
        const int first_row = warpgroup * warpgroup_rows;
        copy_Q<warpgroup_rows, warpgroup_threads>(args, share.item, shared.Q(warpgroup), first_row, thread); // @operand Q
        cp_async_commit_group();
    }
    DEVICE void finish_Q() {
        cp_async_wait_group<0>();
        // All threads' rows are there. The fence that follows the wait for K is for Q, too.
        named_barrier_sync(barriers::Q + warpgroup, warpgroup_threads);
        if constexpr (shape::Q_in_registers) {
            Q.shared = shared.Q(warpgroup) + first_row % warpgroup_rows * layout::row_bytes;
            Q.load_entire_block();
        }
    }
    DEVICE void start_scores() {
        const Slot K = shared.K(K_place.stage);
        K.wait_until_full(K_place.lap); // @operand K
        fence_async_proxy();            // threads have copied what the product reads
        if constexpr (shape::Q_in_registers) {
            issue_scores(K.data); // @product S
        } else {
            issue_shared_shared<cfg::d_head, cfg::B_c>(S[0], shared.Q(warpgroup), K.data); // @product S
        }
    }
    DEVICE void issue_scores(uint32 K) {
        const uint64 keys = operand_descriptor(K, OperandLayout::summed_over_columns());
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < cfg::d_head / mma_depth; ++k) {
            const uint64 columns = keys + descriptor_offset(depth_offset<cfg::B_c>(k));
            if (k == 0)
                wgmma_registers_columns_first(S[0], Q.block(k, 0, 0), columns);
            else
                wgmma_registers_columns(S[0], Q.block(k, 0, 0), columns);
        }
        wgmma_commit_group();
    }
    DEVICE void finish_scores() {
        pin_registers(S[0]);
        shared.K(K_place.stage).release(); // @operand K
        K_place.advance();
    }
    DEVICE void start_output() {
        const Slot V = shared.V(V_place.stage);
        V.wait_until_full(V_place.lap); // @operand V
        fence_async_proxy();
        issue_registers_shared<cfg::B_c>(O[0], P, V.data); // @product O
    }
    DEVICE void finish_output() {
        wgmma_wait_group<0>();
        pin_registers(O[0]);
        shared.V(V_place.stage).release(); // @operand V
        V_place.advance();
    }
    DEVICE void round_scores() {
#pragma unroll
        for (int n = 0; n < cfg::B_c / mma_columns; ++n)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                P[n / 2][n % 2 * 2 + half] = pack_16bit<cfg::dtype>(S[0][n][2 * half], S[0][n][2 * half + 1]);
    }

    // --- A segment ---

    // Each step's softmax runs while the product O += PV of the step before does.
    DEVICE void compute(auto &softmax) {
        const PackedScores scores(args, share.item);
#pragma unroll
        for (int n = 0; n < cfg::d_head / mma_columns; ++n)
#pragma unroll
            for (int i = 0; i < accumulator_values; ++i)
                O[0][n][i] = 0;
        start_scores();
        wgmma_wait_group<0>();
        finish_scores();
        scores.finish(args, share.item, S, first_row, first_key(share.first));
        softmax.template step<true>(S); // @phase softmax
        round_scores();
#pragma unroll 1
        for (int unit = share.first + 1; unit < share.last; ++unit) {
            start_scores();
            start_output();
            wgmma_wait_group<1>();
            finish_scores();
            scores.finish(args, share.item, S, first_row, first_key(unit));
            const Shrinkage<1> shrinkage = softmax.template step<false>(S); // @phase softmax
            finish_output();
            apply(shrinkage, O); // @phase rescale O
            round_scores();
        }
        start_output();
        finish_output();
    }
    DEVICE int first_key(int unit) const { return (share.item.first_unit + unit) * cfg::B_c; }

    // --- Results ---

    DEVICE void store(auto &softmax, const Destination &to) {
        const Item &item = share.item;
        const Partials partials{args};
        const bool whole = share.is_whole_item();
        for_each_part(softmax, [&](int row, int index, const RowPart &part) {
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

    template <class Function> DEVICE void for_each_part(auto &softmax, const Function &function) {
        const auto terms = [&](int half) { return terms_of_row(softmax, half); };
        ::for_each_part(O[0], terms, first_row, 0, function);
    }
};

template <HopperDecodeKernelConfig>
__global__ void __launch_bounds__(consumer_threads + warpgroup_threads, 1)
    hopper_decode_kernel(const __grid_constant__ DecodeArguments args) {
    extern __shared__ __align__(OperandLayout::swizzle_period_bytes) char shared_memory[];
    const SharedMemory shared{shared_address(shared_memory)};
    __shared__ int chunk;
    allow_next_grid();
    const Share share(args, find_start<consumer_threads + warpgroup_threads>(args));
    if (threadIdx.x == 0)
        shared.init_barriers();
    __syncthreads(); // the barriers are there
    wait_for_grids_before();

    // A warpgroup's registers are its own: of three, the producers give some to the consumers. Two have enough.
    if (threadIdx.x >= consumer_threads) {
        if constexpr (cfg::n_consumers > 1)
            give_registers_back<shape::producer_registers>();
        Producer{args, shared, share}.run();
    } else {
        if constexpr (cfg::n_consumers > 1)
            take_registers<shape::consumer_registers>();
        Consumer{args, shared, share, chunk}.run();
    }
}
