"""What kernels call of the CUDA run time: printf and assert."""

from __future__ import annotations

import io

import numpy as np
import pytest

from flashwright.simulator.errors import SimulationError

from .tools import compile_cuda, launch


def printed(body: str, block: int = 1, **options: object) -> str:
    text = io.StringIO()
    ptx = compile_cuda('extern "C" __global__ void k(int *out) { int t = threadIdx.x; ' + body + "}")
    launch(ptx, block, {"out": np.zeros(64, np.int32)}, stdout=text, **options)
    return text.getvalue()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (r'"plain 100%%\n"', "plain 100%\n"),
        (r'"%d %i|%5d|%-5d|%05d|%+d\n", 1 + t, -2, 3, 4, 5, 6', "1 -2|    3|4    |00005|+6\n"),
        (r'"%u %x %X %#x %o %#o\n", -1, 255, 255, 255, 8, 8', "4294967295 ff FF 0xff 10 010\n"),
        (r'"%d %lld %ld %llu\n", t, -(1ll << 40), 1l << 40, ~0ull', f"0 {-(1 << 40)} {1 << 40} {(1 << 64) - 1}\n"),
        (r'"%hd %hhu\n", 65537, 257', "1 1\n"),
        (r'"%f %.2f %8.3e %g %G\n", 1.5, 2.345f, 1e-3, 1e10, 1e-10', "1.500000 2.35 1.000e-03 1e+10 1E-10\n"),
        (r'"%d %f %d %f\n", 1, 2.0, 3, 4.0', "1 2.000000 3 4.000000\n"),
        (r'"%s|%8s|%-4s|%.2s|%c\n", t ? "odd" : "even", "right", "l", "cut", 65', "even|   right|l   |cu|A\n"),
        (r'"%*d|%.*f\n", 4, 7, 1, 0.25', "   7|0.2\n"),
        (r'"%f %e\n", 1.0 / t, -1.0 / t', "inf -inf\n"),
        (r'"%p\n", (void *)4096', "0x1000\n"),
    ],
)
def test_printf_converts_as_c_does(arguments: str, text: str) -> None:
    assert printed(f"printf({arguments});") == text


def test_threads_print_in_order_and_printf_returns_the_number_of_arguments() -> None:
    ptx = compile_cuda("""extern "C" __global__ void k(int *out) {
        int t = threadIdx.x;
        if (t % 2) out[t] = printf("thread %d of %d\\n", t, blockDim.x); else out[t] = printf("-\\n"); }""")
    outputs = {"out": np.full(4, -1, np.int32)}
    text = io.StringIO()
    launch(ptx, 4, outputs, stdout=text)
    assert sorted(text.getvalue().splitlines()) == ["-", "-", "thread 1 of 4", "thread 3 of 4"]
    assert outputs["out"].tolist() == [0, 2, 0, 2]


def test_printing_goes_to_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    ptx = compile_cuda("""extern "C" __global__ void k(int *out) { printf("block %d\\n", blockIdx.x); }""")
    launch(ptx, 1, {"out": np.zeros(1, np.int32)}, grid=3)
    assert capsys.readouterr().out == "block 0\nblock 1\nblock 2\n"


def test_a_string_that_is_nowhere() -> None:
    with pytest.raises(SimulationError, match="a string that does not end, or is outside of any memory"):
        printed('printf("%s", (const char *)64);')


def test_a_failed_assertion_gives_its_text_file_and_line() -> None:
    ptx = compile_cuda("""
extern "C" __device__ void __assertfail(const char *, const char *, unsigned, const char *, unsigned long);
#define assert(e) ((e) ? (void)0 : __assertfail(#e, "kernels/softmax.cu", __LINE__, __func__, 1))
extern "C" __global__ void softmax(int *out, int n) {
    assert(threadIdx.x < n && "too many threads");
    out[threadIdx.x] = 1;
}""")
    outputs = {"out": np.zeros(64, np.int32)}
    launch(ptx, 8, outputs, np.int32(8))
    with pytest.raises(SimulationError) as caught:
        launch(ptx, 64, outputs, np.int32(40))
    error = caught.value
    assert error.kind == "trap" and (error.warp, error.lane) == (1, 8)
    assert error.detail == 'kernels/softmax.cu:5: softmax: assertion `threadIdx.x < n && "too many threads"` failed'
    assert error.source_line == 5
