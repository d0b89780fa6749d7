// The waves in which the tiles of a backward stand that rounds dQ itself.
//
// A wave is the tiles of `pairs_at_once` heads of K and V. Its tiles also finish dQ of the wave two before: each rounds a
// part of it, and leaves zeros in the sums. They wait until all tiles of that wave are done, which have added all there
// is to add, and have finished the wave two before theirs. Behind the last wave come two of tiles without keys, which
// finish what is left.
//
// So sums are needed for four waves: while the tiles of one add, those before it may be adding, too, and the tiles of both
// are finishing two others. They lie in the cache between multiprocessors from the first addition to the last reading.
#pragma once
#include "attention/key_tile.cuh"
#include "ptx/atomics.cuh"

struct Waves {
    static constexpr int behind = 2, kept = 2 * behind;

    const BackwardArguments &args;

    struct Place {
        int wave, tile; // of all waves, and among its tiles
    };

    // Of a tile of the launch, or of one without keys, which are counted behind those.
    DEVICE Place of(int tile) const {
        const int keyless = tile - key_tiles(args);
        const int wave = (keyless < 0 ? tile : keyless) / full();
        return {wave + (keyless < 0 ? 0 : count()), (keyless < 0 ? tile : keyless) - wave * full()};
    }
    // All tiles, those without keys included.
    DEVICE int tiles() const { return key_tiles(args) + behind * full(); }
    DEVICE int tiles_of(int wave) const { return wave < count() ? pairs_of(wave) * args.kv_blocks : full(); }

    // Heads of K and V whose tiles are a wave's, in all batches.
    DEVICE int first_pair(int wave) const { return wave * args.pairs_at_once; }
    DEVICE int pairs_of(int wave) const { return min(args.pairs_at_once, pairs() - first_pair(wave)); }

    // Until all tiles of the wave two before are done, whose dQ those of this one finish.
    DEVICE void wait_for_turn_of(int wave) const {
        if (wave >= behind)
            while (load_acquire(done(wave - behind)) != (uint64)tiles_of(wave - behind)) {
            }
    }
    // By one thread that knows of all additions.
    DEVICE void count_tile(int wave) const { add_acq_rel(done(wave), 1); }

    // Of each wave, the tiles that are done.
    DEVICE uint64 *done(int wave) const { return (uint64 *)args.turns + wave; }
    DEVICE int count() const { return (pairs() + args.pairs_at_once - 1) / args.pairs_at_once; }

  private:
    DEVICE int full() const { return args.pairs_at_once * args.kv_blocks; }
    DEVICE int pairs() const { return key_tiles(args) / args.kv_blocks; }
};

// The head of K and V that a head of Q reads, counted through all batches.
DEVICE int pair_of_head(const BackwardArguments &args, int head, int batch) {
    const int heads = args.forward.q_heads_per_kv_head;
    return batch * (args.forward.q_heads / heads) + head / heads;
}

// The first row of a head in the sums of dQ.
template <int block_queries, bool in_waves>
DEVICE int64 row_of_sums(const BackwardArguments &args, const Sequence &sequence, int head, int batch) {
    if constexpr (!in_waves)
        return padded_row<block_queries>(args, sequence, head, batch);
    const int heads = args.forward.q_heads_per_kv_head;
    const int place = pair_of_head(args, head, batch) % (Waves::kept * args.pairs_at_once);
    return ((int64)place * heads + head % heads) * args.padded_rows;
}
