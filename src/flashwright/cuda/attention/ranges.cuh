// Which keys a query row attends to, and what follows for blocks: the blocks of keys that a block of queries visits,
// and the blocks of queries that a block of keys visits.
//
// A kernel visits blocks in steps. Steps whose every row attends to every key are plain, and need no mask. They follow
// one another, as rows attend to intervals of keys that move with the row.
#pragma once
#include "types.cuh"

// The keys that each query row attends to: first_key(row) … last_key(row), both included.
struct Window {
    int left, right, kv_length;

    // Row i attends to the keys i + left … i + right, in a mask aligned to the bottom right shifted so that the last
    // row is level with the last key.
    DEVICE Window(int left, int right, bool align_bottom_right, int q_length, int kv_length) : kv_length(kv_length) {
        int shift = align_bottom_right ? kv_length - q_length : 0;
        this->left = left + shift;
        this->right = right + shift;
    }

    DEVICE int first_key(int row) const { return variant::masks_left ? max(row + left, 0) : 0; }
    DEVICE int last_key(int row) const {
        return variant::masks_right ? min(row + right, kv_length - 1) : kv_length - 1;
    }
    // Keys from the first of the sequence to the last that the row attends to.
    DEVICE int keys_up_to_last(int row) const { return max(0, last_key(row) + 1); }

    // The rows that attend to some of the keys first_key … last_key.
    DEVICE int first_row(int first_key) const { return variant::masks_right ? max(0, first_key - right) : 0; }
    DEVICE int last_row(int last_key, int q_length) const {
        return variant::masks_left ? min(last_key - left, q_length - 1) : q_length - 1;
    }
};

// The steps of some rows of a block. Steps before `begin` have no key for these rows; [begin, plain_begin) and
// [plain_end, count) need the mask; those between are plain.
struct Steps {
    int begin, plain_begin, plain_end;
};

// The blocks of `block_keys` keys that hold a key for any row of a block of queries, in the order in which they are
// visited: the first block first, or last if `reversed`. If `first_leads`, the first block comes first and the others
// follow it in reverse; their steps are those of `reversed`, later by one.
template <int block_keys, bool reversed, bool first_leads = false> struct KeyBlocks {
    static_assert(reversed || !first_leads);
    int first_block, count;

    DEVICE KeyBlocks(const Window &window, int first_query, int last_query) {
        first_block = window.first_key(first_query) / block_keys;
        count = (window.last_key(last_query) + block_keys) / block_keys - first_block;
    }

    // The first key of the block that a step visits.
    DEVICE int first_key(int step) const {
        if (first_leads)
            return (first_block + (step == 0 ? 0 : count - step)) * block_keys;
        return (first_block + (reversed ? count - 1 - step : step)) * block_keys;
    }

    // The steps of the rows first_query … last_query of the block of queries; of none if the last is before the first.
    // Behind the first block, if it leads.
    DEVICE Steps steps_of(const Window &window, int first_query, int last_query) const {
        const int end_block = first_block + count;
        const int keys = last_query < first_query ? 0 : window.keys_up_to_last(last_query);
        const int visited_end = ceil_div(keys, block_keys);
        const int plain_first = ceil_div(window.first_key(last_query), block_keys);
        const int plain_end = window.keys_up_to_last(first_query) / block_keys;
        Steps steps;
        if constexpr (reversed)
            steps = {end_block - visited_end + first_leads, end_block - plain_end + first_leads,
                     end_block - plain_first + first_leads};
        else
            steps = {0, plain_first - first_block, plain_end - first_block};
        steps.begin = min(steps.begin, count);
        steps.plain_begin = min(steps.plain_begin, count);
        return steps;
    }
};

// The blocks of `block_queries` query rows that hold a row attending to any key of a block of keys, first to last. A
// step is plain if all of its rows exist and attend to all keys of a complete block.
template <int block_queries> struct QueryBlocks {
    int first_block, count;
    int plain_begin, plain_end; // the plain steps; the others need the mask

    DEVICE QueryBlocks(const Window &window, int q_length, int first_key, int block_keys) {
        const int last_key = min(first_key + block_keys, window.kv_length) - 1;
        const int first_row = window.first_row(first_key), last_row = window.last_row(last_key, q_length);
        first_block = first_row / block_queries;
        count = first_row <= last_row ? last_row / block_queries + 1 - first_block : 0;

        // Rows from plain_first on have the last key in their window, those before plain_end the first.
        const int plain_first = variant::masks_right ? max(0, last_key - window.right) : 0;
        const int plain_rows_end = variant::masks_left ? min(first_key - window.left + 1, q_length) : q_length;
        const bool complete = last_key - first_key + 1 == block_keys;
        plain_begin = min(ceil_div(plain_first, block_queries) - first_block, count);
        plain_end = complete ? max(plain_begin, max(0, plain_rows_end) / block_queries - first_block) : plain_begin;
    }

    // The first query row of the block that a step visits.
    DEVICE int first_query(int step) const { return (first_block + step) * block_queries; }
};
