// Asynchronous products of one warpgroup, D += A·B with D of 64 rows in registers (PTX: wgmma).
//
// B, and A unless it is in registers too, are read from shared memory, where a descriptor gives their layout. A warp
// holds 16 rows of D (and A), each thread as in `mma.cuh`. The products themselves are in the generated header
// `wgmma_products.cuh`: an instruction names every register of its accumulator.
#pragma once
#include "types.cuh"

// How a tile lies in shared memory: panels of 64 columns, in each of which a row takes 128 bytes, swizzled (PTX:
// "Shared Memory Matrix Layout"). Offsets are in bytes; what they mean depends on which of the tile's dimensions is
// summed over.
struct OperandLayout {
    static constexpr uint32 swizzle_period_bytes = 1024; // eight rows of 128 bytes
    static constexpr uint32 unused = 16;

    uint32 leading_offset, stride_offset;

    // Summed over columns: `stride` separates groups of eight rows.
    static constexpr DEVICE OperandLayout summed_over_columns() { return {unused, swizzle_period_bytes}; }
    // Summed over rows: `leading` separates panels, `stride` groups of eight rows.
    static constexpr DEVICE OperandLayout summed_over_rows(uint32 panel_bytes) {
        return {panel_bytes, swizzle_period_bytes};
    }
};

// A descriptor counts in units of 16 bytes. Moving on in a tile adds to it.
constexpr DEVICE uint64 descriptor_offset(uint32 bytes) { return bytes >> 4; }

DEVICE uint64 operand_descriptor(uint32 shared, OperandLayout layout) {
    constexpr uint64 swizzle_128B = 1ull << 62;
    return swizzle_128B | descriptor_offset(layout.stride_offset) << 32 |
           descriptor_offset(layout.leading_offset) << 16 | descriptor_offset(shared);
}

// Before the first product that touches registers which other instructions wrote.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of products.
DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` of the most recent groups are unfinished.
template <int pending> DEVICE void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving accesses to an accumulator across this point: it does not know that the products
// which write it are asynchronous.
template <int column_tiles> DEVICE void pin_registers(float (&accumulator)[column_tiles][4]) {
#pragma unroll
    for (int n = 0; n < column_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("" : "+f"(accumulator[n][i])::"memory");
}
