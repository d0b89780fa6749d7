// The kernels before and after the backward's own: what it needs of each row of Q, and dQ from its sums.
#pragma once
#include "attention/rescaling.cuh"
#include "attention/tile.cuh"
#include "backward/dq_sums.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

using Sums = DQSums<cfg::B_r, cfg::d_head, shape::dQ_threads, shape::dQ_group_warps, shape::dQ_column_parts>;
constexpr int tensor_columns = variant::pads_columns ? variant::head_dim : cfg::d_head;
constexpr int row_kernel_threads = 128;
constexpr float positive_infinity = -negative_infinity;

// A block of query rows of one head.
struct QueryTile {
    int head, batch, first_row;
    Sequence sequence;
    int rows; // from the first to the sequence's end

    DEVICE QueryTile(const BackwardArguments &args, int head, int batch, int first_row)
        : head(head), batch(batch), first_row(first_row), sequence(args.forward, batch),
          rows(sequence.q_length - first_row) {}

    // Rows before the first packed sequence have slots, too, and a sequence may need fewer than it has.
    DEVICE bool exists() const { return first_row >= 0 && rows > 0; }
    DEVICE char *row(const TensorView &tensor, int row) const {
        return head_start(tensor, variant::variable_lengths ? 0 : batch, head) +
               (sequence.q_start + first_row + row) * tensor.row_stride * element_bytes;
    }
    // The first row in the buffers of padded rows.
    DEVICE int64 padded(const BackwardArguments &args) const {
        return padded_row<cfg::B_r>(args, sequence, head, batch) + first_row;
    }
    DEVICE float *sums(const BackwardArguments &args) const {
        return args.dQ_sums + padded(args) * cfg::d_head;
    }
    // Whether any row attends to any key.
    DEVICE bool attends(const BackwardArguments &args) const {
        const Window window(args.forward.window_left, args.forward.window_right, args.forward.align_bottom_right,
                            sequence.q_length, sequence.kv_length);
        return sequence.kv_length > 0 && window.first_row(0) < first_row + cfg::B_r &&
               window.last_row(sequence.kv_length - 1, sequence.q_length) >= first_row;
    }
};

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

// A row of gradients at zero.
DEVICE void clear_row(char *row) {
    constexpr int vectors = tensor_columns / vector_elements;
    for (int vector = threadIdx.x; vector < vectors; vector += row_kernel_threads)
        store_global_16B(row + vector * vector_bytes, Vector16B{});
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

// The thread blocks of a head share the rows of no packed sequence: their gradients are zero.
DEVICE void clear_rows_of_no_sequence(const TensorView &tensor, int head, const RowsOfNoSequence &rows) {
    for (int i = blockIdx.x; i < rows.count; i += gridDim.x)
        clear_row(head_start(tensor, 0, head) + rows.row(i) * tensor.row_stride * element_bytes);
}
DEVICE void clear_rows_of_no_sequence(const BackwardArguments &args, int head) {
    const ForwardArguments &forward = args.forward;
    clear_rows_of_no_sequence(args.dQ, head, RowsOfNoSequence(forward.q_starts, forward.batches, forward.q_length));
    const int kv_head = head / forward.q_heads_per_kv_head;
    if (head == kv_head * forward.q_heads_per_kv_head) {
        const RowsOfNoSequence keys(forward.kv_starts, forward.batches, forward.kv_length);
        clear_rows_of_no_sequence(args.dK, kv_head, keys);
        clear_rows_of_no_sequence(args.dV, kv_head, keys);
    }
}

// Before: the terms of each row; turns, and the count of taken tiles at zero. Where a kernel comes after, sums of dQ at zero,
// too. Where none does, gradients of zero that nobody else writes: of rows of no packed sequence, and of blocks of queries
// that attend to no key.
template <int> __global__ void __launch_bounds__(row_kernel_threads)
    backward_rows_kernel(const __grid_constant__ BackwardArguments args) {
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *args.tiles_taken = 0;
    const QueryTile tile = query_tile_of_block(args);
    if constexpr (shape::finishes_dQ && variant::variable_lengths && !variant::accumulates)
        clear_rows_of_no_sequence(args, tile.head);
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
    if constexpr (!shape::finishes_dQ) {
        float *sums = tile.sums(args);
        for (int i = threadIdx.x; i < cfg::B_r * cfg::d_head / 4; i += row_kernel_threads)
            store_global_16B(sums + 4 * i, Vector16B{});
    } else if (!variant::accumulates && !tile.attends(args)) {
        for (int row = 0; row < min(cfg::B_r, tile.rows); ++row)
            clear_row(tile.row(args.dQ, row));
    }
    if ((cfg::ordered || shape::finishes_dQ) && threadIdx.x < Turn::words)
        Turn::counters_of(args, padded / cfg::B_r)[threadIdx.x] = 0;
}

// Scales 8 columns of a row, and rounds them or adds them to what there is.
DEVICE void write_columns(char *first, const float (&values)[mma_columns], float scale) {
    if constexpr (variant::accumulates) {
#pragma unroll
        for (int part = 0; part < mma_columns; part += 4) {
            float *sums = (float *)first + part;
            Vector16B v = load_global_16B(sums);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                v.words[i] = __float_as_uint(__uint_as_float(v.words[i]) + values[part + i] * scale);
            store_global_16B(sums, v);
        }
    } else {
        Vector16B v;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v.words[i] = pack_16bit<cfg::dtype>(values[2 * i] * scale, values[2 * i + 1] * scale);
        store_global_16B(first, v);
    }
}

// After: dQ, rounded or added to what there is. Rows of no packed sequence have gradients, too: zeros.
template <int> __global__ void __launch_bounds__(row_kernel_threads)
    backward_dq_kernel(const __grid_constant__ BackwardArguments args) {
    const QueryTile tile = query_tile_of_block(args);
    if constexpr (variant::variable_lengths && !variant::accumulates)
        clear_rows_of_no_sequence(args, tile.head);
    if (!tile.exists())
        return;
    const float *sums = tile.sums(args);
    for (int i = threadIdx.x; i < Sums::pieces; i += row_kernel_threads) {
        const Sums::Piece piece = Sums::Piece::at(i);
        const Sums::TwoRows two = Sums::load(sums, piece);
        if (piece.first_column() >= tensor_columns)
            continue;
#pragma unroll
        for (int half = 0; half < halves; ++half)
            if (const int row = piece.row(half); row < tile.rows)
                write_columns(tile.row(args.dQ, row) + piece.first_column() * gradient_bytes, two.values[half],
                              args.gradient_scale);
    }
}
