// Reductions over the four lanes 4i … 4i+3 that share a row of an mma accumulator (PTX: shfl).
#pragma once
#include "types.cuh"

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
}

DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(all_lanes, x, 1);
    return x + __shfl_xor_sync(all_lanes, x, 2);
}

// A vote has a bit for each lane of the warp, of which those of the caller's four lanes count.
DEVICE bool quad_any(bool x) { return __ballot_sync(all_lanes, x) >> (threadIdx.x & 28) & 15; }

// A value that is equal in all lanes, in a form that shows the compiler so: it keeps such values in registers that the
// lanes of a warp share.
DEVICE int uniform(int value) { return __shfl_sync(all_lanes, value, 0); }
