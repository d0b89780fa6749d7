// Where a sequence's rows lie, and its keys and values.
#pragma once
#include "attention/arguments.cuh"

DEVICE int clamp(int value, int least, int most) { return min(max(value, least), most); }

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
};

// Rows of packed tensors before the first sequence and behind the last. Usually there are none.
struct RowsOfNoSequence {
    int before, behind, count;

    DEVICE RowsOfNoSequence(const int *starts, int sequences, int rows)
        : before(clamp(starts[0], 0, rows)), behind(clamp(starts[sequences], before, rows)),
          count(before + rows - behind) {}
    DEVICE int row(int index) const { return index < before ? index : behind + index - before; }
};

// The head of K and V that a head of Q attends to.
DEVICE int kv_head(const ForwardArguments &args, int q_head) {
    return variant::grouped_heads ? q_head / args.q_heads_per_kv_head : q_head;
}
