// Words that thread blocks share while they run (PTX: atom, and ld and st with .relaxed or .acquire).
#pragma once
#include "types.cuh"

// Adds and returns what was there before. Whatever this thread wrote, and what it saw of others behind a barrier, comes
// before; what others wrote before they added is visible after.
DEVICE uint64 add_acq_rel(uint64 *counter, uint64 amount) {
    uint64 before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(counter), "l"(amount) : "memory");
    return before;
}

// Adds and returns what was there before; orders nothing else.
DEVICE uint64 add_relaxed(uint64 *counter, uint64 amount) {
    uint64 before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(counter), "l"(amount) : "memory");
    return before;
}

DEVICE int add_relaxed(int *counter, int amount) {
    int before;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(amount) : "memory");
    return before;
}

// What others wrote before they added what this sees is visible after.
DEVICE uint64 load_acquire(const uint64 *counter) {
    uint64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
    return value;
}

// Stores what others may be looking at; orders nothing else.
DEVICE void store_relaxed(uint64 *counter, uint64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(counter), "l"(value) : "memory");
}
