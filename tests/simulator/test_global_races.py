"""Races on global memory: thread blocks that hand data to each other, and what is missing when they do it wrong."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright import simulate_kernel
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.gpu import SimulatedGPU

from .tools import compile_cuda

GPU_SCOPE = """
__device__ int load_acquire(int *p) {
    int v; asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
__device__ int load_relaxed(int *p) {
    int v; asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
__device__ void store_release(int *p, int v) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
__device__ void store_relaxed(int *p, int v) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
"""
BLOCK_SCOPE = GPU_SCOPE.replace(".gpu.", ".cta.")


def launch(source: str, grid: int, block: int, *arrays: np.ndarray, **options):
    return simulate_kernel(source, grid=grid, block=block, args=list(arrays), **options)


def zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.int32)


def expect_race(source: str, grid: int, block: int, *arrays: np.ndarray) -> SimulationError:
    with pytest.raises(SimulationError) as caught:
        launch(source, grid, block, *arrays)
    assert caught.value.kind == "global-race", str(caught.value)
    return caught.value


# --- Messages ------------------------------------------------------------------------------------------------------

MESSAGE = """
extern "C" __global__ void pass(int *data, int *flag, int *out) {{
    if (blockIdx.x == 0) {{
        data[threadIdx.x] = threadIdx.x + 1;
        {stored}
        if (threadIdx.x == 0) {{ {send} }}
    }} else {{
        if (threadIdx.x == 0) {{ {receive} }}
        {let_through}
        out[threadIdx.x] = data[threadIdx.x];
    }}
}}
"""
SYNC = "__syncthreads();"
RELEASE, ACQUIRE = "store_release(flag, 1);", "while (load_acquire(flag) == 0) {}"
SET, POLL = "store_relaxed(flag, 1);", "while (load_relaxed(flag) == 0) {}"
FENCE = "__threadfence();"
BLOCK_FENCE = "__threadfence_block();"
VOLATILE_SET, VOLATILE_POLL = "*(volatile int *)flag = 1;", "while (*(volatile int *)flag == 0) {}"
ATOMIC_SET, ATOMIC_POLL = "atomicExch(flag, 1);", "while (atomicAdd(flag, 0) == 0) {}"


def message(send: str, receive: str, stored: str = SYNC, let_through: str = SYNC, scope: str = GPU_SCOPE) -> str:
    return scope + MESSAGE.format(send=send, receive=receive, stored=stored, let_through=let_through)


@pytest.mark.parametrize(
    "source",
    {
        "release, acquire": message(RELEASE, ACQUIRE),
        "fences": message(FENCE + SET, POLL + FENCE),
        "volatile": message(FENCE + VOLATILE_SET, VOLATILE_POLL + FENCE),
        "atomics": message(FENCE + ATOMIC_SET, ATOMIC_POLL + FENCE),
        "fence, acquire": message(FENCE + SET, ACQUIRE),
        "every thread fences before the barrier": message(VOLATILE_SET, ACQUIRE, stored=FENCE + SYNC),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_message_may_be_read_when_its_flag_was_released_and_acquired(source):
    done = launch(source[1], 2, 64, zeros(64), zeros(1), zeros(64))
    assert np.array_equal(done.args[2], np.arange(64) + 1)


@pytest.mark.parametrize(
    "source",
    {
        "no release": message(SET, ACQUIRE),
        "no acquire": message(RELEASE, POLL),
        "neither": message(SET, POLL),
        "no fence before a volatile flag": message(VOLATILE_SET, VOLATILE_POLL + FENCE),
        "no fence after a volatile flag": message(FENCE + VOLATILE_SET, VOLATILE_POLL),
        "no barrier before the flag": message(RELEASE, ACQUIRE, stored=""),
        "a fence after the flag": message(ATOMIC_SET + FENCE, ATOMIC_POLL + FENCE),
        "a fence of block scope": message(BLOCK_FENCE + SET, POLL + FENCE),
        "a fence of block scope in the reader": message(FENCE + SET, POLL + BLOCK_FENCE),
        "release and acquire of block scope": message(RELEASE, ACQUIRE, scope=BLOCK_SCOPE),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_message_without_order_is_a_race(source):
    expect_race(source[1], 2, 64, zeros(64), zeros(1), zeros(64))


def test_the_error_names_both_thread_blocks():
    error = expect_race(message(SET, ACQUIRE), 2, 64, zeros(64), zeros(1), zeros(64))
    assert error.thread_block == (1, 0, 0) and error.other is not None and error.other.thread_block == (0, 0, 0)
    assert "write by thread block (0, 0, 0), warp 0: `st.global" in str(error)
    assert "global load not ordered after a write by another warp" in error.detail


def test_block_scope_orders_within_a_block():
    source = (
        BLOCK_SCOPE
        + """
        extern "C" __global__ void pass(int *data, int *flag, int *out) {
            if (threadIdx.x == 0) { data[0] = 7; store_release(flag, 1); }
            if (threadIdx.x == 32) { while (load_acquire(flag) == 0) {} out[0] = data[0]; }
        }
        """
    )
    assert launch(source, 1, 64, zeros(1), zeros(1), zeros(1)).args[2] == [7]
    expect_race(source.replace("store_release(flag", "store_relaxed(flag"), 1, 64, zeros(1), zeros(1), zeros(1))


def test_what_was_received_is_handed_on():
    """Block 0 to block 1 to block 2."""
    source = (
        GPU_SCOPE
        + """
        extern "C" __global__ void pass(int *data, int *flags, int *out) {
            if (threadIdx.x == 0 && blockIdx.x > 0)
                while (load_acquire(flags + blockIdx.x) == 0) {}
            __syncthreads();
            if (blockIdx.x == 0) data[threadIdx.x] = threadIdx.x;
            if (blockIdx.x == 2) out[threadIdx.x] = data[threadIdx.x];
            __syncthreads();
            if (threadIdx.x == blockDim.x - 1) store_release(flags + blockIdx.x + 1, 1);
        }
        """
    )
    assert np.array_equal(launch(source, 3, 64, zeros(64), zeros(4), zeros(64)).args[2], np.arange(64))
    broken = source.replace("__syncthreads();\n            if (blockIdx.x == 0)", "if (blockIdx.x == 0)")
    expect_race(broken, 3, 64, zeros(64), zeros(4), zeros(64))


# --- Idioms --------------------------------------------------------------------------------------------------------

LAST_BLOCK = """
extern "C" __global__ void sum(const int *x, int *parts, int *counter, int *out) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = x[blockIdx.x];
        __threadfence();
        last = atomicAdd(counter, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        int total = 0;
        for (int i = 0; i < gridDim.x; ++i) total += parts[i];
        *out = total;
    }
}
"""
LOCK = """
extern "C" __global__ void count(int *lock, int *counter) {
    if (threadIdx.x != 0) return;
    while (atomicCAS(lock, 0, 1) != 0) {}
    __threadfence();
    *counter += 1;
    __threadfence();
    atomicExch(lock, 0);
}
"""
GRID_BARRIER = """
extern "C" __global__ void rotate(int *x, int *arrived, int *out) {
    x[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(arrived, 1);
        while (*(volatile int *)arrived < gridDim.x) {}
        __threadfence();
    }
    __syncthreads();
    int other = (blockIdx.x + 1) % gridDim.x;
    out[blockIdx.x * blockDim.x + threadIdx.x] = x[other * blockDim.x + threadIdx.x];
}
"""


def test_the_last_block_reads_what_all_have_stored():
    assert launch(LAST_BLOCK, 200, 64, np.arange(200, dtype=np.int32), zeros(200), zeros(1), zeros(1)).args[3] == 19900


@pytest.mark.parametrize("fence", [0, 1], ids=["before", "after"])
def test_the_last_block_needs_a_fence_on_either_side_of_its_counter(fence):
    parts = LAST_BLOCK.split("__threadfence();")
    broken = parts[0] + ("" if fence == 0 else FENCE) + parts[1] + ("" if fence == 1 else FENCE) + parts[2]
    expect_race(broken, 200, 64, np.arange(200, dtype=np.int32), zeros(200), zeros(1), zeros(1))


def test_a_lock_orders_what_it_protects():
    assert launch(LOCK, 8, 32, zeros(1), zeros(1)).args[1] == [8]
    parts = LOCK.split("__threadfence();")
    expect_race(parts[0] + FENCE + parts[1] + parts[2], 8, 32, zeros(1), zeros(1))
    expect_race(parts[0] + parts[1] + FENCE + parts[2], 8, 32, zeros(1), zeros(1))


@pytest.mark.parametrize("blocks", [4, 100], ids=["one wave", "several waves"])
def test_a_barrier_of_the_grid_orders_all_blocks(blocks):
    done = launch(GRID_BARRIER, blocks, 64, zeros(blocks * 64), zeros(1), zeros(blocks * 64))
    assert np.array_equal(done.args[2].reshape(blocks, 64)[:, 0], np.roll(np.arange(blocks), -1))


@pytest.mark.parametrize(
    "missing",
    [
        "x;\n    __syncthreads();",
        "{\n        __threadfence();",
        "{}\n        __threadfence();",
        "}\n    __syncthreads();",
    ],
    ids=["barrier before", "fence before", "fence after", "barrier after"],
)
def test_a_barrier_of_the_grid_needs_all_its_parts(missing):
    assert GRID_BARRIER.count(missing) == 1
    kept = missing.replace("__syncthreads();", "").replace("__threadfence();", "")
    expect_race(GRID_BARRIER.replace(missing, kept), 4, 64, zeros(256), zeros(1), zeros(256))


# --- Accesses that are ordered, or not -----------------------------------------------------------------------------


def body(text: str) -> str:
    """With an atomic access, so that global memory is looked at."""
    start = 'extern "C" __global__ void f(int *x, int *counter) { int t = threadIdx.x, b = blockIdx.x; '
    return start + f"atomicAdd(counter, 1); {text} }}"


@pytest.mark.parametrize(
    "text",
    [
        "x[0] = b;",
        "x[t % 32] = t / 32;",
        "if (b == 0) x[t] = 1; else x[64 + t] = x[t];",
        "if (b == 0) x[64 + t] = x[t]; else x[t] = 1;",
        "if (b == 0) x[t] = 1; else atomicAdd(x + t, 1);",
        "if (t < 32) x[t] = t; else x[64] = x[t - 32];",
        "if (b == 0) ((short *)x)[2 * t] = 1; else x[t] = 2;",
        'asm volatile("red.relaxed.cta.global.add.u32 [%0], 1;" :: "l"(x) : "memory");',
    ],
)
def test_unordered_accesses_to_the_same_bytes_are_a_race(text):
    expect_race(body(text), 2, 64, np.full(128, 5, np.int32), zeros(1))


@pytest.mark.parametrize(
    "text",
    [
        "x[0] = 1;",
        "if (b == 0) x[t] = 5; else x[64 + t] = x[t];",
        "x[b * 64 + t] = t; x[b * 64 + t] += 1;",
        "x[b * 64 + t] = t; __syncthreads(); x[b * 64 + 63 - t] += 1;",
        "atomicAdd(x + t, 1); atomicMax(x + 63 - t, 3);",
        "((short *)x)[2 * t + b] = b;",
        'asm volatile("red.relaxed.cta.global.add.u32 [%0], 1;" :: "l"(x + b) : "memory");',
    ],
)
def test_ordered_accesses_and_equal_values_are_no_race(text):
    launch(body(text), 2, 64, np.full(128, 5, np.int32), zeros(1))


def test_launches_are_ordered():
    """The second reads what other thread blocks of the first have written, and writes over what they have read."""
    gpu = SimulatedGPU("sm_80")
    module = gpu.load(compile_cuda(body("x[(b + t) % 2] = x[(b + t) % 2] + 1;"), "sm_80"))
    x, counter = gpu.to_device(zeros(2)), gpu.to_device(zeros(1))
    for block in (1, 1):
        module.launch("f", 2, block, args=[x, counter])
    assert np.array_equal(gpu.to_host(x), [2, 2])


def test_races_are_collected_place_by_place():
    source = body("x[0] = b; x[1] = b;")
    run = launch(source, 2, 32, zeros(2), zeros(1), check_hazards="collect").run
    assert [finding.kind for finding in run.findings] == ["global-race"] * 2
    assert not launch(source, 2, 32, zeros(2), zeros(1), check_hazards={"global-race": "ignore"}).run.findings


# --- Sums ----------------------------------------------------------------------------------------------------------

SUM = 'extern "C" __global__ void f(float *x) { atomicAdd(x, 0.5f); }'
SUM_IN_TURN = (
    GPU_SCOPE
    + """
    extern "C" __global__ void f(float *x, int *turn) {
        while (load_acquire(turn) != blockIdx.x) {}
        if (threadIdx.x == 0) atomicAdd(x, 0.5f);
        store_release(turn, blockIdx.x + 1);
    }
    """
)
IN_ORDER = {"unordered-sum": "stop"}


def test_additions_in_any_order_are_found_on_demand():
    x = np.zeros(1, np.float32)
    assert launch(SUM, 4, 32, x, check_hazards="stop").args[0] == 64
    with pytest.raises(SimulationError, match="unordered-sum: an addition not ordered") as caught:
        launch(SUM, 4, 32, x, check_hazards=IN_ORDER)
    assert caught.value.other is not None and caught.value.other.thread_block != caught.value.thread_block


def test_additions_in_turn_are_ordered():
    x = np.zeros(1, np.float32)
    assert launch(SUM_IN_TURN, 4, 1, x, zeros(1), check_hazards=IN_ORDER).args[0] == 2
    for ordered, relaxed in (("load_acquire(turn)", "load_relaxed(turn)"), ("store_release(t", "store_relaxed(t")):
        with pytest.raises(SimulationError, match="unordered-sum"):
            launch(SUM_IN_TURN.replace(ordered, relaxed), 4, 1, x, zeros(1), check_hazards=IN_ORDER)


# --- The counter of a barrier itself -------------------------------------------------------------------------------

COUNTER = """
__device__ unsigned counter;
extern "C" __global__ void count(int *out) {{
    if (threadIdx.x == 0) {{ __threadfence(); atomicAdd(&counter, 1); {wait} __threadfence(); }}
    __syncthreads();
    if (threadIdx.x == {reader}) out[blockIdx.x] = counter;
}}
"""
WAIT_FOR_ALL = "while (*(volatile unsigned *)&counter < gridDim.x) {}"


@pytest.mark.parametrize("reader", [0, 40])
def test_a_strong_write_that_was_observed_comes_before_plain_accesses(reader: int):
    run = launch(COUNTER.format(wait=WAIT_FOR_ALL, reader=reader), 6, 64, zeros(6))
    assert run.args[0].tolist() == [6] * 6
    expect_race(COUNTER.format(wait="", reader=reader), 6, 64, zeros(6))


# --- Writes of the copy engine --------------------------------------------------------------------------------------

BULK_MESSAGE = """
extern "C" __global__ void pass(float *data, int *flag, float *out) {{
    __shared__ alignas(16) float s[64];
    if (blockIdx.x == 0) {{
        s[threadIdx.x] = threadIdx.x + 1;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {{
            asm volatile("{copy} [%0], [%1], 256;"
                         :: "l"(data), "r"((unsigned)__cvta_generic_to_shared(s)) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            asm volatile("{wait}" ::: "memory");
            store_release(flag, 1);
        }}
    }} else {{
        if (threadIdx.x == 0) while (load_acquire(flag) == 0) {{}}
        __syncthreads();
        out[threadIdx.x] = data[threadIdx.x];
    }}
}}
"""


@pytest.mark.parametrize(
    "copy",
    (
        "cp.async.bulk.global.shared::cta.bulk_group",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    ),
)
def test_a_bulk_write_may_be_released_when_it_is_complete_not_when_it_has_been_read(copy):
    arrays = np.zeros(64, np.float32), zeros(1), np.zeros(64, np.float32)
    complete, read = (f"cp.async.bulk.wait_group{modifier} 0;" for modifier in ("", ".read"))
    done = launch(GPU_SCOPE + BULK_MESSAGE.format(copy=copy, wait=complete), 2, 64, *arrays, arch="sm_90")
    assert np.array_equal(done.args[2], np.arange(64) + 1)
    with pytest.raises(SimulationError) as caught:
        launch(GPU_SCOPE + BULK_MESSAGE.format(copy=copy, wait=read), 2, 64, *arrays, arch="sm_90")
    assert caught.value.kind == "global-race" and caught.value.source_line is not None
    assert caught.value.other is not None and copy in caught.value.other.instruction


def test_a_bulk_write_that_is_not_waited_for_comes_last():
    source = GPU_SCOPE + BULK_MESSAGE.format(
        copy="cp.async.bulk.global.shared::cta.bulk_group", wait="cp.async.bulk.wait_group.read 0;"
    )
    arrays = np.zeros(64, np.float32), zeros(1), np.zeros(64, np.float32)
    done = launch(source, 2, 64, *arrays, arch="sm_90", check_hazards=False)
    assert not done.args[2].any() and np.array_equal(done.args[0], np.arange(64) + 1)
