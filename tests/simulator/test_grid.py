"""Thread blocks that wait for each other, and threads that spin."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.simulator import grid
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.run import Run
from flashwright.simulator.sync import spinning

from .tools import compile_cuda, launch

BLOCK = 512  # eight blocks in a wave


def run(body: str, blocks: int, block: int = BLOCK, **options: object) -> tuple[np.ndarray, Run]:
    """``out`` has a word per block, ``state`` 64 words that are 0 at first."""
    ptx = compile_cuda(
        "__device__ __noinline__ int look(volatile int *flag) { return *flag; }"
        'extern "C" __global__ void k(int *out, volatile int *state) {'
        f"const int t = threadIdx.x, b = blockIdx.x, n = gridDim.x; {body} }}"
    )
    outputs = {"out": np.zeros(blocks, np.int32), "state": np.zeros(64, np.int32)}
    return_value = launch(ptx, block, outputs, grid=blocks, **options)
    return outputs["out"], return_value


# How a thread may wait for a word of memory to reach a value.
WAITS = {
    "volatile": "while (state[0] < n);",
    "atomic": "while (atomicAdd((int *)state, 0) < n);",
    "compare and swap": "while (atomicCAS((int *)state, n, n) != n);",
    "sleeping longer and longer": "for (unsigned ns = 8; state[0] < n; ns = ns < 256 ? 2 * ns : 256) __nanosleep(ns);",
    "counting": "int tries = 0; while (state[0] < n) ++tries; out[b] = tries;",
    "writing the same again": "while (state[0] < n) out[b] = 5;",
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=list(WAITS))
def test_a_barrier_of_the_whole_grid(wait: str) -> None:
    out, done = run(
        f"""__syncthreads();
        if (t == 0) {{ __threadfence(); atomicAdd((int *)state, 1); {wait} __threadfence(); }}
        __syncthreads();
        if (t == 0) out[b] = state[0];""",
        blocks=24,
    )
    assert (out == 24).all()
    assert done.counters.barriers == 48


def test_a_lock_that_whole_blocks_poll_through_barriers() -> None:
    """As Triton compiles it. Blocks that wait come first in the program's order, and leave the others their turns."""
    out, done = run(
        """__shared__ int taken;
        while (true) {
            if (t == 0) { taken = atomicCAS((int *)state, 0, 1); __threadfence(); }
            __syncthreads();
            const int found = taken;
            __syncthreads();
            if (found == 0) break;
        }
        if (t == 0) { state[1] += 1; out[b] = state[1]; __threadfence(); }
        __syncthreads();
        if (t == 0) atomicExch((int *)state, 0);""",
        blocks=4,
        block=64,
        step_limit=5_000,
    )
    assert sorted(out) == [1, 2, 3, 4]
    assert done.counters.barriers < 2_000


def test_blocks_that_count_their_polls_through_barriers_let_later_ones_start() -> None:
    """Their registers differ from round to round, so that only what they achieve tells that they wait."""
    out, done = run(
        """__shared__ int seen;
        if (b == n - 1) { if (t == 0) atomicExch((int *)state, 1); return; }
        for (int tries = 1;; ++tries) {
            if (t == 0) seen = atomicAdd((int *)state, 0);
            __syncthreads();
            const int found = seen;
            __syncthreads();
            if (found) { if (t == 0) out[b] = tries; break; }
        }""",
        blocks=9,
    )
    assert (out[:8] > 1).all()
    assert done.counters.barriers < 100_000


def test_many_rounds_through_a_grid_barrier() -> None:
    out, done = run(
        """for (int round = 1; round <= 5; ++round) {
            if (t == 0) { atomicAdd((int *)state, 1); while (state[0] < round * n); out[b] += state[0] == round * n; }
            __syncthreads();
            if (t == 0) { atomicAdd((int *)state + 1, 1); while (state[1] < round * n); }
            __syncthreads();
        }""",
        blocks=24,
    )
    assert (out == 5).all()
    assert done.counters.executed < 500_000


def test_a_chain_from_the_last_block_to_the_first() -> None:
    """Every block waits for one that starts after it."""
    out, done = run(
        "if (t == 0) { while (b + 1 < n && state[b + 1] == 0); out[b] = b + 1 < n ? state[b + 1] + 1 : 1;"
        "__threadfence(); state[b] = out[b]; }",
        blocks=24,
    )
    assert out.tolist() == list(range(24, 0, -1))
    assert done.counters.executed < 100_000


def test_a_scan_that_looks_back() -> None:
    """Each block publishes its sum, then adds up those before it, from the nearest to the first."""
    out, _ = run(
        """if (t < 32) {
            if (t == 0) { __threadfence(); state[b] = 1 + b; }
            int sum = 0;
            for (int last = b - 1; last >= 0; last -= 32) {
                int value;
                do { value = last - t >= 0 ? state[last - t] : 1; } while (__any_sync(~0u, value == 0));
                if (last - t >= 0) sum += value;
            }
            sum = __reduce_add_sync(~0u, sum);
            if (t == 0) out[b] = sum;
        }""",
        blocks=40,
    )
    assert out.tolist() == [b * (b + 1) // 2 for b in range(40)]


def test_lanes_that_spin_together_and_look_one_by_one() -> None:
    """One lane looks, the others get what it saw: ways part and join in every round."""
    out, done = run(
        """if (b == 0 && t < 32) {
            int seen = 0;
            while (true) { if (t == 0) seen = state[1]; seen = __shfl_sync(~0u, seen, 0); if (seen) break; }
            if (t == 0) out[0] = seen;
        }
        if (b == n - 1 && t == 0) state[1] = 7;""",
        blocks=24,
    )
    assert out[0] == 7
    assert done.counters.executed < 100_000


def test_a_handshake_of_two_blocks() -> None:
    """Each waits for the other's last move, so that both are woken again and again."""
    out, done = run(
        """if (t == 0 && (b == 0 || b == n - 1)) {
            int me = b != 0;
            for (int i = 0; i < 20; ++i) { while (state[0] % 2 != me); __threadfence(); state[0] = state[0] + 1; }
            out[b] = state[0];
        }""",
        blocks=24,
    )
    assert out[0] >= 39 and out[-1] == 40
    assert done.counters.executed < 100_000


SPINS = {
    "on memory": "while (state[0] == 0);",
    "on a lock that is never released": "while (atomicCAS((int *)state, 0, 1) != 0);",
    "on nothing": 'while (true) asm volatile("nanosleep.u32 8;");',
    "until a time that does not pass": "long long end = clock64() + 1000; while (clock64() < end);",
    "in a function": "while (look(state) == 0);",
    "one lane for all": "for (int s = 0; !s;) { if (t % 32 == 0) s = state[1]; s = __shfl_sync(~0u, s, 0); }",
}


@pytest.mark.parametrize("body", SPINS.values(), ids=list(SPINS))
def test_threads_that_spin_for_ever_are_an_error_at_once(body: str) -> None:
    with pytest.raises(SimulationError, match="they spin, and nothing that they read changes") as caught:
        run(body, blocks=3, block=64)
    assert caught.value.kind == "deadlock"
    assert caught.value.ptx_line is not None


def test_a_grid_that_no_gpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_MAX_RESIDENT_THREADS", 3 * 4096)
    with pytest.raises(SimulationError, match="32 thread blocks of 512 threads wait for others that have not started"):
        run("if (t == 0) { atomicAdd((int *)state, 1); while (state[0] < n); }", blocks=64)


def test_long_loops_are_no_reason_to_hold_more_blocks_than_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_MAX_RESIDENT_THREADS", 4096)
    monkeypatch.setattr(spinning, "_FRUITLESS_LOOKS", 1)
    out, _ = run("int x = 1; for (int i = 0; i < 1500; ++i) x = x * 5 + state[i % 64]; out[b] = x;", blocks=24)
    assert (out == np.int64(pow(5, 1500, 1 << 32)).astype(np.int32)).all()


def test_an_endless_loop_that_counts_is_stopped_by_the_step_limit() -> None:
    with pytest.raises(SimulationError, match="no end within the step limit"):
        run("int i = 0; while (state[0] == 0) out[b] = ++i;", blocks=2, block=32, step_limit=20_000)


def test_a_long_loop_is_not_taken_for_a_spin() -> None:
    out, _ = run("int x = 1; for (int i = 0; i < 3000; ++i) x = x * 5 + state[i % 64]; out[b] = x;", blocks=1, block=32)
    assert out[0] == np.int64(pow(5, 3000, 1 << 32)).astype(np.int32)


def test_a_warp_of_a_block_that_waits_can_be_traced() -> None:
    _, done = run(
        "if (t == 0) { atomicAdd((int *)state, 1); while (state[0] < n); out[b] = 1; }", blocks=24, trace_warp=(0, 0)
    )
    assert done.trace is not None
    assert [entry.opcode for entry in done.trace].count("st.global.u32") == 1
