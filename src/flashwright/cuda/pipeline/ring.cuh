// Rings of stages in shared memory, by which warps hand tiles to each other.
#pragma once
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/panels.cuh"

// A place in a ring: stage 0, 1, …, and how often (modulo 2) the ring has been gone through.
template <int stages> struct RingPlace {
    int stage = 0;
    uint32 lap = 0;

    // After so many advances: found again where registers are too few to keep it.
    static DEVICE RingPlace after(int steps) { return {steps % stages, (uint32)(steps / stages % 2)}; }

    DEVICE void advance() {
        if (++stage == stages) {
            stage = 0;
            lap ^= 1;
        }
    }
};

// A tile in shared memory together with the two barriers that guard it.
struct Slot {
    static constexpr int barrier_bytes = 8, barrier_pair_bytes = 2 * barrier_bytes;

    uint32 data, full, empty;

    // `barriers` is the address of a pair.
    static DEVICE Slot at(uint32 data, uint32 barriers) { return {data, barriers, barriers + barrier_bytes}; }

    // `readers` release it, warps or lanes; one thread fills it, or announces a copy whose bytes count apart.
    DEVICE void init_barriers(int readers) const {
        mbarrier_init(full, 1);
        mbarrier_init(empty, readers);
    }

    // A barrier's first wait must return at once when a slot starts out empty: the lap before the first has ended.
    DEVICE void wait_until_full(uint32 lap) const { mbarrier_wait(full, lap); }
    DEVICE void wait_until_empty(uint32 lap) const { mbarrier_wait(empty, lap ^ 1); }
    // By every warp whose products read it, once they are complete.
    DEVICE void release() const {
        if (lane_index() == 0)
            mbarrier_arrive(empty);
    }
    // By every lane that loaded from it itself: its arrival comes after its loads, and says nothing of those of others.
    DEVICE void release_by_lane() const { mbarrier_arrive(empty); }
};

// Starts the copy of `rows` rows of a tensor into a slot, panel by panel. Other copies bring `more_bytes` for the slot.
template <int rows, int panels, int more_bytes = 0>
DEVICE void fill(const Slot &slot, const TensorMap &map, int row, int head, int batch) {
    mbarrier_arrive_expecting(slot.full, panels * panel_bytes<rows> + more_bytes);
#pragma unroll
    for (int panel = 0; panel < panels; ++panel)
        bulk_copy_tile(slot.data + panel * panel_bytes<rows>, map, slot.full, panel * panel_columns, row, head, batch);
}
