// Reductions over the four lanes 4i … 4i+3 that share a row of an mma accumulator (PTX: shfl).
#pragma once
#include "types.cuh"

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// The same value, which is equal in all lanes of a warp; the compiler cannot know that otherwise, and keeps what it knows
// to be equal in registers that lanes share.
DEVICE int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }
