// Where the elements of a block lie in shared memory when threads copy them: panels of columns, swizzled. What Python
// computed of the layout is in the namespace `layout`.
#pragma once
#include "types.cuh"

// Moves each 16-byte vector of a bank line to the place given by the line's index, so that the same column of
// consecutive rows lies in different banks. With the mask 0 it moves nothing.
DEVICE uint32 swizzle(uint32 offset) {
    return offset ^ ((offset & layout::swizzle_mask) >> layout::swizzle_shift);
}

// Byte offset of 16-byte vector `vector` of row `row` in a block of `rows` rows.
template <int rows> DEVICE uint32 vector_offset(uint32 row, uint32 vector) {
    uint32 panel = vector / layout::panel_vectors;
    return panel * (rows * layout::row_bytes) +
           swizzle(row * layout::row_bytes + vector % layout::panel_vectors * vector_bytes);
}

// Byte offset of the 16×16 block at row 16·`block_row`, column 16·`block_column`, for a lane whose place in
// block (0, 0) is `lane_offset`. Rows move by whole swizzle periods, so they add; columns XOR.
template <int rows> DEVICE uint32 block_offset(uint32 lane_offset, int block_row, int block_column) {
    constexpr int block_vectors = mma_depth / vector_elements;
    int panel = block_vectors * block_column / layout::panel_vectors;
    int vector = block_vectors * block_column % layout::panel_vectors;
    return panel * (rows * layout::row_bytes) + block_row * (mma_rows * layout::row_bytes) +
           (lane_offset ^ (vector * vector_bytes));
}
