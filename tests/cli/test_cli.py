"""The command line: exit codes, JSON, and messages instead of tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flashwright import get_kernel_progression, parse_kernel_name_into_config

SCALE_PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 x, .param .f32 factor)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<4>;
    .reg .f32 %f<4>;
    ld.param.u64 %rd1, [x];
    ld.param.f32 %f1, [factor];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f2, [%rd3];
    mul.f32 %f3, %f2, %f1;
    st.global.f32 [%rd3], %f3;
    ret;
}
"""


def flashwright(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashwright", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture
def ptx_file(tmp_path):
    path = tmp_path / "scale.ptx"
    path.write_text(SCALE_PTX)
    return str(path)


def test_ladder_reports_every_rung_as_json():
    result = flashwright("ladder", "--json")
    assert result.returncode == 0, result.stderr
    rungs = json.loads(result.stdout)["rungs"]
    expected = get_kernel_progression()
    assert [rung["rung"] for rung in rungs] == list(range(1, len(expected) + 1))
    assert [rung["config"] for rung in rungs] == [rung.config.short_form() for rung in expected]
    for rung in rungs:
        for arch in ("sm_80", "sm_90"):
            assert rung["compiled"][arch].keys() == {
                "registers",
                "spill_bytes",
                "shared_bytes",
                "blocks_per_sm",
                "limited_by",
            }
            assert rung["compiled"][arch]["spill_bytes"] == 0
        assert rung["simulation"].keys() >= {"instructions", "bank_conflicts", "global_sectors", "relative_error"}
        assert 0 < rung["simulation"]["relative_error"] < 4e-3
        swizzled = parse_kernel_name_into_config(rung["config"]).swizzled
        assert (rung["simulation"]["bank_conflicts"] == 0) == swizzled
        assert rung["gpu"] is None or rung["gpu"]["tflops"] > 0


def test_simulate_runs_a_config():
    config = "(BF16, 64, 64, 64, 4): async+swizzled+load_2_2_2_tiles"
    result = flashwright("simulate", config, "--rows", "128", "--heads", "1", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["config"] == config
    assert document["relative_error"] < 4e-3


def test_simulate_runs_a_ptx_file(ptx_file):
    result = flashwright("simulate", ptx_file, "--block", "64", "--arg", "random:f32:64", "--arg", "f32:0.5")
    assert result.returncode == 0, result.stderr
    assert "mul.f32" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "(BF16, 128, 64, 64, 4): async+nonsense"), "nonsense"),
        (("simulate", "missing.ptx"), "missing.ptx"),
        (("simulate", "(BF16, 64, 64, 64, 4): load_2_2_2_tiles", "--rows", "0"), "0 rows are not allowed"),
        (("simulate", "(BF16, 64, 64, 64, 4): load_3_3_3_tiles"), "power of two"),
        (("ladder", "--dtype", "fp8"), "FP16, BF16"),
        (("ladder", "--d-head", "72"), "d_head"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_1(arguments, message):
    result = flashwright(*arguments)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kernel", "other"), "there is no 'other'; there is: scale"),
        (("--grid", "0"), "--grid"),
        (("--arg", "f33:1"), "f33:1"),
        (("--arg", "random:f32:64"), "argument"),
        (("--block", "64", "--arg", "random:f32:32", "--arg", "f32:1"), "out-of-bounds"),
    ],
)
def test_bad_launches_of_a_ptx_file_are_explained(ptx_file, options, message):
    result = flashwright("simulate", ptx_file, *options)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
