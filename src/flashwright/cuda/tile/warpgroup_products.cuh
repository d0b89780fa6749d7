// Products of one warpgroup by wgmma, issued and not waited for: B in shared memory, A there or in registers.
//
// The instructions themselves are in the generated header `wgmma_products.cuh`: each names all registers of its
// accumulator.
#pragma once
#include "tile/panels.cuh"
#include "wgmma_products.cuh"

// Issues C = A·Bᵀ for 64 rows of A and as many rows of B as C has columns, `depth` columns of both summed over. A's tile
// has 64 rows, B's `B_rows`.
template <int depth, int B_rows, int column_tiles>
DEVICE void issue_shared_shared(float (&c)[column_tiles][4], uint32 A, uint32 B) {
    const uint64 a = operand_descriptor(A, OperandLayout::summed_over_columns());
    const uint64 b = operand_descriptor(B, OperandLayout::summed_over_columns());
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < depth / mma_depth; ++k) {
        const uint64 a_k = a + descriptor_offset(depth_offset<warpgroup_rows>(k));
        const uint64 b_k = b + descriptor_offset(depth_offset<B_rows>(k));
        if (k == 0)
            wgmma_columns_columns_first(c, a_k, b_k);
        else
            wgmma_columns_columns(c, a_k, b_k);
    }
    wgmma_commit_group();
}

// Issues C += A·B, summed over the rows of B's tile, of which there are `B_rows`.
template <int B_rows, int depth_steps, int column_tiles>
DEVICE void issue_registers_shared(float (&c)[column_tiles][4], const uint32 (&A)[depth_steps][4], uint32 B) {
    const uint64 b = operand_descriptor(B, OperandLayout::summed_over_rows(panel_bytes<B_rows>));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < depth_steps; ++k)
        wgmma_registers_rows(c, A[k], b + descriptor_offset(k * mma_depth * panel_row_bytes));
    wgmma_commit_group();
}

// Issues C += A·B, summed over `depth` columns of A's tile, which has 64 rows, and as many rows of B's. No group is closed.
template <int depth, int B_rows, int column_tiles>
DEVICE void issue_columns_rows(float (&c)[column_tiles][4], uint32 A, uint32 B) {
    const uint64 a = operand_descriptor(A, OperandLayout::summed_over_columns());
    const uint64 b = operand_descriptor(B, OperandLayout::summed_over_rows(panel_bytes<B_rows>));
#pragma unroll
    for (int k = 0; k < depth / mma_depth; ++k)
        wgmma_columns_rows(c, a + descriptor_offset(depth_offset<warpgroup_rows>(k)),
                           b + descriptor_offset(k * mma_depth * panel_row_bytes));
}

// Issues C += A·B, or C = A·B if `first`, summed over the 64 rows of both tiles, of which A's first panel has the 64 rows
// of C. No group is closed.
template <bool first, int column_tiles> DEVICE void issue_rows_rows(float (&c)[column_tiles][4], uint32 A, uint32 B) {
    const uint64 a = operand_descriptor(A, OperandLayout::summed_over_rows(panel_bytes<warpgroup_rows>));
    const uint64 b = operand_descriptor(B, OperandLayout::summed_over_rows(panel_bytes<warpgroup_rows>));
#pragma unroll
    for (int k = 0; k < warpgroup_rows / mma_depth; ++k) {
        const uint64 offset = descriptor_offset(k * mma_depth * panel_row_bytes);
        if (first && k == 0)
            wgmma_rows_rows_first(c, a + offset, b + offset);
        else
            wgmma_rows_rows(c, a + offset, b + offset);
    }
}
