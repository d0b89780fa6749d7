"""What each knob is worth: the configs that are timed, and how their figures are kept. The machine is a fake."""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.registry import rejection_reason
from flashwright.workbench.bench import knob_effects, peers
from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.knob_effects import (
    Base,
    Effect,
    KnobEffects,
    bases,
    configs_of,
    effect,
    measure_knobs,
    read_knob_effects,
    shuffled_times_ms,
    spread,
    write_knob_effects,
)
from flashwright.workbench.bench.measure import Timed
from flashwright.workbench.bench.peers import Inputs, Prepared
from flashwright.workbench.bench.timing import CapturedCall

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "knob_effects.py"
PEER_MS, KERNEL_MS, UNSWIZZLED_MS = 3.0, 2.0, 8.0


class FakeMachine:
    """Every kernel is right and takes 2 ms, but for those without swizzle; the second timing of one, 1% more."""

    def inputs(self, cell: Cell) -> Inputs:
        return Inputs(cell, cell, cell, causal=False)

    def relative_error(self, prepared: Prepared, inputs: Inputs) -> float:
        return 1e-3

    def gpu_times_ms(self, prepared: Mapping[Timed, Prepared]) -> tuple[dict[Timed, float], dict[Timed, str]]:
        return {timed: self._time_ms(timed.name) for timed in prepared}, {}

    def _time_ms(self, name: str) -> float:
        if name == knob_effects.PEER:
            return PEER_MS
        kernel_ms = KERNEL_MS if "swizzled" in name else UNSWIZZLED_MS
        return kernel_ms * (1.01 if name.endswith(knob_effects.AGAIN) else 1)

    def host_us(self, prepared: Prepared, gpu_ms: float) -> float:
        return 10.0


def prepare_all_but_reversed(config: FlashForwardKernelConfig, inputs: Inputs) -> Prepared:
    if config.reversed_kv:
        raise RuntimeError("this GPU goes forwards only")
    return Prepared(lambda: None)


@pytest.fixture
def peer_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = peers.Peer(knob_effects.PEER, "peer", lambda: None, lambda inputs: Prepared(lambda: None))
    monkeypatch.setitem(knob_effects.PEERS, knob_effects.PEER, peer)


@pytest.fixture
def measured(peer_without_torch: None) -> KnobEffects:
    starts = bases()
    cells = measure_knobs(FakeMachine(), starts, prepare_all_but_reversed)
    return KnobEffects({"gpu": "Fake"}, starts, cells)


def turned(base: Base, knob: str) -> FlashForwardKernelConfig:
    (turn,) = base.turns_of(knob)
    assert turn.config is not None
    return turn.config


def test_every_field_of_the_config_is_turned_from_both_bases():
    names = {field.name for field in fields(FlashForwardKernelConfig)}
    for base in bases():
        assert rejection_reason(base.config) is None
        assert {turn.knob for turn in base.turns} == names


def test_a_turn_changes_its_knob_and_nothing_else_or_says_why_there_is_no_kernel():
    for base in bases():
        for turn in base.turns:
            if turn.config is None:
                assert turn.problem
                continue
            pairs = zip(base.config.values(), turn.config.values(), fields(turn.config), strict=True)
            assert [field.name for old, new, field in pairs if old != new] == [turn.knob]


def test_kernels_of_one_dtype_and_head_dimension_are_timed_together_with_the_peer(measured: KnobEffects):
    problems = [(result.cell.dtype.name, result.cell.d_head, result.cell.length) for result in measured.cells]
    assert len(problems) == len(set(problems)) == 8
    for result in measured.cells:
        assert knob_effects.PEER in result.measurements
        assert result.cell.batch * result.cell.length == 16_384
        assert result.cell.heads * result.cell.d_head == 2_048
    timed = {name for result in measured.cells for name in (*result.measurements, *result.failures)}
    assert {config.short_form() for config in configs_of(measured.bases)} <= timed


def test_an_effect_is_relative_to_the_base_and_to_the_peer(measured: KnobEffects):
    early = measured.bases[0]
    found = effect(measured, early, turned(early, "swizzled"), 4096)
    assert isinstance(found, Effect)
    assert (found.times_base, found.times_peer) == (KERNEL_MS / UNSWIZZLED_MS, PEER_MS / UNSWIZZLED_MS)
    assert found.tflops == pytest.approx(found.cell.flops / UNSWIZZLED_MS / 1e9)


def test_another_problem_has_no_base_to_be_compared_with(measured: KnobEffects):
    early = measured.bases[0]
    found = effect(measured, early, turned(early, "dtype"), 512)
    assert isinstance(found, Effect)
    assert found.times_base is None
    assert found.times_peer == PEER_MS / KERNEL_MS


def test_a_kernel_that_fails_is_recorded_and_the_others_are_timed(measured: KnobEffects):
    for base in measured.bases:
        failed = effect(measured, base, turned(base, "reversed_kv"), 512)
        assert failed == "RuntimeError: this GPU goes forwards only"
        assert isinstance(effect(measured, base, turned(base, "streaming_stores"), 512), Effect)


def test_two_timings_of_one_kernel_say_how_little_a_difference_means(measured: KnobEffects):
    assert spread(measured) == pytest.approx(1 - 1 / 1.01)
    assert spread(KnobEffects({}, measured.bases, ())) is None


def test_every_round_is_in_another_order_and_the_median_counts():
    """The first kernel of a round is ten times as fast, as after a pause: no kernel may always be the first."""
    kernels = {name: CapturedCall(graph=None, launches=1) for name in "abcdefg"}
    turns: list[str] = []

    def replay_ms(one: Mapping[str, CapturedCall]) -> dict[str, float]:
        (name,) = one
        turns.append(name)
        return {name: 0.2 if len(turns) % len(kernels) == 1 else 2.0}

    assert shuffled_times_ms(kernels, replay_ms) == dict.fromkeys(kernels, 2.0)
    rounds = [tuple(turns[start : start + len(kernels)]) for start in range(0, len(turns), len(kernels))]
    assert all(sorted(each) == sorted(kernels) for each in rounds)
    assert len(set(rounds)) == len(rounds) == knob_effects.ROUNDS


def test_the_script_gives_every_kernel_as_many_turns_as_requested(monkeypatch: pytest.MonkeyPatch):
    script = runpy.run_path(str(SCRIPT))
    turns: Counter[str] = Counter()

    def replay_times_ms(one: Mapping[str, CapturedCall], *, stream: object, rounds: int) -> dict[str, float]:
        turns.update(one.keys())
        return dict.fromkeys(one, 2.0)

    parts = script["main"].__globals__
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setitem(parts, "capture", lambda call, stream, launches: CapturedCall(graph=None, launches=1))
    monkeypatch.setitem(parts, "replay_times_ms", replay_times_ms)
    kernels = {name: Prepared(lambda: None) for name in "ab"}
    assert script["Machine"](rounds=4).gpu_times_ms(kernels) == ({"a": 2.0, "b": 2.0}, {})
    assert turns == {"a": 4, "b": 4}


def test_a_result_survives_its_file(measured: KnobEffects, tmp_path: Path):
    path = tmp_path / "result.json"
    write_knob_effects(path, measured)
    assert read_knob_effects(path) == measured


def test_a_file_of_something_else_is_refused(tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"rungs": []}))
    with pytest.raises(ValueError, match=r"not a result of `benchmarks/knob_effects.py`"):
        read_knob_effects(path)


def test_the_script_measures_writes_and_prints(
    peer_without_torch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    script = runpy.run_path(str(SCRIPT))
    parts = script["main"].__globals__
    monkeypatch.setitem(parts, "Machine", lambda rounds: FakeMachine())
    monkeypatch.setitem(parts, "prepare", prepare_all_but_reversed)
    monkeypatch.setitem(parts, "compile_all", lambda configs: None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / "result.json")])
    script["main"]()
    written = read_knob_effects(tmp_path / "result.json")
    assert len(written.cells) == 8
    assert written.environment["rounds"] == knob_effects.ROUNDS
    lines = capsys.readouterr().out.splitlines()
    assert "  swizzled: on → off                     0.250 (0.375 FA-2)  0.250 (0.375 FA-2)" in lines
    assert lines[-1] == "the same kernel timed twice differs by up to 1.0%"
