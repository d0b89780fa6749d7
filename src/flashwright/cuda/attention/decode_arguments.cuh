// What a launch passes to the decode kernels, by value. `kernels/decode/launch.py` packs the same struct.
#pragma once
#include "attention/sequences.cuh"

struct DecodeArguments {
    // K and V are a cache: its batch dimension counts sequences or pages, `kv_length` is the most keys of a sequence.
    ForwardArguments forward;
    // Of each sequence, from the beginning of its cache, less those that were appended since; null: `kv_length` of all.
    const int *kv_lengths;
    const int *kv_begins;   // the first key of each; null: the first of its cache
    const int *cache_index; // which of the cache's sequences each one has, if it is not paged; null: its own
    const int *page_table;  // the pages of each sequence, in order; null: the cache is not paged
    int64 page_table_stride;
    int page_rows, cache_size; // keys of a page; sequences or pages of the cache
    int kv_heads;              // of the cache
    int row_tiles;             // of the most rows that a sequence has
    int appended_keys;         // of every sequence
    int item_overhead;         // what an item costs beside its units, in units
    int line_blocks;           // thread blocks that share what there is to do
    int split_units;           // every split has so many units, whatever else is computed; 0: splits are balanced
    // Partial results: rows of O in fp32, not divided by their sums; maxima and sums of rows; how far each item's segments
    // are.
    float *partial_O, *partial_terms;
    uint64 *progress;
    // Equal items that are dealt whole before the others are shared, and the thread blocks that have one in each round.
    int whole_items, round_blocks;
};

// A sequence: its rows in Q, and its keys [kv_begin, kv_end) in the cache. No length, however wrong, leads out of either.
struct CachedSequence {
    int64 q_start;
    int q_length, kv_begin, kv_end, cache;
    const int *pages;

    DEVICE CachedSequence(const DecodeArguments &args, int batch)
        : q_start(0), q_length(args.forward.q_length), kv_begin(0), kv_end(args.forward.kv_length), pages(nullptr) {
        if constexpr (variant::variable_lengths) {
            const int first = clamp(args.forward.q_starts[batch], 0, args.forward.q_length);
            q_length = clamp(args.forward.q_starts[batch + 1], first, args.forward.q_length) - first;
            q_start = first;
        }
        if (args.kv_lengths)
            kv_end = clamp(args.kv_lengths[batch] + args.appended_keys, 0, args.forward.kv_length);
        if (args.kv_begins)
            kv_begin = clamp(args.kv_begins[batch], 0, kv_end);
        find_cache(args, batch);
    }
    // Where a sequence has its keys. The others that are as long differ in nothing else.
    DEVICE void find_cache(const DecodeArguments &args, int batch) {
        cache = batch;
        if (args.page_table)
            pages = args.page_table + batch * args.page_table_stride;
        else if (args.cache_index)
            cache = existing(args, args.cache_index[batch]);
    }

    // The number of the page that holds a key below `kv_length`, as the page table has it, or of the cache's sequence.
    DEVICE int page_of(const DecodeArguments &args, int key) const {
        return pages ? pages[(uint32)key / args.page_rows] : cache;
    }
    // A number beyond the cache's pages or sequences is none of them: -1.
    static DEVICE int existing(const DecodeArguments &args, int number) {
        return (uint32)number < (uint32)args.cache_size ? number : -1;
    }
    // Where the cache has a key below `kv_length`: in a page, or in a sequence's rows; -1 if nowhere.
    DEVICE int place_of(const DecodeArguments &args, int key) const { return existing(args, page_of(args, key)); }
    // Which of the rows in its place a key has.
    DEVICE int row_of(const DecodeArguments &args, int key) const { return pages ? (uint32)key % args.page_rows : key; }
    // Such a row, of one head.
    static DEVICE const char *row_in(int place, const TensorView &tensor, int head, int row) {
        return head_start(tensor, place, head) + row * tensor.row_stride * element_bytes;
    }
};
