// What the warps of the Hopper backward share: arguments, shared memory and its barriers.
#pragma once
#include "attention/score_gradients.cuh"
#include "attention/tile.cuh"
#include "backward/dq_sums.cuh"
#include "pipeline/ring.cuh"
#include "ptx/cluster.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/warpgroup.cuh"

using Work = KeyTileWork<cfg::B_r, cfg::B_c, shape::together>;
using Sums = DQSums<cfg::B_r, cfg::d_head, shape::dQ_threads, shape::dQ_group_warps, shape::dQ_column_parts>;
constexpr int tensor_columns = variant::pads_columns ? variant::head_dim : cfg::d_head;

struct HopperArguments {
    const TensorMap &Q, &K, &V, &dO;
    const BackwardArguments &backward;
};

constexpr int consumer_threads = cfg::n_consumers * warpgroup_threads;

// Numbers of the named barriers; 0 is that of all threads.
namespace barriers {
constexpr int consumers = 1;
}

using QPlace = RingPlace<cfg::Q_stages>;
using dOPlace = RingPlace<cfg::dO_stages>;
using TurnPlace = RingPlace<1>;
using OrderPlace = RingPlace<shape::turn_stages>;
using KeysPlace = RingPlace<shape::key_stages>;
using TilePlace = RingPlace<shape::tile_stages>;
static_assert(shape::key_stages == 1 || shape::key_stages == shape::tile_stages);
using WeightsPlace = RingPlace<shape::weight_stages>;

DEVICE KeyTile key_tile(const BackwardArguments &backward, int block) {
    return key_tile_of_block<cfg::ordered, cfg::B_c, shape::together>(backward, block);
}
DEVICE Work work_of(const BackwardArguments &backward, int block) { return Work(backward, key_tile(backward, block)); }
// Where dQ of a step is added.
DEVICE float *dQ_sums_of(const BackwardArguments &backward, const Work &work, const QueryStep &at) {
    const int64 row = padded_row<cfg::B_r>(backward, work.sequence, at.head, work.tile.batch);
    return backward.dQ_sums + (row + at.first_row) * cfg::d_head;
}

// The first row of a step's block of dQ.
DEVICE char *dQ_rows_of(const BackwardArguments &backward, const Work &work, const QueryStep &at) {
    const TensorView &dQ = backward.dQ;
    return head_start(dQ, variant::variable_lengths ? 0 : work.tile.batch, at.head) +
           (work.sequence.q_start + at.first_row) * row_stride_bytes<0>(dQ);
}

DEVICE Turn turn_of(const BackwardArguments &backward, const Work &work, const QueryStep &step) {
    return Turn::of<Work, cfg::B_r, cfg::B_c, shape::together>(backward, work, step, cfg::paired ? rank_in_cluster() : 0);
}

// What the producer knows of a step, so that the consumers need no registers for it.
struct StepNote {
    int first_row; // of the block of queries, in its sequence
    int rows;      // of the block, as far as they exist
    bool masked;   // some of its rows do not attend to some of the keys
    float *dQ_sums;

    static constexpr int bytes = sizeof(Vector16B);

    DEVICE void write(uint32 shared) const {
        const uint64 sums = (uint64)dQ_sums;
        store_shared_16B(shared, {(uint32)first_row, (uint32)rows | (uint32)masked << 16, (uint32)sums, (uint32)(sums >> 32)});
    }
    static DEVICE StepNote read(uint32 shared) {
        const Vector16B v = load_shared_16B(shared);
        return {(int)v.words[0], (int)(v.words[1] & 0xffff), v.words[1] >> 16 != 0,
                (float *)(v.words[2] | (uint64)v.words[3] << 32)};
    }
};

// What consumers need to know of a turn where the last to add to a block of dQ finishes it.
struct TurnNote {
    bool is_first, is_last;
    char *dQ_rows;

    static constexpr int bytes = sizeof(Vector16B);

    DEVICE void write(uint32 shared) const {
        const uint64 rows = (uint64)dQ_rows;
        store_shared_16B(shared, {(uint32)is_first, (uint32)is_last, (uint32)rows, (uint32)(rows >> 32)});
    }
    static DEVICE TurnNote read(uint32 shared) {
        const Vector16B v = load_shared_16B(shared);
        return {uniform(v.words[0]) != 0, uniform(v.words[1]) != 0, (char *)(v.words[2] | (uint64)v.words[3] << 32)};
    }
};

// The number of a turn that a pair takes out of order, from the first thread block to the second.
struct TakenTurn {
    static constexpr int bytes = sizeof(Vector16B);

    static DEVICE void send(const Slot &slot, int number) {
        const uint32 full = address_in_block(slot.full, 1);
        mbarrier_arrive_expecting_remote(full, bytes);
        store_to_block_16B(address_in_block(slot.data, 1), {(uint32)number}, full);
    }
    static DEVICE int read(const Slot &slot) { return load_shared_16B(slot.data).words[0]; }
    // To the first thread block.
    static DEVICE void release(const Slot &slot) { mbarrier_arrive_remote(address_in_block(slot.empty, 0)); }
};

// A tile of a persistent thread block, as one of its threads announces it to the others. Of a pair, a thread of the first
// thread block announces both tiles, each where it is computed.
struct TileNote {
    int tile;  // as thread blocks are numbered where each has one
    int steps; // negative: there are no more tiles

    static constexpr int bytes = sizeof(Vector16B);
    static constexpr int none = -1;

    DEVICE bool is_none() const { return steps < 0; }
    DEVICE void announce(const Slot &slot) const {
        store_shared_16B(slot.data, words());
        mbarrier_arrive(slot.full);
    }
    DEVICE void announce_in_block(const Slot &slot, uint32 rank) const {
        const uint32 full = address_in_block(slot.full, rank);
        mbarrier_arrive_expecting_remote(full, bytes);
        store_to_block_16B(address_in_block(slot.data, rank), words(), full);
    }
    static DEVICE TileNote read(uint32 shared) {
        const Vector16B v = load_shared_16B(shared);
        return {(int)v.words[0], (int)v.words[1]};
    }
    // By every reader, to who announces tiles.
    static DEVICE void release(const Slot &slot) {
        if constexpr (cfg::paired)
            mbarrier_arrive_remote(address_in_block(slot.empty, 0));
        else
            mbarrier_arrive(slot.empty);
    }

  private:
    DEVICE Vector16B words() const { return {(uint32)tile, (uint32)steps}; }
};

struct SharedMemory {
    uint32 base;

    // 64 keys each, all rows of which one warpgroup multiplies at a time.
    DEVICE Slot K(int group, int stage = 0) const { return keys(shape::K_offset, 0, group, stage); }
    DEVICE Slot V(int group, int stage = 0) const { return keys(shape::V_offset, shape::key_slots, group, stage); }
    DEVICE Slot Q(int stage) const {
        return slot(shape::Q_offset + stage * shape::query_bytes, 2 * shape::key_slots, stage);
    }
    DEVICE Slot dO(int stage) const {
        return slot(shape::dO_offset + stage * shape::query_bytes, 2 * shape::key_slots + cfg::Q_stages, stage);
    }
    // Full: it is this thread block's turn to add to dQ. Empty: it has added.
    DEVICE Slot turn(int turn) const {
        const int stage = OrderPlace::after(turn).stage;
        return slot(shape::turns_offset + stage * TurnNote::bytes, 2 * shape::key_slots + cfg::Q_stages + cfg::dO_stages,
                    stage);
    }
    // Full: the second thread block of a pair has been sent the number of the turn. Empty: it has read it.
    DEVICE Slot taken_turn(int turn) const {
        const int stage = OrderPlace::after(turn).stage;
        return slot(shape::taken_turns_offset + stage * TakenTurn::bytes,
                    2 * shape::key_slots + cfg::Q_stages + cfg::dO_stages + 2 * shape::turn_stages, stage);
    }
    // Empty: the turn has been passed on.
    DEVICE Slot passed_turn(int turn) const {
        return slot(0, 2 * shape::key_slots + cfg::Q_stages + cfg::dO_stages + shape::turn_stages,
                    OrderPlace::after(turn).stage);
    }
    // A warpgroup's part of a block of dQ on its way to its sums, where the copy engine adds it. Consumers have no turns
    // then.
    DEVICE Slot dQ(int warpgroup) const {
        return slot(shape::dQ_offset + warpgroup * shape::dQ_part_bytes,
                    2 * shape::key_slots + cfg::Q_stages + cfg::dO_stages, warpgroup);
    }
    // A tile of a persistent thread block, by its number among those. Full: it is announced. Empty: nobody needs it, in
    // both thread blocks of a pair.
    DEVICE Slot tile(int index) const {
        const int stage = TilePlace::after(index).stage;
        return slot(shape::tiles_offset + stage * TileNote::bytes, tile_barriers, stage);
    }
    // Full: dS of a step, and P if it is in shared memory, are written. Empty: they have been read, in both thread blocks
    // of a pair.
    DEVICE Slot weights(int step) const { return slot(0, weights_barriers, step % shape::weight_stages); }
    // dS of the other thread block of a pair, and its K.
    DEVICE Slot received_slot(int step) const {
        return slot(0, weights_barriers + shape::weight_stages, step % shape::weight_stages);
    }
    DEVICE uint32 received(int step, int group) const {
        return base + shape::received_offset + weights(step, group);
    }
    DEVICE Slot other_K(int group) const {
        return slot(shape::other_K_offset + group * shape::other_K_bytes, weights_barriers + 2 * shape::weight_stages, group);
    }
    // Of each row: log-sum-exps arrive with Q, dot products of O and dO with dO.
    DEVICE uint32 lse(int stage) const { return base + shape::lse_offset + stage * shape::terms_bytes; }
    DEVICE uint32 dots(int stage) const { return base + shape::dots_offset + stage * shape::terms_bytes; }
    // Visible when Q is full, and kept for as long again as Q: dQ comes when Q has been given back.
    DEVICE uint32 note(int step) const {
        return base + shape::notes_offset + step % (2 * cfg::Q_stages) * StepNote::bytes;
    }
    // A key group's rows of P and of dS.
    DEVICE uint32 P(int step, int group) const { return base + shape::P_offset + weights(step, group); }
    DEVICE uint32 dS(int step, int group) const { return base + shape::dS_offset + weights(step, group); }

    DEVICE void init_barriers() const {
        constexpr int consumer_warps = consumer_threads / warp_threads;
        for (int stage = 0; stage < shape::key_stages; ++stage)
            for (int group = 0; group < shape::key_groups; ++group) {
                K(group, stage).init_barriers(consumer_warps);
                V(group, stage).init_barriers(consumer_warps);
            }
        for (int stage = 0; stage < cfg::Q_stages; ++stage)
            Q(stage).init_barriers(consumer_threads);
        for (int stage = 0; stage < cfg::dO_stages; ++stage)
            dO(stage).init_barriers(consumer_threads);
        if constexpr (cfg::bulk_dQ) {
            for (int warpgroup = 0; warpgroup < cfg::n_consumers; ++warpgroup) {
                mbarrier_init(dQ(warpgroup).full, consumer_warps / cfg::n_consumers);
                mbarrier_init(dQ(warpgroup).empty, 1);
            }
        } else if constexpr (shape::takes_turns) {
            for (int stage = 0; stage < shape::turn_stages; ++stage) {
                turn(stage).init_barriers(consumer_threads);
                passed_turn(stage).init_barriers(1);
                if constexpr (shape::sends_turns)
                    taken_turn(stage).init_barriers(1);
            }
        }
        for (int stage = 0; stage < shape::weight_stages; ++stage) {
            mbarrier_init(weights(stage).full, consumer_warps);
            mbarrier_init(weights(stage).empty, shape::together * consumer_warps);
            received_slot(stage).init_barriers(consumer_warps);
        }
        for (int group = 0; group < shape::key_groups; ++group)
            other_K(group).init_barriers(consumer_warps);
        if constexpr (shape::announces_tiles) {
            // Others that read it: who copies, who sends weights, who adds by the copy engine, who waits for turns and
            // who passes them on.
            constexpr int others = 1 + cfg::paired + (cfg::bulk_dQ ? 1 : shape::takes_turns ? 2 : 0);
            for (int stage = 0; stage < shape::tile_stages; ++stage)
                tile(stage).init_barriers(shape::together * (consumer_threads + others));
        }
        mbarrier_init_fence();
    }

  private:
    static constexpr int weights_barriers = 2 * shape::key_slots + cfg::Q_stages + cfg::dO_stages + shape::dQ_slots;
    static constexpr int tile_barriers = weights_barriers + 2 * shape::weight_stages + shape::key_groups;

    DEVICE Slot keys(uint32 offset, int first_barriers, int group, int stage) const {
        const int place = stage * shape::key_groups + group;
        return slot(offset + place * shape::key_group_bytes, first_barriers, place);
    }
    DEVICE Slot slot(uint32 data_offset, int first_barriers, int index) const {
        return Slot::at(base + data_offset,
                        base + shape::barriers_offset + Slot::barrier_pair_bytes * (first_barriers + index));
    }
    static DEVICE int weights(int step, int group) {
        return (step % shape::weight_stages * shape::key_groups + group) * shape::weight_group_bytes;
    }
};
