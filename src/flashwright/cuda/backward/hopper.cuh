// FlashAttention backward for Hopper: copies by the copy engine, products by asynchronous warpgroup instructions.
//
// One thread block owns B_c keys of one head of K and V, and visits the blocks of B_r queries that attend to them, of
// every head of Q that shares the keys: dK and dV stay in registers, dQ is added to sums in global memory. Scores are
// computed transposed, a row per key. A producer fills rings of Q and dO stages in shared memory; a stage is `full` when
// its copy has arrived and `empty` when every consumer warp has read it.
//
// A persistent thread block owns several blocks of keys, one after the other: while the consumers leave one, the next
// one's first blocks of Q and dO, and its K and V where there is room for two, are copied. It takes them from a common
// count; of a pair, the first thread block takes them for both.
//
// Where blocks of keys take turns at a block of dQ, the last may finish it: then no kernel comes after.
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
    if (!shape::announces_tiles && !work_of(backward, blockIdx.x).exists())
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
        const auto is_first_of = [](int warp) { return threadIdx.x == consumer_threads + warp * warp_threads; };
        if (is_first_of(0))
            produce(args, shared);
        if (cfg::bulk_dQ && is_first_of(1))
            add_blocks_of_dQ(args, shared);
        if (cfg::paired && is_first_of(2))
            send_weights(args, shared);
        if (shape::takes_turns) {
            if (is_first_of(1))
                wait_for_turns(args, shared);
            if (is_first_of(3))
                pass_turns(args, shared);
        }
    } else {
        take_registers<shape::consumer_registers>();
        Consumer{args, shared}.run();
    }
}
