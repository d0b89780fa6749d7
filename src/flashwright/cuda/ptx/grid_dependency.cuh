// The grids before and after this one on its stream (PTX: griddepcontrol, from sm_90 on). Where a launch allows it, a grid
// starts while the one before still runs.
#pragma once
#include "types.cuh"

// The next grid may start once all thread blocks have said so, or ended.
DEVICE void allow_next_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until all grids before have ended, and what they wrote is visible. No global memory may be touched before.
DEVICE void wait_for_grids_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
