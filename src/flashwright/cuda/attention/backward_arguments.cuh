// What a launch passes to the kernels of the backward, by value. `kernels/backward/launch.py` packs the same struct.
#pragma once
#include "attention/arguments.cuh"

struct BackwardArguments {
    ForwardArguments forward; // the forward that is differentiated: its tensors, log-sum-exp, lengths, mask and scales
    TensorView dO, dQ, dK, dV;
    // Gradients of the log-sum-exp, with the strides of `forward.lse`; null: there are none.
    const float *dlse;
    // What the backward keeps of each row of Q, in fp32, for each head one after the other: `padded_rows` rows, of which
    // those of a sequence begin with a whole block.
    float *row_lse;  // log-sum-exps in powers of two; infinite where a row attends to nothing, or does not exist
    float *row_dot;  // dot products of O and dO, less the gradient of the log-sum-exp
    float *dQ_sums;  // `d_head` columns, in the order of `DQSums`
    int *turns;      // how many blocks of keys have added to each block of dQ, where they do so in order
    int padded_rows;
    int kv_blocks; // of a sequence, or slots of all packed ones
    // Heads of K and V, of all batches, whose blocks of keys take turns at thread blocks, where they do.
    int pairs_at_once;
    // What gradients of scores are multiplied by to be those of products q·k.
    float gradient_scale;
    uint64 *tiles_taken; // by persistent thread blocks, beyond the first of each
};
