// What a launch passes to the kernel, by value. `kernels/forward/launch.py` packs the same struct.
#pragma once
#include "types.cuh"

// A (batch, head, row, column) tensor with contiguous columns; strides in elements of 16 bits.
struct TensorView {
    char *data;
    int64 batch_stride, head_stride, row_stride;
};

// The first row of a (batch, head) pair.
DEVICE char *head_start(const TensorView &tensor, int batch, int head) {
    return tensor.data + element_bytes * (batch * tensor.batch_stride + head * tensor.head_stride);
}

// Bytes from a row to the next: known at compile time, or the tensor's own where `static_row_stride` is 0.
template <int static_row_stride> DEVICE int64 row_stride_bytes(const TensorView &tensor) {
    return element_bytes * (static_row_stride ? static_row_stride : tensor.row_stride);
}

struct ForwardArguments {
    TensorView Q, K, V, O;
    float *lse;
    int64 lse_batch_stride, lse_head_stride;
    // Variable lengths: sequence b is rows starts[b] … starts[b + 1] - 1 of tensors without a batch dimension.
    const int *q_starts, *kv_starts;
    // Rows of the tensors: the lengths of all sequences, unless these vary.
    int q_length, kv_length;
    int q_heads, q_heads_per_kv_head;
    // Blocks of query rows of each sequence, or slots of all packed ones; sequences.
    int q_blocks, batches;
    // Row i attends to the keys i + window_left … i + window_right; if the mask is aligned to the bottom right, shifted
    // by kv_length - q_length of its sequence.
    int window_left, window_right, align_bottom_right;
    // Scores are multiplied by it, after the soft cap.
    float softmax_scale;
    // Soft-capping: scores become tanh(score · capping_scale / (2·log2(e))).
    float capping_scale;
};
