"""The commands take Hopper configs and climb the Hopper ladder."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import flashwright
from rich.console import Console

from flashwright import parse_hopper_config
from flashwright.cli.ladder import _print_ladder
from flashwright.kernels.forward.hopper.config import HopperForwardKernelConfig
from flashwright.kernels.forward.hopper.ladder import get_hopper_progression
from flashwright.kernels.ladder import climbed
from flashwright.workbench import ladder as ladder_module
from flashwright.workbench.bench.figures import save_figure
from flashwright.workbench.ladder import (
    Compiled,
    Ladder,
    RungResult,
    Simulated,
    Timed,
    climb,
    ladder_of,
    read_ladder,
    write_ladder,
)
from flashwright.workbench.ladder_plot import ladder_figure

SMALL = parse_hopper_config("hopper (FP16, 64, 128, 32): stages_2+overlap+ping_pong+persistent+lazy")


# --- The ladder --------------------------------------------------------------------------------------------------


@pytest.fixture
def short_ladder(monkeypatch) -> None:
    """Two rungs, which compile in two seconds."""
    base = replace(SMALL, lazy_rescale=False)
    short = climbed(base, [("base", {}), ("lazy rescaling of O", {"lazy_rescale": True})])
    ladder = replace(ladder_of("hopper"), rungs=lambda dtype, d_head: short)
    monkeypatch.setattr(ladder_module, "ladder_of", lambda family, operation: {"hopper": ladder}[family])


def simulated(config: HopperForwardKernelConfig) -> Simulated:
    scores = 182 * config.B_r * config.B_c // config.n_warps  # 182 steps of warps
    return Simulated(145_600, 800.0, 0, 24_576, 2.1e-3, scores)


def a_timed_ladder() -> Ladder:
    """Each rung takes half the time of the one before."""
    rungs = [
        RungResult(
            rung,
            {"sm_90a": Compiled(168, 0, 160 * 1024, 1, "registers")},
            simulated(rung.config),
            Timed(64.0 / 2**rung.number, 100.0 * rung.number, {"sdpa-cudnn": 0.1 * rung.number, "sdpa-fa2": 1.5}),
        )
        for rung in get_hopper_progression()
    ]
    return Ladder(tuple(rungs), {"gpu": "NVIDIA Imaginary"})


def test_the_hopper_ladder_is_compiled_simulated_and_checked(short_ladder):
    code, out, error = flashwright("ladder", "--family", "hopper", "--json")
    assert code == 0, error
    first, second = json.loads(out)["rungs"]
    assert (first["config"], second["config"]) == (str(replace(SMALL, lazy_rescale=False)), str(SMALL))
    assert first["compiled"].keys() == {"sm_90a"}
    assert first["compiled"]["sm_90a"]["blocks_per_sm"] == 1
    assert 0 < second["simulation"]["relative_error"] < 5e-4
    assert second["simulation"]["instructions"] < first["simulation"]["instructions"]


@pytest.mark.parametrize(("arch", "timed"), [("sm_90", True), ("sm_80", False), ("sm_100", False)])
def test_the_hopper_ladder_is_timed_on_hopper_gpus_only(short_ladder, monkeypatch, arch, timed):
    monkeypatch.setattr(ladder_module, "gpu_available", lambda: True)
    monkeypatch.setattr(ladder_module, "_this_arch", lambda: arch)
    times = [Timed(1.0, 2.0, {"sdpa-cudnn": 1.1})] * 2

    def time_all(rungs, ladder, sample, *, progress):
        assert ladder.peers == ("sdpa-cudnn", "sdpa-fa2")
        return times

    monkeypatch.setattr(ladder_module, "_time_all", time_all)
    assert climb(family="hopper", progress=False).timings == (times if timed else [])


def test_the_hopper_ladder_is_shown_beside_cudnn_and_flash_attention_2(tmp_path):
    ladder = a_timed_ladder()
    console = Console(width=200, record=True, file=io.StringIO())
    _print_ladder(console, ladder)
    text = console.export_text()
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    third = next(row for row in rows if row[1] == "3")
    assert third[-6:-1] == ["8.000", "300", "30.0", "150.0", "2.00"]
    assert "sm_90a" in text and "beside cuDNN (SDPA) and FlashAttention-2 (SDPA)" in text
    save_figure(ladder_figure(ladder), [tmp_path / "ladder.svg"])
    picture = (tmp_path / "ladder.svg").read_text()
    assert "The Hopper ladder" in picture and "% of cuDNN (SDPA) (dashed)" in picture


def test_the_hopper_ladder_fits_80_columns(tmp_path):
    console = Console(width=80, record=True, file=io.StringIO())
    _print_ladder(console, a_timed_ladder())
    tables = [line for line in console.export_text().splitlines() if line.startswith(("┃", "│", "┏"))]
    assert max(map(len, tables)) <= 80
    assert not any("…" in line for line in tables)


def test_configs_of_the_ladder_can_be_copied_from_a_narrow_terminal():
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    ladder = a_timed_ladder()
    _print_ladder(console, ladder)
    lines = console.export_text().splitlines()
    for result in ladder.rungs:
        assert f"{result.rung.number:2} {result.rung.config}" in lines


@pytest.mark.parametrize("spill_bytes", [0, 12])
def test_the_mark_of_kernels_that_spill_is_explained(spill_bytes):
    ladder = a_timed_ladder()
    spilling = {"sm_90a": replace(ladder.rungs[0].compiled["sm_90a"], spill_bytes=spill_bytes)}
    console = Console(width=200, record=True, file=io.StringIO())
    _print_ladder(console, Ladder((replace(ladder.rungs[0], compiled=spilling), *ladder.rungs[1:])))
    text = " ".join(console.export_text().split())
    assert ("168!" in text) == ("!: the kernel spills registers to memory." in text) == (spill_bytes > 0)


def test_instructions_of_rungs_compare_whatever_their_blocks():
    first, *_, last = a_timed_ladder().rungs  # 800 instructions of a warp in a step; 64 keys a step, then 128
    assert first.instructions_per_thousand_scores == 800 * 1000 / (16 * 64)
    assert last.instructions_per_thousand_scores == 800 * 1000 / (16 * 128)


def test_a_hopper_ladder_is_read_back_as_it_was_written(tmp_path):
    write_ladder(tmp_path / "ladder.json", a_timed_ladder())
    assert read_ladder(tmp_path / "ladder.json") == a_timed_ladder()


def test_a_ladder_stored_when_there_was_one_peer_is_still_read(tmp_path):
    write_ladder(tmp_path / "ladder.json", a_timed_ladder())
    document = json.loads(Path(tmp_path / "ladder.json").read_text())
    for rung in document["rungs"]:
        rung["gpu"]["ratio_to_flash_attention_2"] = rung["gpu"].pop("ratios")["sdpa-fa2"]
    (tmp_path / "ladder.json").write_text(json.dumps(document))
    old = read_ladder(tmp_path / "ladder.json")
    assert old.peers == ["sdpa-fa2"]
    assert old.timings[0].ratios == {"sdpa-fa2": 1.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--family", "blackwell"), "family: 'blackwell' is not known; allowed: ampere, hopper"),
        (("--family", "hopper", "--d-head", "80"), "d_head: 80 is not allowed; allowed: 64, 96, 128, 192, 256"),
        (("--family", "hopper", "--from", "x.json"), "do not go with it"),
    ],
)
def test_bad_options_of_the_ladder_are_one_message(options, message):
    code, out, error = flashwright("ladder", *options)
    assert (code, out) == (1, "")
    assert message in error


# --- Others ------------------------------------------------------------------------------------------------------


def test_simulate_runs_a_hopper_config_on_its_architecture():
    code, out, error = flashwright("simulate", str(SMALL), "--rows", "256", "--heads", "1", "--json")
    assert code == 0, error
    document = json.loads(out)
    assert document["config"] == str(SMALL)
    assert 0 < document["relative_error"] < 5e-4
    code, out, error = flashwright("simulate", str(SMALL), "--arch", "sm_80")
    assert (code, out) == (1, "")
    assert "the hopper family runs on sm_90a alone, not on sm_80" in error


def test_tune_says_what_there_is_to_time(monkeypatch):
    monkeypatch.setattr("flashwright.cli.tune.this_machine", lambda: None)
    code, out, error = flashwright(
        "tune", "--dry-run", "--family", "hopper", "--d-head", "64", "--limit", "1", "--json"
    )
    assert code == 0, error
    (report,) = json.loads(out)["searches"]
    assert report["problem"]["family"] == "hopper"
    assert report["space"]["kept"] == 42 + 20  # in either order of blocks
    (survivor,) = report["candidates"]["survivors"]
    assert survivor["config"].startswith("hopper (BF16, 64, ")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("hopper (BF16, 256, 128, 128): stages_2", "bytes of shared memory; a thread block has at most 232448"),
        ("hopper (BF16, 128, 128, 128): stages_2+pingpong", "did you mean 'ping_pong'?"),
        ("hopper (FP16, 128, 128, 128): stages_2", "computes FP16, not BF16"),
    ],
)
def test_bench_refuses_configs_that_cannot_be_measured_before_anything_else(config, message):
    code, out, error = flashwright("bench", "--config", config, "--dtype", "BF16")
    assert (code, out) == (1, "")
    assert message in error
