// FlashAttention forward for Hopper: copies by the copy engine, products by asynchronous warpgroup instructions.
//
// A producer fills a ring of K and V stages in shared memory; each consumer warpgroup computes 64 rows of O. They meet at
// barriers in shared memory: a stage is `full` when its copy has arrived and `empty` when every consumer warp has read it.
// With the persistent schedule the thread block goes on to its next tile of rows, which a scheduler announces, and the
// producer runs ahead into it while the consumers finish the last.
#pragma once
#include "hopper_consumer.cuh"
#include "hopper_producer.cuh"

template <HopperForwardKernelConfig>
__global__ void __launch_bounds__(consumer_threads + warpgroup_threads, 1)
    hopper_forward_kernel(const __grid_constant__ TensorMap Q, const __grid_constant__ TensorMap K,
                          const __grid_constant__ TensorMap V, const __grid_constant__ ForwardArguments forward,
                          const __grid_constant__ Schedule schedule) {
    const HopperArguments args{Q, K, V, forward, schedule};
    extern __shared__ __align__(1024) char shared_memory[];
    const SharedMemory shared{shared_address(shared_memory)};
    if (threadIdx.x == 0)
        shared.init_barriers();
    __syncthreads();

    // A warpgroup's registers are its own: those that do not compute need few, and give the others to the consumers.
    if (threadIdx.x >= consumer_threads) {
        give_registers_back<shape::producer_registers>();
        if (threadIdx.x == consumer_threads)
            produce(args, shared);
        if (threadIdx.x == consumer_threads + 32)
            announce_tiles(args, shared);
    } else {
        take_registers<shape::consumer_registers>();
        Consumer{args, shared}.run();
    }
}
