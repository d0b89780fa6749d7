// What a tile leaves in global memory: its rows of O, and the log-sum-exp of each.
#pragma once
#include "attention/tile.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/store.cuh"

// A row whose keys come in parts: the shares of what is known of it and of what one more part adds, and the log-sum-exp
// of all.
struct Mixture {
    float known, added, lse;

    DEVICE Mixture(float known_lse, float added_lse) : known(0), added(1), lse(added_lse) {
        if (known_lse == negative_infinity) // the first part that has a key
            return;
        const float difference = added_lse - known_lse;
        known = 1 / (1 + expf(difference));
        added = 1 / (1 + expf(-difference));
        lse = fmaxf(known_lse, added_lse) + log1pf(expf(-fabsf(difference)));
    }
};

// Where the results of a tile's rows go, of which the first `rows` exist; perhaps fewer than the tile's, perhaps more.
template <int static_row_stride = 0> struct OutputRows {
    char *O; // the first row
    float *lse;
    int64 O_stride;
    int rows;

    template <class Work>
    DEVICE OutputRows(const ForwardArguments &args, const Work &work)
        : O_stride(row_stride_bytes<static_row_stride>(args.O)), rows(work.q_rows) {
        const int64 first_row = work.sequence.q_start + work.q_row;
        O = head_start(args.O, work.tile.batch, work.tile.head) + first_row * O_stride;
        if constexpr (variant::returns_lse)
            lse = args.lse + first_row + work.tile.batch * args.lse_batch_stride +
                  work.tile.head * args.lse_head_stride;
    }

    // Of a warp's rows, which start at `warp_row`: one lane of each quad has a row's.
    template <class Softmax, int row_tiles = Softmax::row_tiles>
    DEVICE void store_lse(const Softmax &softmax, int warp_row) const {
        for (int m = 0; m < row_tiles; ++m)
            for (int half = 0; half < halves; ++half) {
                const int row = warp_row + accumulator_row(m, half);
                if (leads_quad() && row < rows)
                    lse[row] = softmax.log_sum_exp(m, half);
            }
    }

    // Mixes a warp's rows into O, in fp32, and their log-sum-exps into `lse`: both hold the results of other keys.
    template <int columns, int at_once, class Softmax, int row_tiles, int column_tiles>
    DEVICE void accumulate(const Softmax &softmax, int warp_row, const float (&c)[row_tiles][column_tiles][4]) const {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
            const int first_row = warp_row + mma_rows * m;
            float known_lse[halves];
            for (int half = 0; half < halves; ++half) {
                const int row = first_row + accumulator_row(0, half);
                known_lse[half] = row < rows ? lse[row] : negative_infinity;
            }
            const auto mix_lse = [&] {
                Shares shares;
                __syncwarp(); // all lanes of a row have read its log-sum-exp, so that one may replace it
                for (int half = 0; half < halves; ++half) {
                    const Mixture mixture(known_lse[half], softmax.log_sum_exp(m, half));
                    shares.kept[half] = mixture.known;
                    shares.added[half] = mixture.added;
                    const int row = first_row + accumulator_row(0, half);
                    if (leads_quad() && row < rows)
                        lse[row] = mixture.lse;
                }
                return shares;
            };
            add_rows<at_once>(O + first_row * O_stride, O_stride, c[m], rows - first_row, columns, mix_lse);
        }
    }
};

// Rows of no packed sequence: their O is zero, their log-sum-exp minus infinity. All warps given, in all thread blocks,
// share them, a row at a time.
template <int columns> DEVICE void clear_rows_of_no_sequence(const ForwardArguments &args, int warp, int warps) {
    constexpr int vectors = columns / vector_elements;
    const RowsOfNoSequence rows(args.q_starts, args.batches, args.q_length);
    const int64 O_stride = row_stride_bytes<0>(args.O);
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int blocks = gridDim.x * gridDim.y * gridDim.z;
    for (int i = block * warps + warp; i < rows.count; i += blocks * warps) {
        const int row = rows.row(i);
        for (int head = 0; head < args.q_heads; ++head) {
            char *O = head_start(args.O, 0, head) + row * O_stride;
            for (int vector = lane_index(); vector < vectors; vector += warp_threads)
                store_global_16B(O + vector * vector_bytes, Vector16B{});
            if (variant::returns_lse && lane_index() == 0)
                args.lse[head * args.lse_head_stride + row] = negative_infinity;
        }
    }
}
