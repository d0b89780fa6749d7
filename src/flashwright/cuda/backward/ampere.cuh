// FlashAttention-2 backward for mma.sync tensor cores: dQ, dK and dV of O = softmax(Q·Kᵀ·scale)·V.
//
// One thread block owns B_c keys of one head of K and V, and visits the blocks of B_r queries that attend to them, of
// every head of Q that shares the keys: dK and dV stay in registers, dQ is added to sums in global memory. Scores are
// computed transposed, a row per key: the probabilities and the gradients of the scores then are, in the registers that
// hold them, the left operands of dV += Pᵀ·dO and dK += dSᵀ·Q. Only dS goes through shared memory, for dQ = dS·K.
//
// Warps stand in groups along the keys and in `parts` along the other dimension of each product: queries in S and dP,
// columns in dV and dK. With more than one part P goes through shared memory too, for the warps of the other parts.
#pragma once
#include "attention/score_gradients.cuh"
#include "attention/sources.cuh"
#include "backward/dq_sums.cuh"
#include "ptx/order.cuh"
#include "tile/copy.cuh"
#include "tile/products.cuh"
#include "tile/store.cuh"

constexpr int queries_per_part = cfg::B_r / cfg::parts, columns_per_part = cfg::d_head / cfg::parts;
constexpr int slice_queries = queries_per_part / cfg::slices;
constexpr int schedulers = 4; // of a multiprocessor; warp w is served by scheduler w % 4
constexpr int tensor_columns = variant::pads_columns ? variant::head_dim : cfg::d_head;

// Operands loaded 16 deep at a time. The assembler orders loads and products its own way.
template <int depth, int outer> using Loaded = Fragments<depth / mma_depth, 1, outer / mma_depth, 1>;
using ScoresLeft = Loaded<cfg::d_head, shape::keys_per_warp>;       // K in S, V in dP
using ScoresRight = Loaded<cfg::d_head, slice_queries>;             // Q in S, dO in dP
using OwnRight = Loaded<slice_queries, columns_per_part>;           // dO in dV, Q in dK, of the warp's own queries
using OthersLeft = Loaded<queries_per_part, shape::keys_per_warp>;  // P in dV, dS in dK, of another part's queries
using OthersRight = Loaded<queries_per_part, columns_per_part>;     // dO in dV, Q in dK
// P and dS of a slice as operands in registers.
using Weights = Fragments<slice_queries / mma_depth, 1, shape::row_tiles, slice_queries / mma_depth>;

using Copies = BlockCopies<shape::threads, true>;
using Work = KeyTileWork<cfg::B_r, cfg::B_c>;
using Sums = DQSums<cfg::B_r, cfg::d_head, shape::dQ_threads, shape::dQ_group_warps, shape::dQ_column_parts>;
using Terms = RowTerms<cfg::B_r>;
using DQLeft = Loaded<cfg::B_c, Sums::row_tiles * mma_rows>;
using DQRight = Loaded<cfg::B_c, cfg::d_head / shape::dQ_column_parts>;

using ScoreAccumulator = float[shape::row_tiles][slice_queries / mma_columns][accumulator_values];
using GradientAccumulator = float[shape::row_tiles][columns_per_part / mma_columns][accumulator_values];

struct SharedMemory {
    uint32 base;

    DEVICE uint32 K() const { return base + shape::K_offset; }
    DEVICE uint32 V() const { return base + shape::V_offset; }
    DEVICE uint32 Q(int step) const { return base + shape::Q_offset + step % cfg::Q_stages * shape::query_bytes; }
    DEVICE uint32 dO(int step) const { return base + shape::dO_offset + step % cfg::dO_stages * shape::query_bytes; }
    DEVICE uint32 P() const { return base + shape::P_offset; }
    DEVICE uint32 dS(int step) const { return base + shape::dS_offset + step % shape::dS_buffers * shape::weight_bytes; }
    DEVICE Terms terms(int step) const {
        return {base + shape::terms_offset + step % cfg::Q_stages * Terms::bytes};
    }
};

// What a thread copies of the next block of queries, and from where. Addresses move on from block to block: finding them
// anew would take a step some hundred instructions.
struct NextQueries {
    using Slice = BlockSlice<cfg::B_r, shape::threads>;
    static constexpr int vector_rows = vector_bytes / sizeof(float), term_vectors = cfg::B_r / vector_rows;

    const BackwardArguments &args;
    const Work &work;
    SharedMemory shared;
    RunningSteps<Work, cfg::B_r> steps;
    const char *Q, *dO; // this thread's first vectors

    DEVICE NextQueries(const BackwardArguments &args, const Work &work, SharedMemory shared)
        : args(args), work(work), shared(shared), steps(args, work) {
        find();
    }

    DEVICE void start_Q_copy() const {
        start_terms_copy();
        start_copy(shared.Q(steps.step), Q, args.forward.Q); // @operand Q
    }
    DEVICE void start_dO_copy() const { start_copy(shared.dO(steps.step), dO, args.dO); } // @operand dO

    // Behind the last block of a head comes the first of the next.
    DEVICE void advance() {
        const bool of_another_head = steps.advance();
        move(Q, of_another_head, row_stride_bytes<0>(args.forward.Q), element_bytes * args.forward.Q.head_stride);
        move(dO, of_another_head, row_stride_bytes<0>(args.dO), element_bytes * args.dO.head_stride);
    }

  private:
    DEVICE void move(const char *&place, bool of_another_head, int64 row, int64 head) const {
        const int rows_behind = (work.queries.count - 1) * cfg::B_r;
        place += of_another_head ? head - rows_behind * row : cfg::B_r * row;
    }
    DEVICE void find() {
        const QueryStep at = steps.at_hand();
        Q = first_vector(args.forward.Q, at);
        dO = first_vector(args.dO, at);
    }
    DEVICE const char *first_vector(const TensorView &tensor, const QueryStep &at) const {
        const int64 stride = row_stride_bytes<0>(tensor);
        return head_start(tensor, variant::variable_lengths ? 0 : work.tile.batch, at.head) +
               (work.sequence.q_start + at.first_row) * stride + Slice(threadIdx.x).global_offset(0, stride);
    }
    DEVICE void start_copy(uint32 target, const char *first, const TensorView &tensor) const {
        Copies::start_from<cfg::B_r>(target, first, row_stride_bytes<0>(tensor),
                                     work.sequence.q_length - steps.at_hand().first_row, threadIdx.x);
    }
    // Part of the group that the next copy closes.
    DEVICE void start_terms_copy() const {
        const uint32 target = shared.terms(steps.step).shared;
#pragma unroll
        for (int first = 0; first < 2 * term_vectors; first += shape::threads) {
            const int place = first + threadIdx.x, i = place % term_vectors;
            const float *terms = place < term_vectors ? args.row_lse : args.row_dot;
            if (place < 2 * term_vectors)
                cp_async_16B(target + place * vector_bytes, terms + steps.row + i * vector_rows);
        }
    }
};

// Writes a slice of a warp's P or dS into a block with a row per key. Rows 8 apart differ by a constant, as the swizzle's
// period divides 8; a slice's columns lie in one panel, or begin with a whole one.
DEVICE void store_weights(uint32 block, int first_row, int first_column, Weights &weights) {
    const uint32 first_vector = first_column / vector_elements;
    const uint32 panel = block + first_vector / layout::panel_vectors * (cfg::B_c * layout::row_bytes);
    const uint32 lane_offset = vector_offset<cfg::B_c>(first_row + accumulator_row(0, 0), first_vector % layout::panel_vectors) +
                               accumulator_column() * element_bytes;
#pragma unroll
    for (int vector = 0; vector < 2 * Weights::tiles; ++vector) {
        const uint32 column = panel + vector / layout::panel_vectors * (cfg::B_c * layout::row_bytes) +
                              (lane_offset ^ vector % layout::panel_vectors * vector_bytes);
#pragma unroll
        for (int m = 0; m < shape::row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half) // as `mma` has A: rows 0 and 8, columns 0, then columns 8
                store_shared_4B(column + (mma_rows * m + fragment * half) * layout::row_bytes,
                                weights.block(vector / 2, 0, m)[vector % 2 * 2 + half]);
    }
}

// What a warp holds from the first block of queries to the last.
struct Warp {
    const SharedMemory shared;
    const int warp = threadIdx.x / warp_threads;
    const int first_key = warp / cfg::parts * shape::keys_per_warp, part = warp % cfg::parts;
    GradientAccumulator dK = {}, dV = {};

    // The first query of the warp's slice.
    DEVICE int first_query(int slice) const { return part * queries_per_part + slice * slice_queries; }

    // S = K·Qᵀ, or dP = V·dOᵀ, of the warp's keys and a slice of its queries.
    DEVICE void scores(ScoreAccumulator &c, uint32 keys, uint32 queries, int slice) const {
        SharedOperand<ScoresLeft, cfg::B_c, Role::A> left(keys + first_key * layout::row_bytes, lane_index());
        SharedOperand<ScoresRight, cfg::B_r, Role::B> right(queries + first_query(slice) * layout::row_bytes,
                                                            lane_index());
        matmul<cfg::dtype, Place::shared, Place::shared, false, false>(left, right, c);
    }

    // dV += P·dO, or dK += dS·Q, of the warp's keys and its part of the columns: the queries of a slice, whose weights
    // are in registers.
    DEVICE void own_gradient(GradientAccumulator &c, Weights &weights, uint32 queries, int slice) const {
        SharedOperand<OwnRight, cfg::B_r, Role::B_transposed> right(
            queries + first_query(slice) * layout::row_bytes, lane_index(), part * columns_per_part / mma_depth);
        matmul<cfg::dtype, Place::registers, Place::shared, false, false>(weights, right, c);
    }

    // The same, of the queries of all other parts, whose weights are in a block of shared memory.
    DEVICE void others_gradient(GradientAccumulator &c, uint32 weights, uint32 queries) const {
#pragma unroll
        for (int distance = 1; distance < cfg::parts; ++distance) {
            const int other = (part + distance) % cfg::parts;
            SharedOperand<OthersLeft, cfg::B_c, Role::A> left(weights + first_key * layout::row_bytes, lane_index(),
                                                              other * queries_per_part / mma_depth);
            SharedOperand<OthersRight, cfg::B_r, Role::B_transposed> right(
                queries + other * queries_per_part * layout::row_bytes, lane_index(),
                part * columns_per_part / mma_depth);
            matmul<cfg::dtype, Place::shared, Place::shared, false, false>(left, right, c);
        }
    }

    // dQ = dS·K: all keys, the warp's part of the block.
    DEVICE void queries_gradient(Sums::Accumulator &c, int step) const {
        SharedOperand<DQLeft, cfg::B_c, Role::A_transposed> left(shared.dS(step), lane_index(),
                                                                 Sums::first_row(warp) / mma_rows);
        SharedOperand<DQRight, cfg::B_c, Role::B_transposed> right(shared.K(), lane_index(),
                                                                   Sums::first_column(warp) / mma_depth);
        matmul<cfg::dtype, Place::shared, Place::shared, false, false>(left, right, c);
    }

    DEVICE void store(const TensorView &tensor, const Work &work, const GradientAccumulator &c) const {
        const int64 stride = row_stride_bytes<0>(tensor);
        char *rows = head_start(tensor, variant::variable_lengths ? 0 : work.tile.batch, work.tile.kv_head) +
                     (work.sequence.kv_start + work.first_key + first_key) * stride +
                     part * columns_per_part * gradient_bytes;
#pragma unroll
        for (int m = 0; m < shape::row_tiles; ++m)
            write_rows<cfg::dtype, variant::accumulates, 8>(rows + m * mma_rows * stride, stride, c[m],
                                                            work.keys - first_key - m * mma_rows,
                                                            tensor_columns - part * columns_per_part);
    }
};

// A late dQ has no registers for more than one address.
constexpr bool of_one_address = cfg::late_dQ;

// Whether products of the step are left when dQ is complete, and nothing waits for their end. Half of the additions to dQ
// are issued among them, which is up to 5% faster on an H200 where heads are grouped, likely for the loads of operands.
constexpr bool adds_in_halves =
    cfg::parts > 1 && !cfg::late_dQ && !cfg::ordered && cfg::Q_stages == 2 && cfg::dO_stages == 2;

// dQ of the block of queries that a step is at, added to its sums.
DEVICE void add_queries_gradient(const Warp &warp, const BackwardArguments &args, const Work &work, const QueryStep &at,
                                 int64 row, int step) {
    Sums::Accumulator dQ = {};
    warp.queries_gradient(dQ, step); // @product dQ
    float *sums = args.dQ_sums + row * cfg::d_head;
    if constexpr (cfg::ordered) {
        const Turn turn = Turn::of<Work, cfg::B_r, cfg::B_c>(args, work, at);
        if (threadIdx.x == 0)
            turn.wait();
        __syncthreads(); // nobody adds before it is this block's turn
        Sums::add<of_one_address>(sums, dQ);
        __syncthreads(); // all have added
        if (threadIdx.x == 0)
            turn.pass();
    } else {
        Sums::add<of_one_address>(sums, dQ);
    }
}

// One block of queries.
DEVICE void query_step(Warp &warp, const RunningSteps<Work, cfg::B_r> &running, NextQueries &next, int steps) {
    const BackwardArguments &args = next.args;
    const Work &work = next.work;
    const SharedMemory &shared = warp.shared;
    const QueryStep at = running.at_hand();
    const int step = running.step;
    const bool last = step + 1 == steps;
    Copies::wait<0>(); // @operand Q
    // After this barrier every thread's part of Q and dO (and of K and V) is visible to all warps, as is dS of the previous
    // step; and every warp has finished the products before it, so that P, a buffer of dS and the other stage may be
    // overwritten.
    __syncthreads();
    if (cfg::Q_stages == 2 && !last)
        next.start_Q_copy();
    if (cfg::dO_stages == 2 && !last)
        next.start_dO_copy();

    // Of the warps that share a scheduler, one multiplies for dQ while the other exponentiates. In order, all add at once.
    const bool dQ_first = cfg::n_warps > schedulers && !cfg::ordered && warp.warp / schedulers % 2;
    if (cfg::late_dQ && dQ_first && step > 0)
        add_queries_gradient(warp, args, work, running.before(), running.row_before(), step - 1);

    const float scale_log2 = args.forward.softmax_scale * log2_e;
    const bool plain = at.block >= work.queries.plain_begin && at.block < work.queries.plain_end;
#pragma unroll
    for (int slice = 0; slice < cfg::slices; ++slice) {
        ScoreAccumulator S = {}, dP = {};
        const Terms terms = shared.terms(step);
        const int first_query = warp.first_query(slice);
        warp.scores(S, shared.K(), shared.Q(step), slice); // @product S
        // Ahead of the products dP, so that the assembler puts them in between.
        ScoreGradients::exponentiate(S, terms, first_query, scale_log2); // @phase gradients of scores
        warp.scores(dP, shared.V(), shared.dO(step), slice);             // @product dP
        ScoreGradients::differentiate(S, dP, terms, first_query, scale_log2, // @phase gradients of scores
                                      args.forward.capping_scale);
        if (!plain)
            ScoreGradients::mask(S, dP, work.window, work.first_key + warp.first_key, at.first_row + first_query);

        Weights P, dS;
        round_to_operand<cfg::dtype>(P, S);
        round_to_operand<cfg::dtype>(dS, dP);
        store_weights(shared.dS(step), warp.first_key, first_query, dS);
        if constexpr (cfg::parts > 1)
            store_weights(shared.P(), warp.first_key, first_query, P);
        warp.own_gradient(warp.dV, P, shared.dO(step), slice); // @product dV
        warp.own_gradient(warp.dK, dS, shared.Q(step), slice); // @product dK
    }
    if (cfg::late_dQ && !dQ_first && step > 0)
        add_queries_gradient(warp, args, work, running.before(), running.row_before(), step - 1);

    // After this barrier dS, and P if it is there, is visible to all warps. With one part, every warp has finished with
    // Q and dO: a late dQ needs the barrier for nothing else.
    if (!cfg::late_dQ || cfg::parts > 1 || cfg::Q_stages == 1 || cfg::dO_stages == 1)
        __syncthreads();
    if constexpr (cfg::parts > 1)
        warp.others_gradient(warp.dV, shared.P(), shared.dO(step)); // @product dV
    if constexpr (adds_in_halves) {
        Sums::Accumulator dQ = {};
        warp.queries_gradient(dQ, step); // @product dQ
        float *sums = args.dQ_sums + running.row * cfg::d_head;
        Sums::add<true, 0, 2>(sums, dQ);
        keep_order_here();
        Sums::add<true, 1, 2>(sums, dQ);
    }
    if constexpr (cfg::parts > 1) {
        warp.others_gradient(warp.dK, shared.dS(step), shared.Q(step)); // @product dK
        if (cfg::Q_stages == 1 || cfg::dO_stages == 1)
            __syncthreads(); // every warp has finished with Q and dO
    }
    if (cfg::Q_stages == 1 && !last)
        next.start_Q_copy();
    if (cfg::dO_stages == 1 && !last)
        next.start_dO_copy();
    next.advance();

    if constexpr (!cfg::late_dQ && !adds_in_halves)
        add_queries_gradient(warp, args, work, at, running.row, step);
}

DEVICE void compute(const BackwardArguments &args, const Work &work, SharedMemory shared) {
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
        NextQueries next(args, work, shared);
        next.start_Q_copy();
        next.start_dO_copy();
        next.advance();
        RunningSteps<Work, cfg::B_r> running(args, work);
#pragma unroll 1
        for (; running.step < steps; running.advance())
            query_step(warp, running, next, steps);
        if constexpr (cfg::late_dQ) {
            __syncthreads(); // dS of the last block is visible to all warps
            add_queries_gradient(warp, args, work, running.before(), running.row_before(), steps - 1);
        }
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
    const Work work(args, key_tile_of_block<cfg::ordered, cfg::B_c>(args, blockIdx.x));
    if (work.exists())
        compute(args, work, SharedMemory{shared_address(shared_memory)});
}
