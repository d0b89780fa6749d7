// FlashAttention-2 forward for mma.sync tensor cores: O = softmax(Q·Kᵀ·scale)·V.
//
// One thread block computes B_r rows of O for one (batch, head), visiting K and V in blocks of B_c rows. Each
// warp owns a slice of the rows; all warps share the K and the V block in shared memory.
#pragma once
#include "copy.cuh"
#include "gemm.cuh"
#include "mask.cuh"
#include "softmax.cuh"

using QFragments = Fragments<shape::QK_tiles, shape::QK_steps_per_tile, shape::row_tiles, shape::Q_buffers>;
using KFragments = Fragments<shape::QK_tiles, shape::QK_steps_per_tile, cfg::B_c / 16, shape::K_buffers>;
using PFragments = Fragments<shape::PV_tiles, shape::PV_steps_per_tile, shape::row_tiles, shape::PV_tiles>;
using VFragments = Fragments<shape::PV_tiles, shape::PV_steps_per_tile, cfg::d_head / 16, shape::V_buffers>;

// Where K and V come from, which blocks of them are visited, and where these lie in shared memory.
struct KVBlocks {
    const char *K_head, *V_head;
    int64 K_stride, V_stride;
    uint32 K_shared, V_shared;
    int length;
    KVRange range;

    DEVICE KVBlocks(const ForwardArguments &args, int batch, int q_head, const Sequence &sequence, KVRange range,
                    uint32 shared)
        : K_stride(row_stride_bytes(args.K)), V_stride(row_stride_bytes(args.V)),
          K_shared(shared + shape::K_shared_offset), V_shared(shared + shape::V_shared_offset),
          length(sequence.kv_length), range(range) {
        const int head = variant::grouped_heads ? q_head / args.q_heads_per_kv_head : q_head;
        K_head = head_start(args.K, batch, head) + sequence.kv_start * K_stride;
        V_head = head_start(args.V, batch, head) + sequence.kv_start * V_stride;
    }

    // Where the blocks of a step lie: with two stages, those of even and of odd steps lie apart.
    DEVICE uint32 K_block(int step) const { return K_shared + stage_offset(step); }
    DEVICE uint32 V_block(int step) const { return V_shared + stage_offset(step); }

    DEVICE void start_K_copy(int step) const {
        const int64 row = range.first_row(step);
        copy_GM2SM<cfg::B_c, variant::ragged_kv>(K_block(step), K_head + row * K_stride, K_stride, length - (int)row);
    }
    DEVICE void start_V_copy(int step) const {
        const int64 row = range.first_row(step);
        copy_GM2SM<cfg::B_c, variant::ragged_kv>(V_block(step), V_head + row * V_stride, V_stride, length - (int)row);
    }

  private:
    DEVICE static uint32 stage_offset(int step) { return cfg::two_kv_stages ? step % 2 * shape::KV_stage_bytes : 0; }
};

// What a warp holds in registers for its rows from the first KV block to the last.
struct WarpState {
    SharedOperand<QFragments, cfg::B_r, Role::A> Q;
    OnlineSoftmax<shape::row_tiles> softmax;
    float O[shape::row_tiles][cfg::d_head / 8][4] = {};

    DEVICE WarpState(uint32 Q_shared, float softmax_scale) : Q(Q_shared), softmax(softmax_scale) {}
};

// One block of K and V: S = QKᵀ, its softmax, O += PV.
template <bool first>
DEVICE void kv_step(WarpState &warp, const KVBlocks &kv, const Window &window, int step, int warp_row,
                    const ForwardArguments &args) {
    const bool last = step + 1 == kv.range.count;
    wait_for_copies<0>();
    // After this barrier every thread's part of K (and of Q; with two stages, of V) is visible to all warps, and every
    // warp has finished the previous PV, so that V, or the other stage, may be overwritten.
    __syncthreads();
    if constexpr (cfg::two_kv_stages) {
        if (!last) {
            kv.start_K_copy(step + 1);
            kv.start_V_copy(step + 1);
        }
    } else if constexpr (cfg::eager_load_blocks) {
        kv.start_V_copy(step);
    }

    float S[shape::row_tiles][cfg::B_c / 8][4] = {};
    SharedOperand<KFragments, cfg::B_c, Role::B> K(kv.K_block(step));
    if constexpr (shape::K_entire_block)
        K.load_entire_block();
    matmul<!shape::Q_entire_block, !shape::K_entire_block, shape::QK_double_buffer>(warp.Q, K, S);

    if constexpr (!cfg::two_kv_stages) {
        if constexpr (!cfg::eager_load_blocks)
            kv.start_V_copy(step);
        wait_for_copies<0>();
        // After this barrier V is visible to all warps, and every warp has finished S, so that K may be overwritten.
        __syncthreads();
        if (cfg::eager_load_blocks && !last)
            kv.start_K_copy(step + 1);
    }

    if constexpr (variant::softcaps)
        cap_scores(S, args.capping_scale);
    if constexpr (variant::masks_left || variant::masks_right || variant::ragged_kv)
        apply_mask(S, window, warp_row, kv.range.first_row(step));
    warp.softmax.step<first>(S, warp.O);
    PFragments P;
    round_to_operand(P, S);
    if constexpr (mma_row_sum)
        warp.softmax.add_row_sums(P);
    SharedOperand<VFragments, cfg::B_c, Role::B_transposed> V(kv.V_block(step));
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

    const int q_block = variant::masks_right ? gridDim.x - 1 - blockIdx.x : blockIdx.x; // longest first
    const int head = blockIdx.y, batch = blockIdx.z;
    const Sequence sequence(args, batch);
    const int q_row = q_block * cfg::B_r, q_rows = sequence.q_length - q_row;
    if (variant::variable_lengths && q_rows <= 0)
        return; // a shorter sequence than the longest
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * shape::QO_rows_per_warp;

    const Window window(args, sequence);
    const KVRange range(window, q_row, min(q_row + cfg::B_r, sequence.q_length) - 1);
    const KVBlocks kv(args, batch, head, sequence, range, Q_shared);
    WarpState warp(Q_shared + warp_row * layout::row_bytes, args.softmax_scale);

    // Only a mask can leave a block of rows with no keys at all.
    if (range.count > 0 || !(variant::masks_left || variant::masks_right || variant::variable_lengths)) {
        const int64 Q_stride = row_stride_bytes(args.Q);
        copy_GM2SM<cfg::B_r, variant::ragged_q>(
            Q_shared, head_start(args.Q, batch, head) + (sequence.q_start + q_row) * Q_stride, Q_stride, q_rows);
        kv.start_K_copy(0);
        if constexpr (cfg::two_kv_stages)
            kv.start_V_copy(0);
        if constexpr (shape::Q_entire_block) {
            wait_for_copies<cfg::two_kv_stages ? 2 : 1>(); // for Q; the first K and V may still be on their way
            __syncthreads();
            warp.Q.load_entire_block();
        }
        if constexpr (cfg::peeled_first_step)
            kv_step<true>(warp, kv, window, 0, q_row + warp_row, args);
#pragma unroll 1
        for (int step = cfg::peeled_first_step; step < range.count; ++step)
            kv_step<false>(warp, kv, window, step, q_row + warp_row, args);
    }

    warp.softmax.normalize(warp.O);

    // A warp's rows of Q were read by that warp alone, so it may put its rows of O in their place without waiting for
    // the others. With two stages no barrier has come after its lanes' last reads.
    if constexpr (cfg::two_kv_stages)
        __syncwarp();
    copy_RF2SM<cfg::B_r>(Q_shared, warp_row, warp.O);
    __syncwarp();
    const int64 O_stride = row_stride_bytes(args.O);
    copy_SM2GM<cfg::B_r, shape::QO_rows_per_warp, variant::ragged_q>(
        head_start(args.O, batch, head) + (sequence.q_start + q_row) * O_stride, O_stride, Q_shared, warp_row, q_rows);

    if constexpr (variant::returns_lse) {
        float *lse = args.lse + batch * args.lse_batch_stride + head * args.lse_head_stride + sequence.q_start + q_row;
        for (int m = 0; m < shape::row_tiles; ++m)
            for (int half = 0; half < 2; ++half) {
                const int row = warp_row + 16 * m + 8 * half + lane / 4;
                if (lane % 4 == 0 && (!variant::ragged_q || row < q_rows))
                    lse[row] = warp.softmax.log_sum_exp(m, half);
            }
    }
}
