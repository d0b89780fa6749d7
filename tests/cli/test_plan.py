"""`flashwright plan`: what attention over many GPUs costs, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import flashwright

from flashwright.cli import plan
from flashwright.cli.output import TableConsole
from flashwright.workbench.planning import MEASURED_BACKWARD


def planned(*arguments):
    code, out, error = flashwright("plan", *arguments, "--json")
    assert code == 0, error
    return json.loads(out)


@pytest.mark.parametrize("columns", [50, 80])
def test_a_narrow_terminal_cuts_no_number(monkeypatch, columns):
    monkeypatch.setattr(plan, "table_console", lambda: TableConsole(width=columns))
    code, out, error = flashwright("plan", "--gpus", "8", "--tokens", "128K", "--heads", "32/8")
    assert code == 0, error
    assert "…" not in out and "1,120" in out
    assert columns < 80 or max(map(len, out.splitlines())) <= columns


def test_plan_prints_every_strategy_and_how_far_the_model_is_off():
    code, out, error = flashwright(
        "plan", "--gpus", "64", "--tokens", "1M", "--heads", "64/8", "--head-dim", "128", "--link", "ib400"
    )
    assert code == 0, error
    for strategy in ("ring ", "all-gather ", "all-to-all ", "ring 8 × all-to-all 8"):
        assert strategy in out
    assert "1,048,576 tokens, 64/8 heads of 128, causal, zigzag, on 64 × NVIDIA H200" in out
    assert "8 × H800, zigzag, forward: 85.2% published" in out


def test_the_model_is_within_five_points_of_published_efficiencies():
    figures = planned()["published"]["figures"]
    assert len(figures) == 8
    assert all(abs(each["published"] - each["modelled"]) < 0.05 for each in figures)


def test_bytes_are_those_of_the_keys_and_values_that_travel():
    plan = planned("--gpus", "4", "--tokens", "4K", "--heads", "8/2", "--head-dim", "64", "--full")
    by_name = {each["strategy"]: each for each in plan["strategies"]}
    shard = 2 * 1024 * 2 * 64 * 2  # K and V: rows, heads, columns, bytes
    for name in ("ring", "all-gather"):
        assert by_name[name]["forward"]["sent_bytes"] == 3 * shard
        assert by_name[name]["backward"]["sent_bytes"] == 3 * (shard + 2 * shard)  # gradients return in fp32
    queries = 1024 * 8 * 64 * 2 * 3 / 4  # three quarters of the heads go to others
    # Two ranks share each head of K and V: each of the four ranks gets one of them.
    keys_values = 2 * 1024 * 4 * 64 * 2 * 3 / 4
    assert by_name["all-to-all"]["forward"]["sent_bytes"] == 2 * queries + keys_values


def test_a_window_leaves_little_to_send():
    whole = planned("--gpus", "8", "--tokens", "64K", "--layout", "contiguous")
    window = planned("--gpus", "8", "--tokens", "64K", "--layout", "contiguous", "--window", "1024,0")
    ring = [next(e for e in each["strategies"] if e["strategy"] == "ring") for each in (whole, window)]
    assert ring[1]["forward"]["sent_bytes"] < ring[0]["forward"]["sent_bytes"] / 20


def test_zigzag_is_twice_as_efficient_as_contiguous_shards_under_a_causal_mask():
    rings = [
        next(each["efficiency"] for each in planned("--layout", layout)["strategies"] if each["strategy"] == "ring")
        for layout in ("zigzag", "contiguous")
    ]
    assert rings[0] > 1.6 * rings[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "many"), "--tokens: 'many' is not a number of tokens"),
        (("--heads", "64:8"), "--heads: '64:8' is not a pair"),
        (("--heads", "6/4"), "heads: 6/4 is not allowed; allowed: 1 or more, where heads of k and v divide those of q"),
        (("--heads", "0/8"), "heads: 0/8 is not allowed; allowed: 1 or more"),
        (("--link", "telegraph"), "link: 'telegraph' is not known; allowed: nvlink"),
        (("--gpus", "0"), "gpus: 0 is not allowed; allowed: 1 to 1024"),
        (("--gpus", "100000"), "gpus: 100000 is not allowed; allowed: 1 to 1024"),
        (("--d-head", "0"), "d_head: 0 is not allowed; allowed: 1 to 256"),
        (("--tokens", "0"), "tokens: 0 is not allowed; allowed: 1 or more"),
        (("--tflops", "fast"), "--tflops: 'fast' is not a pair; expected e.g. 612.5/450"),
        (("--tflops", "0/100"), "tflops: 0/100 is not allowed; allowed: more than 0"),
        (("--layout", "striped"), "layout: 'striped' is not known"),
        (("--gpu", "a100"), "gpu: no speed of head_dim 128 in BF16 is measured on"),
    ],
)
def test_what_is_not_allowed_is_refused_with_what_is(arguments, message):
    code, _, error = flashwright("plan", *arguments)
    assert code == 1
    assert message in error


def test_speeds_of_another_gpu_may_be_given():
    found = planned("--gpu", "a100", "--tflops", "200.5/150")
    assert (found["forward_tflops"], found["backward_tflops"]) == (200.5, 150)


def test_speeds_are_those_that_were_measured():
    results = Path(__file__).parents[2] / "benchmarks/results/distributed_h200.json"
    measured = {
        ("NVIDIA H200", each["head_dim"]): each["tflops"]
        for each in json.loads(results.read_text())["speeds"]
        if (each["operation"], each["mask"]) == ("backward", "full")
    }
    assert {key: speed / 1e12 for key, speed in MEASURED_BACKWARD.items()} == pytest.approx(measured, rel=0.005)
