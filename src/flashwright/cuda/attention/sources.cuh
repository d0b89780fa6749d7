// Where the rows of a sequence's K or V lie in global memory, for one head: a source of blocks.
//
// Every source has `block(row)`, the address of the block that begins with a row of the sequence, and `row_stride`, the
// bytes from each of the block's rows to the next.
#pragma once
#include "types.cuh"

// Rows one after the other: a sequence of its own, or packed, if `first_row` is the address of the sequence's first.
struct ContiguousRows {
    const char *first_row;
    int64 row_stride;

    DEVICE const char *block(int64 row) const { return first_row + row * row_stride; }
};

// Rows in pages of a pool, which a table lists in the sequence's order. A block lies within a page: its rows divide the
// page's.
struct PagedRows {
    const char *pool; // this head's first row in page 0
    const int *page_table;
    int page_rows;
    int64 page_stride, row_stride;

    DEVICE const char *block(int row) const {
        return pool + page_table[row / page_rows] * page_stride + row % page_rows * row_stride;
    }
};
