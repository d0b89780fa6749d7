// The consumers of the Hopper backward: five products a step, and the gradients of scores between them.
//
// Warpgroups stand in `key_groups` of 64 keys and `parts` along the other dimension of each product: queries in S and dP,
// columns in dV and dK. In dQ = dS·K they stand along its rows and columns, and each sums over all keys.
//
// dQ is a step late: dS of all warpgroups has been written by then, and none waits for another, so that one multiplies
// while the other computes gradients of scores.
//
//     step i:  S(i), dP(i)                                  dQ(i-1), dV(i), dK(i)
//                └─ gradients of scores i, dS to shared memory ─┘ └─ dQ(i-1) is added
//
// P and dS are operands of dV and dK in the registers that hold them. Where P goes through shared memory, two warpgroups
// have written it before either multiplies it; a pair of thread blocks has registers for dQ(i-1) during the gradients.
//
// With a causal mask a tile's first queries may come before all keys of a warpgroup: it can leave that step out.
//
// Nothing is under way from one step to the next: the assembler would wait for every product where the registers of one
// meet at the beginning of a loop.
//
// Additions to dQ are what the cache between multiprocessors has least room for. The thread blocks of a pair, neighbours
// in keys, send each other dS: each adds half of the columns of dQ, summed over the keys of both.
#pragma once
#include "attention/score_gradients.cuh"
#include "backward/hopper_shared.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "tile/store.cuh"
#include "tile/warpgroup_products.cuh"

constexpr int queries_per_part = cfg::B_r / shape::parts, columns_per_part = cfg::d_head / shape::parts;
constexpr int column_tiles = queries_per_part / mma_columns; // of S and dP
constexpr int tiles_at_once = shape::term_tiles; // whose terms fit into registers
constexpr int panels_per_part = columns_per_part / panel_columns;

struct Consumer {
    const HopperArguments &args;
    const SharedMemory &shared;
    const int warpgroup = uniform(threadIdx.x / warpgroup_threads);
    const int key_group = warpgroup / shape::parts, part = warpgroup % shape::parts;

    float S[1][column_tiles][accumulator_values];
    float dP[1][column_tiles][accumulator_values];
    uint32 P[queries_per_part / mma_depth][4], dS[queries_per_part / mma_depth][4]; // operands of products
    float dK[1][columns_per_part / mma_columns][accumulator_values] = {};
    float dV[1][columns_per_part / mma_columns][accumulator_values] = {};
    Sums::Accumulator dQ;
    Pair lse[column_tiles], dots[column_tiles];
    int index = 0; // of the tile, among those of this thread block

    DEVICE void run() {
        if constexpr (shape::announces_tiles)
            compute_announced_tiles();
        else
            compute(0, work().steps(args.backward));
        // The other thread block may be reading what this one has sent, or telling it so.
        if constexpr (cfg::paired)
            cluster_sync();
    }

  private:
    DEVICE void compute_announced_tiles() {
        int step = 0;
#pragma unroll 1
        for (;; ++index) {
            const Slot slot = shared.tile(index);
            slot.wait_until_full(TilePlace::after(index).lap);
            const int steps = uniform(TileNote::read(slot.data).steps);
            if (steps == TileNote::none)
                return;
            compute(step, step + steps);
            step += steps;
            __syncwarp(); // lanes that have rows to store and lanes that have none arrive together
            TileNote::release(slot);
        }
    }
    // A tile, by all its steps.
    DEVICE void compute(int first_step, int end) {
        const int first = shape::announces_tiles ? first_step : 0;
        if constexpr (shape::announces_tiles) {
            // The tile before has left sums, and keys have been copied for one without steps.
            clear(dK[0]);
            clear(dV[0]);
            wait_for_keys();
        }
        if (first < end) {
            if constexpr (!shape::announces_tiles)
                wait_for_keys();
            // Zeros are there before any product is under way.
            pin_registers(dK[0]);
            pin_registers(dV[0]);
            this->step<true>(first);
#pragma unroll 1
            for (int step = first + 1; step < end; ++step)
                this->step<false>(step);
            finish_dQ(end - 1);
        }
        if constexpr (shape::announces_tiles && !cfg::keys_ahead)
            release_keys();
        store();
    }
    template <int column_tiles> static DEVICE void clear(float (&c)[column_tiles][accumulator_values]) {
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
            for (int i = 0; i < accumulator_values; ++i)
                c[n][i] = 0;
    }

    // Found again where it is needed: the loop has no registers to keep it.
    DEVICE Work work() const { return work_of(args.backward, tile()); }
    DEVICE int tile() const {
        if constexpr (shape::announces_tiles)
            return TileNote::read(shared.tile(index).data).tile;
        return block_index_again().x;
    }
    DEVICE KeysPlace keys_place() const { return KeysPlace::after(index); }
    // Of the warp's first key, in the tile.
    DEVICE int first_key() const { return key_group * warpgroup_rows + thread_index_again() / warp_threads % 4 * mma_rows; }

    // --- Products ---

    DEVICE void wait_for_keys() {
        for (int group = 0; group < shape::key_groups; ++group) {
            K(group).wait_until_full(keys_place().lap); // @operand K
            if constexpr (cfg::paired)
                shared.other_K(group).wait_until_full(keys_place().lap); // @operand K
        }
        clear_keys_of_others();
        for (int group = 0; group < shape::key_groups; ++group)
            V(group).wait_until_full(keys_place().lap); // @operand V
    }
    // For those of the next tile.
    DEVICE void release_keys() const {
        for (int group = 0; group < shape::key_groups; ++group) {
            K(group).release();
            V(group).release();
        }
    }
    DEVICE Slot K(int group) const { return shared.K(group, keys_place().stage); }
    DEVICE Slot V(int group) const { return shared.V(group, keys_place().stage); }

    DEVICE void start_scores(int step) {
        const QPlace place = QPlace::after(step);
        const Slot Q = shared.Q(place.stage);
        Q.wait_until_full(place.lap); // @operand Q
        clear_queries_of_others(Q.data, step);
        if constexpr (!variant::softcaps)
            load_terms<0, tiles_at_once>(lse, shared.lse(place.stage)); // before the products: loads would wait for those
        issue_shared_shared<cfg::d_head, cfg::B_r>(S[0], found_again(K(key_group).data), // @product S
                                                   in_block(Q.data) + first_query_offset());
    }
    DEVICE void start_dP(int step) {
        const dOPlace place = dOPlace::after(step);
        const Slot dO = shared.dO(place.stage);
        dO.wait_until_full(place.lap); // @operand dO
        clear_queries_of_others(dO.data, step);
        const uint32 queries = cfg::dO_stages == 1 ? found_again(dO.data) : in_block(dO.data); // one stage stays there, too
        issue_shared_shared<cfg::d_head, cfg::B_r>(dP[0], found_again(V(key_group).data), // @product dP
                                                   queries + first_query_offset());
    }
    static DEVICE uint32 in_block(uint32 address) { return cfg::paired ? address_for_descriptor(address) : address; }
    // Of what stays there: found where it is used, where the loop has no registers to keep descriptors.
    static DEVICE uint32 found_again(uint32 address) {
        return in_block(shape::finds_again ? opaque(address) : address);
    }
    // What is known of the queries of some of this thread's columns.
    template <int begin, int end> DEVICE void load_terms(Pair (&pairs)[column_tiles], uint32 terms) const {
#pragma unroll
        for (int n = begin; n < end; ++n)
            pairs[n] = term(terms, n);
    }
    DEVICE Pair term(uint32 terms, int n) const {
        return load_shared_8B(terms + (part * queries_per_part + mma_columns * n + accumulator_column()) * sizeof(float));
    }
    DEVICE uint32 first_query_offset() const { return part * queries_per_part * panel_row_bytes; }
    // Of a part's columns in a tile of queries.
    DEVICE uint32 first_column_offset() const { return part * panels_per_part * panel_bytes<cfg::B_r>; }

    DEVICE Slot Q(int step) const { return shared.Q(QPlace::after(step).stage); }
    DEVICE Slot dO(int step) const { return shared.dO(dOPlace::after(step).stage); }

    DEVICE void start_dV(int step) {
        const uint32 columns = in_block(dO(step).data) + first_column_offset();
        if constexpr (shape::P_in_registers) {
            issue_registers_shared<cfg::B_r>(dV[0], P, columns); // @product dV
        } else {
            wgmma_fence();
            issue_columns_rows<cfg::B_r, cfg::B_r>(dV[0], in_block(shared.P(step, key_group)), columns); // @product dV
            wgmma_commit_group();
        }
    }
    DEVICE void start_dK(int step) {
        const uint32 columns = in_block(Q(step).data) + first_column_offset();
        if constexpr (shape::P_in_registers) {
            issue_registers_shared<cfg::B_r>(dK[0], dS, columns); // @product dK
        } else {
            wgmma_fence();
            issue_columns_rows<cfg::B_r, cfg::B_r>(dK[0], in_block(shared.dS(step, key_group)), columns); // @product dK
            wgmma_commit_group();
        }
    }
    DEVICE void start_dQ(int step) {
        const uint32 rows = dQ_group() / shape::dQ_column_parts * panel_bytes<warpgroup_rows>;
        const int first_panel = dQ_group() % shape::dQ_column_parts * (shape::panels / shape::dQ_column_parts);
        const uint32 columns = first_panel * panel_bytes<warpgroup_rows>;
        wgmma_fence();
        issue_rows_rows<true>(dQ[0], in_block(shared.dS(step, 0)) + rows, // @product dQ
                              found_again(K(0).data) + columns);
#pragma unroll
        for (int group = 1; group < shape::key_groups; ++group)
            issue_rows_rows<false>(dQ[0], in_block(shared.dS(step, group)) + rows, // @product dQ
                                   found_again(K(group).data) + columns);
        if constexpr (cfg::paired) {
            const uint32 other_columns = first_panel / shape::together * panel_bytes<warpgroup_rows>;
#pragma unroll
            for (int group = 0; group < shape::key_groups; ++group)
                issue_rows_rows<false>(dQ[0], in_block(shared.received(step, group)) + rows, // @product dQ
                                       found_again(shared.other_K(group).data) + other_columns);
        }
        wgmma_commit_group();
    }
    // Of all warpgroups that share a block of dQ: those of two thread blocks have every other part of the columns.
    DEVICE int dQ_group() const {
        return cfg::paired ? warpgroup * shape::together + rank_in_cluster() : warpgroup;
    }

    // --- A step ---

    template <bool first> DEVICE void step(int step) {
        if constexpr (first && cfg::skips_masked && variant::masks_right)
            if (sees_nothing(step)) {
                skip(step);
                return;
            }
        start_scores(step);
        // Half as many columns of dQ fit into the registers beside S and dP. dO, which has one stage, arrives meanwhile.
        if constexpr (!first && cfg::paired)
            start_dQ_of_written(step - 1);
        start_dP(step);
        differentiate_scores<!first && cfg::paired>(step);
        if constexpr (!first && !cfg::paired)
            start_dQ_of_written(step - 1);
        if constexpr (!shape::P_in_registers)
            shared.weights(step).wait_until_full(WeightsPlace::after(step).lap);
        start_dV(step);
        start_dK(step);
        if constexpr (!first) {
            // Read before dQ is waited for, where there are registers for it: the assembler would put the wait for dV
            // between the two, and additions would begin when dV is complete.
            float *sums;
            if constexpr (shape::P_in_registers)
                sums = dQ_sums(step - 1);
            wgmma_wait_group<2>();
            if constexpr (!shape::P_in_registers)
                sums = dQ_sums(step - 1);
            add_dQ(step - 1, sums);
        }
        wgmma_wait_group<1>();
        pin_registers(dV[0]);
        dO(step).release_by_lane(); // @operand dO
        wgmma_wait_group<0>();
        pin_registers(dK[0]);
        Q(step).release_by_lane(); // @operand Q
    }

    // Whether no query of a tile's first step attends to any key of this warpgroup. Its note was written before K was
    // announced. Behind the last row of a packed sequence, all warpgroups clear the rows of the next one: none leaves that
    // step out.
    DEVICE bool sees_nothing(int step) const {
        const Work work = this->work();
        const StepNote note = StepNote::read(shared.note(step));
        const bool is_whole = !variant::variable_lengths || note.rows == cfg::B_r;
        const int last_query = note.first_row + cfg::B_r - 1;
        return uniform(is_whole && work.first_key + key_group * warpgroup_rows - work.window.right > last_query);
    }
    // Leaves out all products but dQ, which warpgroups multiply together: there dS is zero. Q and dO need not have arrived:
    // some query attends to the tile's first key, so that the first warpgroup waits for them before it gives them back.
    DEVICE void skip(int step) {
        shared.weights(step).wait_until_empty(WeightsPlace::after(step).lap);
#pragma unroll
        for (int n = 0; n < queries_per_part / mma_depth; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                dS[n][i] = 0;
        hand_over_weights(step);
        dO(step).release_by_lane(); // @operand dO
        Q(step).release_by_lane(); // @operand Q
    }

    DEVICE void finish_dQ(int step) {
        start_dQ_of_written(step);
        wgmma_wait_group<0>();
        add_dQ(step, dQ_sums(step));
    }

    DEVICE void start_dQ_of_written(int step) {
        wait_for_weights(step);
        start_dQ(step);
    }
    // Until dS of all warpgroups, and of the other thread block of a pair, can be multiplied.
    DEVICE void wait_for_weights(int step) const {
        shared.weights(step).wait_until_full(WeightsPlace::after(step).lap);
        if constexpr (cfg::paired)
            shared.received_slot(step).wait_until_full(WeightsPlace::after(step).lap);
    }
    // dS and P of a step have been read, those received among them.
    DEVICE void release_weights(int step) const {
        if (lane_index() == 0) {
            mbarrier_arrive(shared.weights(step).empty);
            if constexpr (cfg::paired)
                mbarrier_arrive_remote(address_in_block(shared.weights(step).empty, rank_in_cluster() ^ 1));
        }
    }

    // Waits for S and dP of a step, between which dQ may have been issued, and turns them into P and dS: operands of other
    // products.
    template <bool dQ_between> DEVICE void differentiate_scores(int step) {
        const int first_query = part * queries_per_part;
        const float scale_log2 = args.backward.forward.softmax_scale * log2_e;
        const float capping_scale = args.backward.forward.capping_scale;
        wgmma_wait_group<dQ_between ? 2 : 1>();
        pin_registers(S[0]);
        const uint32 lse_terms = shared.lse(QPlace::after(step).stage);
        if constexpr (!variant::softcaps) {
            load_terms<tiles_at_once, column_tiles>(lse, lse_terms);
#pragma unroll
            for (int n = 0; n < column_tiles; ++n)
                ScoreGradients::exponentiate(S[0][n], lse[n], scale_log2); // @phase gradients of scores
        }
        const uint32 dot_terms = shared.dots(dOPlace::after(step).stage);
        load_terms<0, tiles_at_once>(dots, dot_terms);
        wgmma_wait_group<0>();
        pin_registers(dP[0]);
#pragma unroll
        for (int n = 0; n < column_tiles; ++n) {
            if (n == tiles_at_once)
                load_terms<tiles_at_once, column_tiles>(dots, dot_terms);
            if constexpr (variant::softcaps) // where they are needed: the slope of the cap takes registers
                lse[n] = term(lse_terms, n);
            ScoreGradients::differentiate(S[0][n], dP[0][n], lse[n], dots[n], // @phase gradients of scores
                                          scale_log2, capping_scale);
        }
        const StepNote note = StepNote::read(shared.note(step));
        if (note.masked) {
            const Work work = this->work();
            ScoreGradients::mask(S, dP, work.window, work.first_key + first_key(), note.first_row + first_query);
        }
        shared.weights(step).wait_until_empty(WeightsPlace::after(step).lap);
        round(P, S[0]);
        round(dS, dP[0]);
        hand_over_weights(step);
    }
    DEVICE void hand_over_weights(int step) const {
        if constexpr (!shape::P_in_registers)
            store_weights(shared.P(step, key_group), P);
        store_weights(shared.dS(step, key_group), dS);
        fence_async_proxy();
        __syncwarp(); // the first lane speaks for all
        if (lane_index() == 0)
            mbarrier_arrive(shared.weights(step).full);
    }

    // Where dQ of a step is added.
    DEVICE float *dQ_sums(int step) const { return StepNote::read(shared.note(step)).dQ_sums; }
    // Of a step whose product is complete.
    DEVICE void add_dQ(int step, float *sums) {
        pin_registers(dQ[0]);
        release_weights(step);
        if constexpr (cfg::bulk_dQ) {
            const Slot slot = shared.dQ(warpgroup);
            slot.wait_until_empty(TurnPlace::after(step).lap);
            Sums::store(shared.dQ(0).data, dQ);
            fence_async_proxy();
            __syncwarp(); // the first lane speaks for all
            if (lane_index() == 0)
                mbarrier_arrive(slot.full);
            return;
        }
        if constexpr (shape::takes_turns)
            shared.turn(step).wait_until_full(OrderPlace::after(step).lap);
        const int thread = dQ_group() * warpgroup_threads + threadIdx.x % warpgroup_threads;
        if constexpr (cfg::finishes_dQ)
            add_or_finish_dQ(step, sums, thread);
        else
            Sums::add(sums, dQ, thread);
        if constexpr (shape::takes_turns) {
            __syncwarp(); // lanes that store and lanes that do not arrive together
            shared.turn(step).release_by_lane();
        }
    }

    // The first to add to a block of dQ finds nothing there; the last finishes it.
    DEVICE void add_or_finish_dQ(int step, float *sums, int thread) {
        const TurnNote turn = TurnNote::read(shared.turn(step).data);
        if (turn.is_last) {
            if (!turn.is_first)
                Sums::collect(dQ, sums, thread);
            store_dQ(turn.dQ_rows, StepNote::read(shared.note(step)).rows, thread / warp_threads);
        } else if (turn.is_first) {
            Sums::put(sums, dQ, thread);
        } else {
            Sums::add(sums, dQ, thread);
        }
    }
    // Those of a block's `rows` and columns that are a warp's.
    DEVICE void store_dQ(char *first_row, int rows, int warp) {
        static_assert(Sums::row_tiles == 1);
        const int row = Sums::first_row(warp), column = Sums::first_column(warp);
        const int64 stride = row_stride_bytes<0>(args.backward.dQ);
        scale_row(dQ[0], 0, args.backward.gradient_scale);
        scale_row(dQ[0], 1, args.backward.gradient_scale);
        write_rows<cfg::dtype, variant::accumulates, 8>(first_row + row * stride + column * gradient_bytes, stride, dQ[0],
                                                        rows - row, tensor_columns - column);
    }

    // --- Operands ---

    // Accumulators as the left operand of a product.
    template <int column_tiles>
    static DEVICE void round(uint32 (&operand)[column_tiles / 2][4], const float (&c)[column_tiles][4]) {
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                operand[n / 2][n % 2 * 2 + half] = pack_16bit<cfg::dtype>(c[n][2 * half], c[n][2 * half + 1]);
    }
    // Writes a warp's operands into its rows of a tile of 64 keys.
    DEVICE void store_weights(uint32 tile, const uint32 (&operand)[column_tiles / 2][4]) const {
        // A matrix is 8 × 8: lanes 0 to 15 have the addresses of 16 rows of an even column tile, the others of the next.
        const uint32 lane = lane_index();
        const int row = threadIdx.x % warpgroup_threads / warp_threads * mma_rows + lane % mma_rows;
        const uint32 place = tile + panel_vector_offset<warpgroup_rows>(row, lane / mma_rows);
#pragma unroll
        for (int n = 0; n < column_tiles; n += 2) {
            const int vector = part * column_tiles + n;
            store_matrices((place ^ vector % panel_vectors * vector_bytes) +
                               vector / panel_vectors * panel_bytes<warpgroup_rows>,
                           operand[n / 2]);
        }
    }

    // Behind the last row or key of a packed sequence there are those of the next. Their weights are zero, but zero times
    // infinity is not: they are cleared. All consumers take part, and wait for each other.
    DEVICE void clear_queries_of_others(uint32 tile, int step) const {
        if constexpr (variant::variable_lengths)
            clear_rows_of_others<cfg::B_r, shape::panels>(tile, StepNote::read(shared.note(step)).rows);
    }
    DEVICE void clear_keys_of_others() const {
        if constexpr (variant::variable_lengths)
#pragma unroll
            for (int group = 0; group < shape::key_groups; ++group) {
                const int own = work().keys - group * warpgroup_rows;
                clear_rows_of_others<warpgroup_rows, shape::panels>(K(group).data, own);
                if constexpr (cfg::paired)
                    clear_rows_of_others<warpgroup_rows, shape::other_K_bytes / panel_bytes<warpgroup_rows>>(
                        shared.other_K(group).data, own + (rank_in_cluster() ? cfg::B_c : -cfg::B_c));
            }
    }
    template <int rows, int panels> DEVICE void clear_rows_of_others(uint32 tile, int own_rows) const {
        if (own_rows < rows) {
            clear_rows<rows, panels>(tile, max(0, own_rows), threadIdx.x, consumer_threads);
            fence_async_proxy();
            named_barrier_sync(barriers::consumers, consumer_threads);
        }
    }

    // --- Results ---

    DEVICE void store() {
        const Work work = this->work();
        scale_row(dK[0], 0, args.backward.gradient_scale);
        scale_row(dK[0], 1, args.backward.gradient_scale);
        store(work, args.backward.dK, dK[0]);
        store(work, args.backward.dV, dV[0]);
    }
    DEVICE void store(const Work &work, const TensorView &tensor,
                      const float (&c)[columns_per_part / mma_columns][4]) const {
        const int64 stride = row_stride_bytes<0>(tensor);
        char *rows = head_start(tensor, variant::variable_lengths ? 0 : work.tile.batch, work.tile.kv_head) +
                     (work.sequence.kv_start + work.first_key + first_key()) * stride +
                     part * columns_per_part * gradient_bytes;
        write_rows<cfg::dtype, variant::accumulates, 32>(rows, stride, c, work.keys - first_key(),
                                                         tensor_columns - part * columns_per_part);
    }
};
