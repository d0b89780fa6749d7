// Shared memory to registers and back in 8×8 matrices of 16-bit elements (PTX: ldmatrix, stmatrix).
//
// Lanes 8i … 8i+7 give the addresses of the eight 16-byte rows of matrix i. Of each matrix, a lane receives
// the two elements in row lane/4, columns 2·(lane%4) and +1; with .trans, of the transposed matrix.
#pragma once
#include "types.cuh"

DEVICE void ldmatrix_x4(uint32 (&matrices)[4], uint32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(shared)
                 : "memory");
}

DEVICE void ldmatrix_x4_trans(uint32 (&matrices)[4], uint32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(shared)
                 : "memory");
}

// The same way back, where there is stmatrix.
DEVICE void store_matrices(uint32 shared, const uint32 (&matrices)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
#endif
}
