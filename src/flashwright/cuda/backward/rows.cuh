// The kernels before and after the backward's own: what it needs of each row of Q, and dQ from its sums.
#pragma once
#include "backward/dq_sums.cuh"
#include "attention/rescaling.cuh"
#include "attention/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

using Sums = DQSums<cfg::B_r, cfg::d_head, shape::dQ_threads, shape::dQ_group_warps, shape::dQ_column_parts>;
constexpr int row_kernel_threads = 128;
constexpr int tensor_columns = variant::pads_columns ? variant::head_dim : cfg::d_head;
constexpr float positive_infinity = -negative_infinity;

// A block of query rows of one head: the grid is (blocks of all batches, heads). Packed sequences stand in one line of
// slots, as their padded rows do.
struct QueryTile {
    int head, batch, first_row;
    Sequence sequence;
    int rows; // from the first to the sequence's end
    int64 padded;

    DEVICE explicit QueryTile(const BackwardArguments &args)
        : head(blockIdx.y), batch(batch_of_block(args.forward)),
          first_row(((int)blockIdx.x - first_block(args.forward, batch)) * cfg::B_r), sequence(args.forward, batch),
          rows(sequence.q_length - first_row),
          padded(padded_row<cfg::B_r>(args, sequence, head, batch) + first_row) {}

    // Rows before the first packed sequence have slots, too, and a sequence may need fewer than it has.
    DEVICE bool exists() const { return first_row >= 0 && rows > 0; }
    DEVICE char *row(const TensorView &tensor, int row) const {
        return head_start(tensor, variant::variable_lengths ? 0 : batch, head) +
               (sequence.q_start + first_row + row) * tensor.row_stride * element_bytes;
    }
    DEVICE float *sums(const BackwardArguments &args) const { return args.dQ_sums + padded * cfg::d_head; }

  private:
    static DEVICE int batch_of_block(const ForwardArguments &args) {
        if constexpr (variant::variable_lengths)
            return PackedLine<cfg::B_r>{args}.sequence_of_warp(blockIdx.x);
        return blockIdx.x / args.q_blocks;
    }
    static DEVICE int first_block(const ForwardArguments &args, int batch) {
        if constexpr (variant::variable_lengths)
            return PackedLine<cfg::B_r>{args}.first_slot(batch);
        return batch * args.q_blocks;
    }
};

DEVICE float dot_of_vectors(const Vector16B &a, const Vector16B &b) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < vector_bytes / register_bytes; ++i) {
        const Pair x = unpack_16bit<cfg::dtype>(a.words[i]), y = unpack_16bit<cfg::dtype>(b.words[i]);
        sum += x.values[0] * y.values[0] + x.values[1] * y.values[1];
    }
    return sum;
}

// Before: the terms of each row, sums of dQ, turns and the count of taken tiles at zero.
template <int> __global__ void __launch_bounds__(row_kernel_threads)
    backward_rows_kernel(const __grid_constant__ BackwardArguments args) {
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *args.tiles_taken = 0;
    const QueryTile tile(args);
    if (!tile.exists())
        return;
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
            args.row_lse[tile.padded + row] = attends ? lse * log2_e : positive_infinity;
            args.row_dot[tile.padded + row] = attends ? dot - (args.dlse ? args.dlse[place] : 0) : 0;
        }
    }
    float *sums = tile.sums(args);
    for (int i = threadIdx.x; i < cfg::B_r * cfg::d_head / 4; i += row_kernel_threads)
        store_global_16B(sums + 4 * i, Vector16B{});
    if (cfg::ordered && threadIdx.x < Turn::most_together)
        Turn::counters(args, tile.padded / cfg::B_r)[threadIdx.x] = 0;
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

// After: dQ, rounded or added to what there is. A thread has 8 columns of two rows at a time.
template <int> __global__ void __launch_bounds__(row_kernel_threads)
    backward_dq_kernel(const __grid_constant__ BackwardArguments args) {
    const QueryTile tile(args);
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
    constexpr int quads = warp_threads / 4;
    constexpr int tiles = Sums::warps * Sums::row_tiles * Sums::column_tiles;
    const float *sums = tile.sums(args);
    for (int i = threadIdx.x; i < tiles * quads; i += row_kernel_threads) {
        // Neighbouring threads have neighbouring columns of a row.
        const int n = i % Sums::column_tiles, m = i / Sums::column_tiles % Sums::row_tiles;
        const int rest = i / (Sums::column_tiles * Sums::row_tiles), quad = rest % quads, warp = rest / quads;
        const auto two = Sums::load(sums, warp, quad, m, n);
        const int column = Sums::first_column(warp) + mma_columns * n;
        if (column >= tensor_columns)
            continue;
#pragma unroll
        for (int half = 0; half < halves; ++half) {
            const int row = Sums::first_row(warp) + mma_rows * m + fragment * half + quad;
            if (row < tile.rows)
                write_columns(tile.row(args.dQ, row) + column * gradient_bytes, two.values[half], args.gradient_scale);
        }
    }
}
