// A tile: the block of query rows of one head that a thread block computes at a time.
#pragma once
#include "attention/ranges.cuh"
#include "attention/sequences.cuh"

struct Tile {
    int q_block, head, batch;

    static DEVICE Tile none() { return {-1, 0, 0}; }
    DEVICE bool is_none() const { return q_block < 0; }
};

// A tile's rows, and the blocks of keys they attend to.
template <int block_queries, class KeyBlocks> struct TileWork {
    Tile tile;
    Sequence sequence;
    int q_row, q_rows; // the first row, and how many there are from it to the sequence's end
    Window window;
    KeyBlocks keys;

    DEVICE TileWork(const ForwardArguments &args, const Tile &tile)
        : tile(tile), sequence(args, tile.batch), q_row(tile.q_block * block_queries),
          q_rows(sequence.q_length - q_row), window(args.window_left, args.window_right, args.align_bottom_right,
                                                    sequence.q_length, sequence.kv_length),
          keys(window, q_row, last_q_row()) {}

    DEVICE int last_q_row() const { return min(q_row + block_queries, sequence.q_length) - 1; }

    // A packed sequence may be shorter than the longest.
    DEVICE bool exists() const { return !variant::variable_lengths || q_rows > 0; }

    // Only a mask or an empty packed sequence leaves a tile without keys.
    DEVICE bool has_keys() const {
        return !(variant::masks_left || variant::masks_right || variant::variable_lengths) || keys.count > 0;
    }
};
