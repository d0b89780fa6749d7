// What is read of global memory while a grid before may still write it (PTX: ld.relaxed, prefetch).
#pragma once
#include "types.cuh"

// A word as it is in the L2 cache, where all multiprocessors see the same. It stays in no cache of this one's own: a load
// after the grid before has ended finds what that has written.
DEVICE int guess_global_4B(const int *global) {
    int word;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(word) : "l"(global) : "memory");
    return word;
}

constexpr int cache_line_bytes = 128;

// Fetches a cache line into L2. Whoever writes to it later finds it there. (The bulk form, cp.async.bulk.prefetch, takes
// its address from a register of the whole warp: lanes with addresses of their own issue it one after the other.)
DEVICE void prefetch_line_to_L2(const void *global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}
