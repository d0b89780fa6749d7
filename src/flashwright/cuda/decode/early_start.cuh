// How a thread block begins: it finds its share, and waits for the grids before.
#pragma once
#include "decode/copies.cuh"
#include "ptx/warpgroup.cuh"

// Fetches the first keys and values of a share into the L2 cache, as many as the stages hold. Lengths and pages may be
// guessed, and may change while they are read: wrong ones lead to other keys of the cache, and nowhere else.
template <int threads> DEVICE void prefetch_keys(const DecodeArguments &args, const Start &start) {
    const uint32 begin = start.line.begin(sharer()), end = start.line.begin(sharer() + 1);
    Item item(args, start.pair);
    const uint32 places = item.places(args), of_pair = begin - start.first_place;
    if (begin == end || of_pair >= places * args.kv_heads)
        return;
    item.head = of_pair / places;
    const int split_units = max(1, args.split_units), of_item = of_pair - item.head * places;
    const int first = max(0, of_item - args.item_overhead) * split_units;
    const int last = min((int)(of_item - args.item_overhead + end - begin) * split_units, item.units);
    if (last <= first)
        return;
    const int first_own = own_begin(first, last), last_own = min(own_end(first, last), first_own + cfg::stages);
    const int first_key = (item.first_unit + first_own) * shape::unit_keys;
    const int keys = min((item.first_unit + last_own) * shape::unit_keys, item.sequence.kv_end) - first_key;
    constexpr int row_bytes = cfg::d_head * element_bytes, row_lines = ceil_div(row_bytes, cache_line_bytes);
#pragma unroll 1
    for (int i = threadIdx.x; i < keys * row_lines; i += threads) {
        const int key = first_key + i / row_lines, offset = i % row_lines * cache_line_bytes;
        const int place = item.sequence.place_of(args, key, LengthLoad{});
        if (place < 0)
            continue;
        if (offset < tensor_columns * element_bytes)
            prefetch_line_to_L2(item.sequence.row_in(args, place, args.forward.K, item.head, key) + offset);
        if (offset < value_columns * element_bytes)
            prefetch_line_to_L2(item.sequence.row_in(args, place, args.forward.V, item.head, key) + offset);
    }
}

// The share of a thread block, when the grids before have ended. `prepare` is called before.
template <int threads, class Prepare> DEVICE Share begin(const DecodeArguments &args, const Prepare &prepare) {
    Start start = find_start<threads>(args);
    if (begins_early && reads_lengths(args)) {
        prefetch_keys<threads>(args, start);
        prepare();
        wait_for_grids_before();
        // Only where the share begins is confirmed: what its items are is read again.
        if (!all_are_equal(args)) {
            const OwnPairs<threads> pairs(args.forward.batches * args.row_tiles);
            if (named_barrier_any(0, threads, start.summed != pairs.places(args)))
                start = find_start<threads>(args);
        }
        return Share(args, start);
    }
    const Share share(args, start);
    if constexpr (begins_early)
        prefetch_keys<threads>(args, start);
    prepare();
    wait_for_grids_before();
    return share;
}
