"""Calls through pointers, and branches by an index."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.simulator import SimulationError

from .tools import HEADER, compile_cuda, launch

FUNCTIONS = """
__device__ __noinline__ float twice(float x) { return 2 * x; }
__device__ __noinline__ float square(float x) { return x * x; }
__device__ __noinline__ float negate(float x) { return -x; }
typedef float (*Function)(float);
"""
VALUES = np.arange(64, dtype=np.float32)
WHICH = (np.arange(64) * 7 % 3).astype(np.int32)
EXPECTED = np.select([WHICH == 0, WHICH == 1, WHICH == 2], [2 * VALUES, VALUES**2, -VALUES])


@pytest.mark.parametrize("qualifier", ["__device__", "__constant__"])
def test_threads_call_different_functions_of_a_table(qualifier: str) -> None:
    source = (
        FUNCTIONS
        + f"""{qualifier} Function table[3] = {{twice, square, negate}};
    extern "C" __global__ void k(float *out, const float *in, const int *which) {{
        int t = threadIdx.x;
        out[t] = table[which[t]](in[t]) + 1;
    }}"""
    )
    outputs = {"out": np.zeros(64, np.float32)}
    launch(compile_cuda(source), 64, outputs, VALUES, WHICH)
    np.testing.assert_array_equal(outputs["out"], EXPECTED + 1)


def test_a_function_is_chosen_by_its_address_in_registers() -> None:
    source = (
        FUNCTIONS
        + """extern "C" __global__ void k(float *out, const float *in, const int *which) {
        int t = threadIdx.x;
        Function f = which[t] == 0 ? twice : which[t] == 1 ? square : negate;
        float x = in[t];
        if (t % 2 == 0) x = f(x);
        out[t] = x;
        __syncthreads();
    }"""
    )
    outputs = {"out": np.zeros(64, np.float32)}
    launch(compile_cuda(source), 64, outputs, VALUES, WHICH)
    np.testing.assert_array_equal(outputs["out"], np.where(np.arange(64) % 2 == 0, EXPECTED, VALUES))


def test_virtual_functions() -> None:
    source = """
    struct Base { __device__ virtual float op(float x) const = 0; };
    struct Sum : Base {
      float k; __device__ Sum(float k) : k(k) {} __device__ float op(float x) const { return x + k; } };
    struct Product : Base {
      float k; __device__ Product(float k) : k(k) {} __device__ float op(float x) const { return x * k; } };
    extern "C" __global__ void k(float *out, const float *in, const int *which) {
        int t = threadIdx.x; Sum a(10.f); Product b(3.f);
        const Base *p = which[t] & 1 ? (const Base *)&a : (const Base *)&b;
        out[t] = p->op(in[t]);
    }"""
    outputs = {"out": np.zeros(64, np.float32)}
    launch(compile_cuda(source), 64, outputs, VALUES, WHICH)
    np.testing.assert_array_equal(outputs["out"], np.where(WHICH & 1, VALUES + 10, VALUES * 3))


def test_a_call_through_a_wrong_pointer_names_it() -> None:
    source = (
        FUNCTIONS
        + """__device__ Function used = twice;
    extern "C" __global__ void k(float *out, const long long *pointer) { out[0] = ((Function)pointer[0])(1.f); }"""
    )
    with pytest.raises(SimulationError, match="call through a pointer to no function") as caught:
        launch(compile_cuda(source), 32, {"out": np.zeros(1, np.float32)}, np.array([0x1234], np.int64))
    assert caught.value.address == 0x1234


def test_recursion_through_a_pointer_is_refused_when_it_happens() -> None:
    source = """
    typedef int (*Function)(int);
    extern __device__ Function next;
    __device__ __noinline__ int down(int x) { return x <= 0 ? 0 : next(x - 1) + 1; }
    __device__ Function next = down;
    extern "C" __global__ void k(int *out, int depth) { out[0] = next(depth); }"""
    outputs = {"out": np.zeros(1, np.int32)}
    launch(compile_cuda(source), 32, outputs, np.int32(0))
    assert outputs["out"][0] == 0
    with pytest.raises(SimulationError, match="or to a caller"):
        launch(compile_cuda(source), 32, outputs, np.int32(2))


CALL_TARGETS = (
    HEADER
    + """
.func (.param .b32 r) one(.param .b32 x) { .reg .b32 %r<2>; ld.param.b32 %r0, [x]; add.u32 %r1, %r0, 1;
  st.param.b32 [r], %r1; }
.func (.param .b32 r) ten(.param .b32 x) { .reg .b32 %r<2>; ld.param.b32 %r0, [x]; add.u32 %r1, %r0, 10;
  st.param.b32 [r], %r1; ret; }
.visible .entry k(.param .u64 out) {
  .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p;
  targets: .calltargets one, ten;
  ld.param.u64 %rd0, [out]; mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 4, %rd0;
  mov.u64 %rd1, one; mov.u64 %rd2, ten; setp.lt.u32 %p, %r0, 20; selp.b64 %rd1, %rd1, %rd2, %p;
  { .param .b32 x; .param .b32 r; st.param.b32 [x], %r0; call (r), %rd1, (x), targets; ld.param.b32 %r1, [r]; }
  st.global.b32 [%rd0], %r1; ret; }
"""
)


def test_a_list_of_targets_limits_what_a_pointer_may_mean() -> None:
    outputs = {"out": np.zeros(32, np.int32)}
    launch(CALL_TARGETS, 32, outputs)
    threads = np.arange(32)
    assert (outputs["out"] == threads + np.where(threads < 20, 1, 10)).all()


INDEXED = (
    HEADER
    + """
.visible .entry k(.param .u64 out) {
  .reg .b64 %rd<2>; .reg .b32 %r<4>;
  ld.param.u64 %rd0, [out]; mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 4, %rd0; and.b32 %r1, %r0, MASK;
  table: .branchtargets ZERO, ONE, TWO, ONE;
  brx.idx %r1, table;
  ZERO: mov.u32 %r2, 100; bra END;
  ONE: mov.u32 %r2, 200; bra END;
  TWO: mov.u32 %r2, 300;
  END: st.global.b32 [%rd0], %r2; ret; }
"""
)


def test_branches_by_an_index() -> None:
    outputs = {"out": np.zeros(64, np.int32)}
    launch(INDEXED.replace("MASK", "3"), 64, outputs)
    assert (outputs["out"] == np.array([100, 200, 300, 200])[np.arange(64) % 4]).all()
    with pytest.raises(SimulationError, match="branch index"):
        launch(INDEXED.replace("MASK", "7"), 64, outputs)
