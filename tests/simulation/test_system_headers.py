"""Headers in angle brackets, with and without a CUDA toolkit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashwright import CompileError, simulate_kernel
from flashwright.compiler.toolkit import toolkit_include_directories
from flashwright.simulation import source
from flashwright.simulation.system_headers import HEADERS, TOOLKIT_PACKAGES

EVERY_HEADER = "".join(f"#include <{path.name}>\n" for path in sorted(HEADERS.iterdir()))
USES = """
static_assert(sizeof(std::uint64_t) == 8 && sizeof(uintptr_t) == sizeof(void *) && INT8_MIN == -128);
static_assert(sizeof(CUtensorMap) == 128 && sizeof(std::size_t) == 8 && CHAR_BIT == 8 && ULONG_MAX == UINT64_MAX);
struct Pair { int first, second; };
constexpr float infinity = INFINITY;
__global__ void k(float *x) {
    assert(threadIdx.x < 32);
    printf("x = %d\\n", int(x[0]));
    Pair pair = {1, 2};
    x[0] = std::sqrt(16.0f) + std::abs(-2.5f);
    x[1] = offsetof(Pair, second);
    x[2] = infinity > FLT_MAX;
    x[3] = std::isnan(NAN) && !std::isnan(HUGE_VALF);
    x[4] = float(M_PI);
    std::memcpy(x + 5, &x[4], sizeof(float));
    x[6] = float(INT32_MAX) + float(SIZE_MAX == UINT64_MAX);
    x[7] = float4{1, 2, 3, 4}.z + DBL_DIG;
}
"""


def without_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "toolkit_include_directories", list)


@pytest.mark.parametrize("toolkit", [False, True])
def test_headers_of_c_and_of_the_runtime_need_no_toolkit(monkeypatch, capsys, toolkit):
    if not toolkit:
        without_toolkit(monkeypatch)
    done = simulate_kernel(EVERY_HEADER + USES, 1, 1, [np.full(8, 3, np.float32)])
    assert done.args[0].tolist() == pytest.approx([6.5, 4, 1, 1, np.pi, np.pi, 2.0**31, 18])
    assert capsys.readouterr().out == "x = 3\n"


@pytest.mark.skipif(not toolkit_include_directories(), reason="no headers of a CUDA toolkit are installed")
@pytest.mark.parametrize("order", [1, -1])
def test_they_go_together_with_the_toolkits(order):
    of_toolkit = ("cuda_fp16.h", "cuda_bf16.h", "mma.h", "cooperative_groups.h", "cuda/std/cstdint", "cuda/std/climits")
    includes = [EVERY_HEADER, *(f"#include <{name}>\n" for name in of_toolkit)][::order]
    kernel = "__global__ void k(__half *x, uint32_t y) { x[threadIdx.x] = __float2half(y); }"
    done = simulate_kernel("".join(includes) + kernel, 1, 4, [np.zeros(4, np.float16), 3])
    assert done.args[0].tolist() == [3] * 4


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("cuda_fp16.h", r"cuda_fp16\.h is a header of the CUDA toolkit\. Install .*pip install 'nvidia-cuda-runtime"),
        ("mma.h", r"mma\.h is a header of the CUDA toolkit"),
        ("cooperative_groups.h", r"cooperative_groups\.h is a header of the CUDA toolkit"),
        ("cuda/barrier", r"cuda/barrier is a header of the CUDA toolkit"),
        ("vector", r"NVRTC has no C\+\+ standard library, and no <vector>"),
        ("mine.h", r"mine\.h was looked for beside the file, in directories that are named \(--include"),
    ],
)
def test_an_error_says_where_a_missing_header_is(monkeypatch, header, hint):
    without_toolkit(monkeypatch)
    with pytest.raises(CompileError, match=hint):
        simulate_kernel(f"#include <{header}>\n__global__ void k() {{}}")


def test_the_packages_that_it_names_are_those_that_the_package_offers_to_install():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["optional-dependencies"]["headers"] == list(TOOLKIT_PACKAGES)
