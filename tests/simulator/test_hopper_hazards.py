"""Every hazard of asynchronous instructions is named, with both parties; each has a correct twin that passes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from flashwright.hardware.tensor_map import Swizzle, TensorMap
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.run import Run

from .hopper_tools import BF16, PRELUDE, run_cuda
from .test_hopper_pipeline import GEMM, run_gemm

# Two tiles of 64 rows of 128 bytes; warps 0–3 are a consumer warpgroup, warp 4 may produce.
TILE = 64 * 128
KERNEL = r"""
D void fill(u32 tile, const Map &map, u32 barrier) { expect(barrier, 8192); load2(tile, map, barrier, 0, 0); }
extern "C" __global__ void k(const __grid_constant__ Map in, const __grid_constant__ Map target, float *out) {
  extern __shared__ __align__(1024) char s[];
  __shared__ u64 bars[5];
  const u32 full = addr(bars), full2 = full + 8, empty = full + 16, fresh = full + 24, fresh2 = full + 32;
  const u32 t0 = addr(s), t1 = t0 + 8192;
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  float d[4] = {0, 0, 0, 0}, e[4] = {0, 0, 0, 0};
  u32 a[4] = {0, 0, 0, 0};
  if (t == 0) { init(full, 1); init(full2, 1); init(empty, 4); init(fresh2, 4); init_fence(); }
  __syncthreads();
  BODY
  for (int i = 0; i < 4; ++i) out[4 * t + i] = d[i] + e[i];
}
"""
WAIT = "wait(full, 0); wait(full2, 0);\n"
ISSUE = "fence(); mma(d, desc(t0), desc(t1), 0); commit();\n"
TWO_GROUPS = "fence(); mma(d, desc(t0), desc(t0), 0); commit(); mma(e, desc(t1), desc(t1), 0); commit(); finish<1>();\n"
MMA = ISSUE + "finish<0>();\n"
RELEASE = "if (lane == 0) arrive(empty);\n"
LOAD = "d[0] = *(float *)(s + 16 * t);\n"
LOAD_TOGETHER = "d[0] = *(float *)(s + 16 * warp);\n"
STORE = "((int *)s)[t] = 1;\n"
REFILL = "if (t == 0) fill(t0, in, full);\n"
FILL = "for (int i = t; i < 1024; i += 160) ((uint4 *)s)[i] = make_uint4(0, 0, 0, i);\n"
BULK_STORE = "if (t == 0) { store2(t0, target, 0, 0); bulk_commit(); bulk_wait_read(); }\n"
UNFINISHED_BULK_STORE = "if (t == 0) { store2(t0, target, 0, 0); bulk_commit(); }\n"
BULK_STORE_OF_WRITTEN = (
    'else if (t == 128) { wait(empty, 0); asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;"'
    ' :: "l"(out), "r"(t0) : "memory"); bulk_commit(); bulk_wait_read(); }\n'
)
ASYNC_FILL = (
    "for (int i = t; i < 1024; i += 160)"
    'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(t0 + 16 * i), "l"(out));'
    'asm volatile("cp.async.wait_all;" ::: "memory");\n'
)
FENCED_FILL = FILL + "proxy_fence(); __syncthreads();\n"


def warpgroup(body: str) -> str:
    return "if (t < 128) {\n" + body + "\n}\n"


def consumer(body: str) -> str:
    """Thread 128 fills both tiles, each with its own barrier; the warpgroup executes ``body``."""
    return "if (t == 128) { fill(t0, in, full); fill(t1, in, full2); }\n" + warpgroup(body)


def refilled(body: str, before_refill: str) -> str:
    """As `consumer`, and the producer fills the first tile a second time."""
    return (
        consumer(body) + "else if (t == 128) { wait(full, 0); " + before_refill + "fill(t0, in, full); wait(full, 1); }"
    )


def apart(even: str, odd: str, *, before: str = "", lanes: int = 128) -> str:
    """Every other lane of the warpgroup does the one, and the other lanes the other: they do not meet. `fresh` expects
    so many of them, and the tile is filled again."""
    rest = [f'asm volatile("nanosleep.u32 {n};");' for n in range(4)]  # the compiler would merge what is equal
    sides = f"if (lane % 2) {{ {rest[0]} {odd} {rest[1]} }} else {{ {rest[2]} {even} {rest[3]} }}"
    barriers = f"if (t == 0) {{ init(fresh, {lanes}); init(fresh2, 64); }} __syncthreads();\n"
    return barriers + refilled(WAIT + before + sides, before_refill="wait(fresh, 0);")


def arithmetic(instruction: str, register: str) -> str:
    constraint = "r" if register.startswith("a") else "f"
    return f'asm volatile("{instruction}" : "+{constraint}"({register}));\n'


@dataclass(frozen=True)
class Twins:
    name: str
    kind: str
    faulty: str
    correct: str
    words: tuple[str, ...]


TWINS = [
    Twins(
        "wgmma before its tile has arrived",
        "async-copy",
        faulty=consumer("wait(full2, 0);\n" + MMA),
        correct=consumer(WAIT + MMA),
        words=("wgmma read of A", "mbarrier was not waited for", "other: bulk copy: `cp.async.bulk.tensor"),
    ),
    Twins(
        "wgmma that waits for another stage",
        "async-copy",
        faulty=consumer("wait(full, 0);\n" + MMA),
        correct=consumer(WAIT + MMA),
        words=("wgmma read of B",),
    ),
    Twins(
        "one warp waits for all",
        "async-copy",
        faulty=consumer("if (warp == 0) { " + WAIT + "} __syncwarp();\n" + MMA),
        correct=consumer("if (warp == 0) { " + WAIT + "} bar(1, 128);\n" + MMA),
        words=("wgmma read of",),
    ),
    Twins(
        "ordinary load before the tile has arrived",
        "async-copy",
        faulty=consumer("wait(full2, 0);\n" + LOAD + "wait(full, 0);"),
        correct=consumer(WAIT + LOAD),
        words=("shared load", "bulk copy"),
    ),
    Twins(
        "store into a copy in flight",
        "async-copy",
        faulty=consumer(STORE + WAIT),
        correct=consumer(WAIT + STORE),
        words=("shared store while a bulk copy",),
    ),
    Twins(
        "bulk copy over a tile that wgmma still reads",
        "race",
        faulty=consumer(WAIT + ISSUE + REFILL + "finish<0>(); wait(full, 1);"),
        correct=consumer(WAIT + ISSUE + "finish<0>();" + REFILL + "wait(full, 1);"),
        words=("bulk copy while a wgmma read that was not waited for", "other: wgmma read by warp 0"),
    ),
    Twins(
        "bulk copy over a tile of the newest group after a wait for the older",
        "race",
        faulty=consumer(WAIT + TWO_GROUPS + "if (t == 0) fill(t1, in, full2); finish<0>(); wait(full2, 1);"),
        correct=consumer(WAIT + TWO_GROUPS + REFILL + "finish<0>(); wait(full, 1);"),
        words=("wgmma read",),
    ),
    Twins(
        "ordinary store over a tile that wgmma still reads",
        "race",
        faulty=consumer(WAIT + ISSUE + STORE + "finish<0>();"),
        correct=consumer(WAIT + ISSUE + "finish<0>(); bar(1, 128);" + STORE),
        words=("shared store while a wgmma read",),
    ),
    Twins(
        "the producer does not wait until consumers have read",
        "race",
        faulty=refilled(WAIT + MMA + RELEASE, before_refill=""),
        correct=refilled(WAIT + MMA + RELEASE, before_refill="wait(empty, 0);"),
        words=("bulk copy while a wgmma read",),
    ),
    Twins(
        "a consumer releases a stage before it has read it",
        "race",
        faulty=refilled(WAIT + RELEASE + LOAD, before_refill="wait(empty, 0);"),
        correct=refilled(WAIT + LOAD + "__syncwarp();" + RELEASE, before_refill="wait(empty, 0);"),
        words=("bulk copy while another thread may still read", "read by warp"),
    ),
    Twins(
        "one lane releases what others of its warp may not have read",
        "race",
        faulty=refilled(WAIT + LOAD + RELEASE, before_refill="wait(empty, 0);"),
        correct=refilled(WAIT + LOAD + "__syncwarp();" + RELEASE, before_refill="wait(empty, 0);"),
        words=("bulk copy while another thread may still read", "read by warp"),
    ),
    Twins(
        "of lanes that arrive apart the ones have not read what all read",
        "race",
        faulty=apart("arrive(fresh);" + LOAD_TOGETHER, LOAD_TOGETHER + "arrive(fresh);"),
        correct=apart(LOAD_TOGETHER + "arrive(fresh);", LOAD_TOGETHER + "arrive(fresh);"),
        words=("bulk copy while another thread may still read", "read by warp"),
    ),
    Twins(
        "of lanes that arrive apart the ones tell another mbarrier",
        "race",
        faulty=apart("arrive(fresh);", "arrive(fresh2);", before=LOAD_TOGETHER, lanes=64),
        correct=apart("arrive(fresh);", "arrive(fresh);", before=LOAD_TOGETHER),
        words=("bulk copy while another thread may still read", "read by warp"),
    ),
    Twins(
        "one lane speaks for what others of its warp have written",
        "race",
        faulty=warpgroup(STORE + "proxy_fence();" + RELEASE) + BULK_STORE_OF_WRITTEN,
        correct=warpgroup(STORE + "proxy_fence(); __syncwarp();" + RELEASE) + BULK_STORE_OF_WRITTEN,
        words=("bulk store not ordered after a write by another thread", "write by warp"),
    ),
    Twins(
        "one lane tells of something else, then of what others of its warp have written and fenced",
        "race",
        faulty=warpgroup(STORE + "proxy_fence(); if (lane == 0) arrive(fresh2);" + RELEASE) + BULK_STORE_OF_WRITTEN,
        correct=warpgroup(STORE + "proxy_fence(); if (lane == 0) arrive(fresh2); __syncwarp();" + RELEASE)
        + BULK_STORE_OF_WRITTEN,
        words=("bulk store not ordered after a write by another thread",),
    ),
    Twins(
        "an arrival that may count for the phase before",
        "race",
        faulty=warpgroup(RELEASE + "__syncwarp();" + RELEASE + "wait(empty, 1);"),
        correct=warpgroup(RELEASE + "wait(empty, 0);" + RELEASE + "wait(empty, 1);"),
        words=("not ordered after the end of its phase before",),
    ),
    Twins(
        "accumulators read before the wait",
        "wgmma",
        faulty=consumer(WAIT + ISSUE + "out[t] = d[0]; finish<0>();"),
        correct=consumer(WAIT + ISSUE + "finish<0>(); out[t] = d[0];"),
        words=("wgmma.wait_group", "wgmma in flight by warp"),
    ),
    Twins(
        "accumulators of the newest group read after a wait for the older",
        "wgmma",
        faulty=consumer(WAIT + TWO_GROUPS + "out[t] = e[0]; finish<0>();"),
        correct=consumer(WAIT + TWO_GROUPS + "out[t] = d[0]; finish<0>();"),
        words=("has not been waited for",),
    ),
    Twins(
        "a group that was not committed is not waited for",
        "wgmma",
        faulty=consumer(WAIT + ISSUE.replace("commit();", "") + "finish<0>(); out[t] = d[0]; commit(); finish<0>();"),
        correct=consumer(WAIT + ISSUE + "finish<0>(); out[t] = d[0];"),
        words=("has not been waited for",),
    ),
    Twins(
        "accumulators written before the wait",
        "wgmma",
        faulty=consumer(WAIT + ISSUE + arithmetic("add.f32 %0, %0, 0f3F800000;", "d[1]") + "finish<0>();"),
        correct=consumer(WAIT + ISSUE + "finish<0>();" + arithmetic("add.f32 %0, %0, 0f3F800000;", "d[1]")),
        words=("add.f32",),
    ),
    Twins(
        "registers of A written before the wait",
        "wgmma",
        faulty=consumer(
            WAIT + "fence(); mma_registers(d, a, desc(t1)); commit();\n" + arithmetic("add.u32 %0, %0, 1;", "a[2]")
            + "finish<0>(); d[0] += a[2];"
        ),
        correct=consumer(
            WAIT + "fence(); mma_registers(d, a, desc(t1)); commit(); finish<0>();\n"
            + arithmetic("add.u32 %0, %0, 1;", "a[2]") + "d[0] += a[2];"
        ),
        words=("has not been waited for",),
    ),
    Twins(
        "no fence before the first wgmma",
        "wgmma",
        faulty=consumer(WAIT + MMA.replace("fence();", "")),
        correct=consumer(WAIT + MMA),
        words=("no wgmma.fence before the first",),
    ),
    Twins(
        "accumulators scaled without a fence before the next wgmma",
        "wgmma",
        faulty=consumer(WAIT + MMA + arithmetic("mul.f32 %0, %0, 0f40000000;", "d[0]") + MMA.replace("fence();", "")),
        correct=consumer(WAIT + MMA + arithmetic("mul.f32 %0, %0, 0f40000000;", "d[0]") + MMA),
        words=("no wgmma.fence between", "mul.f32"),
    ),
    Twins(
        "ordinary stores read by wgmma without a proxy fence",
        "proxy-fence",
        faulty=FILL + "__syncthreads();\n" + warpgroup(MMA),
        correct=FENCED_FILL + warpgroup(MMA),
        words=("wgmma read of", "without fence.proxy.async in between", "write by warp"),
    ),
    Twins(
        "a proxy fence by a warp that has not seen the writes",
        "proxy-fence",
        faulty=FILL + "if (warp == 0) proxy_fence(); __syncthreads();\n" + warpgroup(MMA),
        correct=FILL + "__syncthreads(); if (warp == 0) proxy_fence(); __syncthreads();\n" + warpgroup(MMA),
        words=("fence.proxy.async",),
    ),
    Twins(
        "asynchronous copies read by wgmma without a proxy fence",
        "proxy-fence",
        faulty=ASYNC_FILL + "__syncthreads();\n" + warpgroup(MMA),
        correct=ASYNC_FILL + "__syncthreads(); proxy_fence();\n" + warpgroup(MMA),
        words=("fence.proxy.async", "asynchronous copy by warp"),
    ),
    Twins(
        "a proxy fence by the reader, of another warp than the product's",
        "proxy-fence",
        faulty=FILL + "__syncthreads(); if (warp == 4) proxy_fence();\n" + warpgroup(MMA),
        correct=FILL + "__syncthreads(); proxy_fence();\n" + warpgroup(MMA),
        words=("fence.proxy.async",),
    ),
    Twins(
        "a proxy fence without a barrier orders nobody",
        "race",
        faulty=FILL + "proxy_fence();\n" + warpgroup(MMA),
        correct=FENCED_FILL + warpgroup(MMA),
        words=("not ordered after a write",),
    ),
    Twins(
        "bulk store of what was written without a proxy fence",
        "proxy-fence",
        faulty=FILL + "__syncthreads();\n" + BULK_STORE,
        correct=FENCED_FILL + BULK_STORE,
        words=("bulk store after a write by ordinary instructions",),
    ),
    Twins(
        "bulk copy over what was written without a proxy fence",
        "proxy-fence",
        faulty=FILL + "__syncthreads();\n" + REFILL + "wait(full, 0);",
        correct=FENCED_FILL + REFILL + "wait(full, 0);",
        words=("bulk copy after a write by ordinary instructions",),
    ),
    Twins(
        "source of a bulk store overwritten before it was read",
        "race",
        faulty=FENCED_FILL + UNFINISHED_BULK_STORE + "__syncthreads();\n" + STORE + "if (t == 0) bulk_wait_read();",
        correct=FENCED_FILL + BULK_STORE + "__syncthreads();\n" + STORE,
        words=("shared store while a bulk store", "other: bulk store by warp 0"),
    ),
    Twins(
        "bulk store that nobody waits for",
        "async-copy",
        faulty=FENCED_FILL + UNFINISHED_BULK_STORE,
        correct=FENCED_FILL + BULK_STORE,
        words=("exits without waiting",),
    ),
    Twins(
        "bulk copy that nobody waits for",
        "async-copy",
        faulty=REFILL,
        correct=REFILL + "wait(full, 0);",
        words=("the kernel ends while this bulk copy is in flight",),
    ),
    Twins(
        "shared memory that nobody wrote",
        "uninitialised-shared",
        faulty=REFILL + warpgroup("wait(full, 0);" + MMA),
        correct=consumer(WAIT + MMA),
        words=("nobody wrote",),
    ),
    Twins(
        "mbarrier used by another warp without a barrier after its initialisation",
        "race",
        faulty="if (t == 0) init(fresh, 1); if (t == 32) arrive(fresh);",
        correct="if (t == 0) init(fresh, 1); __syncthreads(); if (t == 32) arrive(fresh);",
        words=("after its initialisation",),
    ),
    Twins(
        "bulk copy to an mbarrier whose initialisation was not fenced",
        "mbarrier-fence",
        faulty="if (t == 0) { init(fresh, 1); fill(t0, in, fresh); wait(fresh, 0); }",
        correct="if (t == 0) { init(fresh, 1); init_fence(); fill(t0, in, fresh); wait(fresh, 0); }",
        words=("fence.mbarrier_init",),
    ),
    Twins(
        "a tile that does not begin where the swizzle pattern does",
        "descriptor",
        faulty=consumer(WAIT + MMA.replace("desc(t1)", "desc(t1 + 128)")),
        correct=consumer(WAIT + MMA.replace("desc(t1)", "desc(t1 + 1024 + 32)")),
        words=("multiple of 1024",),
    ),
    Twins(
        "a descriptor that runs out of its row",
        "descriptor",
        faulty=consumer(WAIT + MMA.replace("desc(t1)", "desc(t1 + 112)")),
        correct=consumer(WAIT + MMA.replace("desc(t1)", "desc(t1 + 96)")),
        words=("112 bytes into a row of 128",),
    ),
]  # fmt: skip


@cache  # correct twins are shared
def run(body: str, check_hazards: str | bool = "stop", **options: object) -> Run:
    gpu = SimulatedGPU("sm_90a")
    array = np.ones((64, 64), BF16)
    source, target = (
        TensorMap(gpu.to_device(array), BF16, (64, 64), (128,), (64, 64), swizzle=Swizzle.B128) for _ in range(2)
    )
    out = gpu.to_device(np.zeros(4 * 160, np.float32))
    arguments = [source, target, out]
    source_text = KERNEL.replace("BODY", body)
    return run_cuda(source_text, 160, arguments, gpu, shared_bytes=2 * TILE, check_hazards=check_hazards, **options)


@pytest.mark.parametrize("twins", TWINS, ids=[twins.name for twins in TWINS])
def test_a_hazard_is_named_and_its_correct_twin_passes(twins: Twins) -> None:
    run(twins.correct)
    with pytest.raises(SimulationError) as caught:
        run(twins.faulty)
    error = caught.value
    assert error.kind == twins.kind, str(error)
    for word in twins.words:
        assert word in str(error), str(error)
    assert error.ptx_line is not None and error.source_line is not None


def test_an_mbarrier_without_a_fence_is_reported_and_the_run_goes_on() -> None:
    done = run("if (t == 0) { init(fresh, 1); fill(t0, in, fresh); wait(fresh, 0); }", check_hazards=True)
    assert [(finding.kind, finding.count) for finding in done.findings] == [("mbarrier-fence", 1)]
    assert "fence.mbarrier_init" in done.report()


@pytest.mark.parametrize("instruction", ["try_wait", "test_wait"])
def test_a_wait_whose_answer_is_ignored_passes_unless_waits_fail_spuriously(instruction: str) -> None:
    once = (
        'asm volatile("{\\n.reg .pred done;\\n'
        f'mbarrier.{instruction}.parity.shared::cta.b64 done, [%0], 0;\\n}}" :: "r"(full), "r"(full2) : "memory");'
    )
    body = consumer(once + once.replace("%0", "%1") + MMA)
    run(body)
    with pytest.raises(SimulationError, match="its mbarrier was not waited for") as caught:
        run(body, spurious_waits=True)
    assert caught.value.kind == "async-copy"
    run(consumer(WAIT + MMA), spurious_waits=True)


def test_both_parties_are_found_in_the_source() -> None:
    body = consumer("wait(full2, 0);\n" + MMA)
    with pytest.raises(SimulationError) as caught:
        run(body)
    error = caught.value
    text = PRELUDE + KERNEL.replace("BODY", body)
    line = text[: text.index(ISSUE)].count("\n") + 1
    assert f":{line})" in str(error.source_location)
    assert error.address == 1024 and error.thread_block == (0, 0, 0)
    assert error.other is not None and error.other.warp is None
    assert "cp.async.bulk.tensor" in error.other.instruction and error.other.source_line is not None


# One fault each in the pipelined product of test_hopper_pipeline, and what it may be reported as.
MUTATIONS = {
    "the consumer does not wait for its stage": ("wait(full + 8 * stage, lap);\n", "\n", {"async-copy"}),
    "the producer does not wait for its stage": ("wait(empty + 8 * stage, lap ^ 1);\n", "\n", {"race", "mbarrier"}),
    "a stage is released before wgmma has ended": (
        "finish<0>();\n    if (lane == 0) arrive(empty + 8 * stage);",
        "if (lane == 0) arrive(empty + 8 * stage);\n    finish<0>();",
        {"race"},
    ),
    "one warp waits for the products of all four": (
        "finish<0>();\n    if",
        "if (warp % 4 == 0) finish<0>();\n    if",
        {"race", "wgmma"},
    ),
    "no fence before the products": ("    fence();\n", "", {"wgmma"}),
    "no proxy fence before the bulk store": ("  proxy_fence();\n", "", {"proxy-fence"}),
    "no barrier before the bulk store": ("  bar(1 + group, 128);\n", "", {"race", "uninitialised-shared"}),
    "no wait for the bulk store": ("    bulk_wait_read();\n", "", {"async-copy"}),
    "C overlaps the ring of stages": ("out = tiles + stages * stage_bytes", "out = tiles", {"race"}),
    "too few bytes expected": ("stage, stage_bytes);", "stage, stage_bytes - 128);", {"deadlock", "async-copy"}),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_pipeline_is_caught(name: str) -> None:
    before, after, kinds = MUTATIONS[name]
    assert GEMM.count(before) == 1
    with pytest.raises(SimulationError) as caught:
        run_gemm(GEMM.replace(before, after))
    assert caught.value.kind in kinds, str(caught.value)
