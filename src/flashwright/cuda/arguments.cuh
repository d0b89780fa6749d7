// What a launch passes to the kernel, by value. `runtime.py` packs the same struct.
#pragma once
#include "types.cuh"

// A (batch, head, row, column) tensor of 16-bit elements with contiguous columns; strides in elements.
struct TensorView {
    char *data;
    int64 batch_stride, head_stride, row_stride;
};

struct ForwardArguments {
    TensorView Q, K, V, O;
    float *lse; // (batch, head, row), contiguous
    int q_length, kv_length;
    float softmax_scale;
};
