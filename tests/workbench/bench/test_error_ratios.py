"""Errors beside PyTorch's: what is compared with what, and the script that judges every kind of scores."""

from __future__ import annotations

import json
import math
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flashwright import DType
from flashwright.workbench.bench.error_ratios import (
    EAGER_ROWS,
    ErrorRatios,
    Errors,
    eager_attention,
    error_ratios,
    float64_attention,
    worst_by_kind,
)
from flashwright.workbench.bench.gpu_machine import GPUMachine, prepare_ours
from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.peers import Inputs, Prepared
from flashwright.workbench.bench.scores import KINDS

SCRIPT = Path(__file__).parents[3] / "benchmarks/accuracy.py"
MACHINE = GPUMachine("cpu")


def a_cell(**changes: object) -> Cell:
    values = {"dtype": DType.BF16, "d_head": 32, "causal": True, "length": 64, "batch": 1, "heads": 2, "kv_heads": 2}
    return Cell(**(values | changes))


def spoiled(factor: float, inputs: Inputs) -> Prepared:
    return Prepared(lambda: prepare_ours(inputs).output() * factor)


def failing(inputs: Inputs) -> Prepared:
    raise RuntimeError("no kernel")


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_of_attention_is_within_the_limits_on_every_kind(kind):
    cells = [
        a_cell(scores=kind, dtype=dtype, causal=causal) for dtype, causal in zip(DType, (False, True), strict=True)
    ]
    found, failures = error_ratios(MACHINE.inputs, cells, {"reference": prepare_ours})
    assert failures == []
    assert [each.cell for each in found] == cells
    for each in found:
        assert each.within_limits, (each.largest_ratio, each.rms_ratio)


@pytest.mark.parametrize("kind", ["normal", "sink", "one-hot", "equal"])
def test_results_that_are_off_by_little_more_than_rounding_are_above_a_limit(kind):
    ((found,), _) = error_ratios(MACHINE.inputs, [a_cell(scores=kind)], {"spoiled": partial(spoiled, 1.02)})
    assert not found.within_limits


def errors_like(ours: Errors, scores: str = "sink") -> ErrorRatios:
    return ErrorRatios(a_cell(scores=scores), "ours", ours, Errors(0.02, 5e-4), Errors(0.01, 1e-3), Errors(0.005, 2e-4))


@pytest.mark.parametrize(
    ("ours", "scores", "within"),
    [
        (Errors(0.04, 1.2e-3), "sink", True),
        (Errors(0.0401, 1e-3), "sink", False),
        (Errors(0.02, 1.21e-3), "sink", False),
        (Errors(0.02, 1.06e-3), "normal", True),
        (Errors(0.02, 1.07e-3), "normal", False),
        (Errors(math.inf, math.inf), "sink", False),
    ],
)
def test_the_largest_error_is_judged_by_eager_attention_and_the_rms_by_flash_attention_2(ours, scores, within):
    found = errors_like(ours, scores)
    assert found.within_limits is within
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["within_limits"] is within


def test_an_error_is_compared_with_that_of_rounding_at_least():
    exact = Errors(0.0, 0.0)
    found = ErrorRatios(a_cell(), "ours", Errors(0.01, 1e-3), exact, exact, Errors(0.01, 1e-3))
    assert (found.largest_ratio, found.rms_ratio) == (1, 1)


def test_the_error_of_rounding_is_that_of_values_that_the_dtype_does_not_hold():
    exact = torch.randn(1, 1, 64, 64, dtype=torch.bfloat16).double()
    rounding = Errors.of_rounding(exact, torch.bfloat16)
    assert Errors.of(exact.bfloat16(), exact) == Errors(0, 0)
    assert 2**-10 < rounding.rms / exact.square().mean().sqrt() < 2**-8
    assert rounding.largest <= 2**-8 * exact.abs().max()


def test_what_is_not_finite_has_an_infinite_error():
    expected = torch.zeros(1, 1, 2, 8, dtype=torch.float64)
    assert Errors.of(torch.full((1, 1, 2, 8), math.nan), expected) == Errors(math.inf, math.inf)


@pytest.mark.parametrize("causal", [False, True])
def test_eager_attention_is_attention_over_several_blocks_of_rows_and_grouped_heads(causal):
    cell = a_cell(length=EAGER_ROWS + 8, heads=2, kv_heads=1, d_head=8, causal=causal)
    inputs = MACHINE.inputs(cell)
    errors = Errors.of(eager_attention(inputs), float64_attention(inputs))
    assert 0 < errors.largest < 0.05
    assert eager_attention(inputs).dtype == torch.bfloat16


def test_a_failing_implementation_is_listed_and_the_others_are_compared():
    found, failures = error_ratios(MACHINE.inputs, [a_cell()], {"broken": failing, "reference": prepare_ours})
    assert [each.name for each in found] == ["reference"]
    assert [(each.name, each.reason) for each in failures] == [("broken", "RuntimeError: no kernel")]


def test_the_worst_of_a_kind_may_be_two_cells():
    large, spread = errors_like(Errors(0.04, 1e-4)), errors_like(Errors(0.01, 1e-3))
    assert worst_by_kind([large, spread]) == {("ours", "sink"): (large, spread)}


@pytest.mark.parametrize(
    ("implementations", "code"),
    [({"fine": prepare_ours}, 0), ({"off": partial(spoiled, 1.05)}, 1), ({"x": failing}, 1)],
)
def test_the_script_prints_the_worst_writes_all_and_judges(implementations, code, tmp_path, monkeypatch, capsys):
    script = runpy.run_path(str(SCRIPT))
    parts = script["main"].__globals__
    monkeypatch.setitem(parts, "gpu_available", lambda: True)
    monkeypatch.setitem(parts, "GPUMachine", lambda: MACHINE)
    monkeypatch.setitem(parts, "ours", lambda families: implementations)
    path = tmp_path / "errors.json"
    arguments = ["--scores", "normal,sink", "--dtype", "BF16", "--d-head", "64", "--seqlen", "40", "64"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--output", str(path)])
    assert script["main"]() == code
    document = json.loads(path.read_text())
    assert len(document["cells"]) + len(document["failures"]) == 8
    out = capsys.readouterr().out
    assert ("above the limit" in out) == ("off" in implementations)
    assert ("RuntimeError: no kernel" in out) == ("x" in implementations)


def test_without_a_gpu_the_script_says_so(monkeypatch):
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(script["main"].__globals__, "gpu_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        script["main"]()
