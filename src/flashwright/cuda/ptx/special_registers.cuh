// Special registers, read again at every call (PTX: %tid, %ctaid).
//
// The compiler knows that threadIdx and blockIdx do not change. It computes once what follows from them, and keeps it
// in registers until its last use. Code that runs once a tile reads them again instead, and leaves those registers to
// the loop in between.
#pragma once
#include "types.cuh"

DEVICE uint32 thread_index_again() {
    uint32 thread;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
    return thread;
}

struct BlockIndex {
    uint32 x, y, z;
};

DEVICE BlockIndex block_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }

DEVICE BlockIndex block_index_again() {
    BlockIndex block;
    asm volatile("mov.u32 %0, %ctaid.x;" : "=r"(block.x));
    asm volatile("mov.u32 %0, %ctaid.y;" : "=r"(block.y));
    asm volatile("mov.u32 %0, %ctaid.z;" : "=r"(block.z));
    return block;
}

// The same value, as one that the compiler knows nothing of: what follows from it is computed where it is used, and not
// kept from where the same was computed before.
DEVICE uint32 opaque(uint32 value) {
    asm volatile("" : "+r"(value));
    return value;
}
