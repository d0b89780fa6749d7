// Products of one warp by mma: C += A·B, walked along the summed dimension in register tiles.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/order.cuh"
#include "tile/accumulator.cuh"
#include "tile/layout.cuh"

// An operand in registers: 16×16 blocks, `steps_per_tile` along K by `outer_blocks` across, in `buffers` tiles.
template <int tiles_, int steps_per_tile_, int outer_blocks_, int buffers> struct Fragments {
    static constexpr int tiles = tiles_, steps_per_tile = steps_per_tile_, outer_blocks = outer_blocks_;
    static constexpr bool entire_block = buffers == tiles;

    uint32 blocks[buffers][steps_per_tile][outer_blocks][4];

    DEVICE uint32 (&block(int tile, int step, int outer))[4] { return blocks[tile % buffers][step][outer]; }
};

// How an operand's block lies in shared memory: a row per row of A (Q), per column of A (dS), per column of B (K), or per
// row of B (V).
enum class Role { A, A_transposed, B, B_transposed };

// An operand whose block lies in shared memory with `rows` rows.
template <class Fragments_, int rows, Role role> struct SharedOperand : Fragments_ {
    uint32 shared;      // address of the block, or of the warp's first row in it
    uint32 lane_offset; // of the row that this lane gives to `ldmatrix`, in a 16×16 block

    // `ldmatrix.x4` fills four registers with the four 8×8 matrices of a block, in the order of the lanes' addresses.
    // `mma` wants A's matrices in the order down the rows first; and the two of each 8 columns of B, which are
    // rows here unless transposed, side by side:
    //     A and B transposed  0 2    B and A transposed  0 1
    //                         1 3                        2 3
    // The operand's columns in shared memory begin with 16 · `first_column_block`: those up to its last lie in one panel,
    // or begin with a whole one.
    DEVICE SharedOperand(uint32 block, uint32 lane, int first_column_block = 0) {
        const uint32 first_vector = first_column_block * (mma_depth / vector_elements);
        const uint32 in_panel = first_vector % layout::panel_vectors;
        shared = block + first_vector / layout::panel_vectors * (rows * layout::row_bytes);
        const uint32 matrix_row = lane % fragment, matrix = lane / fragment;
        lane_offset = role == Role::B || role == Role::A_transposed
                          ? vector_offset<mma_rows>(matrix_row + matrix / 2 * fragment, in_panel + matrix % 2)
                          : vector_offset<mma_rows>(lane % mma_rows, in_panel + lane / mma_rows);
    }

    DEVICE void load_tile(int tile) {
#pragma unroll
        for (int step = 0; step < Fragments_::steps_per_tile; ++step)
#pragma unroll
            for (int outer = 0; outer < Fragments_::outer_blocks; ++outer) {
                int k = tile * Fragments_::steps_per_tile + step;
                if constexpr (role == Role::B_transposed || role == Role::A_transposed)
                    ldmatrix_x4_trans(this->block(tile, step, outer),
                                      shared + block_offset<rows>(lane_offset, k, outer));
                else
                    ldmatrix_x4(this->block(tile, step, outer),
                                shared + block_offset<rows>(lane_offset, outer, k));
            }
    }

    template <bool keep_order = false> DEVICE void load_entire_block() {
        if constexpr (keep_order)
            keep_order_here();
#pragma unroll
        for (int tile = 0; tile < Fragments_::tiles; ++tile)
            load_tile(tile);
    }
};

template <DType dtype, class A, class B, int row_tiles, int column_tiles>
DEVICE void multiply_tile(A &a, B &b, float (&c)[row_tiles][column_tiles][4], int tile) {
#pragma unroll
    for (int step = 0; step < A::steps_per_tile; ++step)
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
            for (int m = 0; m < row_tiles; ++m)
                mma_m16n8k16<dtype>(c[m][n], a.block(tile, step, m), &b.block(tile, step, n / 2)[n % 2 * 2]);
}

// Where a product finds an operand: as a whole in registers, or in shared memory, from which it is loaded on the way.
enum class Place { registers, shared };

// C += A·B. Operands in shared memory are loaded tile by tile; with a double buffer, tile t+1 is on its way while
// tile t is multiplied. The assembler may mix the loads and the products of all tiles, unless `keep_order`.
template <DType dtype, Place A_place, Place B_place, bool double_buffer, bool keep_order, class A, class B,
          int row_tiles, int column_tiles>
DEVICE void matmul(A &a, B &b, float (&c)[row_tiles][column_tiles][4]) {
    auto load = [&](int tile) {
        if constexpr (keep_order && (A_place == Place::shared || B_place == Place::shared))
            keep_order_here();
        if constexpr (A_place == Place::shared)
            a.load_tile(tile);
        if constexpr (B_place == Place::shared)
            b.load_tile(tile);
    };
    if constexpr (double_buffer)
        load(0);
#pragma unroll
    for (int tile = 0; tile < A::tiles; ++tile) {
        if constexpr (double_buffer) {
            if (tile + 1 < A::tiles)
                load(tile + 1);
        } else {
            load(tile);
        }
        if constexpr (keep_order)
            keep_order_here();
        multiply_tile<dtype>(a, b, c, tile);
    }
    if constexpr (keep_order)
        keep_order_here();
}

// Accumulators, rounded, as the A operand of another product: those of two 8-column tiles are one 16×16 block.
template <DType dtype, class Operand, int row_tiles, int column_tiles>
DEVICE void round_to_operand(Operand &a, const float (&c)[row_tiles][column_tiles][4]) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
            for (int half = 0; half < halves; ++half) {
                int k = n / 2;
                a.block(k / Operand::steps_per_tile, k % Operand::steps_per_tile, m)[n % 2 * 2 + half] =
                    pack_16bit<dtype>(c[m][n][2 * half], c[m][n][2 * half + 1]);
            }
}
