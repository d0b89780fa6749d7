// Moving blocks of rows × d_head elements between global memory, shared memory and registers.
#pragma once
#include "layout.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"

// The part of a block that one of `threads` threads moves: one 16-byte vector per pass, so that neighbouring threads
// move neighbouring vectors of a row. Rows whose vectors are no power of two are moved in equal segments that are.
template <int rows, int threads> struct BlockSlice {
    static constexpr int rows_per_pass = threads / layout::segment_vectors;
    static constexpr int passes_per_segment = (rows + rows_per_pass - 1) / rows_per_pass;
    static constexpr int passes = layout::segments * passes_per_segment;
    static_assert(threads % layout::segment_vectors == 0, "every pass moves whole segments");

    int first_row, vector;

    DEVICE explicit BlockSlice(int thread)
        : first_row(thread / layout::segment_vectors), vector(thread % layout::segment_vectors) {}

    DEVICE int row(int pass) const { return first_row + pass % passes_per_segment * rows_per_pass; }

    // Whether this thread has a vector to move; all have, unless there are more threads than vectors.
    DEVICE bool covers(int pass) const { return rows % rows_per_pass == 0 || row(pass) < rows; }

    // Passes that move on by whole swizzle periods differ by a constant, and so need one address register.
    DEVICE uint32 shared_offset(int pass) const {
        constexpr int period = layout::swizzle_period_rows;
        constexpr int passes_per_period = rows_per_pass % period == 0   ? 1
                                          : period % rows_per_pass == 0 ? period / rows_per_pass
                                                                        : passes_per_segment;
        int periods = pass % passes_per_segment / passes_per_period;
        int rest = pass % passes_per_segment % passes_per_period;
        return vector_offset<rows>(first_row + rest * rows_per_pass, first_vector(pass) + vector) +
               periods * (passes_per_period * rows_per_pass * layout::row_bytes);
    }

    DEVICE int64 global_offset(int pass, int64 row_stride) const {
        return first_row * row_stride + vector * 16 + first_vector(pass) * 16 +
               pass % passes_per_segment * (rows_per_pass * row_stride);
    }

    // Whether the tensor has these columns; those above its head dimension are padding.
    DEVICE bool is_unpadded(int pass) const {
        return !variant::pads_columns || first_vector(pass) + vector < variant::head_dim / 8;
    }

    DEVICE static int first_vector(int pass) { return pass / passes_per_segment * layout::segment_vectors; }
};

// Starts (cp.async) or does (through registers) the copy of a block. Of a ragged block only the first `valid_rows`
// rows exist, and of a padded one only the first columns; the rest becomes zero.
template <int rows, bool ragged>
DEVICE void copy_GM2SM(uint32 shared, const char *global, int64 row_stride, int valid_rows) {
    const BlockSlice<rows, shape::threads> slice(threadIdx.x);
#pragma unroll
    for (int pass = 0; pass < slice.passes; ++pass) {
        if (!slice.covers(pass))
            continue;
        const char *source = global + slice.global_offset(pass, row_stride);
        uint32 target = shared + slice.shared_offset(pass);
        const bool exists = (!ragged || slice.row(pass) < valid_rows) && slice.is_unpadded(pass);
        if constexpr (cfg::async_copy && (ragged || variant::pads_columns))
            cp_async_16B_or_zero(target, source, exists);
        else if constexpr (cfg::async_copy)
            cp_async_16B(target, source);
        else
            store_shared_16B(target, exists ? load_global_16B(source) : Vector16B{});
    }
    if constexpr (cfg::async_copy)
        cp_async_commit_group();
}

// Waits for this thread's copies but the `pending` latest; a barrier must follow before other threads' parts are
// read.
template <int pending> DEVICE void wait_for_copies() {
    if constexpr (cfg::async_copy)
        cp_async_wait_group<pending>();
}

// Rounds a warp's accumulators to 16 bits and writes them into its rows of a block of shared memory.
template <int rows, int row_tiles, int column_tiles>
DEVICE void copy_RF2SM(uint32 shared, int first_row, const float (&c)[row_tiles][column_tiles][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int row = first_row + 16 * m + 8 * half + lane / 4;
                store_shared_4B(shared + vector_offset<rows>(row, n) + lane % 4 * 4,
                                pack_16bit<cfg::dtype>(c[m][n][2 * half], c[m][n][2 * half + 1]));
            }
}

// Writes a warp's rows of a block in shared memory to global memory, whole rows at a time; of a ragged block only the
// first `valid_rows`.
template <int rows, int warp_rows, bool ragged>
DEVICE void copy_SM2GM(char *global, int64 row_stride, uint32 shared, int first_row, int valid_rows) {
    const BlockSlice<warp_rows, 32> slice(threadIdx.x % 32);
#pragma unroll
    for (int pass = 0; pass < slice.passes; ++pass) {
        if (!slice.covers(pass) || !slice.is_unpadded(pass) || (ragged && first_row + slice.row(pass) >= valid_rows))
            continue;
        uint32 vector = slice.first_vector(pass) + slice.vector;
        Vector16B v = load_shared_16B(shared + vector_offset<rows>(first_row + slice.row(pass), vector));
        char *target = global + first_row * row_stride + slice.global_offset(pass, row_stride);
        if constexpr (cfg::streaming_stores)
            store_global_streaming_16B(target, v);
        else
            store_global_16B(target, v);
    }
}
