// A tile of the backward: a block of keys of one head, and the blocks of queries that attend to any of them.
#pragma once
#include "attention/backward_arguments.cuh"
#include "attention/ranges.cuh"
#include "attention/sequences.cuh"
#include "attention/tile.cuh"

// Of an element of dQ, dK and dV: a kernel that accumulates adds to fp32 sums.
constexpr int gradient_bytes = variant::accumulates ? sizeof(float) : element_bytes;

struct KeyTile {
    int kv_block, kv_head, batch;
};

// All of a launch.
DEVICE int key_tiles(const BackwardArguments &args) {
    const int lines = variant::variable_lengths ? 1 : args.forward.batches;
    return args.kv_blocks * (args.forward.q_heads / args.forward.q_heads_per_kv_head) * lines;
}

// The tile of a thread block. Those of one head and batch are neighbours, so that they share Q and dO in the cache. Where
// a mask leaves earlier keys more queries than later ones, or blocks of keys add to dQ in order, `pairs_at_once` heads and
// batches take turns. With a mask the blocks with most queries begin first, so that none of those is left to the end. In
// order those of later keys begin first; few of each head and batch are under way at a time, and seldom wait for each
// other. Blocks of keys that work together belong to neighbouring thread blocks. Packed sequences of a head stand in one
// line, as a batch of one would (see `PackedLine`).
template <bool ordered, int block_keys, int together = 1>
DEVICE KeyTile key_tile_of_block(const BackwardArguments &args, int block) {
    const int heads = args.forward.q_heads / args.forward.q_heads_per_kv_head;
    const int pairs = heads * (variant::variable_lengths ? 1 : args.forward.batches);
    const int groups = args.kv_blocks / together, group = block / together;
    int pair = group / groups, kv_group = group % groups;
    if constexpr (ordered || variant::masks_right) {
        const int first = group / (args.pairs_at_once * groups) * args.pairs_at_once;
        const int at_once = min(args.pairs_at_once, pairs - first);
        const int place = group - first * groups;
        pair = first + place % at_once;
        const int turn = place / at_once;
        kv_group = ordered ? groups - 1 - turn : turn;
    }
    int batch = pair / heads;
    if constexpr (variant::variable_lengths) {
        const auto line = PackedLine<block_keys * together>::of_keys(args.forward);
        batch = line.sequence_of(kv_group);
        kv_group -= line.first_slot(batch);
    }
    return {kv_group * together + block % together, pair % heads, batch};
}

// The first of a head's rows in the buffers of padded rows. A packed sequence begins with a whole block, behind all
// those before it: each of them takes less than a block more than its rows.
template <int block_queries>
DEVICE int64 padded_row(const BackwardArguments &args, const Sequence &sequence, int head, int batch) {
    if constexpr (variant::variable_lengths)
        return (int64)head * args.padded_rows +
               (sequence.q_start + (int64)batch * block_queries) / block_queries * block_queries;
    return ((int64)batch * args.forward.q_heads + head) * args.padded_rows;
}

// Blocks of keys that work together visit the same blocks of queries.
template <int block_queries, int block_keys, int together = 1> struct KeyTileWork {
    KeyTile tile;
    Sequence sequence;
    int first_key, keys; // the first key, and how many there are from it to the sequence's end
    Window window;
    QueryBlocks<block_queries> queries;

    DEVICE KeyTileWork(const BackwardArguments &args, const KeyTile &tile)
        : tile(tile), sequence(args.forward, tile.batch), first_key(tile.kv_block * block_keys),
          keys(sequence.kv_length - first_key),
          window(args.forward.window_left, args.forward.window_right, args.forward.align_bottom_right,
                 sequence.q_length, sequence.kv_length),
          queries(window, sequence.q_length, first_key_together(), together * block_keys) {}

    // Keys before the first packed sequence have slots, too, and a sequence may need fewer than it has.
    DEVICE bool exists() const {
        return !variant::variable_lengths || (first_key >= 0 && sequence.kv_length > first_key_together());
    }
    // Of all blocks of keys that work together.
    DEVICE int first_key_together() const { return tile.kv_block / together * together * block_keys; }

    // Heads of Q that share this head of K and V, each of which visits all its blocks of queries.
    static DEVICE int heads(const BackwardArguments &args) {
        return variant::grouped_heads ? args.forward.q_heads_per_kv_head : 1;
    }
    DEVICE int q_head(const BackwardArguments &args, int index) const { return tile.kv_head * heads(args) + index; }
    DEVICE int steps(const BackwardArguments &args) const { return heads(args) * queries.count; }
};

// One step of a tile: a block of queries of one head.
struct QueryStep {
    int head;      // of Q
    int block;     // among those that the tile visits
    int first_row; // of the sequence
};

// The steps of a tile in order: all blocks of one head, then those of the next.
template <class Work> struct QuerySteps {
    const BackwardArguments &args;
    const Work &work;

    DEVICE QueryStep at(int step) const {
        const int index = variant::grouped_heads ? step / work.queries.count : 0;
        const int block = step - index * work.queries.count;
        return {work.q_head(args, index), block, work.queries.first_query(block)};
    }
};

// The same for steps that come one after the other. Nothing is found anew in each: divisions, products, and branches at a
// new head would stand between products that the assembler mixes otherwise.
template <class Work, int block_queries> struct RunningSteps {
    const BackwardArguments &args;
    const Work &work;
    int step = 0;
    int index = 0, block_of_head = 0; // of grouped heads: which is at hand, and its block
    int64 row;                        // the first of the block at hand, in the buffers of padded rows

    DEVICE RunningSteps(const BackwardArguments &args, const Work &work) : args(args), work(work) {
        const QueryStep first = at_hand();
        row = padded_row<block_queries>(args, work.sequence, first.head, work.tile.batch) + first.first_row;
    }

    DEVICE QueryStep at_hand() const { return of(index, block()); }
    DEVICE QueryStep before() const {
        return of(index - begins_head(), (begins_head() ? work.queries.count : block()) - 1);
    }
    DEVICE int64 row_before() const { return row - (begins_head() ? to_next_head() : block_queries); }

    // Returns whether another head is at hand now.
    DEVICE bool advance() {
        ++step;
        if (!variant::grouped_heads || ++block_of_head < work.queries.count) {
            row += block_queries;
            return false;
        }
        row += to_next_head();
        block_of_head = 0;
        ++index;
        return true;
    }

  private:
    DEVICE int block() const { return variant::grouped_heads ? block_of_head : step; }
    DEVICE bool begins_head() const { return variant::grouped_heads && block() == 0; }
    // Rows from the last block of a head to the first of the next.
    DEVICE int64 to_next_head() const { return args.padded_rows - (work.queries.count - 1) * block_queries; }
    DEVICE QueryStep of(int index, int block) const {
        return {work.q_head(args, index), block, work.queries.first_query(block)};
    }
};
