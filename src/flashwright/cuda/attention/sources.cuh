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
