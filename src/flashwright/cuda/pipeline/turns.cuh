// Consumer warpgroups take turns at issuing products, so that one's products run during another's softmax.
#pragma once
#include "ptx/warpgroup.cuh"

// `parties` warpgroups with a named barrier each, from `first_barrier` on. Where they are not `taken`, nobody waits.
template <bool taken, int parties, int first_barrier> struct Turns {
    int own, next;

    DEVICE explicit Turns(int warpgroup)
        : own(first_barrier + warpgroup), next(first_barrier + (warpgroup + 1) % parties) {
        if (taken && warpgroup == parties - 1)
            pass(); // the first turn is the first warpgroup's
    }
    DEVICE void wait() const {
        if constexpr (taken)
            named_barrier_sync(own, 2 * warpgroup_threads);
    }
    DEVICE void pass() const {
        if constexpr (taken)
            named_barrier_arrive(next, 2 * warpgroup_threads);
    }
};
