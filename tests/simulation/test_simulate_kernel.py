"""A user's own kernel, from CUDA or PTX to its results, in one call."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from flashwright import CompileError, simulate_kernel
from flashwright.simulation import Uninitialised
from flashwright.simulator import SimulationError

SAXPY = """#include "bias.h"
__constant__ float scale = 1;
__global__ void saxpy(float a, const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] = a * x[i] * scale + y[i] + BIAS;
}
template <int N> __global__ void fill(float *y) { y[threadIdx.x] = N; }
__global__ void transpose(const float *in, float *out) {
    __shared__ float tile[32][32];
    tile[threadIdx.y][threadIdx.x] = in[threadIdx.y * 32 + threadIdx.x];
    __syncthreads();
    out[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}
"""


@pytest.fixture
def saxpy(tmp_path: Path) -> Path:
    (tmp_path / "bias.h").write_text("#define BIAS 0.5f\n")
    file = tmp_path / "saxpy.cu"
    file.write_text(SAXPY)
    return file


def test_a_cuda_file_runs_with_arrays_and_numbers(saxpy: Path) -> None:
    x, y = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
    done = simulate_kernel(saxpy, grid=2, block=64, args=[2, x, y, 100], kernel="saxpy")
    np.testing.assert_array_equal(done.args[2], 2 * x + 1.5)
    assert (y == 1).all() and done.args[0] == 2  # the caller's array is left alone


@pytest.mark.parametrize("is_in_working_directory", [False, True])
def test_counters_stand_beside_the_source_lines(
    saxpy: Path, is_in_working_directory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_in_working_directory:
        monkeypatch.chdir(saxpy.parent)
    x = np.arange(1024, dtype=np.float32).reshape(32, 32)
    done = simulate_kernel(saxpy, 1, (32, 32), [x, Uninitialised((32, 32))], kernel="transpose")
    np.testing.assert_array_equal(done.args[1], x.T)
    lines = {line.split()[0]: line.split() for line in done.source_report().splitlines()[2:]}
    conflicting = next(number for number, text in enumerate(SAXPY.splitlines(), 1) if "= tile[threadIdx.x]" in text)
    assert lines[str(conflicting)][2:6] == ["1,024", "992", "128", "128"]  # wavefronts, conflicts, sectors, ideal
    assert "tile[threadIdx.x][threadIdx.y];" in done.report()
    by_line = done.run.per_source_line()
    file = saxpy.name if is_in_working_directory else str(saxpy)
    assert by_line[(file, conflicting)].bank_conflicts == 992


def test_a_template_is_instantiated_by_its_expression(saxpy: Path) -> None:
    done = simulate_kernel(saxpy, 1, 8, [Uninitialised(8)], kernel="fill<7>")
    assert done.args[0].tolist() == [7] * 8


def test_constants_are_set_by_name(saxpy: Path) -> None:
    ones = np.ones(32, np.float32)
    done = simulate_kernel(
        saxpy, 1, 32, [1, ones, np.zeros(32, np.float32), 32], kernel="saxpy", variables={"scale": np.float32(3)}
    )
    assert (done.args[2] == 3.5).all()


def test_source_and_ptx_are_taken_as_text() -> None:
    source = "__global__ void k(int *p, char c, double d, bool b) { p[threadIdx.x] = c + (int)d + b; }"
    done = simulate_kernel(source, 1, 4, [np.zeros(4, np.int32), -3, 10.0, True])
    assert done.args[0].tolist() == [8] * 4
    again = simulate_kernel(done.module.ptx, 1, 4, [np.zeros(4, np.int32), -3, 10.0, True])
    assert again.args[0].tolist() == [8] * 4 and again.module.arch == "sm_80"


def test_one_array_given_twice_is_one_memory() -> None:
    source = "__global__ void k(const int *in, int *out) { out[threadIdx.x + 4] = in[threadIdx.x]; }"
    both = np.arange(8, dtype=np.int32)
    assert simulate_kernel(source, 1, 4, [both, both]).args[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_bfloat16_arrays_keep_their_type() -> None:
    source = "__global__ void k(unsigned short *p) { p[threadIdx.x] = 0x3f80; }"
    done = simulate_kernel(source, 1, 4, [np.zeros(4, ml_dtypes.bfloat16)])
    assert done.args[0].dtype == ml_dtypes.bfloat16 and (done.args[0] == 1).all()


def test_reading_what_is_uninitialised_is_a_hazard() -> None:
    source = "__global__ void k(int *p) { p[threadIdx.x] += 1; }"
    with pytest.raises(SimulationError, match="uninitialised-global"):
        simulate_kernel(source, 1, 4, [Uninitialised(4, np.int32)])
    done = simulate_kernel(source, 1, 4, [Uninitialised(4, np.int32)], check_hazards="collect")
    assert [finding.count for finding in done.run.findings] == [4]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], r"kernel k takes 3 arguments \(\.u64, \.u32, \.f32\), 0 were given"),
        ([np.zeros(4), np.zeros(4), 1.0], r"argument 1: an array for \.u32 .*, which is no pointer"),
        ([np.zeros(4), 1.5, 1.0], r"argument 1: 1.5 for \.u32 .*, which is an integer"),
        ([np.zeros(4), 2**32, 1.0], r"argument 1: 4294967296 for \.u32 .*: it does not fit 32 bits"),
        ([np.zeros(4), 1, "x"], r"argument 2: str is not allowed; allowed: NumPy arrays"),
    ],
)
def test_arguments_that_do_not_fit_are_explained(args: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_kernel("__global__ void k(float *p, int n, float x) {}", 1, 32, args)


def test_a_source_that_does_not_compile_shows_the_compilers_words() -> None:
    with pytest.raises(CompileError, match='identifier "undefined_name" is undefined'):
        simulate_kernel("__global__ void k() { undefined_name(); }", 1, 32)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("#include <no_such_header.h>", "no_such_header.h was looked for beside the file"),
        ("int main() { return 0; }", "NVRTC compiles device code alone"),
    ],
)
def test_what_nvrtc_lacks_is_explained(line: str, hint: str) -> None:
    with pytest.raises(CompileError, match=hint):
        simulate_kernel(f"{line}\n__global__ void k() {{}}", 1, 32)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.cu", b"  \n", "empty.cu is empty"),
        ("binary.cu", b"\xff\xfe", "byte 0 is not UTF-8"),
        ("kernel.cpp", b"", r"files of kernels end in \.cu, \.cuh, \.ptx"),
    ],
)
def test_files_that_hold_no_kernel_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        simulate_kernel(tmp_path / name, 1, 32)


def test_integers_of_128_bits_need_no_option():
    source = """__global__ void divide(const unsigned long long *x, unsigned long long *q) {
        unsigned __int128 a = (unsigned __int128)x[1] << 64 | x[0], b = (unsigned __int128)x[3] << 64 | x[2];
        q[0] = a / b;
        q[1] = a / b >> 64;
    }"""
    a, b = (0x1234_5678_9ABC_DEF0 << 64) | 0xFEDC_BA98_7654_3210, (0x1111 << 64) | 7
    words = np.array([word for number in (a, b) for word in (number & (1 << 64) - 1, number >> 64)], np.uint64)
    low, high = map(int, simulate_kernel(source, 1, 1, [words, np.zeros(2, np.uint64)]).args[1])
    assert (high << 64 | low) == a // b
