// Tensor-core products C += A·B of one warp: 16×8 += 16×16 · 16×8, 16-bit in, fp32 out (PTX: mma.sync).
//
// With row = lane/4 and column = 2·(lane%4), a lane holds
//   A: a0 (row, column…)  a1 (row+8, column…)  a2 (row, column+8…)  a3 (row+8, column+8…)   two elements each
//   B: b0 (k = column…, n = row)  b1 (k = column+8…, n = row)                                 two elements each
//   C: c0 c1 (row, column…)  c2 c3 (row+8, column…)
#pragma once
#include "types.cuh"

template <DType dtype>
DEVICE void mma_m16n8k16(float (&c)[4], const uint32 (&a)[4], const uint32 *b) {
    if constexpr (dtype == DType::BF16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}
