// Rows whose keys come in parts: the output of one part is mixed into those of the parts before it, in fp32.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "types.cuh"

constexpr int merge_threads = 256;

// What a part adds to a row: its weight against all parts before it, and the log-sum-exp of all.
struct Mixture {
    float weight, lse;

    DEVICE Mixture(float known, float added) : weight(0), lse(known) {
        if (added == negative_infinity) // no key of the part is attended to
            return;
        // exp(added) / (exp(known) + exp(added)): 1 if the row had no key before.
        weight = 1 / (1 + expf(known - added));
        const float larger = fmaxf(known, added), smaller = fminf(known, added);
        lse = larger + log1pf(expf(smaller - larger));
    }
};

// Mixes `part` (16-bit) into `sums` and `part_lse` into `lse`, of `rows` rows of `columns` columns, a multiple of 8 up to
// 256. Strides are in elements; columns are contiguous, and so is `part_lse`. A thread has 8 columns of a row, a thread
// block some rows of a head: blockIdx is (rows, head, batch).
template <DType dtype>
__global__ void __launch_bounds__(merge_threads)
    merge_parts(float *sums, int64 sums_batch_stride, int64 sums_head_stride, int64 sums_row_stride, float *lse,
                int64 lse_batch_stride, int64 lse_head_stride, const uint16 *part, int64 part_batch_stride,
                int64 part_head_stride, int64 part_row_stride, const float *part_lse, int64 rows, int64 columns) {
    const int vectors = (int)columns / vector_elements, block_rows = merge_threads / vectors;
    const int row_in_block = threadIdx.x / vectors, column = threadIdx.x % vectors * vector_elements;
    const int64 row = (int64)blockIdx.x * block_rows + row_in_block;
    const int head = blockIdx.y, batch = blockIdx.z;
    const bool takes_part = row_in_block < block_rows && row < rows;

    float *row_lse = lse + batch * lse_batch_stride + head * lse_head_stride + row;
    Mixture mixture(negative_infinity, negative_infinity);
    if (takes_part)
        mixture = Mixture(*row_lse, part_lse[((int64)batch * gridDim.y + head) * rows + row]);
    __syncthreads(); // all threads of a row have read its log-sum-exp, so that one may replace it
    if (!takes_part)
        return;
    if (column == 0)
        *row_lse = mixture.lse;

    float *sum = sums + batch * sums_batch_stride + head * sums_head_stride + row * sums_row_stride + column;
    const Vector16B added = load_global_16B(part + batch * part_batch_stride + head * part_head_stride +
                                            row * part_row_stride + column);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Vector16B known = load_global_16B(sum + 4 * half);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float new_value = unpack_16bit<dtype>(added.words[2 * half + i / 2]).values[i % 2];
            const float old_value = __int_as_float(known.words[i]);
            known.words[i] = __float_as_int(old_value + mixture.weight * (new_value - old_value));
        }
        store_global_16B(sum + 4 * half, known);
    }
}
