// Where the elements of a tile lie in shared memory when the copy engine brings them and wgmma reads them: panels of 64
// columns, one after the other, in which a row takes 128 bytes. Vectors are swizzled by the hardware.
#pragma once
#include "ptx/memory.cuh"
#include "types.cuh"

constexpr int panel_row_bytes = 128; // the span of the widest swizzle
constexpr int panel_columns = panel_row_bytes / element_bytes;
constexpr int panel_vectors = panel_row_bytes / vector_bytes;

template <int rows> constexpr int panel_bytes = rows * panel_row_bytes;

// Byte offset of 16 columns, summed over in one product, in a tile of `rows` rows.
template <int rows> constexpr DEVICE int depth_offset(int k) {
    constexpr int steps_per_panel = panel_columns / mma_depth;
    return k / steps_per_panel * panel_bytes<rows> + k % steps_per_panel * (mma_depth * element_bytes);
}

// Writes zeros into the rows from `first_row` on. A row is zero in any order of its vectors, so that the swizzle does
// not matter.
template <int rows, int panels> DEVICE void clear_rows(uint32 tile, int first_row, int thread, int threads) {
    constexpr int vectors_per_row = panels * panel_vectors;
    for (int i = thread; i < (rows - first_row) * vectors_per_row; i += threads) {
        const int row = first_row + i / vectors_per_row, vector = i % vectors_per_row;
        store_shared_16B(tile + vector / panel_vectors * panel_bytes<rows> + row * panel_row_bytes +
                             vector % panel_vectors * vector_bytes,
                         Vector16B{});
    }
}

// Byte offset of 16-byte vector `vector` of row `row` in a tile of `rows` rows, as the copy engine would place it.
template <int rows> DEVICE uint32 panel_vector_offset(int row, int vector) {
    constexpr int swizzle_rows = 8;
    return vector / panel_vectors * panel_bytes<rows> + row * panel_row_bytes +
           (vector % panel_vectors ^ row % swizzle_rows) * vector_bytes;
}
