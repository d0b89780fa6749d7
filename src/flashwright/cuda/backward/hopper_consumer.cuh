// The consumers of the Hopper backward: five products a step, and the gradients of scores between them.
//
// Warpgroups stand in `key_groups` of 64 keys and `parts` along the other dimension of each product: queries in S and dP,
// columns in dV and dK. In dQ = dS·K they stand along its rows and columns, and each sums over all keys.
//
// Products are issued so that the tensor cores have work while a warpgroup computes gradients of scores: S and dP of the
// next step come before dK and dQ of this one, and only they are waited for.
//
//     step i:  [gradients of scores i] dV(i) ─ dS to shared memory ─ barrier ─ S(i+1) dP(i+1) dK(i) dQ(i) → step i+1
//                      ↑ while dK(i-1), dQ(i-1) run                                       ↑ added to dQ in step i+1
#pragma once
#include "attention/score_gradients.cuh"
#include "backward/hopper_shared.cuh"
#include "ptx/convert.cuh"
#include "ptx/shuffle.cuh"
#include "tile/store.cuh"
#include "tile/warpgroup_products.cuh"

constexpr int queries_per_part = cfg::B_r / shape::parts, columns_per_part = cfg::d_head / shape::parts;
constexpr int panels_per_part = columns_per_part / panel_columns;

struct Consumer {
    const HopperArguments &args;
    const Work &work;
    const SharedMemory &shared;
    const int warpgroup = uniform(threadIdx.x / warpgroup_threads);
    const int key_group = warpgroup / shape::parts, part = warpgroup % shape::parts;
    const int first_key = key_group * warpgroup_rows + threadIdx.x / warp_threads % 4 * mma_rows; // the warp's, in the tile
    // Of the step whose scores come next; of the one whose gradients of scores do; of the one whose dK does.
    QPlace Q_place, terms_place, Q_read;
    dOPlace dO_place, dO_read; // the same: of dP, of dV
    TurnPlace turn_place;

    float S[1][queries_per_part / mma_columns][accumulator_values];
    float dP[1][queries_per_part / mma_columns][accumulator_values];
    uint32 P[queries_per_part / mma_depth][4];
    float dK[1][columns_per_part / mma_columns][accumulator_values] = {};
    float dV[1][columns_per_part / mma_columns][accumulator_values] = {};
    Sums::Accumulator dQ;

    DEVICE void run() {
        const int steps = work.steps(args.backward);
        if (steps > 0) {
            begin();
#pragma unroll 1
            for (int step = 0; step + 1 < steps; ++step)
                this->step<false>(step);
            this->step<true>(steps - 1);
            wgmma_wait_group<0>();
            pin_registers(dV[0]);
            pin_registers(dK[0]);
            add_dQ(steps - 1);
        }
        scale_row(dK[0], 0, args.backward.gradient_scale);
        scale_row(dK[0], 1, args.backward.gradient_scale);
        store(args.backward.dK, dK[0]);
        store(args.backward.dV, dV[0]);
    }

  private:
    DEVICE QueryStep at(int step) const { return QuerySteps<Work>{args.backward, work}.at(step); }

    // --- Products ---

    // Of the first step, before there is any other.
    DEVICE void begin() {
        for (int group = 0; group < shape::key_groups; ++group)
            shared.K(group).wait_until_full(0); // @operand K
        clear_keys_of_others();
        start_scores(0);
        for (int group = 0; group < shape::key_groups; ++group)
            shared.V(group).wait_until_full(0); // @operand V
        start_dP(0);
        // In the place of the products of a step before.
#pragma unroll
        for (int i = 0; i < products_behind; ++i)
            wgmma_commit_group();
    }

    DEVICE void start_scores(int step) {
        const Slot Q = shared.Q(Q_place.stage);
        Q.wait_until_full(Q_place.lap); // @operand Q
        clear_queries_of_others(Q.data, step);
        issue_shared_shared<cfg::d_head, cfg::B_r>(S[0], shared.K(key_group).data,
                                                   Q.data + first_query_offset()); // @product S
        Q_place.advance();
    }
    DEVICE void start_dP(int step) {
        const Slot dO = shared.dO(dO_place.stage);
        dO.wait_until_full(dO_place.lap); // @operand dO
        clear_queries_of_others(dO.data, step);
        issue_shared_shared<cfg::d_head, cfg::B_r>(dP[0], shared.V(key_group).data,
                                                   dO.data + first_query_offset()); // @product dP
        dO_place.advance();
    }
    DEVICE uint32 first_query_offset() const { return part * queries_per_part * panel_row_bytes; }
    // Of a part's columns in a tile of queries.
    DEVICE uint32 first_column_offset() const { return part * panels_per_part * panel_bytes<cfg::B_r>; }

    DEVICE void start_dV(int step) {
        const uint32 dO = shared.dO(dO_read.stage).data + first_column_offset();
        if constexpr (shape::P_in_registers) {
            issue_registers_shared<cfg::B_r>(dV[0], P, dO); // @product dV
        } else {
            wgmma_fence();
            issue_columns_rows<cfg::B_r, cfg::B_r>(dV[0], shared.P(step, key_group), dO); // @product dV
            wgmma_commit_group();
        }
    }
    DEVICE void start_dK(int step) {
        const uint32 Q = shared.Q(Q_read.stage).data + first_column_offset();
        wgmma_fence();
        issue_columns_rows<cfg::B_r, cfg::B_r>(dK[0], shared.dS(step, key_group), Q); // @product dK
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

    // Groups of products that were issued after S and dP of a step: dK and dQ of the step before, and dV where P is in
    // shared memory.
    static constexpr int products_behind = shape::P_in_registers ? 2 : 3;

    template <bool last> DEVICE void step(int step) {
        const QueryStep at = this->at(step);
        const Terms terms = shared.terms(terms_place.stage);
        const ScoreGradients gradients{work.window, args.backward.forward.softmax_scale * log2_e,
                                       args.backward.forward.capping_scale};
        const int first_query = part * queries_per_part;
        wgmma_wait_group<products_behind + 1>();
        pin_registers(S[0]);
        gradients.exponentiate(S, terms, first_query); // @phase gradients of scores
        wgmma_wait_group<products_behind>();
        pin_registers(dP[0]);
        gradients.differentiate(S, dP, terms, first_query); // @phase gradients of scores
        terms_place.advance();
        if (at.block < work.queries.plain_begin || at.block >= work.queries.plain_end)
            gradients.mask(S, dP, work.first_key + first_key, at.first_row + first_query);
        if constexpr (shape::P_in_registers) {
            round_P();
            start_dV(step);
        } else {
            store_weights(shared.P(step, key_group), S[0]);
        }
        store_weights(shared.dS(step, key_group), dP[0]);
        fence_async_proxy();

        // The products of the step before are complete: its Q may be overwritten, and dO where dV was among them.
        wgmma_wait_group<shape::P_in_registers ? 1 : 0>();
        if (step > 0)
            add_dQ(step - 1);

        // After this barrier dS, and P if it is there, is visible to the products of all warpgroups; and all have
        // finished those of the step before, so that its dS may be overwritten in the next.
        named_barrier_sync(barriers::consumers, consumer_threads);
        if constexpr (shape::P_in_registers) {
            wgmma_wait_group<0>();
            pin_registers(dV[0]);
            shared.dO(dO_read.stage).release(); // @operand dO
            dO_read.advance();
        }
        if constexpr (!last) {
            start_scores(step + 1);
            start_dP(step + 1);
        }
        if constexpr (!shape::P_in_registers)
            start_dV(step);
        start_dK(step);
        start_dQ(step);
    }

    // Of a step whose products are complete.
    DEVICE void add_dQ(int step) {
        pin_registers(dQ[0]);
        shared.Q(Q_read.stage).release(); // @operand Q
        Q_read.advance();
        if constexpr (!shape::P_in_registers) {
            shared.dO(dO_read.stage).release(); // @operand dO
            dO_read.advance();
        }
        const QueryStep at = this->at(step);
        const int64 row = padded_row<cfg::B_r>(args.backward, work.sequence, at.head, work.tile.batch) + at.first_row;
        if constexpr (cfg::ordered)
            shared.turn().wait_until_full(turn_place.lap);
        Sums::add(args.backward.dQ_sums + row * cfg::d_head, dQ);
        if constexpr (cfg::ordered) {
            __syncwarp(); // the first lane speaks for all
            shared.turn().release();
            turn_place.advance();
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
        const int first_row = threadIdx.x / warp_threads % 4 * mma_rows, first_vector = part * column_tiles;
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                store_shared_4B(tile + panel_vector_offset<warpgroup_rows>(first_row + accumulator_row(0, half),
                                                                           first_vector + n) +
                                    accumulator_column() * element_bytes,
                                pack_16bit<cfg::dtype>(c[n][2 * half], c[n][2 * half + 1]));
    }

    // Behind the last row or key of a packed sequence there are those of the next. Their weights are zero, but zero times
    // infinity is not: they are cleared. All consumers take part, and wait for each other.
    DEVICE void clear_queries_of_others(uint32 tile, int step) const {
        if constexpr (variant::variable_lengths)
            clear_rows_of_others<cfg::B_r>(tile, work.sequence.q_length - at(step).first_row);
    }
    DEVICE void clear_keys_of_others() const {
        if constexpr (variant::variable_lengths)
#pragma unroll
            for (int group = 0; group < shape::key_groups; ++group)
                clear_rows_of_others<warpgroup_rows>(shared.K(group).data, work.keys - group * warpgroup_rows);
    }
    template <int rows> DEVICE void clear_rows_of_others(uint32 tile, int own_rows) const {
        if (own_rows < rows) {
            clear_rows<rows, shape::panels>(tile, max(0, own_rows), threadIdx.x, consumer_threads);
            fence_async_proxy();
            named_barrier_sync(barriers::consumers, consumer_threads);
        }
    }

    // --- Results ---

    DEVICE void store(const TensorView &tensor, const float (&c)[columns_per_part / mma_columns][4]) const {
        const int64 stride = row_stride_bytes<0>(tensor);
        char *rows = head_start(tensor, variant::variable_lengths ? 0 : work.tile.batch, work.tile.kv_head) +
                     (work.sequence.kv_start + work.first_key + first_key) * stride +
                     part * columns_per_part * element_bytes;
        store_rows<cfg::dtype>(rows, stride, c, work.keys - first_key, tensor_columns - part * columns_per_part);
    }
};
