// The kernels before and after the backward's own: what it needs of each row of Q, and dQ from its sums.
#pragma once
#include "attention/rescaling.cuh"
#include "backward/query_tile.cuh"

constexpr int row_kernel_threads = 128;
constexpr float positive_infinity = -negative_infinity;

// The grid is (blocks of all batches, heads). Packed sequences stand in one line of slots, as their padded rows do.
DEVICE QueryTile query_tile_of_block(const BackwardArguments &args) {
    if constexpr (variant::variable_lengths) {
        const PackedLine<cfg::B_r> line{args.forward};
        const int batch = line.sequence_of_warp(blockIdx.x);
        return {args, (int)blockIdx.y, batch, ((int)blockIdx.x - line.first_slot(batch)) * cfg::B_r};
    }
    const int batch = blockIdx.x / args.forward.q_blocks;
    return {args, (int)blockIdx.y, batch, ((int)blockIdx.x - batch * args.forward.q_blocks) * cfg::B_r};
}

DEVICE float dot_of_vectors(const Vector16B &a, const Vector16B &b) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < vector_bytes / register_bytes; ++i) {
        const Pair x = unpack_16bit<cfg::dtype>(a.words[i]), y = unpack_16bit<cfg::dtype>(b.words[i]);
        sum += x.values[0] * y.values[0] + x.values[1] * y.values[1];
    }
    return sum;
}

// Before: the terms of each row; sums of dQ, turns or tiles of each wave that are done, and the count of taken tiles at
// zero.
template <int> __global__ void __launch_bounds__(row_kernel_threads)
    backward_rows_kernel(const __grid_constant__ BackwardArguments args) {
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *args.tiles_taken = 0;
    const QueryTile tile = query_tile_of_block(args);
    if (!tile.exists())
        return;
    const int64 padded = tile.padded(args);
    constexpr int lanes = 8; // of a row
    const int lane = threadIdx.x % lanes;
    for (int row = threadIdx.x / lanes; row < cfg::B_r; row += row_kernel_threads / lanes) {
        const bool exists = row < tile.rows;
        float dot = 0;
        if (exists)
            for (int vector = lane; vector < tensor_columns / vector_elements; vector += lanes)
                dot += dot_of_vectors(load_global_16B(tile.row(args.forward.O, row) + vector * vector_bytes),
                                      load_global_16B(tile.row(args.dO, row) + vector * vector_bytes));
#pragma unroll
        for (int distance = 1; distance < lanes; distance *= 2)
            dot += __shfl_xor_sync(all_lanes, dot, distance);
        if (lane == 0) {
            const int64 place = tile.batch * args.forward.lse_batch_stride + tile.head * args.forward.lse_head_stride +
                                tile.sequence.q_start + tile.first_row + row;
            const float lse = exists ? args.forward.lse[place] : negative_infinity;
            const bool attends = lse != negative_infinity;
            args.row_lse[padded + row] = attends ? lse * log2_e : positive_infinity;
            args.row_dot[padded + row] = attends ? dot - (args.dlse ? args.dlse[place] : 0) : 0;
        }
    }
    // In waves, the sums of the first alone: those of others are cleared when they have been read. There are as many waves
    // as heads of K and V, or fewer.
    const int pair = pair_of_head(args, tile.head, tile.batch);
    if (!shape::finishes_dQ || pair < Waves::kept * args.pairs_at_once) {
        float *sums = tile.sums(args);
        for (int i = threadIdx.x; i < cfg::B_r * cfg::d_head / 4; i += row_kernel_threads)
            store_global_16B(sums + 4 * i, Vector16B{});
    }
    if (shape::finishes_dQ && tile.first_row == 0 && tile.head % args.forward.q_heads_per_kv_head == 0 && threadIdx.x == 0)
        *Waves{args}.done(pair) = 0;
    if (cfg::ordered && threadIdx.x < Turn::most_together)
        Turn::counters(args, padded / cfg::B_r)[threadIdx.x] = 0;
}

// Rows of no packed sequence: their gradients are zero. The thread blocks of a head share them.
DEVICE void clear(const TensorView &tensor, int head, const RowsOfNoSequence &rows) {
    constexpr int vectors = tensor_columns / vector_elements;
    for (int i = blockIdx.x; i < rows.count; i += gridDim.x) {
        char *row = head_start(tensor, 0, head) + rows.row(i) * tensor.row_stride * element_bytes;
        for (int vector = threadIdx.x; vector < vectors; vector += row_kernel_threads)
            store_global_16B(row + vector * vector_bytes, Vector16B{});
    }
}

// After: dQ, where the backward's own kernel leaves that to others.
template <int> __global__ void __launch_bounds__(row_kernel_threads)
    backward_dq_kernel(const __grid_constant__ BackwardArguments args) {
    const QueryTile tile = query_tile_of_block(args);
    if constexpr (variant::variable_lengths && !variant::accumulates) {
        const ForwardArguments &forward = args.forward;
        clear(args.dQ, tile.head, RowsOfNoSequence(forward.q_starts, forward.batches, forward.q_length));
        const int kv_head = tile.head / forward.q_heads_per_kv_head;
        if (tile.head == kv_head * forward.q_heads_per_kv_head) {
            const RowsOfNoSequence keys(forward.kv_starts, forward.batches, forward.kv_length);
            clear(args.dK, kv_head, keys);
            clear(args.dV, kv_head, keys);
        }
    }
    if (!tile.exists())
        return;
    finish_dQ<row_kernel_threads>(args, tile, threadIdx.x);
}
