// The consumers of the Hopper kernel: products, softmax, and what comes of them.
#pragma once
#include "attention/epilogue.cuh"
#include "attention/guessing_softmax.cuh"
#include "attention/scores.cuh"
#include "attention/softmax.cuh"
#include "forward/hopper_shared.cuh"
#include "ptx/shuffle.cuh"
#include "tile/store.cuh"
#include "tile/warpgroup_products.cuh"

struct SoftmaxPolicy {
    static constexpr DType dtype = cfg::dtype;
    static constexpr bool optimized = true, mma_row_sum = false, lazy_rescale = cfg::lazy_rescale;
    static constexpr bool spreads_chains = shape::spreads_chains, shares_dominance = shape::shares_dominance;
    static constexpr bool rows_may_be_empty = variant::masks_left || variant::masks_right || variant::variable_lengths;
};
template <bool guesses> struct SoftmaxOf {
    using type = OnlineSoftmax<SoftmaxPolicy, 1>;
};
template <> struct SoftmaxOf<true> {
    using type = GuessingSoftmax<SoftmaxPolicy>;
};
using Softmax = SoftmaxOf<cfg::guesses_maxima>::type;

// The steps of a warpgroup's rows.
struct WarpgroupSteps : Steps {
    int first;             // the first step with a key for its rows: `begin`, or that of a first block that leads
    bool begins_with_half; // its rows attend to the first half of the block at `begin`, and to no more of it
    int care_end;          // the end of the steps in which a softmax that guesses takes care

    DEVICE WarpgroupSteps(const HopperTileWork &work, int row)
        : Steps(work.keys.steps_of(work.window, row, last_row(work, row))) {
        // Of the row whose last key comes first, the last block with care: the block of its last key is, so that all
        // that need a mask on the right are.
        const int last_with_care = work.window.last_key(row) / cfg::B_c - (shape::blocks_with_care - 1);
        const int last_block = work.keys.first_block + work.keys.count - 1;
        care_end = min(last_block - last_with_care + 1 + shape::first_block_leads, work.keys.count);
        const int keys = last_row(work, row) < row ? 0 : work.window.keys_up_to_last(last_row(work, row));
        begins_with_half = keys - work.keys.first_key(begin) <= shape::half_block;
        first = !shape::first_block_leads ? begin : keys > 0 ? 0 : work.keys.count;
    }

  private:
    // Before the first if the sequence ends before it.
    static DEVICE int last_row(const HopperTileWork &work, int row) {
        return min(row + warpgroup_rows, work.sequence.q_length) - 1;
    }
};

// One consumer warp: 16 of its warpgroup's 64 rows.
struct Consumer {
    const HopperArguments &args;
    const SharedMemory &shared;
    const int warpgroup = uniform(threadIdx.x / warpgroup_threads);
    const int row_in_tile = threadIdx.x / warp_threads * mma_rows; // of the warp's first row
    const Turns<cfg::ping_pong, cfg::n_consumers, barriers::turns> turns{warpgroup};
    QPlace Q_place;
    KVPlace K_place, V_place;

    float S[1][cfg::B_c / mma_columns][accumulator_values];
    uint32 P[cfg::B_c / mma_depth][4];
    float O[1][cfg::d_head / mma_columns][accumulator_values];

    DEVICE void run() {
        HopperTiles tiles{shared};
        for (Tile tile = tiles.next(); !tile.is_none(); tile = tiles.next()) {
            const HopperTileWork work(args.forward, tile);
            if (work.exists())
                compute(work);
        }
    }

    // --- Parts of a step ---

    DEVICE Slot Q() const { return shared.Q(Q_place.stage, warpgroup); }

    // Waits for K and issues the scores of a block's first keys.
    template <int keys = cfg::B_c> DEVICE void start_scores() {
        const Slot K = shared.K(K_place.stage);
        K.wait_until_full(K_place.lap); // @operand K
        issue_shared_shared<cfg::d_head, cfg::B_c>(scores_of<keys>()[0], Q().data, K.data); // @product S
    }
    template <int keys> DEVICE auto scores_of() -> float (&)[1][keys / mma_columns][accumulator_values] {
        return reinterpret_cast<float (&)[1][keys / mma_columns][accumulator_values]>(S);
    }
    // When the scores are complete: K, and after its last use Q, may be overwritten.
    template <int keys = cfg::B_c> DEVICE void finish_scores(bool last) {
        pin_registers(scores_of<keys>()[0]);
        shared.K(K_place.stage).release(); // @operand K
        K_place.advance();
        if (last)
            Q().release(); // @operand Q
    }
    DEVICE void start_output() {
        const Slot V = shared.V(V_place.stage);
        V.wait_until_full(V_place.lap); // @operand V
        issue_registers_shared<cfg::B_c>(O[0], P, V.data); // @product O
    }
    DEVICE void await_output() {
        wgmma_wait_group<0>();
        pin_registers(O[0]);
    }
    DEVICE void finish_output() {
        await_output();
        shared.V(V_place.stage).release(); // @operand V
        V_place.advance();
    }
    DEVICE void clear_output() {
#pragma unroll
        for (int n = 0; n < cfg::d_head / mma_columns; ++n)
#pragma unroll
            for (int i = 0; i < accumulator_values; ++i)
                O[0][n][i] = 0;
    }
    template <int keys = cfg::B_c> DEVICE void round_scores() {
#pragma unroll
        for (int n = 0; n < cfg::B_c / mma_columns; ++n)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                P[n / 2][n % 2 * 2 + half] =
                    mma_columns * n < keys ? pack_16bit<cfg::dtype>(S[0][n][2 * half], S[0][n][2 * half + 1]) : 0;
    }
    DEVICE Scores scores(const HopperTileWork &work) const { return {work.window, args.forward.capping_scale}; }
    template <bool masked, int keys = cfg::B_c> DEVICE void cap_and_mask(const HopperTileWork &work, int step) {
        scores(work).finish<masked>(scores_of<keys>(), work.q_row + row_in_tile, work.keys.first_key(step));
    }
    // The step of the last keys: of a packed sequence, perhaps with rows of V behind them that belong to the next one.
    // Their weights are zero, but zero times infinity is not: they are cleared. All consumers take part, and wait for
    // each other.
    DEVICE void clear_tail(const HopperTileWork &work, int step, const KVPlace &place) {
        const int rows = work.sequence.kv_length - work.keys.first_key(step);
        if (variant::variable_lengths && rows < cfg::B_c) {
            const Slot V = shared.V(place.stage);
            V.wait_until_full(place.lap); // @operand V
            clear_rows<cfg::B_c, shape::panels>(V.data, rows, threadIdx.x, consumer_threads);
            fence_async_proxy();
            named_barrier_sync(barriers::V_cleared, consumer_threads);
        }
    }

    // --- A tile ---

    DEVICE void compute(const HopperTileWork &work) {
        Softmax softmax(args.forward.softmax_scale);
        clear_output();
        if (work.keys.count > 0) {
            const WarpgroupSteps steps(work, work.q_row + warpgroup * warpgroup_rows);
            Q().wait_until_full(Q_place.lap); // @operand Q
            for (int step = 0; step < steps.first; ++step)
                skip_step(work, step);
            if (steps.first < work.keys.count) {
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

    // With a mask, or behind the last row, a warpgroup has no key in blocks that others need. It takes part in all that
    // these wait for.
    DEVICE void skip_step(const HopperTileWork &work, int step) {
        skip_scores(work, step);
        clear_tail(work, step, V_place);
        skip_output();
    }
    DEVICE void skip_scores(const HopperTileWork &work, int step) {
        turns.wait();
        turns.pass();
        shared.K(K_place.stage).wait_until_full(K_place.lap); // @operand K
        finish_scores(step + 1 == work.keys.count);
    }
    DEVICE void skip_output() {
        shared.V(V_place.stage).wait_until_full(V_place.lap); // @operand V
        finish_output();
    }

    // One thing after the other.
    DEVICE void compute_in_sequence(const HopperTileWork &work, const WarpgroupSteps &steps, auto &softmax) {
        step_in_sequence<true, true>(work, softmax, steps.begin);
        further_steps(work, steps, softmax);
    }

    template <bool first, bool masked>
    DEVICE void step_in_sequence(const HopperTileWork &work, auto &softmax, int step) {
        turns.wait();
        start_scores();
        wgmma_wait_group<0>();
        finish_scores(step + 1 == work.keys.count);
        turns.pass();
        cap_and_mask<masked>(work, step);
        softmax.step<first>(S, O); // @phase softmax
        round_scores();
        if constexpr (first)
            clear_tail(work, step, V_place);
        start_output();
        finish_output();
    }

    // Along the diagonal every other warpgroup attends to the first half of its first block only.
    static constexpr bool halves_first_block = variant::masks_right && shape::halves_first_block;

    // Each step's softmax runs while the product O += PV of the step before does.
    DEVICE void compute_overlapped(const HopperTileWork &work, const WarpgroupSteps &steps, auto &softmax) {
        constexpr int half_block = halves_first_block ? shape::half_block : cfg::B_c;
        if constexpr (shape::first_block_leads) {
            leading_steps(work, steps, softmax);
        } else {
            if (halves_first_block && steps.begins_with_half)
                first_step_overlapped<half_block>(work, softmax, steps.begin);
            else
                first_step_overlapped<cfg::B_c>(work, softmax, steps.begin);
            clear_tail(work, steps.begin, V_place);
        }
        further_steps(work, steps, softmax);
        start_output();
        finish_output();
        if (steps.begin == work.keys.count)
            release_skipped(steps);
        if constexpr (cfg::guesses_maxima)
            softmax.rescale(O); // @phase rescale O
    }

    // The first block of keys, which leads, and those behind it that are for other rows alone. The product with the first
    // block's V is left to the next step, as behind any other step; the V of blocks that were skipped lie behind it in the
    // ring, and are released after it.
    DEVICE void leading_steps(const HopperTileWork &work, const WarpgroupSteps &steps, auto &softmax) {
        first_step_overlapped<cfg::B_c>(work, softmax, 0);
        clear_tail(work, 0, V_place);
        if constexpr (variant::masks_right) {
            KVPlace place = V_place;
            for (int step = 1; step < steps.begin; ++step) {
                place.advance();
                skip_scores(work, step);
                clear_tail(work, step, place);
            }
        }
    }
    // Behind that product.
    DEVICE void release_skipped(const WarpgroupSteps &steps) {
        if constexpr (shape::first_block_leads && variant::masks_right)
            for (int step = 1; step < steps.begin; ++step)
                skip_output();
    }

    template <int keys> DEVICE void first_step_overlapped(const HopperTileWork &work, auto &softmax, int step) {
        turns.wait();
        start_scores<keys>();
        turns.pass();
        wgmma_wait_group<0>();
        finish_scores<keys>(step + 1 == work.keys.count);
        cap_and_mask<true, keys>(work, step);
        if constexpr (cfg::guesses_maxima) {
            softmax.first_step(scores_of<keys>()); // @phase softmax
        } else {
            softmax.step<true>(scores_of<keys>()); // @phase softmax
        }
        round_scores<keys>();
    }

    template <bool masked> DEVICE void step_overlapped(const HopperTileWork &work, auto &softmax, int step) {
        start_products();
        finish_scores(step + 1 == work.keys.count);
        cap_and_mask<masked>(work, step);
        const Shrinkage<1> shrinkage = softmax.step<false>(S); // @phase softmax
        finish_output();
        apply(shrinkage, O); // @phase rescale O
        round_scores();
    }
    // The scores of a step, and the output of the one before; waits for the scores.
    template <int keys = cfg::B_c> DEVICE void start_products() {
        turns.wait();
        start_scores<keys>();
        start_output();
        turns.pass();
        wgmma_wait_group<1>();
    }

    // The same with a softmax that guesses; with care, or free of masks and maxima. Returns whether exponentials of any
    // row of the warpgroup overflowed without care: the scores were computed again, from the K that was kept.
    template <bool with_care, int keys = cfg::B_c>
    DEVICE bool step_by_guess(const HopperTileWork &work, auto &softmax, int step) {
        bool overflowed = false, has_grown;
        start_products<keys>();
        pin_registers(scores_of<keys>()[0]);
        if constexpr (with_care) // K is not needed again
            finish_scores<keys>(step + 1 == work.keys.count);
        cap_and_mask<with_care, keys>(work, step);
        if constexpr (with_care) {
            has_grown = exponentiate_with_care(work, softmax, scores_of<keys>(), step); // @phase softmax
        } else {
            const auto sums = softmax.exponentiate(S); // @phase softmax
            overflowed = any_of_warpgroup(softmax.overflows(sums));
            if (overflowed) {
                await_output();
                // To the compiler another stage, whose addresses it has not computed before.
                if constexpr (shape::recomputes_addresses)
                    K_place.stage = uniform(K_place.stage);
                start_scores();
                wgmma_wait_group<0>();
                pin_registers(S[0]);
                scores(work).cap(S);
                has_grown = exponentiate_with_care(work, softmax, S, step); // @phase softmax
            } else {
                has_grown = softmax.accept(sums, S); // @phase softmax
            }
        }
        // The branch also keeps the assembler from waiting for the product before the exponentials are there.
        if (has_grown) {
            await_output();
            softmax.rescale(O); // @phase rescale O
            softmax.lift_references();
        }
        if constexpr (!with_care)
            finish_scores(step + 1 == work.keys.count);
        finish_output();
        if (!has_grown)
            softmax.rescale(O); // @phase rescale O
        round_scores<keys>();
        if constexpr (shape::first_block_leads && with_care)
            clear_tail(work, step, V_place);
        return overflowed;
    }
    // Equal in all lanes, and known to the compiler as such: addresses that follow from it stay in shared registers.
    DEVICE bool any_of_warpgroup(bool value) const {
        return __any_sync(all_lanes, named_barrier_any(barriers::guess + warpgroup, warpgroup_threads, value));
    }
    template <int column_tiles>
    DEVICE bool exponentiate_with_care(const HopperTileWork &work, auto &softmax, float (&scores)[1][column_tiles][4],
                                       int step) const {
        bool in_first_blocks[halves];
        for (int half = 0; half < halves; ++half) {
            const int row = work.q_row + row_in_tile + accumulator_row(0, half);
            const int end_with_care = work.keys.first_key(step) + shape::blocks_with_care * cfg::B_c;
            in_first_blocks[half] = end_with_care > work.window.last_key(row);
        }
        return softmax.step_with_care(scores, in_first_blocks);
    }

    template <bool masked> DEVICE void further_step(const HopperTileWork &work, auto &softmax, int step) {
        if constexpr (cfg::overlaps_softmax)
            step_overlapped<masked>(work, softmax, step);
        else
            step_in_sequence<false, masked>(work, softmax, step);
    }

    // All steps but the first, or the leading ones; masks are only in the code of those that need one.
    DEVICE void further_steps(const HopperTileWork &work, const WarpgroupSteps &steps, auto &softmax) {
        int step = steps.begin + !shape::first_block_leads;
        const int plain_end = variant::masks_left ? steps.plain_end : work.keys.count;
        if constexpr (cfg::guesses_maxima) {
            // With care at first, and again behind the last plain step or the first that overflows.
            int care_end = steps.care_end;
            if constexpr (shape::first_block_leads && halves_first_block)
                if (step < work.keys.count && steps.begins_with_half) {
                    step_by_guess<true, shape::half_block>(work, softmax, step++);
                    release_skipped(steps);
                }
#pragma unroll 1
            while (step < work.keys.count) {
#pragma unroll 1
                for (; step < care_end; ++step) {
                    step_by_guess<true>(work, softmax, step);
                    if (step == steps.begin)
                        release_skipped(steps);
                }
                bool overflowed = false;
#pragma unroll 1
                for (; step < plain_end && !overflowed; ++step)
                    overflowed = step_by_guess<false>(work, softmax, step);
                care_end = work.keys.count;
            }
        } else {
            if constexpr (variant::masks_right)
#pragma unroll 1
                for (; step < steps.plain_begin; ++step)
                    further_step<true>(work, softmax, step);
#pragma unroll 1
            for (; step < plain_end; ++step)
                further_step<false>(work, softmax, step);
            if constexpr (variant::masks_left)
#pragma unroll 1
                for (; step < work.keys.count; ++step)
                    further_step<true>(work, softmax, step);
        }
    }

    // --- Results ---

    DEVICE void store(const HopperTileWork &work, const auto &softmax) const {
        const OutputRows output(args.forward, work);
        if constexpr (variant::accumulates) {
            output.accumulate<output_columns, 32>(softmax, row_in_tile, O);
            return;
        }
        store_rows<cfg::dtype>(output.O + row_in_tile * output.O_stride, output.O_stride, O[0],
                               output.rows - row_in_tile, output_columns);
        if constexpr (variant::returns_lse)
            output.store_lse(softmax, row_in_tile);
    }
};
