// FlashAttention forward for Hopper: copies by the copy engine, products by asynchronous warpgroup instructions.
//
// A producer fills a ring of K and V stages in shared memory; each consumer warpgroup computes 64 rows of O. They meet
// at barriers in shared memory: a stage is `full` when its copy has arrived and `empty` when every consumer warp has
// read it. With the persistent schedule the thread block goes on to its next tile of rows, which a scheduler announces,
// and the producer runs ahead into it while the consumers finish the last.
#pragma once
#include "attention/epilogue.cuh"
#include "forward/hopper_consumer.cuh"
#include "forward/hopper_producer.cuh"

// The warpgroup that does not compute: a thread of the first warp copies, one of the second announces tiles, the other
// warps clear rows.
DEVICE void assist(const HopperArguments &args, const SharedMemory &shared) {
    constexpr int producer = consumer_threads, scheduler = producer + warp_threads, others = scheduler + warp_threads;
    if (threadIdx.x == producer)
        produce(args, shared);
    if (threadIdx.x == scheduler) {
        using Tiles = TileSequence<HopperSchedule, cfg::B_r, variant::masks_right, cfg::persistent>;
        announce_tiles<shape::tile_stages>(Tiles(args.forward, args.schedule), shared);
    }
    if (variant::variable_lengths && !variant::accumulates && threadIdx.x >= others) {
        constexpr int warps = (consumer_threads + warpgroup_threads - others) / warp_threads;
        clear_rows_of_no_sequence<output_columns>(args.forward, (threadIdx.x - others) / warp_threads, warps);
    }
}

template <HopperForwardKernelConfig>
__global__ void __launch_bounds__(consumer_threads + warpgroup_threads, 1)
    hopper_forward_kernel(const __grid_constant__ TensorMap Q, const __grid_constant__ TensorMap K,
                          const __grid_constant__ TensorMap V, const __grid_constant__ ForwardArguments forward,
                          const __grid_constant__ HopperSchedule schedule) {
    const HopperArguments args{Q, K, V, forward, schedule};
    extern __shared__ __align__(OperandLayout::swizzle_period_bytes) char shared_memory[];
    const SharedMemory shared{shared_address(shared_memory)};
    if (threadIdx.x == 0)
        shared.init_barriers();
    __syncthreads();

    // A warpgroup's registers are its own: those that do not compute need few, and give the others to the consumers.
    if (threadIdx.x >= consumer_threads) {
        give_registers_back<shape::producer_registers>();
        assist(args, shared);
    } else {
        take_registers<shape::consumer_registers>();
        Consumer{args, shared}.run();
    }
}
