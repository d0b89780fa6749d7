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

// A value rounded to 16 bits and back.
template <DType dtype> DEVICE float rounded(float x) {
    const uint32 packed = pack_16bit<dtype>(x, 0);
    if constexpr (dtype == DType::BF16)
        return __int_as_float(packed << 16);
    float back;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(back) : "r"(packed));
    return back;
}

// Two packed values, the one in the low half first.
template <DType dtype> DEVICE Pair unpack_16bit(uint32 packed) {
    Pair pair;
    if constexpr (dtype == DType::BF16)
        return {__int_as_float(packed << 16), __int_as_float(packed & 0xffff0000)};
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(pair.values[0]), "=f"(pair.values[1])
        : "r"(packed));
    return pair;
}
