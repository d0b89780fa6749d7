// FlashAttention-2 backward for mma.sync tensor cores: dQ, dK and dV of O = softmax(Q·Kᵀ·scale)·V.
//
// One thread block owns B_c keys of one head of K and V, and visits the blocks of B_r queries that attend to them, of
// every head of Q that shares the keys: dK and dV stay in registers, dQ is added to sums in global memory. Scores are
// computed transposed, a row per key: the probabilities and the gradients of the scores then are, in the registers that
// hold them, the left operands of dV += Pᵀ·dO and dK += dSᵀ·Q. Only dS goes through shared memory, for dQ = dS·K.
//
// Warps stand in `key_groups` along the keys and `parts` along the other dimension of each product: queries in S and dP,
// columns in dV and dK. With more than one part, P goes through shared memory too.
#pragma once
#include "attention/score_gradients.cuh"
#include "attention/sources.cuh"
#include "backward/dq_sums.cuh"
#include "tile/copy.cuh"
#include "tile/products.cuh"
#include "tile/store.cuh"

constexpr int queries_per_part = cfg::B_r / shape::parts, columns_per_part = cfg::d_head / shape::parts;
constexpr int tensor_columns = variant::pads_columns ? variant::head_dim : cfg::d_head;

// Operands loaded 16 deep at a time. The assembler orders loads and products its own way.
template <int depth, int outer> using Loaded = Fragments<depth / mma_depth, 1, outer / mma_depth, 1>;
using ScoresLeft = Loaded<cfg::d_head, shape::keys_per_warp>;       // K in S, V in dP
using ScoresRight = Loaded<cfg::d_head, queries_per_part>;          // Q in S, dO in dP
using WeightsLeft = Loaded<cfg::B_r, shape::keys_per_warp>;         // P in dV, dS in dK, from shared memory
using WeightsRight = Loaded<cfg::B_r, columns_per_part>;            // dO in dV, Q in dK
// P and dS as operands in registers: of all queries, or of a warp's part of them, on their way to shared memory.
using Weights = Fragments<queries_per_part / mma_depth, 1, shape::row_tiles, queries_per_part / mma_depth>;

using Copies = BlockCopies<shape::threads, true>;
using Work = KeyTileWork<cfg::B_r, cfg::B_c>;
using Sums = DQSums<cfg::B_r, cfg::d_head, shape::dQ_threads, shape::dQ_group_warps, shape::dQ_column_parts>;
using Terms = RowTerms<cfg::B_r>;
using DQLeft = Loaded<cfg::B_c, Sums::row_tiles * mma_rows>;
using DQRight = Loaded<cfg::B_c, cfg::d_head / shape::dQ_column_parts>;

using ScoreAccumulator = float[shape::row_tiles][queries_per_part / mma_columns][accumulator_values];
using GradientAccumulator = float[shape::row_tiles][columns_per_part / mma_columns][accumulator_values];

struct SharedMemory {
    uint32 base;

    DEVICE uint32 K() const { return base + shape::K_offset; }
    DEVICE uint32 V() const { return base + shape::V_offset; }
    DEVICE uint32 Q(int step) const { return base + shape::Q_offset + step % cfg::Q_stages * shape::query_bytes; }
    DEVICE uint32 dO(int step) const { return base + shape::dO_offset + step % cfg::dO_stages * shape::query_bytes; }
    DEVICE uint32 P() const { return base + shape::P_offset; }
    DEVICE uint32 dS() const { return base + shape::dS_offset; }
    DEVICE Terms terms(int step) const {
        return {base + shape::terms_offset + step % cfg::Q_stages * Terms::bytes};
    }
};

// Where Q and dO come from.
struct Queries {
    const BackwardArguments &args;
    const Work &work;
    SharedMemory shared;

    DEVICE QueryStep at(int step) const { return QuerySteps<Work>{args, work}.at(step); }
    DEVICE int64 padded(const QueryStep &step) const {
        return padded_row<cfg::B_r>(args, work.sequence, step.head, work.tile.batch) + step.first_row;
    }

    DEVICE void start_Q_copy(int step) const {
        const QueryStep at = this->at(step);
        start_terms_copy(shared.terms(step), padded(at));
        start_copy(shared.Q(step), args.forward.Q, at); // @operand Q
    }
    DEVICE void start_dO_copy(int step) const { start_copy(shared.dO(step), args.dO, at(step)); } // @operand dO

  private:
    DEVICE void start_copy(uint32 target, const TensorView &tensor, const QueryStep &at) const {
        const int64 stride = row_stride_bytes<0>(tensor);
        const char *rows = head_start(tensor, variant::variable_lengths ? 0 : work.tile.batch, at.head) +
                           (work.sequence.q_start + at.first_row) * stride;
        Copies::start<cfg::B_r>(target, rows, stride, work.sequence.q_length - at.first_row, threadIdx.x);
    }
    // Part of the group that the next copy closes.
    DEVICE void start_terms_copy(const Terms &terms, int64 row) const {
        constexpr int vector_rows = vector_bytes / sizeof(float), vectors = cfg::B_r / vector_rows;
#pragma unroll
        for (int first = 0; first < 2 * vectors; first += shape::threads) {
            const int place = first + threadIdx.x, i = place % vectors;
            if (place < vectors)
                cp_async_16B(terms.shared + i * vector_bytes, args.row_lse + row + i * vector_rows);
            else if (place < 2 * vectors)
                cp_async_16B(terms.shared + Terms::array_bytes + i * vector_bytes, args.row_dot + row + i * vector_rows);
        }
    }
};

// Writes a warp's part of P or dS into a block with a row per key.
DEVICE void store_weights(uint32 block, int first_row, int first_column, Weights &weights) {
#pragma unroll
    for (int m = 0; m < shape::row_tiles; ++m)
#pragma unroll
        for (int k = 0; k < Weights::tiles; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) // as `mma` has A: rows 0 and 8, columns 0, then columns 8
                store_shared_4B(block + vector_offset<cfg::B_c>(first_row + accumulator_row(m, i % 2),
                                                                first_column / vector_elements + 2 * k + i / 2) +
                                    accumulator_column() * element_bytes,
                                weights.block(k, 0, m)[i]);
}

// What a warp holds from the first block of queries to the last.
struct Warp {
    const SharedMemory shared;
    const int warp = threadIdx.x / warp_threads;
    const int first_key = warp / shape::parts * shape::keys_per_warp, part = warp % shape::parts;
    GradientAccumulator dK = {}, dV = {};

    // S = K·Qᵀ, or dP = V·dOᵀ, of the warp's keys and its part of the queries.
    DEVICE void scores(ScoreAccumulator &c, uint32 keys, uint32 queries) const {
        SharedOperand<ScoresLeft, cfg::B_c, Role::A> left(keys + first_key * layout::row_bytes, lane_index());
        SharedOperand<ScoresRight, cfg::B_r, Role::B> right(queries + part * queries_per_part * layout::row_bytes,
                                                            lane_index());
        matmul<cfg::dtype, Place::shared, Place::shared, false, false>(left, right, c);
    }

    // dV += P·dO, or dK += dS·Q, of the warp's keys and its part of the columns. The weights are in registers, or in a
    // block of shared memory.
    DEVICE void gradient(GradientAccumulator &c, Weights &weights, uint32 block, uint32 queries) const {
        SharedOperand<WeightsRight, cfg::B_r, Role::B_transposed> right(queries, lane_index(),
                                                                        part * columns_per_part / mma_depth);
        if constexpr (shape::weights_in_registers) {
            matmul<cfg::dtype, Place::registers, Place::shared, false, false>(weights, right, c);
        } else {
            SharedOperand<WeightsLeft, cfg::B_c, Role::A> left(block + first_key * layout::row_bytes, lane_index());
            matmul<cfg::dtype, Place::shared, Place::shared, false, false>(left, right, c);
        }
    }

    // dQ = dS·K: all keys, the warp's part of the block.
    DEVICE void queries_gradient(Sums::Accumulator &c) const {
        SharedOperand<DQLeft, cfg::B_c, Role::A_transposed> left(shared.dS(), lane_index(),
                                                                 Sums::first_row(warp) / mma_rows);
        SharedOperand<DQRight, cfg::B_c, Role::B_transposed> right(shared.K(), lane_index(),
                                                                   Sums::first_column(warp) / mma_depth);
        matmul<cfg::dtype, Place::shared, Place::shared, false, false>(left, right, c);
    }

    DEVICE void store(const TensorView &tensor, const Work &work, const GradientAccumulator &c) const {
        const int64 stride = row_stride_bytes<0>(tensor);
        char *rows = head_start(tensor, variant::variable_lengths ? 0 : work.tile.batch, work.tile.kv_head) +
                     (work.sequence.kv_start + work.first_key + first_key) * stride +
                     part * columns_per_part * element_bytes;
#pragma unroll
        for (int m = 0; m < shape::row_tiles; ++m)
            store_rows<cfg::dtype>(rows + m * mma_rows * stride, stride, c[m], work.keys - first_key - m * mma_rows,
                                   tensor_columns - part * columns_per_part);
    }
};

// One block of queries.
DEVICE void query_step(Warp &warp, const Queries &queries, int step, int steps) {
    const BackwardArguments &args = queries.args;
    const Work &work = queries.work;
    const SharedMemory &shared = warp.shared;
    const QueryStep at = queries.at(step);
    const bool last = step + 1 == steps;
    Copies::wait<0>(); // @operand Q
    // After this barrier every thread's part of Q and dO (and of K and V) is visible to all warps, and every warp has
    // finished the products of the previous step, so that dS, P and the other stage may be overwritten.
    __syncthreads();
    if (cfg::Q_stages == 2 && !last)
        queries.start_Q_copy(step + 1);
    if (cfg::dO_stages == 2 && !last)
        queries.start_dO_copy(step + 1);

    ScoreAccumulator S = {}, dP = {};
    warp.scores(S, shared.K(), shared.Q(step));   // @product S
    warp.scores(dP, shared.V(), shared.dO(step)); // @product dP
    const Terms terms = shared.terms(step);
    const float scale_log2 = args.forward.softmax_scale * log2_e;
    const int first_query = warp.part * queries_per_part;
    ScoreGradients::exponentiate(S, terms, first_query, scale_log2); // @phase gradients of scores
    ScoreGradients::differentiate(S, dP, terms, first_query, scale_log2, // @phase gradients of scores
                                  args.forward.capping_scale);
    if (at.block < work.queries.plain_begin || at.block >= work.queries.plain_end)
        ScoreGradients::mask(S, dP, work.window, work.first_key + warp.first_key, at.first_row + first_query);

    Weights P, dS;
    round_to_operand<cfg::dtype>(P, S);
    round_to_operand<cfg::dtype>(dS, dP);
    store_weights(shared.dS(), warp.first_key, first_query, dS);
    if constexpr (shape::weights_in_registers) {
        warp.gradient(warp.dV, P, 0, shared.dO(step)); // @product dV
    } else {
        store_weights(shared.P(), warp.first_key, first_query, P);
    }
    // After this barrier dS, and P if it is there, is visible to all warps. Where P is in registers, every warp has
    // finished with dO.
    __syncthreads();
    if constexpr (!shape::weights_in_registers)
        warp.gradient(warp.dV, P, shared.P(), shared.dO(step)); // @product dV
    if (shape::weights_in_registers && cfg::dO_stages == 1 && !last)
        queries.start_dO_copy(step + 1);
    warp.gradient(warp.dK, dS, shared.dS(), shared.Q(step)); // @product dK

    Sums::Accumulator dQ = {};
    warp.queries_gradient(dQ); // @product dQ
    float *sums = args.dQ_sums + queries.padded(at) * cfg::d_head;
    if constexpr (cfg::ordered) {
        const Turn turn = Turn::of<Work, cfg::B_r, cfg::B_c>(args, work, at);
        if (threadIdx.x == 0)
            turn.wait();
        __syncthreads(); // nobody adds before it is this block's turn
        Sums::add(sums, dQ);
        __syncthreads(); // all have added
        if (threadIdx.x == 0)
            turn.pass();
    } else {
        Sums::add(sums, dQ);
    }

    if (cfg::Q_stages == 1 || (!shape::weights_in_registers && cfg::dO_stages == 1)) {
        __syncthreads(); // every warp has finished with Q, and with dO
        if (cfg::Q_stages == 1 && !last)
            queries.start_Q_copy(step + 1);
        if (!shape::weights_in_registers && cfg::dO_stages == 1 && !last)
            queries.start_dO_copy(step + 1);
    }
}

DEVICE void compute(const BackwardArguments &args, const Work &work, SharedMemory shared) {
    const Queries queries{args, work, shared};
    Warp warp{shared};
    const int steps = work.steps(args);
    if (steps > 0) {
        const auto start_keys_copy = [&](uint32 target, const TensorView &tensor) {
            const int64 stride = row_stride_bytes<0>(tensor);
            const char *rows = head_start(tensor, variant::variable_lengths ? 0 : work.tile.batch, work.tile.kv_head) +
                               (work.sequence.kv_start + work.first_key) * stride;
            Copies::start<cfg::B_c>(target, rows, stride, work.keys, threadIdx.x);
        };
        start_keys_copy(shared.K(), args.forward.K); // @operand K
        start_keys_copy(shared.V(), args.forward.V); // @operand V
        queries.start_Q_copy(0);
        queries.start_dO_copy(0);
#pragma unroll 1
        for (int step = 0; step < steps; ++step)
            query_step(warp, queries, step, steps);
    }
#pragma unroll
    for (int m = 0; m < shape::row_tiles; ++m)
        for (int half = 0; half < halves; ++half)
            scale_row(warp.dK[m], half, args.gradient_scale);
    warp.store(args.dK, work, warp.dK);
    warp.store(args.dV, work, warp.dV);
}

template <AmpereBackwardKernelConfig>
__global__ void __launch_bounds__(shape::threads)
    ampere_backward_kernel(const __grid_constant__ BackwardArguments args) {
    extern __shared__ __align__(bank_line_bytes) char shared_memory[];
    const Work work(args, key_tile_of_block<cfg::ordered>(args, blockIdx.x));
    if (work.exists())
        compute(args, work, SharedMemory{shared_address(shared_memory)});
}
