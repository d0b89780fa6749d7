"""`benchmarks/beside_best_peers.py`: stored results beside peers that are not installed."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from flashwright.problem.dtypes import DType
from flashwright.workbench.bench.grid import cell_of
from flashwright.workbench.bench.results import BenchResult, CellResult, Measurement, ours_of, write_result

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SCRIPT = BENCHMARKS / "beside_best_peers.py"


def measured(times_ms: dict[str, float], length: int = 8192) -> CellResult:
    cell = cell_of(DType.BF16, 128, True, length)
    return CellResult(cell, {name: Measurement(ms, 10, 1e-3) for name, ms in times_ms.items()})


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    def run(cells: list[CellResult], *options: str) -> tuple[int, str]:
        path = tmp_path / "result.json"
        write_result(path, BenchResult({"date": "2026-11-16"}, {}, tuple(cells)))
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(path), *options])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return end.value.code, capsys.readouterr().out

    return run


def best_over_cudnn(length: int) -> float:
    cells = json.loads((BENCHMARKS / "results/peers_h200.json").read_text())["cells"]
    (speeds,) = (
        cell["tflops"]
        for cell in cells
        if (cell["operation"], cell["d_head"], cell["causal"], cell["length"]) == ("forward", 128, True, length)
    )
    return max(speeds.values()) / speeds["sdpa-cudnn"]


def test_ours_is_ahead_where_it_has_more_over_cudnn_than_the_fastest_peer_has(run):
    best = best_over_cudnn(8192)
    assert best > 1.1  # FlashAttention-3 is faster than cuDNN there
    ahead = measured({ours_of("hopper"): 1, "sdpa-cudnn": best * 1.02})
    code, text = run([ahead])
    assert code == 0
    assert "mean 1.020, worst 1.020 (128 causal 8k)" in text
    assert "0 of 1 cells" in text


def test_a_cell_that_falls_short_is_named(run):
    behind = measured({ours_of("hopper"): 1, "sdpa-cudnn": best_over_cudnn(8192) * 0.9})
    ahead = measured({ours_of("hopper"): 1, "sdpa-cudnn": best_over_cudnn(2048) * 1.1}, length=2048)
    code, text = run([behind, ahead])
    assert code == 1
    assert "below 1: 128 causal 8k 0.90" in text
    assert "1 of 2 cells" in text
    code, text = run([ahead], "--least", "1.2")
    assert code == 1
    assert "below 1.2: 128 causal 2k 1.10" in text


def test_the_ampere_family_is_measured_by_flash_attention_2(run):
    code, text = run([measured({ours_of("ampere"): 1, "sdpa-fa2": 1.15, "sdpa-cudnn": 0.6})])
    assert code == 0
    assert "mean 1.150" in text


def test_a_result_without_a_common_peer_says_nothing(run):
    code, text = run([measured({ours_of("hopper"): 1, "sdpa-fa2": 2})])
    assert code == 1
    assert "0 of 0 cells" in text
