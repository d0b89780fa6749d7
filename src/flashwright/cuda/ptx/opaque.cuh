// Values that the compiler knows nothing about.
#pragma once
#include "types.cuh"

// The value as it is. What is computed from it is computed behind this: not before a copy is started, nor out of a loop.
DEVICE uint32 computed_from_here(uint32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

DEVICE float computed_from_here(float value) {
    asm volatile("" : "+f"(value));
    return value;
}
