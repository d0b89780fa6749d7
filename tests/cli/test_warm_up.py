"""`flashwright warm-up`."""

from __future__ import annotations

import json
import sys

import pytest
from command_line import flashwright


def test_warm_up_compiles_with_and_without_a_mask_and_finds_it_again():
    command = ("warm-up", "--head-dim", "64", "--arch", "sm_80", "--json")
    _, out, _ = flashwright(*command)
    configs = json.loads(out)["kernels"]
    assert len(configs) >= 4 and {kernel["arch"] for kernel in configs} == {"sm_80"}
    _, out, _ = flashwright(*command)
    assert all(kernel["from_cache"] for kernel in json.loads(out)["kernels"])


def test_a_wrong_head_dimension_is_an_error():
    code, _, error = flashwright("warm-up", "--head-dim", "60", "--arch", "sm_80")
    assert code == 1 and "head_dim 60 is not allowed" in error


@pytest.mark.parametrize("options", [("--window", "64,0"), ("--window-left", "64", "--window-right", "0")])
def test_a_window_is_given_as_in_every_command_or_by_its_sides(monkeypatch, options):
    windows = []
    monkeypatch.setattr(
        sys.modules["flashwright.cli.warm_up"], "compile_ahead", lambda *_, window, **__: windows.append(window) or []
    )
    assert flashwright("warm-up", "--d-head", "64", "--full", *options)[0] == 0
    assert windows == [(64, 0)]


def test_a_window_is_given_once():
    code, _, error = flashwright("warm-up", "--d-head", "64", "--window", "64,0", "--window-left", "3")
    assert code == 1 and "--window: not together with --window-left" in error
