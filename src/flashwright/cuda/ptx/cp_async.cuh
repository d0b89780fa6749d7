// Asynchronous copies from global to shared memory (PTX: cp.async).
#pragma once
#include "types.cuh"

// Copies 16 bytes through L2, bypassing L1 (.cg). The data may be read only after this thread has waited for
// the copy's group, and by other threads only after a barrier that follows the wait.
DEVICE void cp_async_16B(uint32 shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same where the data exists; otherwise writes 16 zero bytes and reads nothing.
DEVICE void cp_async_16B_or_zero(uint32 shared, const void *global, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(exists ? 16 : 0)
                 : "memory");
}

// Closes this thread's current group of copies.
DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's most recent groups are unfinished.
template <int pending> DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Arrives at a barrier when all of this thread's copies so far have come; one of the arrivals that the barrier expects.
DEVICE void cp_async_mbarrier_arrive(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
