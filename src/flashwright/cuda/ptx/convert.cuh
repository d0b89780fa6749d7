// Rounding fp32 to 16 bits (PTX: cvt).
#pragma once
#include "types.cuh"

// Two values rounded to nearest even and packed into one register, `low` in the low half.
template <DType dtype> DEVICE uint32 pack_16bit(float low, float high) {
    uint32 packed;
    if constexpr (dtype == DType::BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
