"""Counters follow the hardware's definitions, checked by hand-computed patterns."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flashwright.simulator.counters import InstructionCounts
from flashwright.simulator.run import Run

from .tools import HEADER, compile_cuda, launch


def counts_of(run: Run, prefix: str) -> InstructionCounts:
    total = InstructionCounts()
    for item in run.per_instruction:
        if item.opcode.startswith(prefix):
            total.add(item.counts)
    return total


def shared_load(address: str, width: str = "b32", guard: str = "") -> InstructionCounts:
    """Counts of one shared load of one warp; ``address`` computes %r2 from the lane in %r1."""
    target = {"b32": "%r3", "v2.b32": "{%r3, %r4}", "v4.b32": "{%r3, %r4, %r5, %r6}", "b64": "%rd1", "u8": "%r3"}[width]
    ptx = (
        HEADER
        + f""".visible .entry k() {{
        .shared .align 16 .b8 tile[16384];
        .reg .b32 %r<8>; .reg .b64 %rd<2>; .reg .pred %p<2>;
        mov.u32 %r1, %laneid;
        {address}
        {guard and "setp." + guard + " %p1, %r1, 16;"}
        {"@%p1" if guard else ""} ld.shared.{width} {target}, [%r2];
        ret; }}"""
    )
    run = launch(ptx, 32, {}, check_hazards=False)
    return counts_of(run, "ld.shared")


@pytest.mark.parametrize(
    ("stride_words", "wavefronts"), [(0, 1), (1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (16, 16), (32, 32), (33, 1)]
)
def test_strided_words_conflict_as_often_as_they_share_a_bank(stride_words: int, wavefronts: int) -> None:
    counts = shared_load(f"mul.lo.u32 %r2, %r1, {4 * stride_words};")
    assert (counts.shared_accesses, counts.shared_wavefronts, counts.shared_wavefronts_ideal) == (1, wavefronts, 1)
    assert counts.bank_conflicts == wavefronts - 1


def test_lanes_that_read_the_same_word_share_it() -> None:
    # Two words of the same bank, each read by sixteen lanes.
    assert shared_load("and.b32 %r2, %r1, 1; shl.b32 %r2, %r2, 7;").shared_wavefronts == 2
    # Bytes of one word are one word.
    assert shared_load("mov.u32 %r2, %r1;", "u8").shared_wavefronts == 1


@pytest.mark.parametrize(
    ("width", "stride_bytes", "wavefronts", "ideal"),
    [
        ("b64", 8, 2, 2),  # conflict-free: two half-warps of 128 bytes
        ("v2.b32", 8, 2, 2),
        ("b64", 16, 4, 2),  # every other 8 bytes: two-way in each half-warp
        ("b64", 128, 32, 2),
        ("v4.b32", 16, 4, 4),  # conflict-free: four quarter-warps
        ("v4.b32", 32, 8, 4),
        ("v4.b32", 64, 16, 4),
        ("v4.b32", 128, 32, 4),  # eight rows of 128 bytes: all lanes of a quarter in the same banks
    ],
)
def test_wide_accesses_are_served_in_phases(width: str, stride_bytes: int, wavefronts: int, ideal: int) -> None:
    counts = shared_load(f"mul.lo.u32 %r2, %r1, {stride_bytes};", width)
    assert (counts.shared_wavefronts, counts.shared_wavefronts_ideal) == (wavefronts, ideal)


def test_inactive_lanes_cost_nothing() -> None:
    half = shared_load("mul.lo.u32 %r2, %r1, 16;", "v4.b32", guard="lt.u32")
    assert (half.shared_wavefronts, half.shared_wavefronts_ideal, half.bytes_shared_to_registers) == (2, 2, 256)


LDMATRIX = """extern "C" __global__ void k(unsigned *out) {{
    extern __shared__ __align__(16) unsigned char tile[];
    unsigned a = (unsigned)__cvta_generic_to_shared(tile), lane = threadIdx.x % 32, r[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a + {offset}));
    out[threadIdx.x] = r[0] + r[1] + r[2] + r[3]; }}"""


@pytest.mark.parametrize(
    ("offset", "wavefronts"),
    [
        ("lane * 16", 4),
        ("lane * 128", 32),  # rows of 64 halves without swizzle: 8-way
        ("(lane * 128) + ((lane % 8) * 16)", 4),  # rotated (as a swizzle does): free
        ("(lane * 128) + (((lane % 8) * 16) ^ 48)", 4),
        ("lane * 32", 8),
        ("lane * 144", 4),  # padded rows
    ],
)
def test_ldmatrix_conflicts(offset: str, wavefronts: int) -> None:
    run = launch(
        compile_cuda(LDMATRIX.format(offset=offset)),
        64,
        {"out": np.zeros(64, np.uint32)},
        shared_bytes=8192,
        check_hazards=False,
    )
    counts = counts_of(run, "ldmatrix")
    assert (counts.executed, counts.shared_accesses) == (2, 2)
    assert (counts.shared_wavefronts, counts.shared_wavefronts_ideal) == (2 * wavefronts, 8)


def test_asynchronous_copies_count_both_sides() -> None:
    source = """extern "C" __global__ void k(const char *in, int shared_stride) {
        extern __shared__ __align__(16) char tile[];
        unsigned a = (unsigned)__cvta_generic_to_shared(tile) + threadIdx.x * shared_stride;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(a), "l"(in + threadIdx.x * 16));
        asm volatile("cp.async.commit_group;"); asm volatile("cp.async.wait_group 0;"); }"""
    ptx = compile_cuda(source)
    data = np.zeros(1024, np.uint8)
    free = launch(ptx, 64, {}, data, np.int32(16), shared_bytes=8192).counters
    assert (free.shared_wavefronts, free.bank_conflicts) == (8, 0)
    assert (free.global_sectors, free.global_sectors_ideal, free.bytes_global_to_shared) == (32, 32, 1024)
    assert free.bytes_shared_to_registers == free.bytes_global_to_registers == 0
    conflicting = launch(ptx, 64, {}, data, np.int32(128), shared_bytes=8192).counters
    assert conflicting.bank_conflicts == 64 - 8


@pytest.mark.parametrize(
    ("index", "sectors", "ideal"),
    [
        ("t", 4, 4),  # 32 floats in a row: 128 bytes
        ("t + 1", 5, 4),  # shifted by one float: one sector more
        ("2 * t", 8, 4),
        ("8 * t", 32, 4),  # one sector per lane
        ("32 * t", 32, 4),
        ("0", 1, 1),  # one float for all
        ("31 - t", 4, 4),
        ("t / 4", 1, 1),
    ],
)
def test_global_sectors(index: str, sectors: int, ideal: int) -> None:
    ptx = compile_cuda(f"""extern "C" __global__ void k(float *out, const float *in) {{
        int t = threadIdx.x; out[t] = in[{index}]; }}""")
    run = launch(ptx, 32, {"out": np.zeros(32, np.float32)}, np.zeros(1024, np.float32))
    loads = counts_of(run, "ld.global")
    assert (loads.global_requests, loads.global_sectors, loads.global_sectors_ideal) == (1, sectors, ideal)
    assert loads.bytes_global_to_registers == 128


def test_vector_loads_of_sixteen_bytes_fill_sixteen_sectors() -> None:
    ptx = compile_cuda(
        """extern "C" __global__ void k(float4 *out, const float4 *in) { out[threadIdx.x] = in[threadIdx.x]; }"""
    )
    counters = launch(ptx, 32, {"out": np.zeros(128, np.float32)}, np.zeros(128, np.float32)).counters
    assert counters.global_sectors == counters.global_sectors_ideal == 32


def test_instructions_are_counted_per_warp_that_reaches_them() -> None:
    ptx = (
        HEADER
        + """.visible .entry k() {
        .reg .b32 %r<4>; .reg .pred %p<3>;
        mov.u32 %r1, %tid.x;
        setp.lt.u32 %p1, %r1, 40;
        @%p1 bra SMALL;
        add.u32 %r2, %r1, 1;
        ret;
        SMALL: setp.gt.u32 %p2, %r1, 1000;
        @%p2 mul.lo.u32 %r2, %r1, 3;
        ret; }"""
    )
    counters = launch(ptx, 96, {}, grid=2).counters
    # Warp 0 goes to SMALL, warp 1 goes both ways, warp 2 falls through.
    assert counters.instructions == {
        "mov.u32": 6, "setp.lt.u32": 6, "bra": 6, "add.u32": 4, "ret": 8, "setp.gt.u32": 4,
        "mul.lo.u32": 4,  # issued although its guard is false in every lane
    }  # fmt: skip
    assert counters.executed == 38


def test_groups_in_flight_and_barriers() -> None:
    ptx = compile_cuda("""extern "C" __global__ void k(const char *in) {
        __shared__ __align__(16) char tile[4 * 512];
        unsigned a = (unsigned)__cvta_generic_to_shared(tile) + threadIdx.x * 16;
        for (int i = 0; i < 4; ++i) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(a + i * 512), "l"(in + threadIdx.x * 16));
            asm volatile("cp.async.commit_group;");
            if (i == 2) { asm volatile("cp.async.wait_group 1;"); __syncthreads(); }
        }
        asm volatile("cp.async.commit_group;"); // empty: not in flight
        asm volatile("cp.async.wait_all;"); __syncthreads(); }""")
    counters = launch(ptx, 32, {}, np.zeros(512, np.uint8), grid=3).counters
    assert counters.max_async_groups_in_flight == 3
    assert counters.barriers == 6


def test_counts_by_source_line_and_as_json() -> None:
    source = """__device__ float twice(float x) { return x * 2.f; }
extern "C" __global__ void k(float *out) {
    __shared__ float s[1024];
    s[threadIdx.x * 32] = 1.f;
    __syncthreads();
    out[threadIdx.x] = twice(s[threadIdx.x * 32]);
}"""
    run = launch(compile_cuda(source), 32, {"out": np.zeros(32, np.float32)})
    lines = {line: counts for (_, line), counts in run.per_source_line().items()}
    assert lines[4].shared_wavefronts == 32 and lines[4].bank_conflicts == 31
    assert lines[1].executed >= 1  # inlined: at its own line …
    outer = {line: counts for (_, line), counts in run.per_source_line(outermost=True).items()}
    assert 1 not in outer and outer[6].executed > lines[6].executed  # … or at the line that calls it
    data = json.loads(json.dumps(run.to_dict()))
    assert data["counters"]["bank_conflicts"] == run.counters.bank_conflicts == 62
    assert data["per_source_line"] and data["per_instruction"]
    report = run.report()
    assert "bank_conflicts" in report and "test.cu:4" in report


def test_trace_lists_what_one_warp_executed() -> None:
    ptx = (
        HEADER
        + """.visible .entry k() {
        .reg .b32 %r<4>; .reg .pred %p<2>;
        mov.u32 %r1, %ctaid.x;
        mov.u32 %r2, 0;
        LOOP: add.u32 %r2, %r2, 1;
        setp.lt.u32 %p1, %r2, %r1;
        @%p1 bra LOOP;
        ret; }"""
    )
    run = launch(ptx, 64, {}, grid=5, trace_warp=(3, 1))
    assert run.trace is not None
    body = ["add.u32", "setp.lt.u32", "bra"]
    assert [entry.opcode for entry in run.trace] == ["mov.u32", "mov.u32", *body * 3, "ret"]
    assert run.trace[0].ptx_line == 6
    assert launch(ptx, 64, {}).trace is None
