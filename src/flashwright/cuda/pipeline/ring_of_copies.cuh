// A ring of stages in shared memory that all warps of a thread block read, and all its threads refill by cp.async.
//
// Two barriers guard a stage: its copies arrive at `full`, one arrival of each thread, and its readers at `empty`, one of
// each warp. Warps go at their own pace: a warp waits for the copies of the stage that it reads, and, before it refills a
// stage, for the last reader of what was there.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "types.cuh"

template <int stages, int threads> struct RingOfCopies {
    static constexpr int barrier_bytes = 8;

    uint32 barriers; // address of a stage's pair after another

    // By all threads; a barrier of the thread block must follow before any of them arrives or waits.
    DEVICE void init() const {
        if (threadIdx.x == 0)
#pragma unroll
            for (int stage = 0; stage < stages; ++stage) {
                mbarrier_init(full(stage), threads);
                mbarrier_init(empty(stage), threads / warp_threads);
            }
    }

    // Step s is the lap s / stages of its stage.
    DEVICE void wait_until_full(int step) const { mbarrier_poll(full(step), lap(step) % 2); }

    // For the readers of the lap before; there are none in the first, whose wait returns at once.
    DEVICE void wait_until_empty(int step) const { mbarrier_poll(empty(step), (lap(step) + 1) % 2); }

    // After this thread has started its copies into a step's stage: they arrive when they have come, and with them all
    // that this thread had started before.
    DEVICE void announce_copies(int step) const { cp_async_mbarrier_arrive(full(step)); }

    // By every warp, after all its lanes' reads of a step's stage.
    DEVICE void release(int step) const {
        __syncwarp();
        if (lane_index() == 0)
            mbarrier_arrive(empty(step));
    }

  private:
    static DEVICE uint32 lap(int step) { return step / stages; }
    DEVICE uint32 full(int step) const { return barriers + step % stages * (2 * barrier_bytes); }
    DEVICE uint32 empty(int step) const { return full(step) + barrier_bytes; }
};
