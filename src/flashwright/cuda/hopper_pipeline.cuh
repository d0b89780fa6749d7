// How the producer and the consumers of the Hopper kernel hand tiles to each other in shared memory.
#pragma once
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warpgroup.cuh"
#include "tile_scheduler.cuh"

struct HopperArguments {
    const TensorMap &Q, &K, &V;
    const ForwardArguments &forward;
    const Schedule &schedule;
};

constexpr int warpgroup_threads = 128, warpgroup_rows = 64;
constexpr int consumer_threads = cfg::n_consumers * warpgroup_threads;

// Numbers of the named barriers; 0 is that of all threads. Turns and guesses have one for each warpgroup.
namespace barriers {
constexpr int turns = 1, guess = turns + cfg::n_consumers, V_cleared = guess + cfg::n_consumers;
}

// A place in a ring: stage 0, 1, …, and how often (modulo 2) the ring has been gone through.
template <int stages> struct RingPlace {
    int stage = 0;
    uint32 lap = 0;

    DEVICE void advance() {
        if (++stage == stages) {
            stage = 0;
            lap ^= 1;
        }
    }
};

using TilePlace = RingPlace<shape::tile_stages>;
using QPlace = RingPlace<shape::Q_stages>;
using KVPlace = RingPlace<cfg::kv_stages>;

// A tile in shared memory together with the two barriers that guard it.
struct Slot {
    uint32 data, full, empty;

    // A barrier's first wait must return at once when a slot starts out empty: the lap before the first has ended.
    DEVICE void wait_until_full(uint32 lap) const { mbarrier_wait(full, lap); }
    DEVICE void wait_until_empty(uint32 lap) const { mbarrier_wait(empty, lap ^ 1); }
    // By every warp that read it, after its reads.
    DEVICE void release() const {
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive(empty);
    }
};

struct SharedMemory {
    uint32 base;

    DEVICE Slot Q(int stage, int warpgroup) const {
        const int index = stage * cfg::n_consumers + warpgroup;
        return slot(shape::Q_offset + index * shape::Q_bytes, shape::Q_barriers_offset, index);
    }
    DEVICE Slot K(int stage) const {
        return slot(shape::K_offset + stage * shape::KV_bytes, shape::K_barriers_offset, stage);
    }
    DEVICE Slot V(int stage) const {
        return slot(shape::V_offset + stage * shape::KV_bytes, shape::V_barriers_offset, stage);
    }
    // Which tile comes next: its coordinates.
    DEVICE Slot tile(int stage) const {
        return slot(shape::tiles_offset + stage * sizeof(Vector16B), shape::tile_barriers_offset, stage);
    }

    DEVICE void init_barriers() const {
        constexpr int warps_per_warpgroup = 4;
        for (int stage = 0; stage < shape::Q_stages; ++stage)
            for (int warpgroup = 0; warpgroup < cfg::n_consumers; ++warpgroup)
                init(Q(stage, warpgroup), warps_per_warpgroup);
        for (int stage = 0; stage < cfg::kv_stages; ++stage) {
            init(K(stage), cfg::n_consumers * warps_per_warpgroup);
            init(V(stage), cfg::n_consumers * warps_per_warpgroup);
        }
        for (int stage = 0; stage < shape::tile_stages; ++stage)
            init(tile(stage), cfg::n_consumers * warps_per_warpgroup + 1); // the producer reads them too
        mbarrier_init_fence();
    }

  private:
    DEVICE Slot slot(uint32 data_offset, uint32 barriers_offset, int index) const {
        const uint32 barriers = base + barriers_offset + 16 * index;
        return {base + data_offset, barriers, barriers + 8};
    }
    static DEVICE void init(Slot slot, int readers) {
        mbarrier_init(slot.full, 1); // one thread fills it, or announces a copy whose bytes count apart
        mbarrier_init(slot.empty, readers);
    }
};

// Consumer warpgroups take turns at issuing products, so that one's products run during another's softmax.
struct Turns {
    int own, next;

    DEVICE explicit Turns(int warpgroup)
        : own(barriers::turns + warpgroup), next(barriers::turns + (warpgroup + 1) % cfg::n_consumers) {
        if (cfg::ping_pong && warpgroup == cfg::n_consumers - 1)
            pass(); // the first turn is the first warpgroup's
    }
    DEVICE void wait() const {
        if constexpr (cfg::ping_pong)
            named_barrier_sync(own, 2 * warpgroup_threads);
    }
    DEVICE void pass() const {
        if constexpr (cfg::ping_pong)
            named_barrier_arrive(next, 2 * warpgroup_threads);
    }
};
