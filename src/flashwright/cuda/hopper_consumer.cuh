// The consumers of the Hopper kernel: products, softmax, and what comes of them.
#pragma once
#include "hopper_scheduler.cuh"
#include "mask.cuh"
#include "register_store.cuh"
#include "softmax.cuh"
#include "wgmma_products.cuh"

// Issues S = QKᵀ for 64 rows of Q and as many keys as S has columns.
template <int column_tiles>
DEVICE void issue_scores(float (&S)[column_tiles][4], uint32 Q, uint32 K) {
    const uint64 a = operand_descriptor(Q, OperandLayout::summed_over_columns());
    const uint64 b = operand_descriptor(K, OperandLayout::summed_over_columns());
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < cfg::d_head / 16; ++k) {
        const int panel = k / 4, offset = k % 4 * 32; // 16 columns are 32 bytes of a panel's row
        const uint64 a_k = a + ((panel * warpgroup_rows * 128 + offset) >> 4);
        const uint64 b_k = b + ((panel * cfg::B_c * 128 + offset) >> 4);
        if (k == 0)
            wgmma_AB_shared(S, a_k, b_k);
        else
            wgmma_AB_shared_more(S, a_k, b_k);
    }
    wgmma_commit_group();
}

// Issues O += PV.
template <int k_steps, int column_tiles>
DEVICE void issue_output(float (&O)[column_tiles][4], const uint32 (&P)[k_steps][4], uint32 V) {
    const uint64 b = operand_descriptor(V, OperandLayout::summed_over_rows(cfg::B_c * 128));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < k_steps; ++k)
        wgmma_B_shared_transposed(O, P[k], b + (k * 16 * 128 >> 4));
    wgmma_commit_group();
}

// Rows of V beyond a packed sequence's end belong to the next one. Their weights are zero, but zero times infinity is
// not: they are cleared. All consumers take part, and wait for each other.
DEVICE void clear_rows_beyond(uint32 V, int rows) {
    constexpr int vectors_per_row = shape::panels * 8;
    for (int i = threadIdx.x; i < (cfg::B_c - rows) * vectors_per_row; i += consumer_threads) {
        const int row = rows + i / vectors_per_row, vector = i % vectors_per_row;
        store_shared_16B(V + vector / 8 * (cfg::B_c * 128) + row * 128 + vector % 8 * 16, Vector16B{});
    }
    fence_async_proxy();
    named_barrier_sync(barriers::V_cleared, consumer_threads);
}

// What a warpgroup's rows may look at, by steps: KV blocks are visited from the last to the first. Before `begin`, at
// nothing; up to `right_end`, and from `left_begin` on, not at all keys.
struct WarpgroupSteps {
    int begin, right_end, left_begin;
    bool begins_with_half; // of a block, or less

    DEVICE WarpgroupSteps(const TileWork &work, int row) {
        const int rows = min(warpgroup_rows, work.sequence.q_length - row); // none or fewer beyond the sequence's end
        const int blocks_end = work.range.first_block + work.range.count;
        const int first_row_keys = max(0, work.window.last_key(row) + 1);
        const int last_row_keys = rows > 0 ? max(0, work.window.last_key(row + rows - 1) + 1) : 0;
        const int last_row_first_key = work.window.first_key(row + warpgroup_rows - 1);
        begin = blocks_end - (last_row_keys + cfg::B_c - 1) / cfg::B_c;
        right_end = blocks_end - first_row_keys / cfg::B_c;
        left_begin = blocks_end - (last_row_first_key + cfg::B_c - 1) / cfg::B_c;
        begins_with_half = last_row_keys - (blocks_end - begin - 1) * cfg::B_c <= shape::half_block;
        begin = min(begin, work.range.count);
        right_end = min(right_end, work.range.count);
    }
};

// One consumer warp: 16 of its warpgroup's 64 rows.
struct Consumer {
    const HopperArguments &args;
    const SharedMemory &shared;
    const int warpgroup = uniform(threadIdx.x / warpgroup_threads);
    const int row_in_tile = threadIdx.x / 32 * 16; // of the warp's first row
    const Turns turns{warpgroup};
    QPlace Q_place;
    KVPlace K_place, V_place;

    float S[1][cfg::B_c / 8][4];
    uint32 P[cfg::B_c / 16][4];
    float O[1][cfg::d_head / 8][4];

    DEVICE void run() {
        AnnouncedTiles tiles{shared, 0xffffffff};
        for (Tile tile = tiles.next(); !tile.is_none(); tile = tiles.next()) {
            const TileWork work(args.forward, tile);
            if (work.exists())
                compute(work);
        }
    }

    // --- Parts of a step ---

    DEVICE Slot Q() const { return shared.Q(Q_place.stage, warpgroup); }

    // Waits for K and issues the scores of a block's first keys.
    template <int keys = cfg::B_c> DEVICE void start_scores() {
        const Slot K = shared.K(K_place.stage);
        K.wait_until_full(K_place.lap);
        issue_scores(scores_of<keys>()[0], Q().data, K.data);
    }
    template <int keys> DEVICE auto scores_of() -> float (&)[1][keys / 8][4] {
        return reinterpret_cast<float (&)[1][keys / 8][4]>(S);
    }
    // When the scores are there: K, and after its last use Q, may be overwritten.
    template <int keys = cfg::B_c> DEVICE void finish_scores(bool last) {
        pin_registers(scores_of<keys>()[0]);
        shared.K(K_place.stage).release();
        K_place.advance();
        if (last)
            Q().release();
    }
    DEVICE void start_output() {
        const Slot V = shared.V(V_place.stage);
        V.wait_until_full(V_place.lap);
        issue_output(O[0], P, V.data);
    }
    DEVICE void finish_output() {
        wgmma_wait_group<0>();
        pin_registers(O[0]);
        shared.V(V_place.stage).release();
        V_place.advance();
    }
    DEVICE void clear_output() {
#pragma unroll
        for (int n = 0; n < cfg::d_head / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                O[0][n][i] = 0;
    }
    template <int keys = cfg::B_c> DEVICE void round_scores() {
#pragma unroll
        for (int n = 0; n < cfg::B_c / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                P[n / 2][n % 2 * 2 + half] =
                    8 * n < keys ? pack_16bit<cfg::dtype>(S[0][n][2 * half], S[0][n][2 * half + 1]) : 0;
    }
    template <int keys = cfg::B_c> DEVICE void cap() {
        if constexpr (variant::softcaps)
            cap_scores(scores_of<keys>(), args.forward.capping_scale);
    }
    template <bool masked, int keys = cfg::B_c> DEVICE void cap_and_mask(const TileWork &work, int step) {
        cap<keys>();
        if constexpr (masked)
            apply_mask(scores_of<keys>(), work.window, work.q_row + row_in_tile, work.range.first_row(step));
    }
    // Step 0 visits the last keys: of a packed sequence, perhaps with the next one's rows behind them.
    DEVICE void clear_tail(const TileWork &work, int step) {
        const int rows = work.sequence.kv_length - work.range.first_row(step);
        if (variant::variable_lengths && step == 0 && rows < cfg::B_c) {
            const Slot V = shared.V(V_place.stage);
            V.wait_until_full(V_place.lap);
            clear_rows_beyond(V.data, rows);
        }
    }

    // --- A tile ---

    DEVICE void compute(const TileWork &work) {
        OnlineSoftmax<1> softmax(args.forward.softmax_scale);
        clear_output();
        if (work.range.count > 0) { // only a mask can leave a tile with no keys at all
            const WarpgroupSteps steps(work, work.q_row + warpgroup * warpgroup_rows);
            Q().wait_until_full(Q_place.lap);
            if constexpr (some_steps_are_idle)
                for (int step = 0; step < steps.begin; ++step)
                    skip_step(work, step);
            if (!some_steps_are_idle || steps.begin < work.range.count) {
                if constexpr (cfg::overlaps_softmax)
                    compute_overlapped(work, steps, softmax);
                else
                    compute_in_sequence(work, steps, softmax);
            }
            Q_place.advance();
        }
        softmax.normalize(O);
        store(work, softmax);
    }

    // With a mask, or behind the last row, a warpgroup may have nothing to look at in blocks that others need.
    static constexpr bool some_steps_are_idle = variant::masks_right || variant::ragged_q;

    // Takes part in all that others wait for.
    DEVICE void skip_step(const TileWork &work, int step) {
        turns.wait();
        turns.pass();
        shared.K(K_place.stage).wait_until_full(K_place.lap);
        finish_scores(step + 1 == work.range.count);
        clear_tail(work, step);
        shared.V(V_place.stage).wait_until_full(V_place.lap);
        finish_output();
    }

    // One thing after the other.
    DEVICE void compute_in_sequence(const TileWork &work, const WarpgroupSteps &steps, OnlineSoftmax<1> &softmax) {
        step_in_sequence<true, any_mask>(work, softmax, first_step(steps));
        further_steps(work, steps, softmax);
    }
    static DEVICE int first_step(const WarpgroupSteps &steps) { return some_steps_are_idle ? steps.begin : 0; }

    template <bool first, bool masked>
    DEVICE void step_in_sequence(const TileWork &work, OnlineSoftmax<1> &softmax, int step) {
        turns.wait();
        start_scores();
        wgmma_wait_group<0>();
        finish_scores(step + 1 == work.range.count);
        turns.pass();
        cap_and_mask<masked>(work, step);
        softmax.step<first>(S, O);
        round_scores();
        if constexpr (first)
            clear_tail(work, step);
        start_output();
        finish_output();
    }

    // Along the diagonal every other warpgroup looks at the first half of its first block only.
    static constexpr bool halves_first_block = variant::masks_right && shape::halves_first_block;

    // Each step's softmax runs while the product O += PV of the step before does.
    DEVICE void compute_overlapped(const TileWork &work, const WarpgroupSteps &steps, OnlineSoftmax<1> &softmax) {
        constexpr int half_block = halves_first_block ? shape::half_block : cfg::B_c;
        if (halves_first_block && steps.begins_with_half)
            first_step_overlapped<half_block>(work, softmax, first_step(steps));
        else
            first_step_overlapped<cfg::B_c>(work, softmax, first_step(steps));
        clear_tail(work, first_step(steps));
        further_steps(work, steps, softmax);
        start_output();
        finish_output();
    }

    template <int keys> DEVICE void first_step_overlapped(const TileWork &work, OnlineSoftmax<1> &softmax, int step) {
        turns.wait();
        start_scores<keys>();
        turns.pass();
        wgmma_wait_group<0>();
        finish_scores<keys>(step + 1 == work.range.count);
        cap_and_mask<any_mask, keys>(work, step);
        softmax.step<true>(scores_of<keys>());
        round_scores<keys>();
    }

    template <bool masked>
    DEVICE void step_overlapped(const TileWork &work, OnlineSoftmax<1> &softmax, int step) {
        turns.wait();
        start_scores();
        start_output();
        turns.pass();
        wgmma_wait_group<1>();
        if constexpr (cfg::guesses_maxima && !masked) {
            exponentiate_by_guess(softmax);
            finish_scores(step + 1 == work.range.count);
            finish_output();
        } else {
            finish_scores(step + 1 == work.range.count);
            cap_and_mask<masked>(work, step);
            const Shrinkage<1> shrinkage = softmax.step<false>(S);
            finish_output();
            softmax.apply(shrinkage, O);
        }
        round_scores();
    }

    // Without maxima; and again, with them, if that fails for any row of the warpgroup: K is kept until then.
    DEVICE void exponentiate_by_guess(OnlineSoftmax<1> &softmax) {
        pin_registers(S[0]);
        cap();
        const Guess<1> guess = softmax.guess(S);
        if (named_barrier_any(barriers::guess + warpgroup, warpgroup_threads, guess.fails)) {
            wgmma_wait_group<0>();
            pin_registers(O[0]);
            start_scores();
            wgmma_wait_group<0>();
            pin_registers(S[0]);
            cap();
            softmax.step<false>(S, O);
        } else {
            softmax.accept(guess);
        }
    }

    template <bool masked> DEVICE void further_step(const TileWork &work, OnlineSoftmax<1> &softmax, int step) {
        if constexpr (cfg::overlaps_softmax)
            step_overlapped<masked>(work, softmax, step);
        else
            step_in_sequence<false, masked>(work, softmax, step);
    }

    static constexpr bool any_mask = variant::masks_left || variant::masks_right || variant::ragged_kv;

    // All steps but the first; masks are only in the code of those that need one. Along the diagonal rows have seen too
    // few keys for a guess, so that one step more looks for maxima.
    DEVICE void further_steps(const TileWork &work, const WarpgroupSteps &steps, OnlineSoftmax<1> &softmax) {
        int step = first_step(steps) + 1;
        if constexpr (variant::masks_right) {
            const int end = cfg::guesses_maxima ? min(max(steps.right_end, step + 1), work.range.count) : steps.right_end;
#pragma unroll 1
            for (; step < end; ++step)
                further_step<true>(work, softmax, step);
        }
        const int end = variant::masks_left ? steps.left_begin : work.range.count;
#pragma unroll 1
        for (; step < end; ++step)
            further_step<false>(work, softmax, step);
        if constexpr (variant::masks_left) {
#pragma unroll 1
            for (; step < work.range.count; ++step)
                further_step<true>(work, softmax, step);
        }
    }

    // --- Results ---

    DEVICE void store(const TileWork &work, const OnlineSoftmax<1> &softmax) const {
        store_rows(output_rows(work), 2 * args.forward.O.row_stride, O[0], work.q_rows - row_in_tile);
        if constexpr (variant::returns_lse)
            store_lse(work, softmax.log_sum_exp(0, 0), softmax.log_sum_exp(0, 1));
    }

    // The warp's first row, counted from the first of the tensor.
    DEVICE int64 first_row(const TileWork &work) const {
        return work.sequence.q_start + work.q_row + row_in_tile;
    }
    DEVICE char *output_rows(const TileWork &work) const {
        return head_start(args.forward.O, work.tile.batch, work.tile.head) +
               2 * first_row(work) * args.forward.O.row_stride;
    }
    DEVICE void store_lse(const TileWork &work, float upper, float lower) const {
        float *lse = args.forward.lse + work.tile.batch * args.forward.lse_batch_stride +
                     work.tile.head * args.forward.lse_head_stride + first_row(work);
        const int lane = threadIdx.x % 32, rows = work.q_rows - row_in_tile;
        if (lane % 4 == 0 && (!variant::ragged_q || lane / 4 < rows))
            lse[lane / 4] = upper;
        if (lane % 4 == 0 && (!variant::ragged_q || lane / 4 + 8 < rows))
            lse[lane / 4 + 8] = lower;
    }
};
