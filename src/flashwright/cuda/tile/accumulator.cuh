// Which rows and columns of an accumulator a lane holds.
//
// A warp's accumulator is 16×8 tiles, `float c[row_tiles][column_tiles][4]`. Of each tile a lane has two neighbouring
// columns of row lane/4 ("half" 0: c[m][n][0], c[m][n][1]) and of row lane/4 + 8 ("half" 1: c[m][n][2], c[m][n][3]).
#pragma once
#include "types.cuh"

constexpr int accumulator_values = 4, halves = 2, half_values = accumulator_values / halves;

// The row of a half, counted from the warp's first.
DEVICE int accumulator_row(int m, int half, uint32 lane = lane_index()) {
    return mma_rows * m + fragment * half + lane / 4;
}

// This lane's first column of every tile. Four lanes, a quad, share a row.
DEVICE int accumulator_column(uint32 lane = lane_index()) { return lane % 4 * half_values; }
// One lane of the quad, to do what has to be done once a row.
DEVICE bool leads_quad() { return lane_index() % 4 == 0; }
