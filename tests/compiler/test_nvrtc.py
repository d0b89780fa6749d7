"""From a config to machine code, with no GPU: what a kernel is, what goes wrong, what is remembered."""

from __future__ import annotations

import ctypes
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest

from flashwright import (
    AttentionVariant,
    CompileError,
    DType,
    ForwardKernelTileShapes,
    compile_kernel,
    compile_many,
    get_autotuning_kernel_configs,
    get_kernel_progression_configs,
    parse_kernel_name_into_config,
    run_forward,
)
from flashwright.compiler import nvrtc
from flashwright.compiler.nvrtc import compile_source, compiler_build
from flashwright.compiler.program_cache import ProgramCache
from flashwright.kernels.forward.ampere.source import forward_kernel_source
from flashwright.kernels.source import KernelSource
from flashwright.workbench.tuning.space import space_of

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
NO_SPILL_ARCHS = ("sm_80", "sm_90")


def demangled(symbol: str) -> str:
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except OSError:
        pytest.skip("no C++ runtime library to demangle with")
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = demangle(symbol.encode(), None, None, ctypes.byref(status))
    assert status.value == 0, f"{symbol} is not a C++ symbol"
    return ctypes.string_at(address).decode()


def cuda(text: str, *, name: str = "kernel", options: tuple[str, ...] = ()) -> KernelSource:
    return KernelSource(text, headers=(), name_expression=name, file_name="example.cu", options=options)


def instructions(ptx: str) -> list[str]:
    """The kernel without line information and without the constants around it, whose names NVRTC makes up."""
    lines = [line.strip() for line in ptx[ptx.index(".entry") : ptx.index("\n}")].splitlines()]
    return [line for line in lines if line and not line.startswith((".loc", "//", "$L__tmp"))]


# --- A kernel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_is_machine_code_ptx_and_resources(small_config, arch):
    kernel = compile_kernel(small_config, arch)
    shapes = ForwardKernelTileShapes(small_config)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert f".entry {kernel.name}(" in kernel.ptx
    assert f".target {arch}" in kernel.ptx
    assert kernel.arch == arch
    assert 1 <= kernel.registers <= 255
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert (kernel.threads, kernel.shared_bytes) == (shapes.threads, shapes.shared_bytes) == (128, 16384)
    assert (kernel.config, kernel.variant) == (small_config, AttentionVariant())


@pytest.mark.parametrize(
    "short_form",
    [
        "(BF16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax",
        "(FP16, 64, 64, 32, 4): load_2_2_2_tiles",
        "(FP16, 64, 64, 32, 4): async+eager+load_2_2_2_tiles+buffer+peeled+streaming+mma_sum+reorder+stride_64",
    ],
)
def test_the_kernels_symbol_tells_its_config(short_form):
    config = parse_kernel_name_into_config(short_form)
    assert parse_kernel_name_into_config(demangled(compile_kernel(config).name)) == config


@pytest.mark.parametrize("returns_lse", [False, True])
def test_the_flattened_source_is_one_file_that_compiles_to_the_same_instructions(small_config, returns_lse):
    kernel = compile_kernel(small_config, "sm_80", AttentionVariant(returns_lse=returns_lse))
    assert '#include "' not in kernel.source
    source = KernelSource(kernel.source, (), small_config.kernel_name(), "flattened.cu", ("--ptxas-options=-O1",))
    program = compile_source(source, "sm_80")
    assert (program.name, program.registers) == (kernel.name, kernel.registers)
    assert instructions(program.ptx) == instructions(kernel.ptx)


def test_ptx_does_not_depend_on_the_working_directory(small_config, tmp_path, monkeypatch, empty_cache):
    here = compile_kernel(small_config)
    monkeypatch.chdir(tmp_path)
    elsewhere = compile_kernel(small_config, cache=empty_cache)
    assert not elsewhere.program.from_cache
    assert instructions(elsewhere.ptx) == instructions(here.ptx)
    assert str(tmp_path) not in elsewhere.ptx


def test_a_kernel_a_program_and_a_source_print_as_one_line(small_config):
    kernel = compile_kernel(small_config)
    assert str(kernel) == repr(kernel) == (
        f"<Kernel {small_config} for sm_80: {kernel.registers} registers, 0 bytes spilled, "
        "16384 bytes of shared memory, 128 threads>"
    )  # fmt: skip
    source = forward_kernel_source(small_config)
    assert repr(source) == (
        f"<KernelSource flash_forward.cu: {small_config.kernel_name()}, {len(source.headers)} headers>"
    )
    for text in (repr(kernel.program), repr(source)):
        assert "\n" not in text
        assert len(text) < 500


# --- What goes wrong -----------------------------------------------------------------------------------------


def test_a_compile_error_shows_the_log_with_the_offending_line():
    source = cuda("__global__ void kernel(int *p) {\n    *p = no_such_thing + 1;\n}\n")
    with pytest.raises(CompileError) as caught:
        compile_source(source, "sm_80")
    message = str(caught.value)
    assert "example.cu does not compile for sm_80" in message
    assert 'example.cu(2): error: identifier "no_such_thing" is undefined' in message
    assert "*p = no_such_thing + 1;" in message
    assert caught.value.log.strip() in message


def test_an_error_in_a_header_is_shown_in_that_header(small_config):
    source = forward_kernel_source(small_config)
    broken = tuple((name, text.replace("fmaxf", "fmaxx")) for name, text in source.headers)
    with pytest.raises(CompileError, match=r'softmax\.cuh\(\d+\): error: identifier "fmaxx" is undefined'):
        compile_source(replace(source, headers=broken), "sm_80")


@pytest.mark.parametrize(
    ("arch", "what_is_said"),
    [
        ("sm_75", "arch: sm_75 is too old; the kernels need sm_80"),
        ("sm_5", "'sm_5' is not a GPU target"),
        ("ampere", "'ampere' is not a GPU target; expected a text such as 'sm_80'"),
        ("compute_80", "'compute_80' is not a GPU target"),
        ("sm_80 ", "'sm_80 ' is not a GPU target"),
        ("sm_90x", "'sm_90x' is not a GPU target"),
        ("", "'' is not a GPU target"),
        (80, "80 is not a GPU target"),
        (None, "None is not a GPU target"),
        ("sm_95", "arch: .*sm_95"),
        ("sm_999", "arch: .*sm_999"),
    ],
)
def test_an_architecture_that_cannot_be_compiled_for_is_a_value_error(small_config, arch, what_is_said):
    with pytest.raises(ValueError, match=what_is_said):
        compile_kernel(small_config, arch)


@pytest.mark.parametrize(
    ("short_form", "rule"),
    [
        ("(BF16, 128, 64, 64, 8): async+load_0_2_2_tiles", "B_r = 64 with n_warps = 8"),
        ("(BF16, 128, 64, 64, 4): async+load_0_2_3_tiles", "V_mma_load_K_tiles: 3"),
    ],
)
def test_a_config_that_no_kernel_can_be_built_from_is_a_value_error_with_the_rule(short_form, rule):
    with pytest.raises(ValueError, match=rule):
        compile_kernel(parse_kernel_name_into_config(short_form))


@pytest.mark.parametrize(
    "short_form",
    [
        "(FP16, 16, 64, 64, 4): async+swizzled+load_2_2_2_tiles",
        "(FP16, 96, 64, 32, 4): async+swizzled+load_2_2_2_tiles",
        "(FP16, 160, 16, 32, 1): async+swizzled+load_2_2_2_tiles",
        "(FP16, 256, 64, 16, 4): async+swizzled+load_2_2_2_tiles",
        "(FP16, 64, 128, 16, 8): swizzled+load_2_2_2_tiles",
        "(FP16, 128, 48, 48, 3): async+load_2_2_2_tiles",
        "(FP16, 128, 48, 48, 3): async+swizzled+load_2_2_2_tiles",
        "(FP16, 64, 80, 80, 5): async+swizzled+load_2_2_2_tiles",
        "(FP16, 128, 96, 32, 6): swizzled+load_2_2_2_tiles",
    ],
)
def test_an_unusual_shape_is_computed_rightly_or_refused(short_form):
    config = parse_kernel_name_into_config(short_form)
    try:
        compile_kernel(config)
    except ValueError:
        return
    random = np.random.default_rng(0)
    rows = (config.B_r, 2 * config.B_c, 2 * config.B_c)
    q, k, v = (random.standard_normal((1, 1, n, config.d_head)).astype(np.float16) for n in rows)
    output = run_forward(config, q, k, v, device="simulator").astype(np.float64)
    scores = np.exp(q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3) / np.sqrt(config.d_head))
    expected = scores / scores.sum(axis=-1, keepdims=True) @ v.astype(np.float64)
    assert np.linalg.norm(output - expected) <= 1e-3 * np.linalg.norm(expected)


# --- The cache -----------------------------------------------------------------------------------------------

TINY = cuda("__global__ void kernel(int *p) { *p = 1; }\n")


def test_the_second_compilation_comes_from_the_cache_and_is_the_same(small_config, empty_cache):
    first = compile_kernel(small_config, cache=empty_cache)
    second = compile_kernel(small_config, cache=empty_cache)
    assert (first.program.from_cache, second.program.from_cache) == (False, True)
    assert replace(first.program, from_cache=True) == second.program


@pytest.mark.parametrize(
    ("source", "arch"),
    [
        (replace(TINY, text=TINY.text.replace("1", "2")), "sm_80"),
        (replace(TINY, headers=(("unused.cuh", "// nothing"),)), "sm_80"),
        (replace(TINY, options=("--use_fast_math",)), "sm_80"),
        (replace(TINY, file_name="other.cu"), "sm_80"),
        (TINY, "sm_90"),
    ],
    ids=["source", "header", "options", "file name", "architecture"],
)
def test_whatever_a_program_depends_on_is_part_of_its_key(empty_cache, source, arch):
    assert not compile_source(TINY, "sm_80", cache=empty_cache).from_cache
    assert not compile_source(source, arch, cache=empty_cache).from_cache
    assert compile_source(TINY, "sm_80", cache=empty_cache).from_cache
    assert compile_source(source, arch, cache=empty_cache).from_cache


def test_another_build_of_the_compiler_compiles_anew(empty_cache, monkeypatch):
    assert not compile_source(TINY, "sm_80", cache=empty_cache).from_cache
    monkeypatch.setattr(nvrtc, "compiler_build", lambda: "CL-1 V13.0.1")
    assert not compile_source(TINY, "sm_80", cache=empty_cache).from_cache
    assert compile_source(TINY, "sm_80", cache=empty_cache).from_cache


def test_the_compilers_build_is_read_from_ptx_without_running_the_assembler(monkeypatch):
    """Every process asks for it before it can use the cache."""
    requested = []
    compile_program = nvrtc._compile_program

    def recorded(program, options):
        requested.append(list(options))
        return compile_program(program, options)

    monkeypatch.setattr(nvrtc, "_compile_program", recorded)
    nvrtc._compiler_build.cache_clear()
    assert re.fullmatch(r"CL-\d+ V\d+\.\d+\.\d+", compiler_build())
    assert compiler_build() == compiler_build()
    assert len(requested) == 1
    assert re.fullmatch(r"--gpu-architecture=compute_\d+", *requested[0])


def test_an_empty_log_leaves_the_memory_of_python_alone():
    """NVRTC writes one byte, the end of the text; Python shares one object of all one-byte texts that are alike."""
    nvrtc._compiler_build.cache_clear()
    compiler_build()
    assert list(b" ") == [0x20]


# --- Many threads --------------------------------------------------------------------------------------------

THREADS = 20


@pytest.fixture
def nvrtc_runs(monkeypatch) -> list[str]:
    """The names of the files that NVRTC compiles from now on, each slowly enough for other threads to request it."""
    runs: list[str] = []
    run_nvrtc = nvrtc._run_nvrtc

    def counted(source, arch, options):
        runs.append(source.file_name)
        time.sleep(0.5)
        return run_nvrtc(source, arch, options)

    monkeypatch.setattr(nvrtc, "_run_nvrtc", counted)
    return runs


def at_once(work) -> list[Future]:
    """The same work in many threads that begin together; what a thread raises is in its future."""
    barrier = Barrier(THREADS)

    def begin():
        barrier.wait()
        return work()

    with ThreadPoolExecutor(THREADS) as pool:
        return [pool.submit(begin) for _ in range(THREADS)]


def test_threads_that_request_one_kernel_compile_it_once(small_config, empty_cache, nvrtc_runs):
    kernels = [future.result() for future in at_once(lambda: compile_kernel(small_config, cache=empty_cache))]
    assert nvrtc_runs == ["flash_forward.cu"]
    assert len({kernel.cubin for kernel in kernels}) == 1


def test_threads_that_request_one_kernel_compile_it_once_without_a_cache_too(nvrtc_runs, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="cannot be opened"):
        unusable = ProgramCache(tmp_path / "file")
    programs = [future.result() for future in at_once(lambda: compile_source(TINY, "sm_80", cache=unusable))]
    assert nvrtc_runs == ["example.cu"]
    assert len({program.cubin for program in programs}) == 1


def test_every_thread_that_requested_a_broken_kernel_gets_the_error(empty_cache, nvrtc_runs):
    broken = cuda("__global__ void kernel() { no_such_thing(); }")
    for future in at_once(lambda: compile_source(broken, "sm_80", cache=empty_cache)):
        with pytest.raises(CompileError, match='identifier "no_such_thing" is undefined'):
            future.result()
    with pytest.raises(CompileError):  # and so does one that comes later
        compile_source(broken, "sm_80", cache=empty_cache)


# --- Many kernels --------------------------------------------------------------------------------------------

SMALL_ONES = [
    parse_kernel_name_into_config(f"({dtype.name}, 64, 64, 32, 4): {copies}+load_2_2_2_tiles+opt_softmax")
    for copies in ("async+swizzled", "swizzled")
    for dtype in DType
]


def test_many_kernels_come_in_the_order_asked_for_and_from_the_cache_the_next_time(empty_cache):
    kernels = compile_many(SMALL_ONES, "sm_80", cache=empty_cache)
    assert [kernel.config for kernel in kernels] == SMALL_ONES
    assert not any(kernel.program.from_cache for kernel in kernels)
    again = compile_many(SMALL_ONES[::-1], "sm_80", cache=empty_cache, progress=False)
    assert [kernel.config for kernel in again] == SMALL_ONES[::-1]
    assert all(kernel.program.from_cache for kernel in again)


def test_no_kernels_are_compiled_when_none_are_asked_for():
    assert compile_many([], "sm_80") == []


@pytest.mark.parametrize(
    ("configs", "arch", "what_is_said"),
    [
        ([*SMALL_ONES, replace(SMALL_ONES[0], n_warps=8)], "sm_80", "B_r = 64 with n_warps = 8"),
        (SMALL_ONES, "sm_75", "sm_75 is too old"),
    ],
)
def test_one_bad_config_or_architecture_fails_the_whole_with_its_own_error(configs, arch, what_is_said):
    with pytest.raises(ValueError, match=what_is_said):
        compile_many(configs, arch)


# --- Spills --------------------------------------------------------------------------------------------------


def ladder_configs() -> list:
    return [
        config for dtype in DType for d_head in (64, 128) for config in get_kernel_progression_configs(dtype, d_head)
    ]


def spilling(configs, arch: str) -> list[tuple[str, int]]:
    kernels = compile_many(configs, arch)
    return [(str(k.config), k.spill_bytes) for k in kernels if k.spill_bytes or k.stack_bytes]


@pytest.mark.parametrize("arch", NO_SPILL_ARCHS)
def test_no_sampled_config_of_the_space_spills_registers(arch):
    space = get_autotuning_kernel_configs()
    sample = space[7 :: len(space) // 9]
    heaviest = parse_kernel_name_into_config(
        "(BF16, 128, 128, 64, 4): async+eager+swizzled+load_4_4_2_tiles+opt_softmax"
    )
    ladder = get_kernel_progression_configs()
    assert spilling([*sample, heaviest, ladder[0], ladder[-1]], arch) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", NO_SPILL_ARCHS)
@pytest.mark.parametrize("d_head", [64, 128])
@pytest.mark.parametrize("dtype", DType)
def test_no_rung_of_the_ladder_spills_registers_and_no_config_of_the_space_more_than_its_family_bears(
    dtype, d_head, arch
):
    assert spilling(get_kernel_progression_configs(dtype, d_head), arch) == []
    bearable = space_of("ampere").bearable_spill_bytes
    space = spilling(get_autotuning_kernel_configs(dtype, d_head), arch)
    assert [(config, spilled) for config, spilled in space if spilled > bearable] == []
