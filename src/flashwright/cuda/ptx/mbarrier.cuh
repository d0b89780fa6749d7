// Barriers in shared memory that count arrivals and bytes of bulk copies (PTX: mbarrier).
//
// A barrier is in phase 0, 1, 0, … A phase ends when as many threads as it was initialised for have arrived and all the
// bytes announced for it have been copied. Waiting for parity p returns once the phase of that parity has ended.
#pragma once
#include "types.cuh"

DEVICE void mbarrier_init(uint32 barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes this thread's initialisations visible to bulk copies.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces that copies will bring so many bytes.
DEVICE void mbarrier_arrive_expecting(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE bool mbarrier_try_wait(uint32 barrier, uint32 parity) {
    uint32 ended;
    asm volatile("{\n"
                 ".reg .pred ended;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, ended;\n"
                 "}"
                 : "=r"(ended)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return ended;
}

DEVICE void mbarrier_wait(uint32 barrier, uint32 parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// The same on every architecture that has these barriers: those before sm_90 cannot put a thread to sleep.
DEVICE bool mbarrier_test_wait(uint32 barrier, uint32 parity) {
    uint32 ended;
    asm volatile("{\n"
                 ".reg .pred ended;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, ended;\n"
                 "}"
                 : "=r"(ended)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return ended;
}

DEVICE void mbarrier_poll(uint32 barrier, uint32 parity) {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(barrier, parity);
#else
    while (!mbarrier_test_wait(barrier, parity)) {
    }
#endif
}
