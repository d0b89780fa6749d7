// One thread finds out which tiles are its thread block's, and announces them to the others in shared memory.
//
// It has registers to spare for that; the producer and the consumers have not. `Memory` has a slot for the tile of each
// of `stages` stages.
#pragma once
#include "pipeline/ring.cuh"
#include "pipeline/schedule.cuh"
#include "ptx/memory.cuh"

template <int stages, class TileSequence, class Memory>
DEVICE void announce_tiles(TileSequence tiles, const Memory &shared) {
    RingPlace<stages> place;
    const auto announce = [&](const Tile &tile) {
        const Slot slot = shared.tile(place.stage);
        slot.wait_until_empty(place.lap);
        store_shared_16B(slot.data, {(uint32)tile.q_block, (uint32)tile.head, (uint32)tile.batch, 0});
        mbarrier_arrive(slot.full);
        place.advance();
    };
    for (; !tiles.ended(); tiles.advance())
        if (const Tile tile = tiles.tile(); !tile.is_none())
            announce(tile);
    announce(Tile::none());
}

// What the others read of it: all lanes of a consumer warp, or the one thread that produces.
template <int stages, class Memory> struct AnnouncedTiles {
    const Memory &shared;
    RingPlace<stages> place;

    // The next tile, or none at the end.
    DEVICE Tile next() {
        const Slot slot = shared.tile(place.stage);
        slot.wait_until_full(place.lap);
        const Vector16B tile = load_shared_16B(slot.data);
        slot.release_by_lane();
        place.advance();
        return {(int)tile.words[0], (int)tile.words[1], (int)tile.words[2]};
    }
};
