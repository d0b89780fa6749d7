// Tiles of tensors between global and shared memory, moved by the copy engine (PTX: cp.async.bulk.tensor).
#pragma once
#include "types.cuh"

// Describes a tensor to the copy engine: made by the driver on the host, opaque here.
struct alignas(64) TensorMap {
    char opaque[128];
};

// Copies the tile at (column, row, head, batch); what lies outside of the tensor becomes zero. One thread issues it;
// the bytes of the whole tile, zeros included, are counted by the barrier.
DEVICE void bulk_copy_tile(uint32 shared, const TensorMap &map, uint32 barrier, int column, int row, int head,
                           int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
                 "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// Copies a stretch of bytes, a multiple of 16, aligned to 16 on both sides.
DEVICE void bulk_copy_bytes(uint32 shared, const void *global, uint32 barrier, uint32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Adds a stretch of floats in shared memory to one in global memory, by bytes: a multiple of 16, aligned to 16 on both
// sides. It belongs to the thread's next group.
DEVICE void bulk_add_floats(float *global, uint32 shared, uint32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
                 "r"(bytes)
                 : "memory");
}

// Closes a group of this thread's additions.
DEVICE void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the last `pending` of this thread's groups have read what they add.
template <int pending> DEVICE void bulk_wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// Waits until all of this thread's groups have added.
DEVICE void bulk_wait_until_added() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's ordinary writes to shared memory before reads by the copy engine or by wgmma.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
