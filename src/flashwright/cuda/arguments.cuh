// What a launch passes to the kernel, by value. `launch_arguments.py` packs the same struct.
#pragma once
#include "types.cuh"

// A (batch, head, row, column) tensor of 16-bit elements with contiguous columns; strides in elements.
struct TensorView {
    char *data;
    int64 batch_stride, head_stride, row_stride;
};

// The first row of a (batch, head) pair.
DEVICE char *head_start(const TensorView &tensor, int batch, int head) {
    return tensor.data + 2 * (batch * tensor.batch_stride + head * tensor.head_stride);
}

struct ForwardArguments {
    TensorView Q, K, V, O;
    float *lse;
    int64 lse_batch_stride, lse_head_stride;
    // Variable lengths: sequence b is rows starts[b] … starts[b + 1] - 1 of tensors without a batch dimension.
    const int *q_starts, *kv_starts;
    // Rows of the tensors: the lengths of all sequences, unless these vary.
    int q_length, kv_length;
    int q_heads_per_kv_head;
    // Row i may look at the keys i + window_left … i + window_right; if the mask is aligned to the bottom right, of
    // the keys' end: shifted by the keys' lead over the queries.
    int window_left, window_right, align_bottom_right;
    // Scores are multiplied by it; after soft-capping if there is any.
    float softmax_scale;
    // Soft-capping: scores become tanh(score · capping_scale / (2·log2(e))).
    float capping_scale;
};
