// Copies of rows from global to shared memory: of a cache, in any place, and of packed queries.
#pragma once
#include "decode/items.cuh"
#include "ptx/cp_async.cuh"
#include "tile/layout.cuh"

constexpr int tensor_columns = variant::pads_columns ? variant::head_dim : cfg::d_head;
constexpr int value_columns = variant::value_head_dim ? variant::value_head_dim : tensor_columns; // of V and O
constexpr int row_vectors = cfg::d_head / vector_elements;
// Keys that lie in one page: pages have a multiple of so many.
constexpr int key_group = 16;

// The page of a group of keys, to be read ahead of their copies; -1 if there are none. Whether it exists is asked when it is
// used: whoever asks at once waits for the page table.
DEVICE int page_of_group(const DecodeArguments &args, const Item &item, int key) {
    return key < item.sequence.kv_end ? item.sequence.page_of(args, key) : -1;
}

// A group of keys in its place. Keys without one are zero: no other sequence's are read instead.
struct KeyGroup {
    const DecodeArguments &args;
    const Item &item;
    int key, place;
    int exist; // keys of the group

    DEVICE KeyGroup(const DecodeArguments &args, const Item &item, int first_key, int page) : args(args), item(item) {
        const bool is_there = CachedSequence::existing(args, page) >= 0;
        key = is_there ? first_key : 0; // an address to take in place of none
        place = is_there ? page : 0;
        exist = is_there ? item.sequence.kv_end - first_key : 0;
    }

    // Starts the copies of one of `threads` threads, of a tensor's rows into those from `first_row` on of a tile. Columns
    // that the tensor does not have become zero.
    template <int tile_rows, int threads, int columns>
    DEVICE void copy(uint32 tile, const TensorView &tensor, int first_row, int thread) const {
        constexpr int vectors = key_group * row_vectors;
        const char *source = item.sequence.row_in(args, place, tensor, item.head, key);
        if (exist >= key_group && columns == cfg::d_head) {
#pragma unroll
            for (int pass = 0; pass < ceil_div(vectors, threads); ++pass) {
                const int i = pass * threads + thread;
                if (vectors % threads == 0 || i < vectors)
                    cp_async_16B(target<tile_rows>(tile, first_row, i), source + offset(tensor, i));
            }
        } else { // a loop, for few groups are not complete
#pragma unroll 1
            for (int i = thread; i < vectors; i += threads) {
                const bool exists = i / row_vectors < exist && i % row_vectors < columns / vector_elements;
                cp_async_16B_or_zero(target<tile_rows>(tile, first_row, i), source + (exists ? offset(tensor, i) : 0),
                                     exists);
            }
        }
    }

  private:
    // Of vector i of the group, in a tile and in a tensor.
    template <int tile_rows> static DEVICE uint32 target(uint32 tile, int first_row, int i) {
        return tile + vector_offset<tile_rows>(first_row + i / row_vectors, i % row_vectors);
    }
    static DEVICE int64 offset(const TensorView &tensor, int i) {
        return i / row_vectors * tensor.row_stride * element_bytes + i % row_vectors * vector_bytes;
    }
};

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
