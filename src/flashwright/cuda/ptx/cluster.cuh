// Thread blocks of a cluster: their ranks, each other's shared memory, and what passes between them (PTX: mapa,
// barrier.cluster, mbarrier, st.async and cp.async.bulk with shared::cluster).
#pragma once
#include "types.cuh"

DEVICE uint32 rank_in_cluster() {
    uint32 rank;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The same place in the shared memory of the thread block of that rank.
DEVICE uint32 address_in_block(uint32 shared, uint32 rank) {
    uint32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}

// A place in a block's own shared memory as descriptors of wgmma have it: without the bits above its own that say, in a
// cluster, in whose block it is.
DEVICE uint32 address_for_descriptor(uint32 shared) { return shared & ((1 << 18) - 1); }

// Waits until all threads of all blocks of the cluster have arrived, those that have ended apart. What they wrote before
// is visible after.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at a barrier of another block, to say that this one has read what that one sent.
DEVICE void mbarrier_arrive_remote(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at a barrier of another block, and announces that so many bytes will be stored or copied there.
DEVICE void mbarrier_arrive_expecting_remote(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Stores to another block, whose barrier counts the bytes. They are visible to who has waited for it.
DEVICE void store_to_block_16B(uint32 there, Vector16B v, uint32 barrier_there) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
                 "r"(v.words[0]), "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3]), "r"(barrier_there)
                 : "memory");
}

// Copies a stretch of this block's shared memory to another block, whose barrier counts the bytes.
DEVICE void bulk_copy_to_block(uint32 there, uint32 here, uint32 barrier_there, uint32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(there),
                 "r"(here), "r"(bytes), "r"(barrier_there)
                 : "memory");
}
