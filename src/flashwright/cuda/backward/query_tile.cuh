// A block of query rows of one head in the backward, and its dQ on the way from sums to what is returned.
#pragma once
#include "attention/tile.cuh"
#include "backward/dq_sums.cuh"
#include "backward/waves.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

using Sums = DQSums<cfg::B_r, cfg::d_head, shape::dQ_threads, shape::dQ_group_warps, shape::dQ_column_parts>;
constexpr int tensor_columns = variant::pads_columns ? variant::head_dim : cfg::d_head;

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
        const int64 row = row_of_sums<cfg::B_r, shape::finishes_dQ>(args, sequence, head, batch) + first_row;
        return args.dQ_sums + row * cfg::d_head;
    }
};

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

// dQ of a tile, rounded or added to what there is, by `threads` threads. If they `clear`, they leave zeros in the sums, and
// have two pieces each on the way where that divides.
template <int threads, bool clear = false>
DEVICE void finish_dQ(const BackwardArguments &args, const QueryTile &tile, int thread) {
    constexpr int at_once = clear && Sums::pieces % (2 * threads) == 0 ? 2 : 1;
    float *const sums = tile.sums(args);
    for (int first = thread; first < Sums::pieces; first += at_once * threads) {
        Sums::TwoRows two[at_once];
#pragma unroll
        for (int j = 0; j < at_once; ++j)
            two[j] = Sums::load(sums, Sums::Piece::at(first + j * threads));
#pragma unroll
        for (int j = 0; j < at_once; ++j) {
            const Sums::Piece piece = Sums::Piece::at(first + j * threads);
            if constexpr (clear)
                Sums::clear(sums, piece);
            if (piece.first_column() >= tensor_columns)
                continue;
#pragma unroll
            for (int half = 0; half < halves; ++half)
                if (const int row = piece.row(half); row < tile.rows)
                    write_columns(tile.row(args.dQ, row) + piece.first_column() * gradient_bytes, two[j].values[half],
                                  args.gradient_scale);
        }
    }
}
