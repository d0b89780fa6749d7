// The warps that share the rows of a softmax: one, or two that have half of the keys each.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/accumulator.cuh"

// A warp that has its rows for itself, and nobody to exchange anything with.
struct OneWarp {
    static constexpr int warps = 1;

    DEVICE void sync() const { __syncwarp(); }
    DEVICE bool any(bool value) const { return __any_sync(all_lanes, value); }
    template <class Maxima> DEVICE void join(Maxima &) const {}
    template <class Operand> DEVICE void send(Operand &) const {}
    template <class Operand> DEVICE void receive(Operand &) const {}
};

// Two neighbouring warps. They agree on the references of their rows, and give each other their exponentials: a lane of
// one has of an operand in registers what the same lane of the other needs.
//
// `vectors` 16-byte vectors of a lane are an operand. Barrier 0 is the thread block's; a pair has three: one that both
// wait at, and one of each warp, at which it says that its operand is there, and the other waits for it.
template <int row_tiles, int vectors> struct PairOfWarps {
    static constexpr int warps = 2, threads = warps * warp_threads, barriers = 3;
    static constexpr int operand_bytes = vectors * warp_threads * vector_bytes;
    static constexpr int maxima_bytes = row_tiles * mma_rows * (int)sizeof(float);
    static constexpr int shared_bytes = warps * (operand_bytes + maxima_bytes);

    uint32 shared; // `shared_bytes` that are the pair's
    int pair, side;

    DEVICE PairOfWarps(uint32 shared, int warp) : shared(shared), pair(warp / warps), side(warp % warps) {}

    DEVICE void sync() const { named_barrier_sync(common_barrier(), threads); }
    // After this both have read what they last received: what was sent may be replaced.
    DEVICE bool any(bool value) const { return named_barrier_any(common_barrier(), threads, value); }

    // Maxima of rows over one warp's keys become those over both.
    DEVICE void join(float (&maximum)[row_tiles][halves]) const {
        const uint32 own = maxima(side), others = maxima(1 - side);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                if (leads_quad())
                    store_shared_float(own + accumulator_row(m, half) * (int)sizeof(float), maximum[m][half]);
        sync(); // both have stored; neither stores again before both have come to the next `any`
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                maximum[m][half] =
                    fmaxf(maximum[m][half], load_shared_float(others + accumulator_row(m, half) * (int)sizeof(float)));
    }

    template <class Operand> DEVICE void send(Operand &operand) const {
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            const auto &block = operand.nth(i);
            store_shared_16B(place(side, i), {block[0], block[1], block[2], block[3]});
        }
        named_barrier_arrive(own_barrier(side), threads);
    }

    template <class Operand> DEVICE void receive(Operand &operand) const {
        named_barrier_sync(own_barrier(1 - side), threads);
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            const Vector16B v = load_shared_16B(place(1 - side, i));
#pragma unroll
            for (int word = 0; word < 4; ++word)
                operand.nth(i)[word] = v.words[word];
        }
    }

  private:
    DEVICE int common_barrier() const { return 1 + barriers * pair; }
    DEVICE int own_barrier(int of_side) const { return common_barrier() + 1 + of_side; }
    DEVICE uint32 maxima(int of_side) const { return shared + warps * operand_bytes + of_side * maxima_bytes; }
    DEVICE uint32 place(int of_side, int vector) const {
        return shared + of_side * operand_bytes + (vector * warp_threads + lane_index()) * vector_bytes;
    }
};
