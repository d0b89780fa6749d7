// The consumers of the Hopper backward: five products a step, and the gradients of scores between them.
//
// Warpgroups stand in `key_groups` of 64 keys and `parts` along the other dimension of each product: queries in S and dP,
// columns in dV and dK. In dQ = dS·K they stand along its rows and columns, and each sums over all keys.
//
// Products are issued so that the tensor cores have work while a warpgroup computes gradients of scores: S and dP of the
// next step come before dK of this one, and only they are waited for. dQ comes when S and dP need no registers.
//
//     step i:  S(i+1), dP(i+1), dK(i)                        dQ(i), dV(i+1)
//                └─ gradients of scores i+1, dS to shared memory ─┘ └─ dQ(i) is added ─ barrier
//
// Nothing is under way from one step to the next: the assembler would wait for every product where the registers of one
// meet at the beginning of a loop.
#pragma once
#include "attention/score_gradients.cuh"
#include "backward/hopper_shared.cuh"
#include "ptx/convert.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "tile/store.cuh"
#include "tile/warpgroup_products.cuh"

constexpr int queries_per_part = cfg::B_r / shape::parts, columns_per_part = cfg::d_head / shape::parts;
constexpr int panels_per_part = columns_per_part / panel_columns;

struct Consumer {
    const HopperArguments &args;
    const SharedMemory &shared;
    const int warpgroup = uniform(threadIdx.x / warpgroup_threads);
    const int key_group = warpgroup / shape::parts, part = warpgroup % shape::parts;

    float S[1][queries_per_part / mma_columns][accumulator_values];
    float dP[1][queries_per_part / mma_columns][accumulator_values];
    uint32 P[queries_per_part / mma_depth][4];
    float dK[1][columns_per_part / mma_columns][accumulator_values] = {};
    float dV[1][columns_per_part / mma_columns][accumulator_values] = {};
    Sums::Accumulator dQ;

    DEVICE void run() {
        const int steps = work().steps(args.backward);
        if (steps > 0) {
            begin();
#pragma unroll 1
            for (int step = 0; step + 1 < steps; ++step)
                this->step(step);
            finish(steps - 1);
        }
        store();
    }

  private:
    // Found again where it is needed: the loop has no registers to keep it.
    DEVICE Work work() const { return Work(args.backward, key_tile_of_block<cfg::ordered>(args.backward, block_index_again().x)); }
    // Of the warp's first key, in the tile.
    DEVICE int first_key() const { return key_group * warpgroup_rows + thread_index_again() / warp_threads % 4 * mma_rows; }

    // --- Products ---

    DEVICE void begin() {
        for (int group = 0; group < shape::key_groups; ++group)
            shared.K(group).wait_until_full(0); // @operand K
        clear_keys_of_others();
        start_scores(0);
        for (int group = 0; group < shape::key_groups; ++group)
            shared.V(group).wait_until_full(0); // @operand V
        start_dP(0);
        differentiate_scores<0>(0);
        if constexpr (shape::P_in_registers)
            start_dV(0);
        finish_weights(0);
    }

    DEVICE void start_scores(int step) {
        const QPlace place = QPlace::after(step);
        const Slot Q = shared.Q(place.stage);
        Q.wait_until_full(place.lap); // @operand Q
        clear_queries_of_others(Q.data, step);
        issue_shared_shared<cfg::d_head, cfg::B_r>(S[0], shared.K(key_group).data, // @product S
                                                   Q.data + first_query_offset());
    }
    DEVICE void start_dP(int step) {
        const dOPlace place = dOPlace::after(step);
        const Slot dO = shared.dO(place.stage);
        dO.wait_until_full(place.lap); // @operand dO
        clear_queries_of_others(dO.data, step);
        issue_shared_shared<cfg::d_head, cfg::B_r>(dP[0], shared.V(key_group).data, // @product dP
                                                   dO.data + first_query_offset());
    }
    DEVICE uint32 first_query_offset() const { return part * queries_per_part * panel_row_bytes; }
    // Of a part's columns in a tile of queries.
    DEVICE uint32 first_column_offset() const { return part * panels_per_part * panel_bytes<cfg::B_r>; }

    DEVICE Slot Q(int step) const { return shared.Q(QPlace::after(step).stage); }
    DEVICE Slot dO(int step) const { return shared.dO(dOPlace::after(step).stage); }

    DEVICE void start_dV(int step) {
        const uint32 columns = dO(step).data + first_column_offset();
        if constexpr (shape::P_in_registers) {
            issue_registers_shared<cfg::B_r>(dV[0], P, columns); // @product dV
        } else {
            wgmma_fence();
            issue_columns_rows<cfg::B_r, cfg::B_r>(dV[0], shared.P(step, key_group), columns); // @product dV
            wgmma_commit_group();
        }
    }
    DEVICE void start_dK(int step) {
        wgmma_fence();
        issue_columns_rows<cfg::B_r, cfg::B_r>(dK[0], shared.dS(step, key_group), // @product dK
                                               Q(step).data + first_column_offset());
        wgmma_commit_group();
    }
    DEVICE void start_dQ(int step) {
        const int row_group = warpgroup / shape::dQ_column_parts, column_part = warpgroup % shape::dQ_column_parts;
        const uint32 rows = row_group * panel_bytes<warpgroup_rows>;
        const uint32 columns = column_part * (shape::panels / shape::dQ_column_parts) * panel_bytes<warpgroup_rows>;
        wgmma_fence();
        issue_rows_rows<true>(dQ[0], shared.dS(step, 0) + rows, shared.K(0).data + columns); // @product dQ
#pragma unroll
        for (int group = 1; group < shape::key_groups; ++group)
            issue_rows_rows<false>(dQ[0], shared.dS(step, group) + rows, shared.K(group).data + columns); // @product dQ
        wgmma_commit_group();
    }

    // --- A step ---

    // From the weights of one step to those of the next.
    DEVICE void step(int step) {
        start_scores(step + 1);
        start_dP(step + 1);
        if constexpr (!shape::P_in_registers)
            start_dV(step);
        start_dK(step);
        differentiate_scores<shape::P_in_registers ? 1 : 2>(step + 1);
        finish_dK(step);
        start_dQ(step);
        if constexpr (shape::P_in_registers)
            start_dV(step + 1);
        wgmma_wait_group<shape::P_in_registers ? 1 : 0>();
        add_dQ(step);
        finish_weights(step + 1);
    }
    DEVICE void finish(int step) {
        if constexpr (!shape::P_in_registers)
            start_dV(step);
        start_dK(step);
        finish_dK(step);
        start_dQ(step);
        wgmma_wait_group<0>();
        add_dQ(step);
    }

    // After its barrier dS, and P if it is in shared memory, is visible to the products of all warpgroups; and all have
    // finished with those of the step before, which may be overwritten.
    DEVICE void finish_weights(int step) {
        named_barrier_sync(barriers::consumers, consumer_threads);
        if constexpr (shape::P_in_registers) {
            wgmma_wait_group<0>();
            finish_dV(step);
        }
    }
    DEVICE void finish_dK(int step) {
        wgmma_wait_group<0>();
        pin_registers(dK[0]);
        if constexpr (!shape::P_in_registers)
            finish_dV(step);
        __syncwarp();      // the first lane releases the terms that all have read
        Q(step).release(); // @operand Q
    }
    DEVICE void finish_dV(int step) {
        pin_registers(dV[0]);
        dO(step).release(); // @operand dO
    }

    // Waits for S and dP of a step, after which so many other groups of products were issued, and turns them into P and
    // dS: operands of other products, visible to this warpgroup.
    template <int products_behind> DEVICE void differentiate_scores(int step) {
        const int stage = QPlace::after(step).stage, first_query = part * queries_per_part;
        const Terms terms = shared.terms(stage);
        const float scale_log2 = args.backward.forward.softmax_scale * log2_e;
        const float capping_scale = args.backward.forward.capping_scale;
        wgmma_wait_group<products_behind + 1>();
        pin_registers(S[0]);
        ScoreGradients::exponentiate(S, terms, first_query, scale_log2); // @phase gradients of scores
        wgmma_wait_group<products_behind>();
        pin_registers(dP[0]);
        ScoreGradients::differentiate(S, dP, terms, first_query, scale_log2, capping_scale); // @phase gradients of scores
        const StepNote note = StepNote::read(shared.note(step));
        if (note.masked) {
            const Work work = this->work();
            ScoreGradients::mask(S, dP, work.window, work.first_key + first_key(), note.first_row + first_query);
        }
        if constexpr (shape::P_in_registers)
            round_P();
        else
            store_weights(shared.P(step, key_group), S[0]);
        store_weights(shared.dS(step, key_group), dP[0]);
        fence_async_proxy();
    }

    // Of a step whose product is complete.
    DEVICE void add_dQ(int step) {
        pin_registers(dQ[0]);
        if constexpr (cfg::ordered)
            shared.turn().wait_until_full(TurnPlace::after(step).lap);
        Sums::add(StepNote::read(shared.note(step)).dQ_sums, dQ);
        if constexpr (cfg::ordered) {
            __syncwarp(); // the first lane speaks for all
            shared.turn().release();
        }
    }

    // --- Operands ---

    DEVICE void round_P() {
#pragma unroll
        for (int n = 0; n < queries_per_part / mma_columns; ++n)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                P[n / 2][n % 2 * 2 + half] = pack_16bit<cfg::dtype>(S[0][n][2 * half], S[0][n][2 * half + 1]);
    }
    // Rounds a warp's accumulators and writes them into its rows of a tile of 64 keys.
    template <int column_tiles> DEVICE void store_weights(uint32 tile, const float (&c)[column_tiles][4]) const {
        const int row = threadIdx.x % warpgroup_threads / warp_threads * mma_rows + accumulator_row(0, 0);
        const uint32 place = tile + accumulator_column() * element_bytes;
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                store_shared_4B(place + panel_vector_offset<warpgroup_rows>(row + fragment * half, part * column_tiles + n),
                                pack_16bit<cfg::dtype>(c[n][2 * half], c[n][2 * half + 1]));
    }

    // Behind the last row or key of a packed sequence there are those of the next. Their weights are zero, but zero times
    // infinity is not: they are cleared. All consumers take part, and wait for each other.
    DEVICE void clear_queries_of_others(uint32 tile, int step) const {
        if constexpr (variant::variable_lengths)
            clear_rows_of_others<cfg::B_r>(tile, StepNote::read(shared.note(step)).rows);
    }
    DEVICE void clear_keys_of_others() const {
        if constexpr (variant::variable_lengths)
#pragma unroll
            for (int group = 0; group < shape::key_groups; ++group)
                clear_rows_of_others<warpgroup_rows>(shared.K(group).data, work().keys - group * warpgroup_rows);
    }
    template <int rows> DEVICE void clear_rows_of_others(uint32 tile, int own_rows) const {
        if (own_rows < rows) {
            clear_rows<rows, shape::panels>(tile, max(0, own_rows), threadIdx.x, consumer_threads);
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
                     part * columns_per_part * element_bytes;
        store_rows<cfg::dtype>(rows, stride, c, work.keys - first_key(), tensor_columns - part * columns_per_part);
    }
};
