// Scores of packed rows, before the softmax: soft cap and mask.
#pragma once
#include "attention/soft_cap.cuh"
#include "decode/items.cuh"
#include "tile/accumulator.cuh"

// Of an item's rows.
struct PackedScores {
    // Keys in [plain_begin, plain_end) of the cache are attended to by all rows.
    int plain_begin, plain_end;

    DEVICE PackedScores(const DecodeArguments &args, const Item &item)
        : plain_begin(first_key(item, item.query(args, item.tile_rows() - 1))),
          plain_end(last_key(item, item.query(args, 0)) + 1) {}

    // Of a warp's rows, from `row` of the tile on, and the keys from `key` on.
    template <int row_tiles, int column_tiles>
    DEVICE void finish(const DecodeArguments &args, const Item &item, float (&S)[row_tiles][column_tiles][4], int row,
                       int key) const {
        if constexpr (variant::softcaps)
            cap(S, args.forward.capping_scale);
        if (key < plain_begin || key + column_tiles * mma_columns > plain_end)
            mask(args, item, S, row, key);
    }

  private:
    // The keys that a query attends to, counted from the beginning of the cache.
    static DEVICE int first_key(const Item &item, int query) {
        return item.sequence.kv_begin + item.window.first_key(query);
    }
    static DEVICE int last_key(const Item &item, int query) {
        return item.sequence.kv_begin + item.window.last_key(query);
    }

    template <int row_tiles, int column_tiles>
    static DEVICE void cap(float (&S)[row_tiles][column_tiles][4], float capping_scale) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int n = 0; n < column_tiles; ++n)
#pragma unroll
                for (float &score : S[m][n])
                    score = soft_capped(score, capping_scale);
    }
    template <int row_tiles, int column_tiles>
    static DEVICE void mask(const DecodeArguments &args, const Item &item, float (&S)[row_tiles][column_tiles][4],
                            int row, int key) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                const int query = item.query(args, row + accumulator_row(m, half));
                const int first = first_key(item, query) - key, last = last_key(item, query) - key;
#pragma unroll
                for (int n = 0; n < column_tiles; ++n)
#pragma unroll
                    for (int i = 0; i < half_values; ++i) {
                        const int column = mma_columns * n + accumulator_column() + i;
                        if (column < first || column > last)
                            S[m][n][2 * half + i] = negative_infinity;
                    }
            }
    }
};
