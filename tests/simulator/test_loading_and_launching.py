"""What is refused when a module is loaded or launched, and how it is said."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashwright.simulator.errors import SimulationError
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.ptx.lexer import PtxSyntaxError
from flashwright.simulator.ptx.parser import parse

from .tools import HEADER, compile_cuda

EMPTY = HEADER + ".visible .entry k() { ret; }"


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        ("tcgen05.fence::before_thread_sync;", "unknown instruction"),
        ("frobnicate.b32 %r1, %r2;", "unknown instruction"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r2}, {%r2};", "shape"),
        ("atom.global.xor.f64 %fd1, [%rd1], %fd1;", ".xor of .f64"),
        ("add.u64 %rd1, %r1, %rd1;", "narrower"),
        ("mov.u32 %r1, %nonsense;", "%nonsense"),
        ("ld.global.v8.b64 %r1, [%rd1];", ""),
        ("call undefined_function;", "unknown function"),
    ],
)
def test_an_instruction_that_cannot_run_is_refused_at_load(instruction: str, reason: str) -> None:
    registers = ".reg .b32 %r<4>; .reg .b64 %rd<3>; .reg .f64 %fd<2>;"
    ptx = HEADER + f".visible .entry some_kernel() {{\n{registers}\n{instruction}\nret;\n}}"
    with pytest.raises(SimulationError) as caught:
        SimulatedGPU().load(ptx)
    error = caught.value
    assert error.kind == "unsupported"
    assert error.ptx_line == 6 and error.kernel == "some_kernel"
    assert instruction.rstrip(";") in str(error) and reason in str(error)


def test_text_that_is_not_ptx_names_its_line() -> None:
    with pytest.raises(PtxSyntaxError, match="PTX line 5"):
        SimulatedGPU().load(HEADER + "\nhello world")
    with pytest.raises(PtxSyntaxError, match="PTX line 4"):
        SimulatedGPU().load(HEADER + "?")
    with pytest.raises(PtxSyntaxError):
        SimulatedGPU().load(HEADER + ".visible .entry k() { ret;")


def test_recursion_is_refused() -> None:
    ptx = HEADER + ".func f() { call f; ret; }\n.visible .entry k() { call f; ret; }"
    with pytest.raises(SimulationError, match="recursion"):
        SimulatedGPU().load(ptx)


def test_kernels_are_listed_and_an_unknown_name_is_explained() -> None:
    module = SimulatedGPU().load(EMPTY + "\n.entry second() { ret; }")
    assert module.kernels == ["k", "second"]
    with pytest.raises(ValueError, match="it has: k, second"):
        module.launch("third", 1, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "takes 3 arguments .* 0 were given"),
        ([1, np.int32(2), np.float64(3)], "argument 2 .*4 bytes|argument 2 .*f32"),
        ([1, 2, np.float32(3)], "argument 1"),
        ([1, np.int32(2), 3.0], "cannot pass float"),
        ([b"12", np.int32(2), np.float32(1)], "argument 0"),
    ],
)
def test_arguments_are_checked_against_the_declarations(arguments: list[object], message: str) -> None:
    ptx = HEADER + ".visible .entry k(.param .u64 a, .param .u32 b, .param .f32 c) { ret; }"
    with pytest.raises(ValueError, match=message):
        SimulatedGPU().load(ptx).launch("k", 1, 32, 0, arguments)


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [(0, 32, "grid"), (1, 1025, "1025"), (1, (1, 1, 65), "65"), ((1, 70000), 32, "70000"), (1, (8, 8, 8, 8), "block")],
)
def test_launch_dimensions_are_checked(grid: object, block: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedGPU().load(EMPTY).launch("k", grid, block)  # type: ignore[arg-type]


def test_launch_bounds_are_enforced() -> None:
    ptx = compile_cuda('extern "C" __global__ void __launch_bounds__(64) k(int *p) { p[0] = 1; }')
    gpu = SimulatedGPU()
    with pytest.raises(ValueError, match="maxntid"):
        gpu.load(ptx).launch("k", 1, 96, 0, [gpu.allocate(4)])


@pytest.mark.parametrize(
    ("arch", "kib"), [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90", 227), ("sm_90a", 227), ("sm_120", 99)]
)
def test_shared_memory_is_limited_by_the_architecture(arch: str, kib: int) -> None:
    module = SimulatedGPU(arch).load(EMPTY)
    module.launch("k", 1, 32, kib * 1024)
    with pytest.raises(SimulationError) as caught:
        module.launch("k", 1, 32, kib * 1024 + 1)
    assert caught.value.kind == "shared-size" and arch in str(caught.value)


def test_static_and_dynamic_shared_memory_lie_side_by_side() -> None:
    ptx = compile_cuda("""extern "C" __global__ void k(int *out) {
        __shared__ int fixed[10]; extern __shared__ int dynamic[];
        if (threadIdx.x < 10) fixed[threadIdx.x] = threadIdx.x;
        dynamic[threadIdx.x] = 100 + threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = fixed[threadIdx.x % 10] + dynamic[31 - threadIdx.x]; }""")
    gpu = SimulatedGPU()
    module = gpu.load(ptx)
    out = gpu.to_device(np.zeros(32, np.int32))
    module.launch("k", 1, 32, 128, [out])
    assert gpu.to_host(out).tolist() == [t % 10 + 131 - t for t in range(32)]
    assert module.program("k").static_shared_bytes == 40
    with pytest.raises(SimulationError, match="out-of-bounds"):
        module.launch("k", 1, 32, 124, [out])


def test_unknown_architecture() -> None:
    with pytest.raises(ValueError, match="sm_80"):
        SimulatedGPU("sm_12")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.int64])
def test_arrays_come_back_as_they_went(dtype: type) -> None:
    gpu = SimulatedGPU()
    array = np.arange(24).astype(dtype).reshape(2, 3, 4)
    pointer = gpu.to_device(array.transpose(2, 0, 1))
    back = gpu.to_host(pointer)
    assert back.dtype == dtype and (back == array.transpose(2, 0, 1)).all()
    with pytest.raises(ValueError, match="not the start"):
        gpu.to_host(pointer + 4)


def test_inline_assembly_blocks_have_their_own_names() -> None:
    block = (
        "{ .reg .pred p; .reg .b32 t; setp.gt.s32 p, %1, %2; mov.b32 t, 0; @!p bra L; mov.b32 t, 1; L: mov.b32 %0, t; }"
    )
    ptx = compile_cuda(f"""extern "C" __global__ void k(int *out) {{
        int a = threadIdx.x, b, c;
        asm volatile("{block}" : "=r"(b) : "r"(a), "n"(3));
        asm volatile("{block}" : "=r"(c) : "r"(a), "n"(5));
        out[a] = b + 10 * c; }}""")
    gpu = SimulatedGPU()
    out = gpu.to_device(np.zeros(8, np.int32))
    gpu.load(ptx).launch("k", 1, 8, 0, [out])
    assert gpu.to_host(out).tolist() == [0, 0, 0, 0, 1, 1, 11, 11]


def test_source_locations_follow_inlined_calls() -> None:
    ptx = compile_cuda("""__device__ __forceinline__ void inner(float &x) { asm("ex2.approx.f32 %0, %0;" : "+f"(x)); }
__device__ __forceinline__ float outer(float x) {
    inner(x); return x + 1.f; }
extern "C" __global__ void k(float *p) {
    *p = outer(*p); }""")
    instructions = parse(ptx).functions["k"].body
    assert instructions is not None
    chains = {str(item.source).replace(item.source.file, "f") for item in instructions if getattr(item, "source", None)}
    assert "f:1 (inlined at f:3 (inlined at f:5))" in chains
