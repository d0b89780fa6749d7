"""What the documents claim: the pairs that are timed, and what their times say. The machine is a fake."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.workbench.bench.claims import (
    ClaimResults,
    Expected,
    Found,
    Outcome,
    check_buildable,
    claims,
    findings,
    measure_claims,
    read_claims,
    spread,
    verdict,
    write_claims,
)
from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.knob_effects import AGAIN
from flashwright.workbench.bench.measure import Timed
from flashwright.workbench.bench.peers import Inputs, Prepared

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


class FakeMachine:
    """Eager kernels take half the time, double-buffered ones 2% more; the second timing of one, 0.5% more."""

    def inputs(self, cell: Cell) -> Inputs:
        return Inputs(cell, cell, cell, causal=False)

    def relative_error(self, prepared: Prepared, inputs: Inputs) -> float:
        return 1e-3

    def gpu_times_ms(self, prepared: Mapping[Timed, Prepared]) -> tuple[dict[Timed, float], dict[Timed, str]]:
        return {timed: self._time_ms(timed.name) for timed in prepared}, {}

    def _time_ms(self, name: str) -> float:
        time_ms = 1.0 if "eager" in name else 2.0
        time_ms *= 1.02 if "buffer" in name else 1
        return time_ms * (1.005 if name.endswith(AGAIN) else 1)

    def host_us(self, prepared: Prepared, gpu_ms: float) -> float:
        return 10.0


def prepare_all_but_wide_blocks(config: FlashForwardKernelConfig, inputs: Inputs) -> Prepared:
    if config.B_c == 128:
        raise RuntimeError("this GPU is narrow")
    return Prepared(lambda: None)


@pytest.fixture(scope="module")
def measured() -> ClaimResults:
    return ClaimResults({"gpu": "Fake"}, measure_claims(FakeMachine(), claims(), prepare_all_but_wide_blocks))


def of(title: str) -> int:
    return [claim.title for claim in claims()].index(title)


def test_a_kernel_can_be_built_of_every_config():
    check_buildable(claims())


@pytest.mark.parametrize(
    ("title", "knob"),
    [
        ("Eager loading by length", "eager_load_blocks"),
        ("Double buffering by arithmetic intensity", "mma_double_buffer_loads"),
        ("Double buffering when the order holds", "mma_double_buffer_loads"),
        ("K load tiles against the whole block", "K_mma_load_K_tiles"),
        ("K load tiles when the order holds", "K_mma_load_K_tiles"),
        ("The price of keeping the order", "keep_order"),
    ],
)
def test_a_pair_differs_in_the_knob_of_its_claim_alone(title, knob):
    assert len(claims()) == 6
    for pair in claims()[of(title)].pairs:
        values = zip(pair.first.values(), pair.second.values(), fields(pair.first), strict=True)
        assert [field.name for old, new, field in values if old != new] == [knob]


def test_the_conditions_are_those_that_the_documents_speak_of():
    eager, buffering = claims()[0].pairs, claims()[1].pairs
    assert [pair.cell.length for pair in eager] == [64 * 2**power for power in range(9)]
    assert {pair.first.d_head for pair in buffering} == {64, 128, 256}
    assert {pair.first.B_c for pair in buffering} == {32, 64, 128}
    assert {pair.first.dtype.name for pair in buffering} == {"FP16", "BF16"}
    assert {pair.first.optimized_softmax for pair in buffering} == {False, True}
    for index, keeps in ((1, False), (2, True), (3, False), (4, True)):
        assert {pair.first.keep_order for pair in claims()[index].pairs} == {keeps}


def test_kernels_of_one_problem_are_timed_together_and_the_first_of_them_twice(measured):
    assert len({result.cell for result in measured.cells}) == len(measured.cells)
    for result in measured.cells:
        assert sum(name.endswith(AGAIN) for name in (*result.measurements, *result.failures)) == 1


def test_a_faster_kernel_is_as_claimed_where_the_claim_is_that_it_is_faster(measured):
    found = findings(measured, claims()[0])
    assert all(isinstance(each, Found) and each.outcome is Outcome.FASTER and each.ratio == 2 for each in found)
    judged = {each.pair.expected: each.is_as_claimed for each in found if isinstance(each, Found)}
    assert judged == {Expected.NO_GAIN: False, Expected.NOTHING: None, Expected.FASTER: True}
    sides = "in all 5 that should be faster, none of 3 that should gain little"
    assert verdict(found) == f"holds in 5 of 8 conditions ({sides})"


def test_a_slower_kernel_is_as_claimed_where_no_gain_is_claimed(measured):
    found = [each for each in findings(measured, claims()[1]) if isinstance(each, Found)]
    assert {each.outcome for each in found} == {Outcome.SLOWER}
    assert {each.pair.expected: each.is_as_claimed for each in found} == {
        Expected.NO_GAIN: True,
        Expected.FASTER: False,
    }


@pytest.mark.parametrize(("ratio", "as_claimed"), [(0.8, True), (1.04, True), (1.06, False)])
def test_a_gain_of_a_few_percent_is_little(ratio, as_claimed):
    short = claims()[0].pairs[0]
    outcome = Outcome.FASTER if ratio > 1 else Outcome.SLOWER
    assert Found(short, (1.0, ratio), ratio, outcome).is_as_claimed is as_claimed


def test_differences_within_the_spread_are_none(measured):
    assert spread(measured) == pytest.approx(1 - 1 / 1.005)
    found = [each for each in findings(measured, claims()[3]) if isinstance(each, Found)]
    assert {each.outcome for each in found} == {Outcome.EQUAL}
    assert verdict(found) == "holds in none of 8 conditions"


def test_a_kernel_that_fails_gives_its_reason_and_counts_for_nothing(measured):
    found = findings(measured, claims()[1])
    failed = [each for each in found if isinstance(each, str)]
    assert failed == ["RuntimeError: this GPU is narrow"] * 12
    assert verdict(failed) == "not measured"


def test_where_the_documents_say_nothing_there_is_no_verdict(measured):
    assert verdict(findings(measured, claims()[-1])) == "no claim"


def test_a_result_survives_its_file(measured, tmp_path):
    write_claims(tmp_path / "result.json", measured)
    assert read_claims(tmp_path / "result.json") == measured


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"rungs": []}))
    with pytest.raises(ValueError, match=r"not a result of `benchmarks/claims.py`"):
        read_claims(path)


def test_the_script_measures_writes_and_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = runpy.run_path(str(BENCHMARKS / "claims.py"))
    parts = script["main"].__globals__
    monkeypatch.setitem(parts, "Machine", lambda rounds: FakeMachine())
    monkeypatch.setitem(parts, "prepare", prepare_all_but_wide_blocks)
    monkeypatch.setitem(parts, "compile_all", lambda configs: None)
    monkeypatch.setattr(sys, "argv", ["claims.py", str(tmp_path / "result.json"), "--rounds", "4"])
    script["main"]()
    written = read_claims(tmp_path / "result.json")
    assert written.cells
    assert written.environment["rounds"] == 4
    lines = capsys.readouterr().out.splitlines()
    assert f"Eager loading by length: {verdict(findings(written, claims()[0]))}" in lines
    assert lines[-1] == "the same kernel timed twice differs by up to 0.5%"
