"""The command as a whole: its version, its help, completion, and one name for one thing in every subcommand."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from command_line import flashwright
from typer.main import get_command

from flashwright import __version__
from flashwright.cli import app
from flashwright.workbench.tuning import candidates


def test_the_version_is_printed():
    assert flashwright("--version") == (0, f"flashwright {__version__}\n", "")


def test_help_begins_with_what_the_package_is():
    code, out, _ = flashwright("--help")
    _, first, *_ = (line.strip() for line in out.splitlines() if line.strip())
    assert code == 0
    assert first.startswith("FlashAttention kernels you can read, configure, simulate, tune and use")


@pytest.mark.parametrize(
    ("command", "whole"),
    [("explain", ("--no-causal, --full", "--keys, --kv-seqlen")), ("tune", ("all of them, or none if the file",))],
)
def test_help_shortens_neither_names_nor_descriptions_on_a_narrow_terminal(command, whole):
    result = subprocess.run(
        [sys.executable, "-m", "flashwright", command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert all(text in " ".join(result.stdout.split()) for text in whole), result.stdout


def test_shells_complete_commands():
    environment = {
        "_FLASHWRIGHT_COMPLETE": "complete_bash",
        "COMP_WORDS": "flashwright exp",
        "COMP_CWORD": "1",
    }
    script = "import sys; sys.argv = ['flashwright']; from flashwright.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert result.stdout.split() == ["explain"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--d-head", "64", "--rows", "512", "--keys", "1024", "--no-causal"),
        ("--head-dim", "64", "--seqlen", "512", "--kv-seqlen", "1024", "--full"),
    ],
)
def test_tune_takes_both_spellings_of_its_options(monkeypatch, arguments):
    monkeypatch.setattr(candidates, "compile_all", lambda *arguments, **options: [])
    code, out, error = flashwright("tune", "--dry-run", "--limit", "1", "--json", *arguments)
    assert code == 0, error
    (search,) = json.loads(out)["searches"]
    problem = search["problem"]
    assert (problem["d_head"], problem["q_length"], problem["kv_length"], problem["causal"]) == (64, 512, 1024, False)


@pytest.mark.parametrize(
    "arguments",
    [("--d-head", "64", "--rows", "512", "--no-causal"), ("--head-dim", "64", "--seqlen", "512", "--full")],
)
def test_bench_takes_both_spellings_of_its_options(monkeypatch, arguments):
    given = {}
    monkeypatch.setattr(sys.modules["flashwright.cli.bench"], "_measured", lambda values: given.update(values) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        flashwright("bench", *arguments)
    assert given == {"d_head": [64], "seqlen": [512], "causal": False}


@pytest.mark.parametrize("command", [command.__name__.replace("_", "-") for command in app.COMMANDS] + ["tune"])
def test_one_thing_has_the_same_names_in_every_command(command):
    spellings = {"--d-head": "--head-dim", "--rows": "--seqlen", "--keys": "--kv-seqlen", "--no-causal": "--full"}
    found = get_command(app.app).commands[command]
    for parameter in found.params:
        names = {*parameter.opts, *parameter.secondary_opts}
        assert {spellings[name] for name in names & spellings.keys()} <= names
        assert "--causal" not in names or "--no-causal" in names


def test_simulate_takes_both_spellings_of_its_options():
    config = "(BF16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax"
    both = [
        flashwright("simulate", config, rows, "64", keys, "32", "--heads", "1", mask)
        for rows, keys, mask in (("--rows", "--keys", "--no-causal"), ("--seqlen", "--kv-seqlen", "--full"))
    ]
    assert both[0] == both[1] and both[0][0] == 0


@pytest.mark.parametrize("name", ["--d-head", "--head-dim"])
def test_warm_up_takes_both_spellings_of_the_head_dimension(monkeypatch, name):
    warmed = []
    monkeypatch.setattr(
        sys.modules["flashwright.cli.warm_up"],
        "compile_ahead",
        lambda head_dim, *_, **__: warmed.append(head_dim) or [],
    )
    assert flashwright("warm-up", name, "64", "--full") == (0, "0 kernels are ready, 0 of them compiled just now\n", "")
    assert warmed == [64]


@pytest.mark.parametrize("arguments", [(), ("results.json", "--output", "results.json")])
def test_export_wants_one_file(arguments):
    code, out, error = flashwright("tune", "export", *arguments)
    assert (code, out) == (1, "")
    assert "give one file to write to" in error
