// FlashAttention-2 forward for mma.sync tensor cores: O = softmax(Q·Kᵀ·scale)·V.
//
// One thread block computes B_r rows of O for one (batch, head), visiting K and V in blocks of B_c rows. Each
// warp owns a slice of the rows; all warps share the K and the V block in shared memory.
#pragma once
#include "attention/epilogue.cuh"
#include "attention/scores.cuh"
#include "attention/softmax.cuh"
#include "attention/sources.cuh"
#include "pipeline/ring_of_copies.cuh"
#include "ptx/special_registers.cuh"
#include "tile/copy.cuh"
#include "tile/products.cuh"

using QFragments = Fragments<shape::QK_tiles, shape::QK_steps_per_tile, shape::row_tiles, shape::Q_buffers>;
using KFragments = Fragments<shape::QK_tiles, shape::QK_steps_per_tile, cfg::B_c / mma_depth, shape::K_buffers>;
using PFragments = Fragments<shape::PV_tiles, shape::PV_steps_per_tile, shape::row_tiles, shape::PV_tiles>;
using VFragments = Fragments<shape::PV_tiles, shape::PV_steps_per_tile, cfg::d_head / mma_depth, shape::V_buffers>;
using Copies = BlockCopies<shape::threads, cfg::async_copy>;
using Keys = KeyBlocks<cfg::B_c, cfg::reversed_kv>;
using Work = TileWork<cfg::B_r, Keys>;
constexpr int output_columns = variant::pads_columns ? variant::head_dim : cfg::d_head;

struct SoftmaxPolicy {
    static constexpr DType dtype = cfg::dtype;
    static constexpr bool optimized = cfg::optimized_softmax, lazy_rescale = cfg::lazy_rescale;
    static constexpr bool mma_row_sum = cfg::mma_row_sum && !variant::returns_lse;
    static constexpr bool spreads_chains = false; // it costs registers and 0.5% of the time
    static constexpr bool rows_may_be_empty = variant::masks_left || variant::masks_right || variant::variable_lengths;
};

// Stages of K and V that warps read and refill at their own pace; without `ring_stages`, the thread block's barriers
// take its place.
constexpr bool has_ring = cfg::ring_stages > 0;
using Ring = RingOfCopies<shape::KV_stages, shape::threads>;

// Where K and V come from, which blocks of them are visited, and where these lie in shared memory.
struct KVBlocks {
    ContiguousRows K, V;
    uint32 K_shared, V_shared;
    int length;
    Keys keys;

    DEVICE KVBlocks(const ForwardArguments &args, const Work &work, uint32 shared)
        : K(rows_of(args.K, args, work)), V(rows_of(args.V, args, work)), K_shared(shared + shape::K_shared_offset),
          V_shared(shared + shape::V_shared_offset), length(work.sequence.kv_length), keys(work.keys) {}

    // Where the blocks of a step lie: with several stages, those of neighbouring steps lie apart.
    DEVICE uint32 K_block(int step) const { return K_shared + stage_offset(step); }
    DEVICE uint32 V_block(int step) const { return V_shared + stage_offset(step); }

    // Steps from the first, visited in ascending order, that neither compute nor copy the incomplete last block.
    DEVICE int complete_end() const { return ends_incomplete() ? keys.count - 1 - shape::steps_ahead : keys.count; }
    DEVICE bool ends_incomplete() const { return (keys.first_block + keys.count) * cfg::B_c > length; }

    // Of a block that `is_complete`, or may be the incomplete last one.
    template <bool is_complete> DEVICE void start_K_copy(int step, uint32 thread) const {
        start_copy<is_complete>(K, K_block(step), step, thread); // @operand K
    }
    template <bool is_complete> DEVICE void start_V_copy(int step, uint32 thread) const {
        start_copy<is_complete>(V, V_block(step), step, thread); // @operand V
    }

  private:
    DEVICE static ContiguousRows rows_of(const TensorView &tensor, const ForwardArguments &args, const Work &work) {
        const int64 stride = row_stride_bytes<cfg::static_row_stride>(tensor);
        const char *head = head_start(tensor, work.tile.batch, kv_head(args, work.tile.head));
        return {head + work.sequence.kv_start * stride, stride};
    }
    DEVICE static uint32 stage_offset(int step) { return step % shape::KV_stages * shape::KV_stage_bytes; }
    template <bool is_complete>
    DEVICE void start_copy(const ContiguousRows &rows, uint32 shared, int step, uint32 thread) const {
        const int first_key = keys.first_key(step), rows_left = length - first_key;
        Copies::start<cfg::B_c, is_complete>(shared, rows.block(first_key), rows.row_stride, rows_left, thread);
    }
};

// Starts the copies of a later step's K and V, if there is one, once all warps have left the stage that they go to.
template <bool is_complete> DEVICE void refill(const Ring &ring, const KVBlocks &kv, int step, uint32 thread) {
    if (step >= kv.keys.count)
        return;
    ring.wait_until_empty(step);
    kv.start_K_copy<is_complete>(step, thread);
    kv.start_V_copy<is_complete>(step, thread);
    ring.announce_copies(step);
}

// What a warp holds in registers for its rows from the first KV block to the last.
struct WarpState {
    SharedOperand<QFragments, cfg::B_r, Role::A> Q;
    OnlineSoftmax<SoftmaxPolicy, shape::row_tiles> softmax;
    float O[shape::row_tiles][cfg::d_head / mma_columns][accumulator_values] = {};

    DEVICE WarpState(uint32 Q_shared, float softmax_scale) : Q(Q_shared, lane_index()), softmax(softmax_scale) {}
};

constexpr DEVICE Place place(bool entire_block) { return entire_block ? Place::registers : Place::shared; }

// Whether a step may need a mask though its block is complete.
constexpr bool has_mask = variant::masks_left || variant::masks_right;

// One block of K and V: S = QKᵀ, its softmax, O += PV. The tile's rows start at `q_row`.
//
// A step that is `complete` has whole blocks to compute and, for the next step, to copy.
template <bool first, bool masked, bool complete>
DEVICE void kv_step(WarpState &warp, const KVBlocks &kv, const Ring &ring, const Scores &scores, int step, int q_row) {
    const bool last = step + 1 == kv.keys.count;
    // What follows from a thread's number is computed in every step where registers are too few to keep it: always for
    // the fragments of K and V, in wide heads for copies too.
    const uint32 lane = opaque(threadIdx.x) % warp_threads;
    const uint32 thread = shape::recomputes_copy_offsets ? opaque(threadIdx.x) : threadIdx.x;
    if constexpr (has_ring) {
        // After this wait every thread's part of K and V (and of Q) is visible to this warp.
        ring.wait_until_full(step); // @operand K
        refill<complete>(ring, kv, step + shape::steps_ahead, thread);
    } else {
        Copies::wait<0>(); // @operand K
        // After this barrier every thread's part of K (and of Q; with two stages, of V) is visible to all warps, and every
        // warp has finished the previous PV, so that V, or the other stage, may be overwritten.
        __syncthreads();
        if constexpr (cfg::two_kv_stages) {
            if (!last) {
                kv.start_K_copy<complete>(step + 1, thread);
                kv.start_V_copy<complete>(step + 1, thread);
            }
        } else if constexpr (cfg::eager_load_blocks) {
            kv.start_V_copy<complete>(step, thread);
        }
    }

    float S[shape::row_tiles][cfg::B_c / mma_columns][accumulator_values] = {};
    SharedOperand<KFragments, cfg::B_c, Role::B> K(kv.K_block(step), lane);
    if constexpr (shape::K_entire_block)
        K.load_entire_block<cfg::keep_order>(); // @product S
    constexpr Place Q_place = place(shape::Q_entire_block), K_place = place(shape::K_entire_block);
    matmul<cfg::dtype, Q_place, K_place, shape::QK_double_buffer, cfg::keep_order>(warp.Q, K, S); // @product S

    if constexpr (shape::KV_stages == 1) {
        if constexpr (!cfg::eager_load_blocks)
            kv.start_V_copy<complete>(step, thread);
        Copies::wait<0>(); // @operand V
        // After this barrier V is visible to all warps, and every warp has finished S, so that K may be overwritten.
        __syncthreads();
        if (cfg::eager_load_blocks && !last)
            kv.start_K_copy<complete>(step + 1, thread);
    }

    scores.finish<masked>(S, q_row + thread / warp_threads * shape::QO_rows_per_warp, kv.keys.first_key(step));
    warp.softmax.step<first>(S, warp.O); // @phase softmax
    PFragments P;
    round_to_operand<cfg::dtype>(P, S); // @phase softmax
    if constexpr (SoftmaxPolicy::mma_row_sum)
        warp.softmax.add_row_sums(P); // @phase softmax
    SharedOperand<VFragments, cfg::B_c, Role::B_transposed> V(kv.V_block(step), lane);
    if constexpr (shape::V_entire_block)
        V.load_entire_block<cfg::keep_order>(); // @product O
    constexpr Place V_place = place(shape::V_entire_block);
    matmul<cfg::dtype, Place::registers, V_place, shape::PV_double_buffer, cfg::keep_order>(P, V, warp.O); // @product O

    if constexpr (has_ring)
        ring.release(step);
    if (!cfg::eager_load_blocks && !last)
        kv.start_K_copy<complete>(step + 1, thread);
}

// All blocks of K and V. The main loop is free of whatever an incomplete last block needs: its mask, and copies of fewer
// rows. With an edge of the window, every step tests whether it cuts anything off.
DEVICE void kv_steps(WarpState &warp, const KVBlocks &kv, const Ring &ring, const Scores &scores, int q_row) {
    int step = 0;
    if constexpr (cfg::peeled_first_step)
        kv_step<true, true, false>(warp, kv, ring, scores, step++, q_row);
    if constexpr (cfg::reversed_kv && !cfg::peeled_first_step) // the last block comes first
        if (kv.ends_incomplete())
            kv_step<false, true, false>(warp, kv, ring, scores, step++, q_row);
    const int main_end = cfg::reversed_kv ? kv.keys.count : kv.complete_end();
#pragma unroll 1
    for (; step < main_end; ++step)
        kv_step<false, has_mask, true>(warp, kv, ring, scores, step, q_row);
    if constexpr (!cfg::reversed_kv)
#pragma unroll 1
        for (; step < kv.keys.count; ++step)
            kv_step<false, true, false>(warp, kv, ring, scores, step, q_row);
}

// The grid is (blocks of query rows, heads, batches). More batches than its third dimension holds are beside one another
// along the first. With a right edge, the longest tiles of a head come first. Packed sequences have a slot (see
// `PackedLine`) in the place of a block of rows.
DEVICE Tile tile_of_block(const ForwardArguments &args, BlockIndex block) {
    int q_block = block.x, batch = block.z;
    if constexpr (variant::variable_lengths) {
        const PackedLine<cfg::B_r> line{args};
        const int slot = variant::masks_right ? line.slots() - 1 - q_block : q_block;
        const int sequence = line.sequence_of_warp(slot);
        return {slot - line.first_slot(sequence), (int)block.y, sequence}; // none before the first sequence
    }
    if (args.batches > gridDim.z) {
        batch += q_block / args.q_blocks * gridDim.z;
        q_block %= args.q_blocks;
        if (batch >= args.batches)
            return Tile::none();
    }
    return {variant::masks_right ? args.q_blocks - 1 - q_block : q_block, (int)block.y, batch};
}

// What a block computes is found again for its output, rather than kept in registers; but a search among packed sequences
// takes a block of one warp a tenth of its time.
DEVICE Work work_at_the_end(const ForwardArguments &args, const Work &work) {
    constexpr bool is_kept = variant::variable_lengths && shape::threads == warp_threads;
    return is_kept ? work : Work(args, tile_of_block(args, block_index_again()));
}

DEVICE void compute(const ForwardArguments &args, const Work &work, uint32 Q_shared) {
    const int warp_row = threadIdx.x / warp_threads * shape::QO_rows_per_warp;
    const KVBlocks kv(args, work, Q_shared);
    const Ring ring{Q_shared + shape::ring_barriers_offset};
    const Scores scores{work.window, args.capping_scale};
    WarpState warp(Q_shared + warp_row * layout::row_bytes, args.softmax_scale);

    if (work.has_keys()) {
        const int64 Q_stride = row_stride_bytes<cfg::static_row_stride>(args.Q);
        const char *Q_rows = head_start(args.Q, work.tile.batch, work.tile.head) +
                             (work.sequence.q_start + work.q_row) * Q_stride;
        if constexpr (has_ring) {
            ring.init();
            // After this barrier all threads may arrive at the ring's.
            __syncthreads();
        }
        Copies::start<cfg::B_r>(Q_shared, Q_rows, Q_stride, work.q_rows, threadIdx.x); // @operand Q
        if constexpr (has_ring) {
#pragma unroll
            for (int step = 0; step < shape::steps_ahead; ++step)
                refill<false>(ring, kv, step, threadIdx.x);
        } else {
            kv.start_K_copy<false>(0, threadIdx.x);
            if constexpr (cfg::two_kv_stages)
                kv.start_V_copy<false>(0, threadIdx.x);
        }
        if constexpr (shape::Q_entire_block) {
            if constexpr (has_ring) {
                ring.wait_until_full(0); // the first K and V, and Q, whose copies started before theirs
            } else {
                // The first K, and with two stages the first V, may still be on their way.
                Copies::wait<cfg::two_kv_stages ? 2 : 1>(); // @operand Q
                __syncthreads();
            }
            warp.Q.load_entire_block();
        }
        kv_steps(warp, kv, ring, scores, work.q_row);
    }

    warp.softmax.normalize(warp.O);
    const OutputRows<variant::accumulates ? 0 : cfg::static_row_stride> output(args, work_at_the_end(args, work));
    if constexpr (variant::accumulates) {
        output.accumulate<output_columns, 8>(warp.softmax, warp_row, warp.O);
        return;
    }
    // A warp's rows of Q were read by that warp alone, so it may put its rows of O in their place without waiting for
    // the others. With several stages no barrier has come after its lanes' last reads.
    if constexpr (shape::KV_stages > 1)
        __syncwarp();
    copy_RF2SM<cfg::dtype, cfg::B_r>(Q_shared, warp_row, warp.O);
    __syncwarp();
    copy_SM2GM<cfg::B_r, shape::QO_rows_per_warp, cfg::streaming_stores>(output.O, output.O_stride, Q_shared, warp_row,
                                                                        output.rows);
    if constexpr (variant::returns_lse)
        output.store_lse(warp.softmax, warp_row);
}

// The config is a template argument so that profilers show it in the kernel's name. Its fields, and what Python
// derived from them, are the constants of the namespaces `cfg`, `shape` and `layout`.
template <FlashForwardKernelConfig>
__global__ void __launch_bounds__(shape::threads)
    flash_forward_kernel(const __grid_constant__ ForwardArguments args) {
    extern __shared__ __align__(bank_line_bytes) char shared_memory[];
    const Tile tile = tile_of_block(args, block_index());
    if (!tile.is_none()) {
        const Work work(args, tile);
        if (work.exists())
            compute(args, work, shared_address(shared_memory));
    }
    if constexpr (variant::variable_lengths && !variant::accumulates) {
        constexpr int warps = shape::threads / warp_threads;
        clear_rows_of_no_sequence<output_columns>(args, threadIdx.x / warp_threads, warps);
    }
}
