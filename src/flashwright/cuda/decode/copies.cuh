// Copies of rows from global to shared memory: of a cache, in any place, and of packed queries.
#pragma once
#include "decode/items.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/opaque.cuh"
#include "tile/layout.cuh"

constexpr int tensor_columns = variant::pads_columns ? variant::head_dim : cfg::d_head;
constexpr int value_columns = variant::value_head_dim ? variant::value_head_dim : tensor_columns; // of V and O
constexpr int row_vectors = cfg::d_head / vector_elements;
// Keys that lie in one page: pages have a multiple of so many.
constexpr int key_group = 16;

// The keys and values of a group in its place. What does not exist becomes zero: no other sequence's keys are read instead.
struct KeyGroup {
    const char *K, *V; // the first row of each
    int exist;         // keys that exist; none if zero or less
};

// Where the groups of keys lie that a warp copies in the units of a segment, one after the other. Each lane finds the place
// of one of the next groups, and reads its page's number as many units before: no unit waits for the page table, or divides
// by the keys of a page.
template <int groups, int group_distance, bool has_values = true> struct KeyPlaces {
    static constexpr int units = warp_threads / groups; // whose groups have a lane each

    const char *K, *V; // of the lane's group; null: it has no place
    int page;          // of the lane's group in as many units, as the page table has it; -1: it has no key
    int unit;          // which of the units is copied

    // Before the first unit, whose first key of the warp is given.
    DEVICE void begin(const DecodeArguments &args, const Item &item, int first_key) {
        look_up(args, item, first_key);
        unit = units - 1;
    }
    // Moves on to a unit, the first of as many as are left.
    DEVICE void move_on(const DecodeArguments &args, const Item &item, int first_key, int left) {
        unit = unit + 1 == units ? 0 : unit + 1;
        if (unit > 0)
            return;
        locate(args, item, first_key);
        if (left > units)
            look_up(args, item, first_key + units * shape::unit_keys);
    }
    DEVICE KeyGroup group(const Item &item, int group, int first_key) const {
        const int lane = unit * groups + group;
        KeyGroup found{of_lane(K, lane), nullptr, 0};
        if constexpr (has_values)
            found.V = of_lane(V, lane);
        if (found.K)
            found.exist = item.sequence.kv_end - first_key - group * group_distance;
        return found;
    }

  private:
    DEVICE void look_up(const DecodeArguments &args, const Item &item, int first_key) {
        const int key = own_key(first_key);
        page = key < item.sequence.kv_end ? item.sequence.page_of(args, key) : -1;
    }
    DEVICE void locate(const DecodeArguments &args, const Item &item, int first_key) {
        const int key = own_key(first_key);
        K = V = nullptr;
        if (CachedSequence::existing(args, page) < 0)
            return;
        const int row = item.sequence.row_of(args, key);
        K = CachedSequence::row_in(page, args.forward.K, item.head, row);
        if (has_values)
            V = CachedSequence::row_in(page, args.forward.V, item.head, row);
    }
    static DEVICE int own_key(int first_key) {
        const int lane = lane_index();
        return first_key + lane / groups * shape::unit_keys + lane % groups * group_distance;
    }
    static DEVICE const char *of_lane(const char *place, int lane) {
        return (const char *)__shfl_sync(all_lanes, (uint64)place, lane);
    }
};

// Starts the copies of one of `threads` threads, of `rows` rows that `source` points at into those from `first_row` on of a
// tile: of `vectors` vectors of each, of which the tensor has `tensor_vectors`, and of as many rows as `exist`. The others
// become zero.
template <int tile_rows, int threads, int rows, int vectors, int tensor_vectors>
DEVICE void copy_rows(const char *source, int exist, const TensorView &tensor, uint32 tile, int first_row, int thread) {
    constexpr int all = rows * vectors, passes = ceil_div(all, threads), pass_rows = threads / vectors;
    const int64 row_bytes = tensor.row_stride * element_bytes;
    if (exist >= rows && vectors <= tensor_vectors) {
        if constexpr (threads % vectors == 0 && (pass_rows & (pass_rows - 1)) == 0) {
            // A thread has the same column in every pass, and rows whose numbers have other bits than its first one's:
            // so have the offsets of both, and what the swizzle does to each adds up.
            const int row = thread / vectors, vector = thread % vectors;
            const uint32 panel = tile + vector / layout::panel_vectors * (tile_rows * layout::row_bytes) +
                                 first_row * layout::row_bytes;
            const uint32 first = swizzle(row * layout::row_bytes + vector % layout::panel_vectors * vector_bytes);
            const char *from = source + row * row_bytes + vector * vector_bytes;
#pragma unroll
            for (int pass = 0; pass < passes; ++pass) {
                const uint32 down = pass * pass_rows * layout::row_bytes;
                if (all % threads == 0 || row + pass * pass_rows < rows)
                    cp_async_16B(panel + (first ^ swizzle(down) ^ down) + down, from);
                from += pass_rows * row_bytes;
            }
        } else {
            const int own = computed_from_here((uint32)thread); // or else all passes' offsets are kept in registers
#pragma unroll
            for (int pass = 0; pass < passes; ++pass) {
                const int i = pass * threads + own, row = i / vectors, vector = i % vectors;
                if (all % threads == 0 || i < all)
                    cp_async_16B(tile + vector_offset<tile_rows>(first_row + row, vector),
                                 source + row * row_bytes + vector * vector_bytes);
            }
        }
    } else { // a loop, for few groups are not complete
#pragma unroll 1
        for (int i = thread; i < all; i += threads) {
            const int row = i / vectors, vector = i % vectors;
            const bool exists = row < exist && vector < tensor_vectors;
            cp_async_16B_or_zero(tile + vector_offset<tile_rows>(first_row + row, vector),
                                 exists ? source + row * row_bytes + vector * vector_bytes : tensor.data, exists);
        }
    }
}

// Starts the copies of one of `threads` threads, of an item's packed rows from `first_row` on into a tile. What does not
// exist becomes zero.
template <int tile_rows, int threads>
DEVICE void copy_Q(const DecodeArguments &args, const Item &item, uint32 tile, int first_row, int thread) {
#pragma unroll 1
    for (int i = thread; i < tile_rows * row_vectors; i += threads) {
        const int row = i / row_vectors, vector = i % row_vectors;
        const bool exists = first_row + row < item.rows && vector < tensor_columns / vector_elements;
        const char *source =
            item.row_of(args, args.forward.Q, exists ? first_row + row : 0) + (exists ? vector : 0) * vector_bytes;
        cp_async_16B_or_zero(tile + vector_offset<tile_rows>(row, vector), source, exists);
    }
}
