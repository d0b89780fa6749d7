// Additions to global memory that return nothing, and flags between thread blocks (PTX: red, ld.acquire, st.release).
#pragma once
#include "types.cuh"

constexpr bool has_vector_reductions = __CUDA_ARCH__ >= 900;

DEVICE void reduce_add_global(float *global, float value) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
}

// Four neighbouring values at once, where there are vector reductions.
DEVICE void reduce_add_global_16B(float *global, const float (&values)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(values[0]),
                 "f"(values[1]), "f"(values[2]), "f"(values[3])
                 : "memory");
#endif
}

// What was written before the flag was released is visible to whoever acquires it.
DEVICE int load_acquire(const int *flag) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

// Whatever this thread wrote, and what it saw of others behind a barrier, comes before the flag, and before what is added
// to it.
DEVICE void store_release(int *flag, int value) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
DEVICE void add_release(int *flag, int amount) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(flag), "r"(amount) : "memory");
}
