// Which blocks of query rows a thread block computes, and in which order.
#pragma once
#include "sequence.cuh"

struct Schedule {
    int q_blocks, heads, batches;
};

struct Tile {
    int q_block, head, batch;
};

// The tiles of one thread block, one after the other. With a causal mask the last blocks of rows are the longest: these
// come first, and a persistent thread block is dealt a long one and the short one that makes up for it, so that all have
// about as much to do.
struct TileSequence {
    static constexpr bool in_pairs = cfg::persistent && variant::masks_right;

    const Schedule &schedule;
    int round_start = 0, place_in_round = blockIdx.x;
    bool second = false; // of a pair

    DEVICE explicit TileSequence(const Schedule &schedule) : schedule(schedule) {}

    DEVICE bool ended() const { return index() >= per_head() * schedule.heads * schedule.batches; }
    DEVICE void advance() {
        if (in_pairs && !second && place() < schedule.q_blocks / 2) { // the middle one of an odd number is alone
            second = true;
        } else {
            second = false;
            round_start += gridDim.x;
            // Another place in every round, lest one thread block is dealt all those that are alone.
            if (++place_in_round == gridDim.x)
                place_in_round = 0;
        }
    }
    DEVICE Tile tile() const {
        const int head = index() / per_head();
        const int q_block = second || !variant::masks_right ? place() : schedule.q_blocks - 1 - place();
        return {q_block, head % schedule.heads, head / schedule.heads};
    }

  private:
    DEVICE int per_head() const { return in_pairs ? (schedule.q_blocks + 1) / 2 : schedule.q_blocks; }
    DEVICE int index() const { return round_start + place_in_round; } // of the tile, or of the pair
    DEVICE int place() const { return index() % per_head(); }
};

// A tile's rows, and the keys they look at.
struct TileWork {
    Tile tile;
    Sequence sequence;
    int q_row, q_rows; // the first row, and how many there are from it to the sequence's end
    Window window;
    KVRange range;

    DEVICE TileWork(const ForwardArguments &args, const Tile &tile)
        : tile(tile), sequence(args, tile.batch), q_row(tile.q_block * cfg::B_r),
          q_rows(sequence.q_length - q_row), window(args, sequence),
          range(window, q_row, min(q_row + cfg::B_r, sequence.q_length) - 1) {}

    DEVICE bool exists() const { return !variant::variable_lengths || q_rows > 0; }
};
