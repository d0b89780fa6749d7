// The thread blocks of a cluster combine their parts of a segment: each sends the others the rows that are theirs, and adds
// what it is sent of its own.
#pragma once
#include "decode/parts.cuh"
#include "pipeline/ring.cuh"

// Where a thread block is sent parts of its rows, by all blocks of the cluster, itself among them. The slot is full when
// all consumer warps that have such rows have sent them, and empty when all blocks have read what this one sent them.
struct Exchange {
    static constexpr int rows = cfg::B_r / cfg::cluster; // of each thread block
    static constexpr int senders = cfg::n_warps;         // warps with rows of one thread block, in all blocks
    static constexpr int readers = cfg::cluster * cfg::n_warps;

    Slot slot;
    uint32 lap = 0; // of segments, modulo 2

    DEVICE void init_barriers() const {
        mbarrier_init(slot.full, senders);
        mbarrier_init(slot.empty, readers);
    }

    // A warp's rows belong to one thread block.
    static DEVICE uint32 owner(int row) { return row / rows; }
    static DEVICE int first_own_row() { return rank_in_cluster() * rows; }

    DEVICE void wait_until_read() const { mbarrier_wait_in_cluster(slot.empty, lap ^ 1); }
    DEVICE void send(int row, int index, const RowPart &part) const {
        const uint32 there = address_in_block(slot.data, owner(row)), source = rank_in_cluster();
        store_remote_16B(there + O(source, row % rows, index), part.values());
        if (index == 0)
            store_remote_8B(there + terms(source, row % rows), part.terms());
    }
    // By every warp, when all its lanes have sent.
    DEVICE void announce(int first_row) const {
        __syncwarp(); // what all lanes have sent comes before one lane's arrival
        if (lane_index() == 0)
            mbarrier_arrive_in_cluster(address_in_block(slot.full, owner(first_row)));
    }
    DEVICE void wait_until_received() const { mbarrier_wait_in_cluster(slot.full, lap); }
    // A part of one of this block's own rows, over all blocks in the order of their keys.
    DEVICE RowPart combined(int row, int index) const {
        RowPart part;
#pragma unroll
        for (int source = 0; source < cfg::cluster; ++source)
            part.add(load_shared_8B(slot.data + terms(source, row)), load_shared_16B(slot.data + O(source, row, index)));
        return part;
    }
    // By every warp, when all its lanes have read.
    DEVICE void release() {
        __syncwarp(); // what all lanes have read comes before one lane's arrival
        if (lane_index() < cfg::cluster)
            mbarrier_arrive_in_cluster(address_in_block(slot.empty, lane_index()));
        lap ^= 1;
    }

  private:
    // Neighbouring rows are swizzled: of a fragment's rows, two are in different banks.
    static DEVICE uint32 O(uint32 source, int row, int index) {
        return ((source * rows + row) * RowPart::of_row + (index ^ row % 2 * 4)) * sizeof(Vector16B);
    }
    static DEVICE uint32 terms(uint32 source, int row) {
        return cfg::B_r * cfg::d_head * sizeof(float) + (source * rows + row) * sizeof(Pair);
    }
};
