"""Benchmarks on a real GPU: small cells, for whether they are measured, not for how fast they are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flashwright.problem.dtypes import DType
from flashwright.workbench.bench.gpu_machine import GPUMachine
from flashwright.workbench.bench.results import OURS, read_result

pytestmark = pytest.mark.gpu

SMALL = ["bench", "--d-head", "64", "--seqlen", "256", "--seqlen", "512", "--tokens", "2048", "--hidden", "256"]


def flashwright(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashwright", *arguments], capture_output=True, text=True, timeout=240
    )


def test_bench_measures_ours_beside_the_peers_of_pytorch(tmp_path):
    path = tmp_path / "result.json"
    peers = "sdpa-fa2,sdpa-cudnn,sdpa-efficient"
    run = flashwright(*SMALL, "--peers", peers, "--json", "--output", str(path), "--plot", str(tmp_path))
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["environment"]["gpu"]
    assert document["environment"]["driver"]
    result = read_result(path)
    assert len(result.cells) == 4
    assert 10 < result.peak_tflops < 10_000
    for found in result.cells:
        assert found.measurements.keys() >= {OURS, "sdpa-fa2"}
        for measurement in found.measurements.values():
            assert 0 < measurement.relative_error < 8e-3
            assert 1 < measurement.host_us < 10_000
        assert 0.1 < found.ratio("sdpa-fa2") < 10
    assert (tmp_path / "bench.png").exists()


def test_grouped_heads_are_measured_and_peers_without_them_listed():
    run = flashwright(*SMALL, "--kv-heads", "2", "--causal", "--peers", "sdpa-fa2,sdpa-efficient", "--json")
    assert run.returncode == 0, run.stderr
    for cell in json.loads(run.stdout)["cells"]:
        assert OURS in cell["implementations"]
        assert {"sdpa-fa2", "sdpa-efficient"} <= cell["implementations"].keys() | cell["failures"].keys()


def test_the_peak_is_that_of_tensor_cores():
    assert GPUMachine().peak_tflops(DType.BF16) > 10
