// The soft cap of scores: their hyperbolic tangent. What it is multiplied by is part of the softmax's scale.
#pragma once
#include "ptx/math.cuh"

// tanh(x) = 1 - 2/(exp(2x) + 1), and the scale turns exp(2x) into exp2. Its derivative is 1 - tanh².
DEVICE float soft_capped(float score, float capping_scale) {
    return 1 - 2 * reciprocal_approx(1 + exp2_approx(score * capping_scale));
}
