// The producer of the Hopper kernel: one thread that tells the copy engine what to bring, and when.
#pragma once
#include "hopper_scheduler.cuh"

// Starts the copy of `rows` rows, in panels of 64 columns.
template <int rows>
DEVICE void fill(const Slot &slot, const TensorMap &map, int row, int head, int batch) {
    mbarrier_arrive_expecting(slot.full, shape::panels * rows * 128);
#pragma unroll
    for (int panel = 0; panel < shape::panels; ++panel)
        bulk_copy_tile(slot.data + panel * rows * 128, map, slot.full, panel * 64, row, head, batch);
}

// One thread: copies everything that the consumers read, in the order in which they read it.
DEVICE void produce(const HopperArguments &args, const SharedMemory &shared) {
    QPlace Q_place;
    KVPlace K_place, V_place;
    AnnouncedTiles tiles{shared, 1};
    for (Tile tile = tiles.next(); !tile.is_none(); tile = tiles.next()) {
        const TileWork work(args.forward, tile);
        if (!work.exists() || work.range.count <= 0)
            continue;
        const int head = work.tile.head;
        const int kv_head = variant::grouped_heads ? head / args.forward.q_heads_per_kv_head : head;
        const int batch = variant::variable_lengths ? 0 : work.tile.batch; // packed tensors have one batch
        const int q_start = work.sequence.q_start + work.q_row, kv_start = work.sequence.kv_start;

        const auto fill_Q = [&](int warpgroup) {
            const Slot slot = shared.Q(Q_place.stage, warpgroup);
            slot.wait_until_empty(Q_place.lap);
            fill<warpgroup_rows>(slot, args.Q, q_start + warpgroup * warpgroup_rows, head, batch);
        };
        const auto fill_K = [&](int step) {
            const Slot slot = shared.K(K_place.stage);
            slot.wait_until_empty(K_place.lap);
            fill<cfg::B_c>(slot, args.K, kv_start + work.range.first_row(step), kv_head, batch);
            K_place.advance();
        };
        const auto fill_V = [&](int step) {
            const Slot slot = shared.V(V_place.stage);
            slot.wait_until_empty(V_place.lap);
            fill<cfg::B_c>(slot, args.V, kv_start + work.range.first_row(step), kv_head, batch);
            V_place.advance();
        };

        // K first: its stage may be free while the consumers still read the last tile's Q.
        fill_K(0);
        for (int warpgroup = 0; warpgroup < cfg::n_consumers; ++warpgroup)
            fill_Q(warpgroup);
#pragma unroll 1
        for (int step = 1; step < work.range.count; ++step) {
            if constexpr (!cfg::overlaps_softmax)
                fill_V(step - 1);
            fill_K(step);
            if constexpr (cfg::overlaps_softmax)
                fill_V(step - 1);
        }
        fill_V(work.range.count - 1);
        Q_place.advance();
    }
}
