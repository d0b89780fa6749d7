// What the warps of the Hopper kernel share: arguments, shared memory and its barriers, and what a tile is to them.
#pragma once
#include "pipeline/announcements.cuh"
#include "pipeline/turns.cuh"
#include "ptx/memory.cuh"

using HopperSchedule = Schedule<shape::listed_blocks, shape::listed_tiles>;
// KV blocks are visited from the last to the first, so that steps without a mask follow one another. The first block may
// lead them: then a softmax that guesses finds references at both ends, whatever way scores slope.
using HopperTileWork = TileWork<cfg::B_r, KeyBlocks<cfg::B_c, true, shape::first_block_leads>>;

struct HopperArguments {
    const TensorMap &Q, &K, &V;
    const ForwardArguments &forward;
    const HopperSchedule &schedule;
};

constexpr int output_columns = variant::pads_columns ? variant::head_dim : cfg::d_head;
constexpr int consumer_threads = cfg::n_consumers * warpgroup_threads;

// Numbers of the named barriers; 0 is that of all threads. Turns and guesses have one for each warpgroup.
namespace barriers {
constexpr int turns = 1, guess = turns + cfg::n_consumers, V_cleared = guess + cfg::n_consumers;
}

using QPlace = RingPlace<shape::Q_stages>;
using KVPlace = RingPlace<cfg::kv_stages>;

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
        constexpr int warps_per_warpgroup = warpgroup_threads / warp_threads;
        constexpr int consumer_warps = cfg::n_consumers * warps_per_warpgroup;
        for (int stage = 0; stage < shape::Q_stages; ++stage)
            for (int warpgroup = 0; warpgroup < cfg::n_consumers; ++warpgroup)
                Q(stage, warpgroup).init_barriers(warps_per_warpgroup);
        for (int stage = 0; stage < cfg::kv_stages; ++stage) {
            K(stage).init_barriers(consumer_warps);
            V(stage).init_barriers(consumer_warps);
        }
        for (int stage = 0; stage < shape::tile_stages; ++stage)
            tile(stage).init_barriers(cfg::n_consumers * warpgroup_threads + 1); // the producer reads them too
        mbarrier_init_fence();
    }

  private:
    DEVICE Slot slot(uint32 data_offset, uint32 barriers_offset, int index) const {
        return Slot::at(base + data_offset, base + barriers_offset + Slot::barrier_pair_bytes * index);
    }
};

using HopperTiles = AnnouncedTiles<shape::tile_stages, SharedMemory>;
