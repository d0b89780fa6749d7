// The scheduler of the Hopper kernel: one thread that finds out which tiles are this thread block's, and tells the others.
//
// It has registers to spare for that; the producer and the consumers have not.
#pragma once
#include "hopper_pipeline.cuh"

DEVICE void announce_tiles(const HopperArguments &args, const SharedMemory &shared) {
    TilePlace place;
    const auto announce = [&](const Tile &tile) {
        const Slot slot = shared.tile(place.stage);
        slot.wait_until_empty(place.lap);
        store_shared_16B(slot.data, {(uint32)tile.q_block, (uint32)tile.head, (uint32)tile.batch, 0});
        mbarrier_arrive(slot.full);
        place.advance();
    };
    for (TileSequence tiles(args.schedule); !tiles.ended(); tiles.advance())
        announce(tiles.tile());
    announce(Tile::none());
}

// What all others hear of it: all lanes of a consumer warp, or the one thread that produces.
struct AnnouncedTiles {
    const SharedMemory &shared;
    uint32 lanes;
    TilePlace place;

    // The next tile, or none at the end.
    DEVICE Tile next() {
        const Slot slot = shared.tile(place.stage);
        slot.wait_until_full(place.lap);
        const Vector16B tile = load_shared_16B(slot.data);
        __syncwarp(lanes); // the first lane releases what all have read
        slot.release();
        place.advance();
        return {(int)tile.words[0], (int)tile.words[1], (int)tile.words[2]};
    }
};
