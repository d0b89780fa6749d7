// A tile: the block of query rows of one head that a thread block computes at a time.
#pragma once
#include "attention/ranges.cuh"
#include "attention/sequences.cuh"
#include "ptx/special_registers.cuh"

struct Tile {
    int q_block, head, batch;

    static DEVICE Tile none() { return {-1, 0, 0}; }
    DEVICE bool is_none() const { return q_block < 0; }
};

// Packed sequences stand in one line of slots for `slot_rows` rows each, as many as any sequence may need: sequence b
// begins with slot starts[b] / slot_rows + b. A slot's sequence is found without adding up the slots of those before.
template <int slot_rows> struct PackedLine {
    const int *starts;
    int rows, sequences;

    // Of queries.
    DEVICE explicit PackedLine(const ForwardArguments &args)
        : PackedLine(args.q_starts, args.q_length, args.batches) {}
    static DEVICE PackedLine of_keys(const ForwardArguments &args) { return {args.kv_starts, args.kv_length, args.batches}; }

    DEVICE int slots() const { return rows / slot_rows + sequences; }
    DEVICE int first_slot(int sequence) const { return clamp(starts[sequence], 0, rows) / slot_rows + sequence; }
    // The last sequence that begins with the slot or before; the first, if it begins behind.
    DEVICE int sequence_of(int slot) const {
        int sequence = 0, behind = sequences;
        while (behind - sequence > 1) {
            const int middle = (sequence + behind) / 2;
            if (first_slot(middle) <= slot)
                sequence = middle;
            else
                behind = middle;
        }
        return sequence;
    }
    // The same, found by all lanes of a warp together: loads that depend on one another are few.
    DEVICE int sequence_of_warp(int slot) const {
        int sequence = 0;
        for (int range = sequences; range > 1;) {
            const int step = ceil_div(range, warp_threads), candidate = sequence + (int)lane_index() * step;
            const bool begins = lane_index() * step < range && first_slot(candidate) <= slot;
            const int last = __popc(__ballot_sync(all_lanes, begins)) - 1;
            range = min(step, range - max(last, 0) * step);
            sequence += max(last, 0) * step;
        }
        return sequence;
    }

  private:
    DEVICE PackedLine(const int *starts, int rows, int sequences) : starts(starts), rows(rows), sequences(sequences) {}
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

    // A packed sequence may need fewer slots than it has.
    DEVICE bool exists() const { return !variant::variable_lengths || q_rows > 0; }

    // Only a mask or an empty packed sequence leaves a tile without keys.
    DEVICE bool has_keys() const {
        return !(variant::masks_left || variant::masks_right || variant::variable_lengths) || keys.count > 0;
    }
};
