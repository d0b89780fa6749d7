// Which rows of which sequence a thread block computes, and which KV blocks it visits for them.
#pragma once
#include "arguments.cuh"

struct Sequence {
    int q_length, kv_length;
    int64 q_start, kv_start; // of its rows, in tensors that hold all sequences one after the other

    DEVICE Sequence(const ForwardArguments &args, int batch)
        : q_length(args.q_length), kv_length(args.kv_length), q_start(0), kv_start(0) {
        if constexpr (variant::variable_lengths) {
            // Clamped to the tensors' rows, so that no starts, however wrong, lead out of them.
            const int q_first = clamp(args.q_starts[batch], 0, args.q_length);
            const int kv_first = clamp(args.kv_starts[batch], 0, args.kv_length);
            q_length = clamp(args.q_starts[batch + 1], q_first, args.q_length) - q_first;
            kv_length = clamp(args.kv_starts[batch + 1], kv_first, args.kv_length) - kv_first;
            q_start = q_first;
            kv_start = kv_first;
        }
    }

  private:
    static DEVICE int clamp(int value, int least, int most) { return min(max(value, least), most); }
};

// The keys that each query row may look at: first_key(row) … last_key(row), both included.
struct Window {
    int left, right, kv_length;

    DEVICE Window(const ForwardArguments &args, const Sequence &sequence) : kv_length(sequence.kv_length) {
        int shift = args.align_bottom_right ? sequence.kv_length - sequence.q_length : 0;
        left = args.window_left + shift;
        right = args.window_right + shift;
    }

    DEVICE int first_key(int row) const { return variant::masks_left ? max(row + left, 0) : 0; }
    DEVICE int last_key(int row) const {
        return variant::masks_right ? min(row + right, kv_length - 1) : kv_length - 1;
    }
};

// The KV blocks that hold a key for any of a thread block's rows, in the order in which they are visited.
struct KVRange {
    int first_block, count;

    DEVICE KVRange(const Window &window, int q_row, int last_q_row) {
        first_block = window.first_key(q_row) / cfg::B_c;
        count = (window.last_key(last_q_row) + cfg::B_c) / cfg::B_c - first_block;
    }

    DEVICE int first_row(int step) const {
        return (first_block + (cfg::reversed_kv ? count - 1 - step : step)) * cfg::B_c;
    }
};
