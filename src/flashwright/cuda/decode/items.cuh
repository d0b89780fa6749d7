// What there is to do, and which thread block does what of it.
//
// An item is a tile of packed rows of one sequence and one head of K and V: the rows of all heads of Q that share the
// head, one query after the other. Its keys are visited in units; a split is one unit, or a fixed number of them. The
// items stand in one line, of which every thread block has an equal share. An item has a place for each of its splits,
// behind some places for what it costs to begin and to end it. A thread block's part of an item's splits is a segment. An
// item with several segments is combined by whoever arrives last.
//
// Items that are known to be equal are dealt whole first, one to each thread block in every round: nothing is combined,
// and thread blocks that run side by side read the keys of neighbouring heads. The line has those that no round is left
// for.
//
// Lengths are read here, on the device: a captured launch stays right, and balanced, as caches grow.
#pragma once
#include "attention/decode_arguments.cuh"
#include "attention/ranges.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"

struct Item {
    int pair, head = 0; // of (sequence, row tile) pairs; of K and V
    CachedSequence sequence;
    int first_row, rows; // packed rows of the tile, and how many there are from the first to the sequence's last
    Window window;       // of keys counted from `kv_begin`
    int first_unit, units;

    DEVICE Item(const DecodeArguments &args, int pair)
        : pair(pair), sequence(args, batch(args)), first_row(args.row_tiles == 1 ? 0 : row_tile(args) * cfg::B_r),
          rows(sequence.q_length * group(args) - first_row),
          window(args.forward.window_left, args.forward.window_right, args.forward.align_bottom_right, sequence.q_length,
                 sequence.kv_end - sequence.kv_begin) {
        // Divisions take long at the beginning of a kernel: none where one tile has all rows.
        const bool has_all_rows = first_row + cfg::B_r >= sequence.q_length * group(args);
        const int first_query = first_row == 0 ? 0 : first_row / group(args);
        const int last_query = has_all_rows ? sequence.q_length - 1 : (first_row + cfg::B_r - 1) / group(args);
        const int first_key = sequence.kv_begin + window.first_key(first_query);
        const int last_key = sequence.kv_begin + window.last_key(last_query);
        first_unit = first_key / shape::unit_keys;
        // An item without keys has a unit too: its rows are written.
        units = rows <= 0 ? 0 : max(1, last_key / shape::unit_keys + 1 - first_unit);
    }

    // Moves on to an item that is known to be equal, of a sequence that has one tile.
    DEVICE void move_to_equal(const DecodeArguments &args, int sequence_number, int kv_head) {
        pair = sequence_number;
        head = kv_head;
        sequence.find_cache(args, sequence_number);
    }

    // The row tiles of a sequence stand next to each other in the line, or those of all sequences do that have the same
    // number: then thread blocks that read the same keys do so at about the same time, and find them in the L2 cache.
    DEVICE int batch(const DecodeArguments &args) const {
        return args.row_tiles == 1 ? pair : cfg::tiles_apart ? pair % args.forward.batches : pair / args.row_tiles;
    }
    DEVICE int row_tile(const DecodeArguments &args) const {
        return cfg::tiles_apart ? pair / args.forward.batches : pair % args.row_tiles;
    }
    static DEVICE int group(const DecodeArguments &args) {
        return variant::grouped_heads ? args.forward.q_heads_per_kv_head : 1;
    }
    // Places in the line: before the splits, and for each of them. An item without rows has none.
    DEVICE int places(const DecodeArguments &args) const {
        if (rows <= 0)
            return 0;
        return args.item_overhead + (args.split_units ? ceil_div(units, args.split_units) : units);
    }

    // Rows of the tile that exist.
    DEVICE int tile_rows() const { return min(cfg::B_r, rows); }
    // The row of a tensor of Q's shape that belongs to a packed row of the tile.
    DEVICE int query(const DecodeArguments &args, int row) const {
        return sequence.q_length == 1 ? 0 : (first_row + row) / group(args);
    }
    DEVICE int q_head(const DecodeArguments &args, int row) const {
        return head * group(args) + first_row + row - query(args, row) * group(args);
    }
    DEVICE char *row_of(const DecodeArguments &args, const TensorView &tensor, int row) const {
        return head_start(tensor, variant::variable_lengths ? 0 : batch(args), q_head(args, row)) +
               (sequence.q_start + query(args, row)) * tensor.row_stride * element_bytes;
    }
};

// The line of items, and the shares that thread blocks have of it.
struct Line {
    uint32 places, blocks, share, rest; // of as many thread blocks as have one: places / blocks, and what that leaves

    DEVICE Line(const DecodeArguments &args, uint32 places)
        : places(places), blocks(max(1u, min((uint32)args.line_blocks, places))), share(places / blocks),
          rest(places - share * blocks) {}

    DEVICE uint32 begin(uint32 block) const {
        block = min(block, blocks);
        return block * share + (rest == 0 ? 0 : block * rest / blocks);
    }
    // The thread block that has a place.
    DEVICE uint32 block_of(uint32 place) const {
        uint32 block = min((uint32)__fdividef((float)place * blocks, places), blocks - 1);
        while (begin(block) > place) // the quotient was rounded
            --block;
        while (begin(block + 1) <= place)
            ++block;
        return block;
    }
};

// Where a thread block begins.
struct Start {
    Line line;
    int pair;           // which has its first place
    uint32 first_place; // of that pair, in the line
};

// The numbers of pages that a thread block reads if all sequences are as long as they can be: brought into L2 while their
// lengths are read, which say where it begins.
template <int threads> struct LikelyPages {
    const int *numbers;
    int count;

    DEVICE LikelyPages(const DecodeArguments &args, int pairs) : count(0) {
        if (args.page_table) {
            const int pair = min(blockIdx.x * pairs / args.line_blocks, pairs - 1);
            numbers = args.page_table + pair / args.row_tiles * args.page_table_stride;
            count = args.forward.kv_length / args.page_rows;
        }
    }
    DEVICE void prefetch() const {
        constexpr int of_sector = 8;
        for (int i = threadIdx.x * of_sector; i < count; i += threads * of_sector)
            prefetch_L2(numbers + i);
    }
};

// All threads find it together, each with some of the pairs. Where nothing is read for it, it is found while the grid
// before still runs.
template <int threads> DEVICE Start find_start(const DecodeArguments &args) {
    const int pairs = args.forward.batches * args.row_tiles;
    if (variant::variable_lengths || args.kv_lengths || args.kv_begins || args.cache_index) {
        const LikelyPages<threads> pages(args, pairs);
        wait_for_grids_before();
        pages.prefetch();
    }
    if (!variant::variable_lengths && args.row_tiles == 1 && !args.kv_lengths && !args.kv_begins) { // all are equal
        const uint32 of_item = Item(args, 0).places(args), places = of_item * args.kv_heads;
        const Line line(args, places * pairs - (cfg::deals_items ? of_item * args.whole_items : 0));
        if (cfg::deals_items && args.whole_items) // each segment finds its item by itself
            return {line, 0, 0};
        const int pair = pairs == 1 ? 0 : min((int)(line.begin(blockIdx.x) / places), pairs - 1);
        return {line, pair, pair * places};
    }
    constexpr int warps = threads / warp_threads;
    __shared__ uint32 of_warps[warps], first_place;
    __shared__ int first_pair;
    const int per_thread = ceil_div(pairs, threads);
    const int first = min((int)threadIdx.x * per_thread, pairs), last = min(first + per_thread, pairs);
    uint32 own = 0;
#pragma unroll 1
    for (int pair = first; pair < last; ++pair)
        own += Item(args, pair).places(args) * args.kv_heads;

    // The sum of all threads up to this one: within the warp, then over the warps before.
    uint32 up_to = own;
#pragma unroll
    for (int distance = 1; distance < warp_threads; distance *= 2) {
        const uint32 below = __shfl_up_sync(all_lanes, up_to, distance);
        if (lane_index() >= distance)
            up_to += below;
    }
    if (lane_index() == warp_threads - 1)
        of_warps[threadIdx.x / warp_threads] = up_to;
    __syncthreads(); // the warps' sums are there
    uint32 total = 0;
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) {
        if (warp < (int)threadIdx.x / warp_threads)
            up_to += of_warps[warp];
        total += of_warps[warp];
    }
    const Line line(args, total);
    const uint32 wanted = line.begin(blockIdx.x);
    if (wanted == line.begin(blockIdx.x + 1)) // the same for all threads
        return {line, 0, wanted};
    uint32 place = up_to - own;
    if (place <= wanted && wanted < up_to)
#pragma unroll 1
        for (int pair = first; pair < last; ++pair) {
            const uint32 places = Item(args, pair).places(args) * args.kv_heads;
            if (wanted < place + places) {
                first_pair = pair;
                first_place = place;
                break;
            }
            place += places;
        }
    __syncthreads(); // the one thread that found it has written it
    return {line, first_pair, first_place};
}

// The segments of an item, in the order of its keys: each has a slot for its parts.
struct Segments {
    uint32 first_slot, other_slots, step; // of the first; of segment i > 0: other_slots + i * step
    int count;

    Segments() = default;
    // Of an item whose splits have the places [first, last) of the line.
    DEVICE Segments(const DecodeArguments &args, const Line &line, uint32 first, uint32 last) {
        if (args.split_units) { // each split is one
            first_slot = other_slots = first;
            step = 1;
            count = last - first;
        } else { // a thread block has parts of two items at most: of its first, and of its last
            const uint32 block = line.block_of(first);
            first_slot = 2 * block + (line.begin(block) < first);
            other_slots = 2 * block;
            step = 2;
            count = line.block_of(last - 1) - block + 1;
        }
    }
    DEVICE uint32 slot(int index) const { return index == 0 ? first_slot : other_slots + index * step; }
};

// A thread block's share of what there is to do, segment after segment: of every round an item, then its share of the
// line. It begins with the first.
struct Share {
    Line line;
    uint32 end;
    uint32 first_of_pair; // the first place of the item's pair
    uint32 place;         // the next to look at
    int whole;            // the item of the next round

    // The segment: the units [first, last) of an item, of whose splits the places are [first_split, item_end).
    Item item;
    uint32 begin, first_split, item_end;
    int first, last;

    DEVICE Share(const DecodeArguments &args, const Start &start)
        : line(start.line), end(line.begin(blockIdx.x + 1)), first_of_pair(start.first_place),
          place(line.begin(blockIdx.x)), whole((int)blockIdx.x < args.round_blocks ? blockIdx.x : args.whole_items),
          item(args, start.pair) {
        next(args);
    }

    // Moves on to the next segment, if there is one.
    DEVICE void next(const DecodeArguments &args) {
        if (cfg::deals_items && args.whole_items) {
            next_of_equal_items(args);
            return;
        }
        while (place < end) {
            const uint32 places = item.places(args);
            if (place >= first_of_pair + places * args.kv_heads) { // pairs without rows have no places
                first_of_pair += places * args.kv_heads;
                item = Item(args, item.pair + 1);
                continue;
            }
            item.head = (place - first_of_pair) / places;
            item_end = first_of_pair + (item.head + 1) * places;
            first_split = item_end - places + args.item_overhead;
            begin = max(place, first_split);
            place = args.split_units ? begin + 1 : min(item_end, end);
            const int split_units = max(1, args.split_units);
            first = (begin - first_split) * split_units;
            last = min((int)(place - first_split) * split_units, item.units);
            if (begin < end) // or else only what stands before the splits is in the share
                return;
        }
        first = last = 0;
    }
    // Whether there is a segment.
    DEVICE bool is_some() const { return first < last; }

    // Whether the thread block has nothing else to do, once the rounds are over.
    DEVICE bool is_last() const { return place >= end; }
    DEVICE bool is_whole_item() const { return begin == first_split && place == item_end; }
    // Where the parts of this segment lie.
    DEVICE uint32 slot(const DecodeArguments &args) const {
        return args.split_units ? begin : 2 * blockIdx.x + (line.begin(blockIdx.x) < begin);
    }

  private:
    // Items are numbered sequence by sequence, those of a sequence by their heads. They have places for their units alone.
    DEVICE void next_of_equal_items(const DecodeArguments &args) {
        const bool is_dealt = whole < args.whole_items;
        if (!is_dealt && place >= end) {
            first = last = 0;
            return;
        }
        const uint32 units = item.units, in_line = is_dealt ? 0 : place / units;
        const int index = is_dealt ? whole : args.whole_items + (int)in_line;
        item.move_to_equal(args, index / args.kv_heads, index % args.kv_heads);
        if (is_dealt) { // it has no place in the line
            whole += args.round_blocks;
            begin = first_split = first = 0;
            item_end = place;
            last = units;
            return;
        }
        first_split = in_line * units;
        item_end = first_split + units;
        begin = place;
        place = min(item_end, end);
        first = begin - first_split;
        last = place - first_split;
    }
};
