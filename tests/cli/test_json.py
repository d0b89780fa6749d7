"""JSON of every command: it names its schema, and has the keys that docs/json.md lists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import flashwright

from flashwright.cli import app as cli
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
CONFIG = "(BF16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax"
COMMANDS = {
    "which/1": ("which", "--gpu", "h200"),
    "explain/1": ("explain", CONFIG, "--no-neighbours"),
    "compare/1": ("compare", CONFIG, CONFIG),
    "ladder/1": ("ladder", "--from", str(RESULTS / "ladder_h200.json")),
    "simulate/1": ("simulate", CONFIG, "--rows", "64"),
    "check/1": ("check", str(ROOT / "tests/simulator/data/nvcc_saxpy.ptx"), "--block", "64", "--arg", "ones:f32:64",
                "--arg", "ones:f32:64", "--arg", "f32:3", "--arg", "i32:64"),
    "tune/1": ("tune", "--d-head", "64", "--quick", "--limit", "1", "--dry-run"),
    "tune-show/1": ("tune", "show", "--shipped"),
    "bench/2": ("bench", "--from", str(RESULTS / "bench_h200_bf16.json")),
    "warm-up/1": ("warm-up", "--head-dim", "64", "--arch", "sm_80", "--no-causal"),
    "cache/1": ("cache",),
    "cache-list/1": ("cache", "list"),
    "cache-clear/1": ("cache", "clear"),
    "doctor/1": ("doctor",),
    "plan/1": ("plan", "--gpus", "8", "--tokens", "64k", "--heads", "8/2", "--head-dim", "64"),
}  # fmt: skip
THAT_GROW = ("explain", "compare", "simulate")
"""Their keys are listed as far as programs rely on them."""


def documented() -> dict[str, set[str]]:
    rows = re.findall(r"^\| \[`(\S+/\d+)`\]\S+ \| (.*) \|$", (ROOT / "docs/json.md").read_text("utf-8"), re.MULTILINE)
    return {schema: set(re.findall(r"`(\w+)`", keys)) for schema, keys in rows}


SLOWER = ("compare/1", "tune/1")


@pytest.mark.parametrize(
    "schema", [pytest.param(each, marks=pytest.mark.slow if each in SLOWER else ()) for each in COMMANDS]
)
def test_json_names_its_schema_and_has_the_keys_that_are_documented(schema, monkeypatch, tmp_path):
    if schema.startswith("cache"):
        monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path))
    form = ("--format", "json") if schema.startswith("check") else ("--json",)
    code, out, error = flashwright(*COMMANDS[schema], *form)
    assert code == 0, error
    document = json.loads(out)
    assert next(iter(document)) == "schema"
    assert document.pop("schema") == schema
    keys = documented()[schema]
    assert keys <= document.keys()
    if not schema.startswith(THAT_GROW):
        assert keys == document.keys()


def test_keys_of_a_chosen_kernel_are_documented():
    _, out, _ = flashwright(*COMMANDS["which/1"], "--json")
    section = (ROOT / "docs/json.md").read_text("utf-8").partition("## which")[2].partition("\n## ")[0]
    document = json.loads(out)
    for key in ("gpu", "problem", "variant"):
        (meaning,) = re.findall(rf"^\| `{key}` \| (.*) \|$", section, re.MULTILINE)
        assert document[key].keys() == set(re.findall(r"`(\w+)`", meaning)) - {"null"}


def test_every_schema_is_documented_and_tested():
    assert documented().keys() == COMMANDS.keys()


def test_every_command_has_json():
    """So that a command that is added here is listed there."""
    names = {command.__name__.replace("_", "-") for command in cli.COMMANDS}
    assert names <= {schema.partition("/")[0] for schema in COMMANDS}
