// Plain loads and stores of one thread (PTX: ld, st).
#pragma once
#include "types.cuh"

// The 32-bit address of a shared variable, as the shared-memory instructions take it.
DEVICE uint32 shared_address(const void *pointer) { return (uint32)__cvta_generic_to_shared(pointer); }

DEVICE Vector16B load_global_16B(const void *global) {
    Vector16B v;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(global));
    return v;
}

// Brings the line that holds an address into L2; nobody waits for it.
DEVICE void prefetch_L2(const void *global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

DEVICE void store_global_16B(void *global, Vector16B v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(v.words[0]), "r"(v.words[1]),
                 "r"(v.words[2]), "r"(v.words[3])
                 : "memory");
}

// The same, marked as the first to be evicted from the caches (.cs, "cache streaming").
DEVICE void store_global_streaming_16B(void *global, Vector16B v) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(v.words[0]), "r"(v.words[1]),
                 "r"(v.words[2]), "r"(v.words[3])
                 : "memory");
}

// Two neighbouring fp32 values.
DEVICE Pair load_global_8B(const void *global) {
    Pair pair;
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(pair.values[0]), "=f"(pair.values[1]) : "l"(global));
    return pair;
}

DEVICE void store_global_8B(void *global, Pair pair) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(global), "f"(pair.values[0]), "f"(pair.values[1]) : "memory");
}

DEVICE Vector16B load_shared_16B(uint32 shared) {
    Vector16B v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "r"(shared)
                 : "memory");
    return v;
}

DEVICE void store_shared_16B(uint32 shared, Vector16B v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.words[0]), "r"(v.words[1]),
                 "r"(v.words[2]), "r"(v.words[3])
                 : "memory");
}

DEVICE void store_shared_4B(uint32 shared, uint32 word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

// Two neighbouring fp32 values.
DEVICE Pair load_shared_8B(uint32 shared) {
    Pair pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair.values[0]), "=f"(pair.values[1])
                 : "r"(shared)
                 : "memory");
    return pair;
}

DEVICE void store_shared_8B(uint32 shared, Pair pair) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(pair.values[0]), "f"(pair.values[1]) : "memory");
}
