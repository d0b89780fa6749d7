// The sums of dQ in global memory, in fp32: every block of keys adds its share to the blocks of queries it visits.
//
// A block of queries is one stretch of memory, in the order in which threads hold its accumulators, so that a warp's
// additions fall into whole lines. Groups of `group_warps` warps share its `rows` × `columns`: the warps of a group stand
// along its rows, groups in `column_parts` along its columns, then along its rows. In vectors, a group's part of the
// block is one stretch too.
#pragma once
#include "attention/key_tile.cuh"
#include "ptx/atomics.cuh"
#include "ptx/memory.cuh"
#include "ptx/reduce.cuh"
#include "tile/accumulator.cuh"

template <int rows, int columns, int threads, int group_warps, int column_parts> struct DQSums {
    static constexpr bool in_vectors = has_vector_reductions;
    static constexpr int warps = threads / warp_threads;
    static constexpr int row_tiles = rows * column_parts / (warps * mma_rows);
    static constexpr int column_tiles = columns / column_parts / mma_columns;
    using Accumulator = float[row_tiles][column_tiles][accumulator_values];

    // The rows of a warp, and its columns.
    static DEVICE int first_row(int warp) {
        const int group = warp / group_warps;
        return (group / column_parts * group_warps + warp % group_warps) * row_tiles * mma_rows;
    }
    static DEVICE int first_column(int warp) { return column_part(warp) * column_tiles * mma_columns; }
    static DEVICE int column_part(int warp) { return warp / group_warps % column_parts; }

    // Adds a thread's accumulators, or one of `parts` of them, to the block whose sums begin at `block`. Of one address,
    // additions take the fewest registers and are issued without a pause. Apart, the address of each is computed before it:
    // where nothing is spilled for it and all are added at once, the Ampere family is up to 7% faster so on an H200.
    template <bool of_one_address = true, int part = 0, int parts = 1>
    static DEVICE void add(float *block, const Accumulator &c, int thread = threadIdx.x) {
        constexpr int tiles = row_tiles * column_tiles;
        float *const own = block + first_offset(thread);
        const auto place = [&](int m, int n, int i) {
            return of_one_address ? own + distance(m, n, i) : block + offset(thread, m, n, i);
        };
#pragma unroll
        for (int tile = part * tiles / parts; tile < (part + 1) * tiles / parts; ++tile) {
            const int m = tile / column_tiles, n = tile % column_tiles;
            if constexpr (in_vectors)
                reduce_add_global_16B(place(m, n, 0), c[m][n]);
            else
#pragma unroll
                for (int i = 0; i < accumulator_values; ++i)
                    reduce_add_global(place(m, n, i), c[m][n][i]);
        }
    }

    // The same where nothing has been added yet: what lies there is not read.
    static DEVICE void put(float *block, const Accumulator &c, int thread) {
        static_assert(in_vectors);
        float *const own = block + first_offset(thread);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int n = 0; n < column_tiles; ++n)
                store_global_16B(own + distance(m, n, 0), as_vector(c[m][n]));
    }
    // The other way: adds the sums to a thread's accumulators.
    static DEVICE void collect(Accumulator &c, const float *block, int thread) {
        static_assert(in_vectors);
        const float *const own = block + first_offset(thread);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
            Vector16B sums[column_tiles];
#pragma unroll
            for (int n = 0; n < column_tiles; ++n)
                sums[n] = load_global_16B(own + distance(m, n, 0));
#pragma unroll
            for (int n = 0; n < column_tiles; ++n)
#pragma unroll
                for (int i = 0; i < accumulator_values; ++i)
                    c[m][n][i] += __uint_as_float(sums[n].words[i]);
        }
    }

    // Writes a thread's accumulators to shared memory, where they lie as in the sums.
    static DEVICE void store(uint32 shared, const Accumulator &c) {
        const uint32 own = shared + first_offset(threadIdx.x) * sizeof(float);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int n = 0; n < column_tiles; ++n)
                store_shared_16B(own + distance(m, n, 0) * sizeof(float), as_vector(c[m][n]));
    }
    static DEVICE Vector16B as_vector(const float (&values)[accumulator_values]) {
        Vector16B v;
#pragma unroll
        for (int i = 0; i < accumulator_values; ++i)
            v.words[i] = __float_as_uint(values[i]);
        return v;
    }

    // Where an accumulator of a thread lies: its first one's place, and a constant distance from it.
    static constexpr DEVICE int offset(int thread, int m, int n, int i) {
        constexpr int group_threads = group_warps * warp_threads, group_tiles = row_tiles * column_tiles;
        const int tile = m * column_tiles + n, group = thread / group_threads;
        return in_vectors ? ((group * group_tiles + tile) * group_threads + thread % group_threads) * accumulator_values + i
                          : (tile * accumulator_values + i) * threads + thread;
    }
    static constexpr DEVICE int first_offset(int thread) { return offset(thread, 0, 0, 0); }
    static constexpr DEVICE int distance(int m, int n, int i) { return offset(0, m, n, i); }

    // 8 columns of two rows, `fragment` apart, whose accumulators the four lanes of a quad hold together. Neighbouring
    // pieces have neighbouring columns of a row.
    static constexpr int quads = warp_threads / 4;
    static constexpr int pieces = warps * row_tiles * column_tiles * quads;
    struct Piece {
        int warp, quad, m, n;

        static DEVICE Piece at(int number) {
            const int rest = number / (column_tiles * row_tiles);
            return {rest / quads, rest % quads, number / column_tiles % row_tiles, number % column_tiles};
        }
        DEVICE int first_column() const { return DQSums::first_column(warp) + mma_columns * n; }
        DEVICE int row(int half) const { return first_row(warp) + mma_rows * m + fragment * half + quad; }
        // Its four stretches of 16 bytes. In vectors: all that lane j holds; otherwise value j of all lanes.
        DEVICE int stretch(int j) const {
            const int first_thread = warp * warp_threads + quad * 4;
            return in_vectors ? offset(first_thread + j, m, n, 0) : offset(first_thread, m, n, j);
        }
    };
    struct TwoRows {
        float values[halves][mma_columns];
    };
    static DEVICE TwoRows load(const float *block, const Piece &piece) {
        TwoRows rows_;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const Vector16B v = load_global_16B(block + piece.stretch(j));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int lane = in_vectors ? j : i, value = in_vectors ? i : j;
                rows_.values[value / half_values][lane * half_values + value % half_values] =
                    __int_as_float(v.words[i]);
            }
        }
        return rows_;
    }
};

// Blocks of keys take turns at adding to a block of dQ, each once.
//
// In order, so that sums have the same bits in every run: one after the other, from the last that visits it to the first.
// Thread blocks of later keys are launched first: none waits for one that has not begun.
//
// Out of order, turns are numbered as they are asked for, and it matters only who is first and who is last. The first
// writes over what is there, and the others wait for it; the last waits for all others. Whoever waits does so for turns
// that were taken before: none waits in a circle.
//
// Blocks of keys that work together have a turn together. If they add to other columns, each counts for itself.
struct Turn {
    static constexpr int most_together = 2, words = 4; // what is counted of a block of dQ: turns passed on by each, and taken

    int *counters;
    int part; // of those that work together
    int own, last; // numbers from 0 on; the own one is what it is in order

    template <class Work, int block_queries, int block_keys, int together = 1>
    static DEVICE Turn of(const BackwardArguments &args, const Work &work, const QueryStep &step, int part = 0) {
        constexpr int keys_of_turn = together * block_keys;
        const int last_row = min(step.first_row + block_queries, work.sequence.q_length) - 1;
        const int begins = work.window.last_key(last_row) / keys_of_turn;
        const int ends = work.window.first_key(step.first_row) / keys_of_turn;
        const int64 row = padded_row<block_queries>(args, work.sequence, step.head, work.tile.batch) + step.first_row;
        return {counters_of(args, row / block_queries), part, begins - work.tile.kv_block / together, begins - ends};
    }
    static DEVICE int *counters_of(const BackwardArguments &args, int64 block) { return args.turns + words * block; }

    DEVICE bool is_first() const { return own == 0; }
    DEVICE bool is_last() const { return own == last; }

    // Out of order: the number of a turn that nobody else has.
    DEVICE int take() const { return add_relaxed(counters + most_together, 1); }
    // By one thread, before the others are let through a barrier.
    template <bool in_order = true> DEVICE void wait() const {
        const int passed_on = in_order ? own : is_last() ? last : min(own, 1);
        while (load_acquire(counters + part) < passed_on) {
        }
    }
    // By one thread, behind a barrier after all additions.
    template <bool in_order = true> DEVICE void pass() const {
        if constexpr (in_order)
            store_release(counters + part, own + 1);
        else
            add_release(counters + part, 1);
    }
};
