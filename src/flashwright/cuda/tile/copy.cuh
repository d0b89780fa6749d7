// Moving blocks of rows × d_head elements between global memory, shared memory and registers.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "tile/accumulator.cuh"
#include "tile/layout.cuh"

// The part of a block that one of `threads` threads moves: one 16-byte vector per pass, so that neighbouring threads
// move neighbouring vectors of a row. Rows whose vectors are no power of two are moved in equal segments that are.
template <int rows, int threads> struct BlockSlice {
    static constexpr int rows_per_pass = threads / layout::segment_vectors;
    static constexpr int passes_per_segment = ceil_div(rows, rows_per_pass);
    static constexpr int passes = layout::segments * passes_per_segment;
    static_assert(threads % layout::segment_vectors == 0, "every pass moves whole segments");

    int first_row, vector;

    DEVICE explicit BlockSlice(uint32 thread)
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
        return first_row * row_stride + vector * vector_bytes + first_vector(pass) * vector_bytes +
               pass % passes_per_segment * (rows_per_pass * row_stride);
    }

    // Whether the tensor has these columns; those above its head dimension are padding.
    DEVICE bool is_unpadded(int pass) const {
        return !variant::pads_columns || first_vector(pass) + vector < variant::head_dim / vector_elements;
    }

    DEVICE static int first_vector(int pass) { return pass / passes_per_segment * layout::segment_vectors; }
};

// Copies of blocks from global to shared memory by all of `threads` threads: asynchronous (cp.async), or through
// registers.
template <int threads, bool asynchronous> struct BlockCopies {
    // Starts, or does, the copy of the rows that exist, of which there are `valid_rows`, perhaps more than the block's.
    // What does not exist becomes zero. A complete block, which nearly all are, is copied without a test for each row.
    template <int rows, bool is_complete = false>
    static DEVICE void start(uint32 shared, const char *global, int64 row_stride, int valid_rows, uint32 thread) {
        if (is_complete || valid_rows >= rows)
            start_complete<rows>(shared, global, row_stride, thread);
        else
            start_incomplete<rows>(shared, global, row_stride, valid_rows, thread);
        if constexpr (asynchronous)
            cp_async_commit_group();
    }

    // The same, from the address of this thread's first vector, with which all of a complete block are a few additions.
    template <int rows>
    static DEVICE void start_from(uint32 shared, const char *first, int64 row_stride, int valid_rows, uint32 thread) {
        const BlockSlice<rows, threads> slice(thread);
        if (valid_rows < rows)
            start_incomplete<rows>(shared, first - slice.global_offset(0, row_stride), row_stride, valid_rows, thread);
        else
#pragma unroll
            for (int pass = 0; pass < slice.passes; ++pass)
                if (slice.covers(pass))
                    start_vector<!variant::pads_columns>(
                        shared + slice.shared_offset(pass),
                        first + slice.first_vector(pass) * vector_bytes +
                            pass % slice.passes_per_segment * (slice.rows_per_pass * row_stride),
                        slice.is_unpadded(pass));
        if constexpr (asynchronous)
            cp_async_commit_group();
    }

    // Waits for this thread's copies but the `pending` latest; a barrier must follow before other threads' parts are
    // read.
    template <int pending> static DEVICE void wait() {
        if constexpr (asynchronous)
            cp_async_wait_group<pending>();
    }

  private:
    template <int rows>
    static DEVICE void start_complete(uint32 shared, const char *global, int64 row_stride, uint32 thread) {
        const BlockSlice<rows, threads> slice(thread);
#pragma unroll
        for (int pass = 0; pass < slice.passes; ++pass)
            if (slice.covers(pass))
                start_vector<!variant::pads_columns>(shared + slice.shared_offset(pass),
                                                     global + slice.global_offset(pass, row_stride),
                                                     slice.is_unpadded(pass));
    }

    // Once a tile at most: a loop, which keeps its addresses out of the registers that other code needs.
    template <int rows>
    static DEVICE void start_incomplete(uint32 shared, const char *global, int64 row_stride, int valid_rows,
                                        uint32 thread) {
        const BlockSlice<rows, threads> slice(opaque(thread));
#pragma unroll 1
        for (int pass = 0; pass < slice.passes; ++pass)
            if (slice.covers(pass))
                start_vector<false>(shared + slice.shared_offset(pass), global + slice.global_offset(pass, row_stride),
                                    slice.row(pass) < valid_rows && slice.is_unpadded(pass));
    }

    template <bool always> static DEVICE void start_vector(uint32 target, const char *source, bool exists) {
        if constexpr (asynchronous && always)
            cp_async_16B(target, source);
        else if constexpr (asynchronous)
            cp_async_16B_or_zero(target, source, exists);
        else
            store_shared_16B(target, exists ? load_global_16B(source) : Vector16B{});
    }
};

// Rounds a warp's accumulators to 16 bits and writes them into its rows of a block of shared memory.
template <DType dtype, int rows, int row_tiles, int column_tiles>
DEVICE void copy_RF2SM(uint32 shared, int first_row, const float (&c)[row_tiles][column_tiles][4]) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                store_shared_4B(shared + vector_offset<rows>(first_row + accumulator_row(m, half), n) +
                                    accumulator_column() * element_bytes,
                                pack_16bit<dtype>(c[m][n][2 * half], c[m][n][2 * half + 1]));
}

// Writes a warp's rows of a block in shared memory to global memory, whole rows at a time, as far as they exist: the
// block's first `valid_rows`.
template <int rows, int warp_rows, bool streaming>
DEVICE void copy_SM2GM(char *global, int64 row_stride, uint32 shared, int first_row, int valid_rows) {
    const BlockSlice<warp_rows, warp_threads> slice(lane_index());
#pragma unroll
    for (int pass = 0; pass < slice.passes; ++pass) {
        if (!slice.covers(pass) || !slice.is_unpadded(pass) || first_row + slice.row(pass) >= valid_rows)
            continue;
        uint32 vector = slice.first_vector(pass) + slice.vector;
        Vector16B v = load_shared_16B(shared + vector_offset<rows>(first_row + slice.row(pass), vector));
        char *target = global + first_row * row_stride + slice.global_offset(pass, row_stride);
        if constexpr (streaming)
            store_global_streaming_16B(target, v);
        else
            store_global_16B(target, v);
    }
}
