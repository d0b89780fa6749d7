// FlashAttention backward for Hopper: copies by the copy engine, products by asynchronous warpgroup instructions.
//
// One thread block owns B_c keys of one head of K and V, and visits the blocks of B_r queries that attend to them, of
// every head of Q that shares the keys: dK and dV stay in registers, dQ is added to sums in global memory. Scores are
// computed transposed, a row per key. A producer fills rings of Q and dO stages in shared memory; a stage is `full` when
// its copy has arrived and `empty` when every consumer warp has read it.
//
// A persistent thread block owns several blocks of keys, one after the other: while the consumers leave one, the next
// one's first blocks of Q and dO, and its K and V where there is room for two, are copied. It takes them from a common
// count; to a pair they are dealt, so that both have the same without asking each other. It may finish dQ, too: of heads
// all of whose keys have been visited.
#pragma once
#include "backward/hopper_consumer.cuh"
#include "backward/hopper_producer.cuh"

template <HopperBackwardKernelConfig>
__global__ void __cluster_dims__(shape::together) __launch_bounds__(consumer_threads + warpgroup_threads, 1)
    hopper_backward_kernel(const __grid_constant__ TensorMap Q, const __grid_constant__ TensorMap K,
                           const __grid_constant__ TensorMap V, const __grid_constant__ TensorMap dO,
                           const __grid_constant__ BackwardArguments backward) {
    const HopperArguments args{Q, K, V, dO, backward};
    extern __shared__ __align__(OperandLayout::swizzle_period_bytes) char shared_memory[];
    const SharedMemory shared{shared_address(shared_memory)};
    if (!cfg::persistent && !work_of(backward, blockIdx.x).exists())
        return;
    if (threadIdx.x == 0)
        shared.init_barriers();
    if constexpr (cfg::paired)
        cluster_sync();
    else
        __syncthreads();

    // A warpgroup's registers are its own: those that do not compute need few, and give the others to the consumers.
    if (threadIdx.x >= consumer_threads) {
        give_registers_back<shape::producer_registers>();
        if (threadIdx.x == consumer_threads)
            produce(args, shared);
        if (threadIdx.x == consumer_threads + warp_threads) {
            if constexpr (cfg::bulk_dQ)
                add_blocks_of_dQ(args, shared);
            else if constexpr (cfg::ordered)
                wait_for_turns(args, shared);
        }
        if (threadIdx.x == consumer_threads + 2 * warp_threads) {
            if constexpr (cfg::paired)
                send_weights(args, shared);
            else if constexpr (shape::announces_tiles)
                announce_tiles(args, shared);
        }
        if (!cfg::bulk_dQ && threadIdx.x == consumer_threads + 3 * warp_threads) {
            if constexpr (cfg::ordered)
                pass_turns(args, shared);
            else if constexpr (shape::finishes_dQ)
                count_tiles(args, shared);
        }
    } else {
        take_registers<shape::consumer_registers>();
        Consumer{args, shared}.run();
    }
}
