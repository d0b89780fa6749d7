"""Every kind of hazard is named, with both parties; each has a correct twin that passes."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.simulator.errors import SimulationError
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.run import Run

from .tools import HEADER, compile_cuda, launch

PRELUDE = """
#define COPY(dst, src) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: \
    "r"((unsigned)__cvta_generic_to_shared(dst)), "l"(src) : "memory")
#define COMMIT() asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
#define BAR(id, count) asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(count) : "memory")
#define ARRIVE(id, count) asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(count) : "memory")
extern "C" __global__ void k(int *out, const int *in) {
    __shared__ __align__(16) int s[1024];
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
"""
THREADS = 64


def run(body: str, block: int = THREADS, **options: object) -> np.ndarray:
    return launched(body, block, **options)[0]


def launched(body: str, block: int = THREADS, **options: object) -> tuple[np.ndarray, Run]:
    outputs = {"out": np.zeros(256, np.int32)}
    ptx = compile_cuda(PRELUDE + body + "}")
    result = launch(ptx, block, outputs, np.arange(1024, dtype=np.int32), **options)
    return outputs["out"], result


def fault(body: str, block: int = THREADS) -> SimulationError:
    with pytest.raises(SimulationError) as caught:
        run(body, block)
    return caught.value


def line_of(body: str, needle: str) -> int:
    text = PRELUDE + body
    return text[: text.index(needle, len(PRELUDE))].count("\n") + 1


# Warp 0 writes, and warp 1 reads once the flag says so; what writes and reads the flag.
FLAGS = """
#define RELEASE(p, v) asm volatile("st.release.cta.shared.u32 [%0], %1;" :: \
    "r"((unsigned)__cvta_generic_to_shared(p)), "r"(v) : "memory")
#define RELAXED(p, v) asm volatile("st.relaxed.cta.shared.u32 [%0], %1;" :: \
    "r"((unsigned)__cvta_generic_to_shared(p)), "r"(v) : "memory")
#define ACQUIRE(v, p) asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : \
    "r"((unsigned)__cvta_generic_to_shared(p)) : "memory")
    int *flag = s + 1000, seen = 0;
    volatile int *watched = flag;
    if (t == 0) *flag = 0;
    __syncthreads();
"""


def handed_over(write: str, read: str) -> str:
    return (
        FLAGS + f"if (warp == 0) {{ s[lane] = t; __syncwarp(); if (lane == 0) {{ {write} }} }}"
        f"else {{ {read} out[t] = s[lane]; }}"
    )


LOCKED = (
    FLAGS
    + """
    if (t == 0) s[0] = 0;
    __syncthreads();
    if (lane == 0) {
        while (atomicCAS(flag, 0, 1)); __threadfence_block();
        s[0] += 1; __threadfence_block();
        atomicExch(flag, 0);
    }
    __syncthreads();
    out[t] = s[0];"""
)

# (name, faulty body, correct body, kind)
TWINS = [
    (
        "relaxed write of a flag",
        handed_over("RELAXED(flag, 1);", "do ACQUIRE(seen, flag); while (!seen);"),
        handed_over("RELEASE(flag, 1);", "do ACQUIRE(seen, flag); while (!seen);"),
        "race",
    ),
    (
        "a flag that is watched and not acquired",
        handed_over("RELEASE(flag, 1);", "while (!*watched);"),
        handed_over("RELEASE(flag, 1);", "while (!*watched); __threadfence_block();"),
        "race",
    ),
    (
        "volatile flag without a fence of the writer",
        handed_over("*watched = 1;", "while (!*watched); __threadfence_block();"),
        handed_over("__threadfence_block(); *watched = 1;", "while (!*watched); __threadfence_block();"),
        "race",
    ),
    (
        "weak write of a flag",
        handed_over("__threadfence_block(); *flag = 1;", "while (!*watched); __threadfence_block();"),
        handed_over(
            "__threadfence_block(); atomicExch(flag, 1);", "while (!atomicAdd(flag, 0)); __threadfence_block();"
        ),
        "race",
    ),
    (
        "what is written after the release",
        handed_over("RELEASE(flag, 1); s[3] = 5;", "do ACQUIRE(seen, flag); while (!seen);"),
        handed_over("s[3] = 5; RELEASE(flag, 1);", "do ACQUIRE(seen, flag); while (!seen);"),
        "race",
    ),
    ("a lock without a fence", LOCKED.replace("s[0] += 1; __threadfence_block();", "s[0] += 1;"), LOCKED, "race"),
    (
        "read before the barrier",
        "s[t] = t;\n out[t] = s[(t + 32) % 64];",
        "s[t] = t;\n __syncthreads();\n out[t] = s[(t + 32) % 64];",
        "race",
    ),
    (
        "overwritten while read",
        "s[t] = t; __syncthreads(); int v = s[(t + 32) % 64];\n s[t] = v + 1; out[t] = v;",
        "s[t] = t; __syncthreads(); int v = s[(t + 32) % 64];\n __syncthreads(); s[t] = v + 1; out[t] = v;",
        "race",
    ),
    (
        "two writers",
        "if (warp == 0) s[lane] = 1; if (warp == 1) s[lane] = 2; __syncthreads(); out[t] = s[lane];",
        "if (warp == 0) s[lane] = 1; __syncthreads(); if (warp == 1) s[lane] = 2; __syncthreads(); out[t] = s[lane];",
        "race",
    ),
    (
        "two lanes store different values at once",
        "s[t / 2] = t; __syncthreads(); out[t] = s[t / 2];",
        "s[t] = t; __syncthreads(); out[t] = s[t / 2];",
        "race",
    ),
    (
        "lanes of one warp without warp synchronisation",
        "s[t] = t; out[t] = s[t ^ 1];",
        "s[t] = t; __syncwarp(); out[t] = s[t ^ 1];",
        "race",
    ),
    (
        "warp synchronisation does not order other warps",
        "s[t] = t; __syncwarp(); out[t] = s[t ^ 32];",
        "s[t] = t; __syncthreads(); out[t] = s[t ^ 32];",
        "race",
    ),
    (
        "plain access to an atomic counter",
        "if (t == 0) s[0] = 0; __syncthreads(); atomicAdd(&s[0], 1); out[t] = s[0];",
        "if (t == 0) s[0] = 0; __syncthreads(); atomicAdd(&s[0], 1); __syncthreads(); out[t] = s[0];",
        "race",
    ),
    ("nobody wrote", "out[t] = s[t];", "s[t] = 1; out[t] = s[t];", "uninitialised-shared"),
    (
        "part of a vector not written",
        "if (t % 4) s[t] = t; __syncthreads(); int4 v = ((int4 *)s)[t / 4]; out[t] = v.x + v.y + v.z + v.w;",
        "s[t] = t; __syncthreads(); int4 v = ((int4 *)s)[t / 4]; out[t] = v.x + v.y + v.z + v.w;",
        "uninitialised-shared",
    ),
    (
        "own asynchronous copy not waited for",
        "COPY(s + 4 * t, in + 4 * t); COMMIT();\n out[t] = s[4 * t];",
        "COPY(s + 4 * t, in + 4 * t); COMMIT(); WAIT(0);\n out[t] = s[4 * t];",
        "async-copy",
    ),
    (
        "waited for too few groups",
        "COPY(s + 4 * t, in + 4 * t); COMMIT(); COPY(s + 512 + 4 * t, in + 4 * t); COMMIT(); WAIT(1);"
        "out[t] = s[512 + 4 * t];",
        "COPY(s + 4 * t, in + 4 * t); COMMIT(); COPY(s + 512 + 4 * t, in + 4 * t); COMMIT(); WAIT(1);"
        "out[t] = s[4 * t];",
        "async-copy",
    ),
    (
        "another thread's copy without a barrier after the wait",
        "COPY(s + 4 * t, in + 4 * t); COMMIT(); WAIT(0); out[t] = s[4 * (t ^ 33)];",
        "COPY(s + 4 * t, in + 4 * t); COMMIT(); WAIT(0); __syncthreads(); out[t] = s[4 * (t ^ 33)];",
        "async-copy",
    ),
    (
        "barrier before the wait does not help",
        "COPY(s + 4 * t, in + 4 * t); COMMIT(); __syncthreads(); WAIT(0); out[t] = s[4 * (t ^ 33)];",
        "COPY(s + 4 * t, in + 4 * t); COMMIT(); WAIT(0); __syncthreads(); out[t] = s[4 * (t ^ 33)];",
        "async-copy",
    ),
    (
        "store into a copy in flight",
        "COPY(s + 4 * t, in + 4 * t); COMMIT(); s[4 * t] = 1; WAIT(0); out[t] = 0;",
        "COPY(s + 4 * t, in + 4 * t); COMMIT(); WAIT(0); s[4 * t] = 1; out[t] = 0;",
        "async-copy",
    ),
    (
        "asynchronous copy over data still being read",
        "s[t] = t; __syncthreads(); int v = s[t ^ 32]; if (t < 16) COPY(s + 4 * t, in); COMMIT(); WAIT(0); out[t] = v;",
        "s[t] = t; __syncthreads(); int v = s[t ^ 32]; __syncthreads(); if (t < 16) COPY(s + 4 * t, in);"
        "COMMIT(); WAIT(0); out[t] = v;",
        "race",
    ),
    (
        "a named barrier of other warps",
        "s[t] = t; if (warp < 2) BAR(1, 64); else BAR(2, 64); out[t] = s[t ^ 64];",
        "s[t] = t; if (warp < 2) BAR(1, 64); else BAR(2, 64); out[t] = s[t ^ 32];",
        "race",
    ),
    (
        "arriving does not make one see what others did",
        "s[t] = t; if (warp == 0) { ARRIVE(1, 64); out[t] = s[t + 32]; } else BAR(1, 64);",
        "s[t] = t; if (warp == 0) { ARRIVE(1, 64); } else { BAR(1, 64); out[t] = s[t - 32]; }",
        "race",
    ),
    (
        "what is written after arriving is not handed over",
        "if (warp == 0) { ARRIVE(1, 64); __syncwarp(); s[lane] = 1; __syncwarp(); BAR(2, 32); }"
        "else { BAR(1, 64); out[t] = s[lane]; }",
        "if (warp == 0) { s[lane] = 1; __syncwarp(); ARRIVE(1, 64); } else { BAR(1, 64); out[t] = s[lane]; }",
        "race",
    ),
    (
        "past the end of a tensor",
        "out[t] = in[1000 + t];",
        "out[t] = in[1024 - 64 + t];",
        "out-of-bounds",
    ),
    ("before its start", "out[t] = in[t - 1];", "out[t] = in[t];", "out-of-bounds"),
    (
        "past the end of shared memory",
        "s[t] = 0; out[t] = s[960 + (in[0] + 1) * 60 + t];",
        "s[t] = 0; out[t] = s[in[0] + t];",
        "out-of-bounds",
    ),
    (
        "a vector access off its alignment",
        "int4 v = *(int4 *)(in + t); out[t] = v.x + v.y + v.z + v.w;",
        "int4 v = *(int4 *)(in + 4 * t); out[t] = v.x + v.y + v.z + v.w;",
        "misaligned",
    ),
    (
        "asynchronous copy off its alignment",
        "COPY(s + 4 * t, in + 4 * t + 1); COMMIT(); WAIT(0); out[t] = 0;",
        "COPY(s + 4 * t, in + 4 * t + 4); COMMIT(); WAIT(0); out[t] = 0;",
        "misaligned",
    ),
    (
        "a barrier in a divergent branch",
        "if (lane < 16) __syncthreads(); out[t] = t;",
        "if (warp < 4) __syncthreads(); out[t] = t;",
        "barrier",
    ),
    (
        "not enough warps for a named barrier",
        "if (warp == 0) BAR(1, 128); out[t] = t;",
        "BAR(1, 128); out[t] = t;",
        "deadlock",
    ),
    (
        "warps that disagree on the thread count",
        "if (warp == 0) BAR(1, 64); else BAR(1, 96); out[t] = t;",
        "if (warp == 0) BAR(1, 128); else BAR(1, 128); out[t] = t;",
        "barrier",
    ),
    ("a barrier that does not exist", "BAR(in[16], 64); out[t] = t;", "BAR(in[15], 64); out[t] = t;", "barrier"),
]


@pytest.mark.parametrize(("faulty", "correct", "kind"), [case[1:] for case in TWINS], ids=[case[0] for case in TWINS])
def test_hazard_is_named_and_its_correct_twin_passes(faulty: str, correct: str, kind: str) -> None:
    block = 128 if "128" in faulty + correct or "^ 64" in faulty else THREADS
    assert fault(faulty, block).kind == kind
    run(correct, block)


def test_a_lock_in_shared_memory_counts_all_warps() -> None:
    assert (run(LOCKED, block=256) == 8).all()


def test_a_race_names_both_parties_and_their_lines() -> None:
    body = "s[t] = t;\n int v = 0;\n v = s[(t + 32) % 64];\n out[t] = v;"
    error = fault(body)
    assert error.source_line == line_of(body, "v = s[")
    assert (error.thread_block, error.warp, error.lane, error.address) == ((0, 0, 0), 0, 0, 128)
    assert error.other is not None
    assert (error.other.warp, error.other.lane, error.other.source_line) == (1, 0, line_of(body, "s[t] = t"))
    message = str(error)
    for part in ("race", "warp 0", "lane 0", "ld.shared", "st.shared", "test.cu", "write by warp 1, lane 0"):
        assert part in message


def test_an_unfinished_copy_names_the_copy() -> None:
    error = fault("COPY(s + 4 * t, in + 4 * t); COMMIT(); out[t] = s[4 * t + 3];")
    assert error.other is not None and error.other.instruction.startswith("cp.async.cg")
    assert "asynchronous copy" in str(error)


def test_without_the_wait_the_result_is_wrong_too() -> None:
    body = "COPY(s + 4 * t, in + 4 * t); COMMIT(); out[t] = s[4 * t];"
    assert (run(body, check_hazards=False)[:64] == -1).all()  # data arrives as late as allowed


def test_hazard_checks_can_be_switched_off_but_bounds_stay() -> None:
    run("s[t] = t; out[t] = s[(t + 32) % 64];", check_hazards=False)
    with pytest.raises(SimulationError):
        run("out[t] = in[1000 + t];", check_hazards=False)


def test_equal_values_stored_by_several_threads_are_accepted() -> None:
    run("s[0] = 7; __syncthreads(); out[t] = s[0];")
    run("if (t < 32) s[0] = 7; if (t >= 32) s[0] = 7; __syncthreads(); out[t] = s[0];")


def test_neighbouring_bytes_do_not_race() -> None:
    run("((char *)s)[t] = t; __syncthreads(); out[t] = ((char *)s)[t ^ 63];")
    run("((short *)s)[t] = t; out[t] = ((short *)s)[t];")


def test_deadlock_says_who_waits_where() -> None:
    error = fault("if (warp == 0) BAR(3, 96); out[t] = t;")
    assert error.kind == "deadlock"
    assert "barrier 3 has 32 of 96 threads" in error.detail and "warps 0" in error.detail
    assert error.ptx_line is not None and error.instruction is not None and "bar.sync" in error.instruction


def test_use_after_free() -> None:
    ptx = compile_cuda('extern "C" __global__ void k(int *p) { p[threadIdx.x] = 1; }')
    gpu = SimulatedGPU()
    module = gpu.load(ptx)
    pointer = gpu.allocate(128)
    module.launch("k", 1, 32, 0, [pointer])
    gpu.free(pointer)
    with pytest.raises(SimulationError) as caught:
        module.launch("k", 1, 32, 0, [pointer])
    assert caught.value.kind == "out-of-bounds" and "freed" in caught.value.detail
    with pytest.raises(ValueError, match="already freed"):
        gpu.free(pointer)


def test_memory_is_reused_only_after_quarantine() -> None:
    gpu = SimulatedGPU()
    seen = set()
    for _ in range(80):
        pointer = gpu.allocate(1 << 20)
        gpu.free(pointer)
        seen.add(pointer)
    assert 60 < len(seen) < 80
    live = gpu.to_device(np.arange(10))
    assert gpu.to_host(live).tolist() == list(range(10))


def test_named_barriers_between_producer_and_consumer_warps() -> None:
    body = """
    for (int i = 0; i < 3; ++i) {
        if (warp == 0) { if (i) BAR(2, 64); s[lane] = 10 * i + lane; ARRIVE(1, 64); }
        else { BAR(1, 64); out[32 * i + lane] = s[lane ^ 1]; if (i < 2) ARRIVE(2, 64); }
    }"""
    found = run(body)
    assert found[:96].tolist() == [10 * i + (lane ^ 1) for i in range(3) for lane in range(32)]
    assert fault(body.replace("if (i) BAR(2, 64);", "").replace("if (i < 2) ARRIVE(2, 64);", "")).kind == "race"


def test_barrier_reductions() -> None:
    found = run(
        "out[t] = __syncthreads_count(t % 3 == 0) * 4 + __syncthreads_and(t < 64) * 2 + __syncthreads_or(t == 9);"
    )
    assert (found[:64] == 22 * 4 + 2 + 1).all()


def test_unaligned_barriers_let_lanes_arrive_one_by_one() -> None:
    ptx = (
        HEADER
        + """.visible .entry k(.param .u64 out) {
        .shared .align 4 .b8 s[4];
        .reg .b32 %r<4>; .reg .b64 %rd<3>; .reg .pred %p<2>;
        mov.u32 %r1, %tid.x;
        setp.eq.u32 %p1, %r1, 5;
        @!%p1 bra OTHERS;
        st.shared.u32 [s], 77;
        barrier.sync 0;
        bra END;
        OTHERS: barrier.sync 0;
        END: ld.shared.u32 %r2, [s];
        ld.param.u64 %rd1, [out]; mad.wide.u32 %rd2, %r1, 4, %rd1; st.global.u32 [%rd2], %r2;
        ret; }"""
    )
    outputs = {"out": np.zeros(64, np.uint32)}
    launch(ptx, 64, outputs)
    assert (outputs["out"] == 77).all()


OBSERVED = """int *flag = s + 1000; volatile int *watched = flag;
    if (t == 0) *flag = 0;
    __syncthreads(); __threadfence_block();
    if (lane == 0) { atomicAdd(flag, 1); WATCH __threadfence_block(); out[warp] = *flag; }"""


def test_a_strong_write_that_was_observed_comes_before_plain_accesses() -> None:
    assert run(OBSERVED.replace("WATCH", "while (*watched < 2);"))[:2].tolist() == [2, 2]
    assert fault(OBSERVED.replace("WATCH", "")).kind == "race"
