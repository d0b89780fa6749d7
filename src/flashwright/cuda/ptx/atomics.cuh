// Counters that thread blocks share (PTX: atom).
#pragma once
#include "types.cuh"

// Adds one and returns what was there before. Whatever this thread wrote, and what it saw of others behind a barrier,
// comes before; what others wrote before they added is visible after.
DEVICE int add_one_acq_rel(int *counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
