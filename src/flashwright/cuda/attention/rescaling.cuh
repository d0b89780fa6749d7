// What both kinds of online softmax share: the units of exponentials, and the rescaling of O.
#pragma once
#include "tile/accumulator.cuh"

constexpr float log2_e = 1.4426950408889634f;
constexpr float ln_2 = 0.6931471805599453f;

// What O is multiplied by when references have grown: in few steps.
template <int row_tiles> struct Shrinkage {
    bool needed;
    float factor[row_tiles][halves];
};

template <int column_tiles> DEVICE void scale_row(float (&c)[column_tiles][4], int half, float factor) {
#pragma unroll
    for (int n = 0; n < column_tiles; ++n) {
        c[n][2 * half] *= factor;
        c[n][2 * half + 1] *= factor;
    }
}

template <int row_tiles, int O_column_tiles>
DEVICE void apply(const Shrinkage<row_tiles> &shrinkage, float (&O)[row_tiles][O_column_tiles][4]) {
    if (shrinkage.needed)
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int half = 0; half < halves; ++half)
                scale_row(O[m], half, shrinkage.factor[m][half]);
}
