"""Every example runs, without a GPU, and says what it promises."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMISES = {
    "train.py": (("--steps", "12"), r"12 steps on cpu: loss 3\.\d\d → [12]\.\d\d"),
    "train_gpt.py": (
        ("--steps", "10"),
        r"10 steps on cpu, loss 3\.\d+ → .*differ by at most \d\.\de-0[5-9] in any step",
    ),
    "long_context.py": (
        ("--steps", "4", "--rows", "300"),
        r"1 ranks on cpu, 300 of 300 rows here: 4 steps, loss 3\.\d+ → [12]\.\d+",
    ),
    "generate.py": (("--tokens", "6"), r"105 keys in the cache.*100% of them are those of one pass"),
    "flash_attn_drop_in.py": ((), r"3 sequences, 142 rows on cpu: .* by at most (\d\.\de-0[5-9]|0\.0e)"),
    "tune_your_gpu.py": (("--d-head", "64", "--configs", "2"), r"before: .*rule.*blocks per SM.*nothing was timed"),
    "own_ptx.py": ((), r"right; 480 warp instructions.*out-of-bounds in thread block \(8, 0, 0\)"),
    "own_cuda.py": ((), r"without the barrier: race: .*row_sums\.cu.*with it: right; \d+ barriers, 0 bank conflicts"),
}
"""By example: arguments that make it short, and what it prints."""


def test_every_example_is_run_and_in_the_table():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISES)
    table = (EXAMPLES / "README.md").read_text("utf-8")
    assert set(re.findall(r"^\| \[`(\w+\.py)`\]", table, re.MULTILINE)) == set(PROMISES)


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *PROMISES[name][0]])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("name", PROMISES)
def test_an_example_does_what_it_promises_without_a_gpu(name, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run(name, monkeypatch)
    out = capsys.readouterr().out
    assert re.search(PROMISES[name][1], out, re.DOTALL), out


def test_processes_that_share_a_sequence_train_as_one_does(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    example = [str(EXAMPLES / "long_context.py"), "--steps", "3", "--rows", "203"]
    monkeypatch.setattr(sys, "argv", example)
    runpy.run_path(example[0], run_name="__main__")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    shared = subprocess.run(
        [sys.executable, *launcher, *example], env=environment, capture_output=True, text=True, timeout=120
    )
    assert shared.returncode == 0, shared.stderr
    printed = r"(\d+) ranks on cpu, (\d+) of 203 rows here: .* loss (.*) → (.*)"
    (one,), (two,) = (re.findall(printed, text) for text in (capsys.readouterr().out, shared.stdout))
    assert (one[:2], two[:2]) == (("1", "203"), ("2", "101"))
    assert [float(x) for x in one[2:]] == pytest.approx([float(x) for x in two[2:]], abs=3e-4)


def test_the_page_on_training_says_what_was_stored(monkeypatch, capsys, tmp_path):
    pytest.importorskip("torch")
    stored = EXAMPLES.parent / "benchmarks" / "results" / "train_gpt_h200.json"
    picture = tmp_path / "losses.svg"
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--from", str(stored), "--plot", str(picture)])
    runpy.run_path(str(EXAMPLES / "train_gpt.py"), run_name="__main__")
    page = (EXAMPLES.parent / "docs" / "training.md").read_text()
    found = re.findall(r"loss (\S+) → (\S+), (\S+) tokens/s", capsys.readouterr().out)
    assert len(found) == 2
    for first, last, speed in found:
        assert f"| {first} | {last} | {speed} |" in page
    assert picture.stat().st_size > 1000


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("name", PROMISES)
def test_an_example_runs_on_a_gpu(name, monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path))
    run(name, monkeypatch)
