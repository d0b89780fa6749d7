// Which tiles a thread block computes, and in which order.
#pragma once
#include "attention/tile.cuh"

// Tiles are dealt by a rule in so many rounds; what remains is in lists, one for each thread block. A family's
// `schedule.py` packs the same struct.
template <int listed_blocks, int max_listed_tiles> struct Schedule {
    int q_blocks, heads, batches;
    int rounds;
    uint16 list_starts[listed_blocks + 1], listed_tiles[max_listed_tiles];
};

// The tiles of one thread block, one after the other. With a causal mask the last blocks of rows are the longest: these
// come first, and a persistent thread block is dealt a long one and the short one that makes up for it, so that all
// have about as much to do. Packed sequences are dealt by slots (see `PackedLine`), of one tile or of a pair.
template <class Schedule, int block_queries, bool longest_first, bool persistent> struct TileSequence {
    static constexpr bool in_pairs = persistent && longest_first;
    using Line = PackedLine<in_pairs ? 2 * block_queries : block_queries>;

    const ForwardArguments &args;
    const Schedule &schedule;
    int round = 0, place_in_round = blockIdx.x;
    bool second = false; // of a pair
    int listed = 0;      // where in the lists

    DEVICE TileSequence(const ForwardArguments &args, const Schedule &schedule) : args(args), schedule(schedule) {
        begin_list_if_due();
    }

    DEVICE bool ended() const {
        return in_list() ? listed == schedule.list_starts[blockIdx.x + 1]
                         : index() >= per_head() * schedule.heads * schedule.batches;
    }
    DEVICE void advance() {
        if (in_list()) {
            ++listed;
        } else if (in_pairs && !second && is_pair()) {
            second = true;
        } else {
            second = false;
            // Another place in every round, lest one thread block is dealt all those that are alone.
            if (++place_in_round == gridDim.x)
                place_in_round = 0;
            ++round;
            begin_list_if_due();
        }
    }
    // The tile at hand; none in a slot that its sequence does not need.
    DEVICE Tile tile() const {
        const int head = index() / per_head();
        if constexpr (variant::variable_lengths)
            return packed_tile(head);
        const bool from_start = !longest_first || (in_list() ? schedule.listed_tiles[listed] % 2 : second);
        const int q_block = from_start ? place() : schedule.q_blocks - 1 - place();
        return {q_block, head % schedule.heads, head / schedule.heads};
    }

  private:
    DEVICE Tile packed_tile(int head) const {
        const Line line{args};
        const int sequence = line.sequence_of(place()), slot = place() - line.first_slot(sequence);
        const int blocks = ceil_div(Sequence(args, sequence).q_length, block_queries);
        const int mirrored = blocks - 1 - slot;
        const bool exists = slot >= 0 && (in_pairs ? slot < mirrored + !second : mirrored >= 0);
        if (!exists)
            return Tile::none();
        return {longest_first && !second ? mirrored : slot, head, sequence};
    }
    // The middle one of an odd number of blocks is alone.
    DEVICE bool is_pair() const { return variant::variable_lengths || place() < schedule.q_blocks / 2; }
    DEVICE bool in_list() const { return in_pairs && round == schedule.rounds; }
    DEVICE void begin_list_if_due() {
        if (in_list())
            listed = schedule.list_starts[blockIdx.x];
    }
    DEVICE int per_head() const {
        if constexpr (variant::variable_lengths)
            return Line{args}.slots();
        return in_pairs ? (schedule.q_blocks + 1) / 2 : schedule.q_blocks;
    }
    // Of the tile, or of the pair; a list counts from the first pair that was not dealt in rounds.
    DEVICE int index() const {
        return round * gridDim.x + (in_list() ? schedule.listed_tiles[listed] / 2 : place_in_round);
    }
    DEVICE int place() const { return index() % per_head(); }
};
