// FlashAttention-2 forward for mma.sync tensor cores: O = softmax(Q·Kᵀ·scale)·V.
//
// One thread block computes B_r rows of O for one (batch, head), visiting K and V in blocks of B_c rows. Each
// warp owns a slice of the rows; all warps share the K and the V block in shared memory.
#pragma once
#include "copy.cuh"
#include "gemm.cuh"
#include "softmax.cuh"

using QFragments = Fragments<shape::QK_tiles, shape::QK_steps_per_tile, shape::row_tiles, shape::Q_buffers>;
using KFragments = Fragments<shape::QK_tiles, shape::QK_steps_per_tile, cfg::B_c / 16, shape::K_buffers>;
using PFragments = Fragments<shape::PV_tiles, shape::PV_steps_per_tile, shape::row_tiles, shape::PV_tiles>;
using VFragments = Fragments<shape::PV_tiles, shape::PV_steps_per_tile, cfg::d_head / 16, shape::V_buffers>;

// Where K and V come from, and where their blocks lie in shared memory.
struct KVBlocks {
    const char *K_head, *V_head;
    int64 K_stride, V_stride;
    uint32 K_shared, V_shared;
    int count;

    DEVICE KVBlocks(const ForwardArguments &args, int batch, int head, uint32 shared)
        : K_head(head_start(args.K, batch, head)), V_head(head_start(args.V, batch, head)),
          K_stride(row_stride_bytes(args.K)), V_stride(row_stride_bytes(args.V)),
          K_shared(shared + shape::K_shared_offset), V_shared(shared + shape::V_shared_offset),
          count(args.kv_length / cfg::B_c) {}

    DEVICE int64 first_row(int step) const {
        return (int64)(cfg::reversed_kv ? count - 1 - step : step) * cfg::B_c;
    }
    DEVICE void start_K_copy(int step) const {
        copy_GM2SM<cfg::B_c>(K_shared, K_head + first_row(step) * K_stride, K_stride);
    }
    DEVICE void start_V_copy(int step) const {
        copy_GM2SM<cfg::B_c>(V_shared, V_head + first_row(step) * V_stride, V_stride);
    }
};

// What a warp holds in registers for its rows from the first KV block to the last.
struct WarpState {
    SharedOperand<QFragments, cfg::B_r, Role::A> Q;
    OnlineSoftmax<shape::row_tiles> softmax;
    float O[shape::row_tiles][cfg::d_head / 8][4] = {};

    DEVICE WarpState(uint32 Q_shared, float softmax_scale) : Q(Q_shared), softmax(softmax_scale) {}
};

// One block of K and V: S = QKᵀ, its softmax, O += PV.
template <bool first> DEVICE void kv_step(WarpState &warp, const KVBlocks &kv, int step) {
    const bool last = step + 1 == kv.count;
    wait_for_copies<0>();
    // After this barrier every thread's part of K (and of Q) is visible to all warps, and every warp has finished
    // the previous PV, so that V may be overwritten.
    __syncthreads();
    if constexpr (cfg::eager_load_blocks)
        kv.start_V_copy(step);

    float S[shape::row_tiles][cfg::B_c / 8][4] = {};
    SharedOperand<KFragments, cfg::B_c, Role::B> K(kv.K_shared);
    if constexpr (shape::K_entire_block)
        K.load_entire_block();
    matmul<!shape::Q_entire_block, !shape::K_entire_block, shape::QK_double_buffer>(warp.Q, K, S);

    if constexpr (!cfg::eager_load_blocks)
        kv.start_V_copy(step);
    wait_for_copies<0>();
    // After this barrier V is visible to all warps, and every warp has finished S, so that K may be overwritten.
    __syncthreads();
    if (cfg::eager_load_blocks && !last)
        kv.start_K_copy(step + 1);

    warp.softmax.step<first>(S, warp.O);
    PFragments P;
    round_to_operand(P, S);
    if constexpr (cfg::mma_row_sum)
        warp.softmax.add_row_sums(P);
    SharedOperand<VFragments, cfg::B_c, Role::B_transposed> V(kv.V_shared);
    if constexpr (shape::V_entire_block)
        V.load_entire_block();
    matmul<false, !shape::V_entire_block, shape::PV_double_buffer>(P, V, warp.O);

    if (!cfg::eager_load_blocks && !last)
        kv.start_K_copy(step + 1);
}

// The config is a template argument so that profilers show it in the kernel's name. Its fields, and what Python
// derived from them, are the constants of the namespaces `cfg`, `shape` and `layout`.
template <FlashForwardKernelConfig>
__global__ void __launch_bounds__(shape::threads)
    flash_forward_kernel(const __grid_constant__ ForwardArguments args) {
    extern __shared__ __align__(128) char shared_memory[];
    const uint32 Q_shared = shared_address(shared_memory);

    const int head = blockIdx.y, batch = blockIdx.z;
    const int64 q_row = (int64)blockIdx.x * cfg::B_r;
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * shape::QO_rows_per_warp;

    const KVBlocks kv(args, batch, head, Q_shared);
    const int64 Q_stride = row_stride_bytes(args.Q);
    copy_GM2SM<cfg::B_r>(Q_shared, head_start(args.Q, batch, head) + q_row * Q_stride, Q_stride);
    kv.start_K_copy(0);

    WarpState warp(Q_shared + warp_row * layout::row_bytes, args.softmax_scale);
    if constexpr (shape::Q_entire_block) {
        wait_for_copies</*pending=*/1>(); // for Q; the first K may still be on its way
        __syncthreads();
        warp.Q.load_entire_block();
    }

    if constexpr (cfg::peeled_first_step)
        kv_step<true>(warp, kv, 0);
#pragma unroll 1
    for (int step = cfg::peeled_first_step; step < kv.count; ++step)
        kv_step<false>(warp, kv, step);

    warp.softmax.normalize(warp.O);

    // A warp's rows of Q were read by that warp alone, before its last barrier, so it may put its rows of O in their
    // place without waiting for the others.
    copy_RF2SM<cfg::B_r>(Q_shared, warp_row, warp.O);
    __syncwarp();
    const int64 O_stride = row_stride_bytes(args.O);
    copy_SM2GM<cfg::B_r, shape::QO_rows_per_warp>(head_start(args.O, batch, head) + q_row * O_stride, O_stride,
                                                  Q_shared, warp_row);

    if constexpr (variant::returns_lse) {
        float *lse = args.lse + ((int64)batch * gridDim.y + head) * args.q_length + q_row + warp_row;
        for (int m = 0; m < shape::row_tiles; ++m)
            for (int half = 0; half < 2; ++half)
                if (lane % 4 == 0)
                    lse[16 * m + 8 * half + lane / 4] = warp.softmax.log_sum_exp(m, half);
    }
}
