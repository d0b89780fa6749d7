// What a warpgroup (four warps) does as one: registers, turns (PTX: setmaxnreg, bar).
#pragma once
#include "types.cuh"

template <int registers> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers> DEVICE void give_registers_back() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Waits at a named barrier until `threads` threads have arrived, those that do not wait included.
DEVICE void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

DEVICE void named_barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// OR-reducing barrier of `threads` threads: true if any of them passed true.
DEVICE bool named_barrier_any(int barrier, int threads, bool value) {
    uint32 any;
    asm volatile("{\n"
                 ".reg .pred passed, any;\n"
                 "setp.ne.b32 passed, %3, 0;\n"
                 "bar.red.or.pred any, %1, %2, passed;\n"
                 "selp.u32 %0, 1, 0, any;\n"
                 "}"
                 : "=r"(any)
                 : "r"(barrier), "r"(threads), "r"((uint32)value)
                 : "memory");
    return any;
}
