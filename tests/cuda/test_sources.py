"""Where blocks of keys and values lie: rows one after the other, and rows in pages."""

from __future__ import annotations

import numpy as np
from device_code import compile_device_code
from hypothesis import given, settings
from hypothesis import strategies as st

from flashwright.simulator.gpu import SimulatedGPU

KERNEL = """
// One thread per row of a block: the first element of each row of the sequence, by way of blocks.
template <class Source> __device__ void gather(int *out, const Source &source, int block_rows) {
    const int first = blockIdx.x * block_rows;
    out[first + threadIdx.x] = *(const int *)(source.block(first) + threadIdx.x * source.row_stride);
}
extern "C" __global__ void kernel(int *paged, int *contiguous, const char *pool, const int *table, const char *rows,
                                  int page_rows, long long page_stride, long long row_stride, int block_rows) {
    gather(paged, PagedRows{pool, table, page_rows, page_stride, row_stride}, block_rows);
    gather(contiguous, ContiguousRows{rows, row_stride}, block_rows);
}
"""


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from([4, 16, 64]),
    st.integers(1, 4),
    st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True),
    st.integers(1, 5),
)
def test_blocks_of_pages_and_of_contiguous_rows_are_the_same_rows(block_rows, blocks_per_page, pages, row_words):
    """Pages lie anywhere in the pool; the table lists them in the sequence's order."""
    page_rows = block_rows * blocks_per_page
    pool = np.arange(41 * page_rows * row_words, dtype=np.int32).reshape(41, page_rows, row_words)
    rows = pool[pages].reshape(-1, row_words)
    gpu = SimulatedGPU("sm_80")
    outputs = [gpu.to_device(np.full(len(rows), -1, np.int32)) for _ in range(2)]
    inputs = [gpu.to_device(array) for array in (pool, np.array(pages, np.int32), np.ascontiguousarray(rows))]
    module = gpu.load(compile_device_code("attention/sources.cuh", KERNEL))
    strides = np.int64(pool[0].nbytes), np.int64(pool[0, 0].nbytes)
    arguments = [*outputs, *inputs, np.int32(page_rows), *strides, np.int32(block_rows)]
    module.launch("kernel", (len(rows) // block_rows,), (block_rows,), 0, arguments)
    for output in outputs:
        np.testing.assert_array_equal(gpu.to_host(output), rows[:, 0])
