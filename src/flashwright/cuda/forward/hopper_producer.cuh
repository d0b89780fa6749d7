// The producer of the Hopper kernel: one thread that starts the copy engine's copies.
#pragma once
#include "forward/hopper_shared.cuh"

// One thread: copies everything that the consumers read, in the order in which they read it.
DEVICE void produce(const HopperArguments &args, const SharedMemory &shared) {
    QPlace Q_place;
    KVPlace K_place, V_place;
    HopperTiles tiles{shared};
    for (Tile tile = tiles.next(); !tile.is_none(); tile = tiles.next()) {
        const HopperTileWork work(args.forward, tile);
        if (!work.exists() || work.keys.count <= 0)
            continue;
        const int q_head = work.tile.head, key_head = kv_head(args.forward, q_head);
        const int batch = variant::variable_lengths ? 0 : work.tile.batch; // packed tensors have one batch
        const int q_start = work.sequence.q_start + work.q_row, kv_start = work.sequence.kv_start;

        const auto fill_Q = [&](int warpgroup) {
            const Slot slot = shared.Q(Q_place.stage, warpgroup);
            slot.wait_until_empty(Q_place.lap); // @operand Q
            const int row = q_start + warpgroup * warpgroup_rows;
            fill<warpgroup_rows, shape::panels>(slot, args.Q, row, q_head, batch); // @operand Q
        };
        const auto fill_K = [&](int step) {
            const Slot slot = shared.K(K_place.stage);
            slot.wait_until_empty(K_place.lap); // @operand K
            const int row = kv_start + work.keys.first_key(step);
            fill<cfg::B_c, shape::panels>(slot, args.K, row, key_head, batch); // @operand K
            K_place.advance();
        };
        const auto fill_V = [&](int step) {
            const Slot slot = shared.V(V_place.stage);
            slot.wait_until_empty(V_place.lap); // @operand V
            const int row = kv_start + work.keys.first_key(step);
            fill<cfg::B_c, shape::panels>(slot, args.V, row, key_head, batch); // @operand V
            V_place.advance();
        };

        // K first: its stage may be free while the consumers still read the last tile's Q.
        fill_K(0);
        for (int warpgroup = 0; warpgroup < cfg::n_consumers; ++warpgroup)
            fill_Q(warpgroup);
#pragma unroll 1
        for (int step = 1; step < work.keys.count; ++step) {
            if constexpr (!cfg::overlaps_softmax)
                fill_V(step - 1);
            fill_K(step);
            if constexpr (cfg::overlaps_softmax)
                fill_V(step - 1);
        }
        fill_V(work.keys.count - 1);
        Q_place.advance();
    }
}
