"""`flashwright simulate`: CUDA, PTX and configs, with their options; what does not apply is refused."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import flashwright

from flashwright.cli import simulate as command
from flashwright.simulation import simulate_kernel

CONFIG = "(BF16, 64, 64, 64, 4): async+swizzled+load_2_2_2_tiles"
RACE = """__constant__ float bias[2];
__global__ void shift(const float *x, float *y, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = s[(threadIdx.x + 32) % 64] + bias[1] + n;
}
"""
LAUNCH = ("--block", "64", "--arg", "range:f32:64", "--arg", "empty:f32:8x8", "--arg", "i32:5")


@pytest.fixture
def kernel(tmp_path: Path) -> str:
    file = tmp_path / "shift.cu"
    file.write_text(RACE)
    return str(file)


def document_of(*arguments: str) -> dict[str, Any]:
    code, out, error = flashwright(*arguments, "--json")
    assert code == 0, error
    return json.loads(out)


# Files -------------------------------------------------------------------------------------------------------


def test_a_cuda_file_is_compiled_run_and_its_output_saved(kernel: str, tmp_path: Path) -> None:
    saved, given = tmp_path / "y.npy", tmp_path / "bias.npy"
    np.save(given, np.array([1, 100], np.float64))
    options = (*LAUNCH, "--save", f"1={saved}", "--set", f"bias=f32:{given}", "--hazards", "race=ignore")
    code, out, error = flashwright("simulate", kernel, *options)
    assert code == 0, error
    expected = np.roll(np.arange(64), 32) + 105
    np.testing.assert_array_equal(np.load(saved), expected.reshape(8, 8).astype(np.float32))
    assert "s[threadIdx.x] = x[threadIdx.x];" in out  # the source, beside its counters
    assert f"argument 1 was saved to {saved}" in out


def test_hazards_stop_the_run_unless_they_are_collected(kernel: str) -> None:
    code, _, error = flashwright("simulate", kernel, *LAUNCH)
    assert code == 1 and "race: shared load" in error and "shift.cu:5" in error
    found = document_of("simulate", kernel, *LAUNCH, "--hazards", "collect")["findings"]
    assert [(item["kind"], item["count"], item["source_line"]) for item in found] == [("race", 64, 5)]
    assert document_of("simulate", kernel, *LAUNCH, "--no-hazards")["findings"] == []


@pytest.mark.parametrize("checks", ["collect,race=ignore", "race=ignore,uninitialised-shared=collect"])
def test_hazards_are_chosen_by_kind(kernel: str, checks: str) -> None:
    assert document_of("simulate", kernel, *LAUNCH, "--hazards", checks)["findings"] == []


def test_macros_headers_and_options_reach_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "inc").mkdir()
    (tmp_path / "inc" / "two.h").write_text("#define TWO 2\n")
    file = tmp_path / "k.cu"
    file.write_text('#include "two.h"\n__global__ void k(int *p) { *p = TWO * THREE; }\n')
    options = ("-I", str(tmp_path / "inc"), "-D", "THREE=3", "--nvrtc", "--use_fast_math", "--block", "1")
    saved = tmp_path / "p.npy"
    code, _, error = flashwright("simulate", str(file), *options, "--arg", "zeros:i32:1", "--save", f"0={saved}")
    assert code == 0, error
    assert np.load(saved).tolist() == [6]


def test_random_arguments_differ_from_each_other_and_repeat_with_their_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def record(*arguments: Any, **options: Any) -> Any:
        seen.append(options["args"])
        return simulate_kernel(*arguments, **options)

    monkeypatch.setattr(command, "simulate_kernel", record)
    file = tmp_path / "k.cu"
    file.write_text("__global__ void k(float *a, float *b, int *c) {}")
    arguments = ("--arg", "random:f32:16", "--arg", "random:f32:16", "--arg", "random:i32:16")
    for seed in ("0", "0", "1"):
        assert flashwright("simulate", str(file), *arguments, "--seed", seed)[0] == 0
    assert (seen[0][0] != seen[0][1]).any() and (seen[0][0] == seen[1][0]).all() and (seen[0][0] != seen[2][0]).any()
    assert seen[0][2].min() >= 0 and seen[0][2].max() > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--arg", "f33:1"), "--arg: 'f33:1' is not an argument; expected TYPE:VALUE, FILE.npy"),
        (("--arg", "i8:1000"), "--arg: 'i8:1000'"),
        (("--arg", "bf16:e"), "--arg: 'bf16:e': 'e' is no number of type bfloat16"),
        (("--arg", "i32:x"), "--arg: 'i32:x': 'x' is no number of type int32"),
        (("--arg", "bytes:abc"), "--arg: 'bytes:abc': expected two hexadecimal digits for every byte"),
        (("--arg", "zeros:f32:4x"), "'4x' is not a size; expected a number, or a shape as 64x128"),
        (("--arg", "missing.npy"), "error: missing.npy: No such file or directory"),
        (("--arg", "range:f32:a"), "--arg: 'range:f32:a': 'a' is not a number"),
        (("--set", "bias"), "--set: 'bias' is not allowed; expected NAME=VALUE"),
        ((*LAUNCH, "--set", "gain=f32:1"), "no global or constant variable 'gain' in this module; it has: bias"),
        ((*LAUNCH, "--save", "1=y.txt"), "--save: '1=y.txt' is not allowed; expected N=FILE.npy"),
        ((*LAUNCH, "--save", "7=y.npy"), "there is no argument 7; arguments are numbered from 0 to 2"),
        ((*LAUNCH, "--save", "1=nowhere/y.npy"), "there is no directory nowhere"),
        ((*LAUNCH, "--hazards", "often"), "--hazards: 'often' is not allowed; allowed: stop, collect, ignore"),
        ((*LAUNCH, "--hazards", "rage=stop"), "KIND one of uninitialised-shared"),
        ((*LAUNCH, "-I", "nowhere"), "there is no directory nowhere"),
        ((*LAUNCH, "--kernel", "other"), "there is no 'other'; there is: shift"),
        ((*LAUNCH, "--define", "n=1+"), "does not compile for sm_80"),
    ],
)
def test_bad_launches_are_explained(kernel: str, options: tuple[str, ...], message: str) -> None:
    code, _, error = flashwright("simulate", kernel, *options)
    assert code == 1
    assert message in error


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\x7fELF\x02", "is a cubin"), (b".version\0\1", "is binary")],
)
def test_files_that_are_no_ptx_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "kernel.ptx"
    file.write_bytes(content)
    code, _, error = flashwright("simulate", str(file))
    assert code == 1 and f"{file} {message}" in error


ENDLESS = """.version 8.5
.target sm_80
.address_size 64
.visible .entry k() { .reg .b32 %r1; mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; bra L; }
"""


def test_an_endless_loop_ends_at_the_step_limit(tmp_path: Path) -> None:
    file = tmp_path / "endless.ptx"
    file.write_text(ENDLESS)
    code, _, error = flashwright("simulate", str(file), "--step-limit", "5000")
    assert code == 1 and "an endless loop?" in error


def test_the_page_of_the_simulator_shows_a_kernel_and_commands_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text("utf-8")
    (source,) = re.findall(r"```cpp\n(// saxpy\.cu\n.*?)```", page, re.DOTALL)
    commands = re.findall(r"^flashwright ((?:simulate|check) saxpy\.cu.*)$", page, re.MULTILINE)
    assert len(commands) > 4
    (tmp_path / "saxpy.cu").write_text(source)
    monkeypatch.chdir(tmp_path)
    for shown in commands:
        code, _, error = flashwright(*shlex.split(shown))
        assert code == 0, f"{shown}: {error}"
    assert (tmp_path / "saxpy.sarif").is_file()


def test_what_a_kernel_prints_is_no_part_of_the_json(tmp_path: Path) -> None:
    file = tmp_path / "talking.cu"
    file.write_text('__global__ void k() { if (threadIdx.x == 7) printf("hello from thread %d\\n", threadIdx.x); }')
    assert flashwright("simulate", str(file))[1].startswith("hello from thread 7\n")
    code, out, error = flashwright("simulate", str(file), "--json")
    assert code == 0 and json.loads(out)["grid"] == [1, 1, 1]
    assert error == "hello from thread 7\n"


def test_clusters_and_spurious_waits_reach_the_launch(tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(
        """__global__ void k(unsigned *blocks, unsigned *answers) {
        __shared__ unsigned long long barrier;
        unsigned place = (unsigned)__cvta_generic_to_shared(&barrier), done = 0, size;
        asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
        *blocks = size;
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(place) : "memory");
        asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" :: "r"(place) : "memory");
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(place) : "memory");
        *answers = done; }"""
    )
    arguments = ("--arch", "sm_90", "--block", "1", "--arg", "empty:u32:1", "--arg", "empty:u32:1")
    found = []
    for options in ((), ("--grid", "4", "--cluster", "2", "--spurious-waits")):
        saved = [str(tmp_path / f"{name}.npy") for name in ("blocks", "answers")]
        save = [text for index, name in enumerate(saved) for text in ("--save", f"{index}={name}")]
        code, _, error = flashwright("simulate", str(file), *arguments, *options, *save)
        assert code == 0, error
        found.append([int(np.load(name)[0]) for name in saved])
    assert found == [[1, 1], [2, 0]]


# Configs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--causal", "--keys", "200", "--softcap", "4"),
        ("--window", "20,10", "--heads", "4", "--kv-heads", "2"),
    ],
)
def test_a_config_computes_masks_caps_groups_and_other_lengths(options: tuple[str, ...]) -> None:
    document = document_of("simulate", CONFIG, "--rows", "100", *options)
    assert document["relative_error"] < 8e-3 and document["findings"] == []


@pytest.mark.parametrize(
    ("config", "options", "companions"),
    [
        ("ampere backward (BF16, 64, 32, 32, 2): stages_2_1+swizzled", ("--rows", "40", "--causal"), {"rows", "dq"}),
        (
            "ampere decode (BF16, 64, 16, 16, 4): rows_1+stages_2+blocks_1+swizzled",
            ("--rows", "1", "--keys", "100"),
            set(),
        ),
    ],
)
def test_configs_of_every_operation_run(config: str, options: tuple[str, ...], companions: set[str]) -> None:
    document = document_of("simulate", config, *options)
    assert document["relative_error"] < 8e-3
    assert document.get("companions", {}).keys() == companions
    assert config in flashwright("simulate", config, *options)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rows", "-5"), "--rows: -5 rows are not allowed; allowed: 1 to"),
        (("--heads", "0"), "--heads: 0 heads are not allowed"),
        (("--heads", "3", "--kv-heads", "2"), "kv_heads: 2 heads of k and v do not divide 3 heads of q"),
        (("--window", "5"), "--window: '5' is not a window; expected LEFT,RIGHT"),
        (("--softcap", "-1"), "softcap: -1.0 is not allowed"),
    ],
)
def test_problems_that_are_none_are_explained(options: tuple[str, ...], message: str) -> None:
    code, _, error = flashwright("simulate", CONFIG, *options)
    assert code == 1
    assert message in error


# What applies to another kind of target -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (CONFIG, ("--grid", "4"), "--grid: not for a config"),
        (CONFIG, ("--arg", "i32:1", "--save", "0=x.npy", "-I", "."), "--arg, --save, --include: not for a config"),
        ("k.ptx", ("--rows", "3"), "--rows: not for a PTX file"),
        ("k.ptx", ("-D", "X"), "--define: not for a PTX file"),
        ("k.cu", ("--causal", "--kv-heads", "1"), "--kv-heads, --causal: not for a CUDA file"),
    ],
)
def test_options_of_another_kind_of_target_are_refused(target: str, options: tuple[str, ...], message: str) -> None:
    code, _, error = flashwright("simulate", target, *options)
    assert code == 1
    assert message in error


# Ctrl-C ------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_with_a_word_and_exit_code_130(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, progress: Any, **options: Any) -> None:
        progress(3, 8)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "simulate_kernel", interrupted)
    code, _, error = flashwright("simulate", kernel, *LAUNCH)
    assert code == 130
    assert "interrupted after 0 s: 3 of 8 thread blocks were simulated" in error


def test_progress_is_told_per_wave_of_thread_blocks() -> None:
    told: list[tuple[int, int]] = []
    simulate_kernel("__global__ void k() {}", 10, 1024, progress=lambda done, blocks: told.append((done, blocks)))
    assert told == [(0, 10), (4, 10), (8, 10)]
