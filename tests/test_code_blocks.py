"""Every code block of the README, the pages and the tutorial is executed; those that need a GPU, on a GPU."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

from knob_pages.code_blocks import SHELLS, code_blocks, run_python, with_outputs
from knob_pages.kernel_facts import installed_nvrtc, read_facts
from knob_pages.pages import FACTS, TUTORIAL

PAGES = {
    str(path.relative_to(ROOT)): code_blocks(path.read_text("utf-8"))
    for path in (*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "examples").glob("*.md")))
}
LANGUAGES = {"python", "text", "cpp", *SHELLS}
"""`text` and `cpp` are outputs and excerpts, which the pages' generator writes."""

# --- Python ----------------------------------------------------------------------------------------------------------


def pages_with_python(*, on_gpu: bool) -> list[str]:
    return [
        page
        for page, blocks in PAGES.items()
        if page != str(TUTORIAL) and any(b.language == "python" and (b.runs == "gpu") == on_gpu for b in blocks)
    ]


def run_page(page: str, *, on_gpu: bool) -> None:
    """All blocks in order, as a reader would run them; without a GPU, those that need none."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in PAGES[page]:
        if block.language == "python" and (on_gpu or block.runs != "gpu"):
            run_python(block, names, page)


@pytest.fixture
def own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_is_of_a_known_language():
    assert {block.language for blocks in PAGES.values() for block in blocks} <= LANGUAGES
    fences = sum(text.count("\n```") for text in (path.read_text("utf-8") for path in ROOT.glob("*.md")))
    assert fences % 2 == 0


@pytest.mark.parametrize("page", pages_with_python(on_gpu=False))
def test_the_python_of_a_page_runs_without_a_gpu(page, own_directory):
    pytest.importorskip("torch")
    run_page(page, on_gpu=False)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("page", pages_with_python(on_gpu=True))
def test_the_python_of_a_page_runs_on_a_gpu(page, own_directory, monkeypatch):
    offline_models(monkeypatch)
    run_page(page, on_gpu=True)


def offline_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of a download: a model of the same kind with a few random weights, and one text's tokens."""
    transformers = pytest.importorskip("transformers")
    import torch

    def from_pretrained(name: str, *, attn_implementation: str, dtype: torch.dtype) -> object:
        config = transformers.Qwen3Config(
            vocab_size=64, hidden_size=256, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64,
        )  # fmt: skip
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=dtype
        )

    def tokenizer(name: str) -> object:
        ids = torch.tensor([[1, 2, 3]])
        return lambda text, return_tensors: transformers.BatchEncoding(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        )

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tokenizer)


def test_the_tutorial_runs_and_prints_what_it_shows(own_directory):
    text = (ROOT / TUTORIAL).read_text("utf-8")
    executed = with_outputs(text, str(TUTORIAL))
    if read_facts(ROOT / FACTS).nvrtc == installed_nvrtc():
        assert executed == text, "a kernel has changed: run `make docs`"


def test_a_broken_block_is_an_error_with_the_pages_line():
    (block,) = code_blocks("# Title\n\n```python\nx = 1\nprint(y)\n```\n")
    with pytest.raises(NameError) as caught:
        run_python(block, {}, "page.md")
    assert caught.traceback[-1].lineno + 1 == 5


def test_an_output_is_replaced_by_what_is_printed():
    page = "```python\nx = 2\nprint(x)\n```\n\n```text\n1\n```\n\n```python\nprint(x + 1)\n```\n\n```text\n```\n"
    assert with_outputs(page, "page.md") == page.replace("text\n1\n", "text\n2\n").replace("text\n```", "text\n3\n```")


# --- Commands --------------------------------------------------------------------------------------------------------

INSTALLS = re.compile(r"(\.venv/bin/)?pip install ")
"""`tests/test_package.py` builds the wheel and imports from it."""
A_MODULE = (
    ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 x, .param .u32 n)\n{\n ret;\n}\n"
)
SMALLER = {
    "bench": ("--seqlen", "512", "--d-head", "128", "--rounds", "2"), "tune": ("--limit", "4"),
}  # fmt: skip
"""The same commands on fewer problems: whole grids and searches take minutes."""
OF_RESULTS = re.compile(r"flashwright tune (show|export|import|clear)\b")
"""What handles results of searches, and searches nothing."""
FEWER_KEYS = ("--keys", "1024", "--rounds", "2")
"""The same for a benchmark of decoding."""
FEWER_SEARCHES = ("--d-head", "64", "--rows", "512")
"""The same for searches of all problems."""


def commands(*, of_tutorial: bool) -> list[object]:
    found = {}
    for page, blocks in PAGES.items():
        for command in (c for b in blocks if b.language in SHELLS for c in b.commands):
            if (page == str(TUTORIAL)) == of_tutorial and not INSTALLS.match(command):
                found.setdefault(command, pytest.param(command, id=f"{page}: {command}", marks=marks(command)))
    return list(found.values())


def marks(command: str) -> list[pytest.MarkDecorator]:
    """What times kernels needs a GPU."""
    times = re.match(r"flashwright (bench|tune|warm-up)\b", command) and not OF_RESULTS.match(command)
    needs_gpu = times and not re.search(r"--from|--arch", command)
    return [pytest.mark.gpu, pytest.mark.long] if needs_gpu else []


def run(command: str, directory: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(directory)])}
    done = subprocess.run(
        arguments_of(command), cwd=directory, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


def arguments_of(command: str) -> list[str]:
    """As a reader's shell starts it, but for the interpreter; targets of `make` are only looked up, and scripts that
    measure or write into the tree only asked for their options."""
    first, *rest = shlex.split(command.removeprefix("PYTHONPATH=src "))
    if first == "make":
        return ["make", "--dry-run", "--directory", str(ROOT), *rest]
    if first == "flashwright":
        smaller = FEWER_KEYS if rest[0] == "bench" and "decode" in rest else SMALLER.get(rest[0], ())
        smaller += FEWER_SEARCHES if rest[0] == "tune" and "--all" in rest else ()
        measures_nothing = "--from" in rest or OF_RESULTS.match(command)
        return [sys.executable, "-m", "flashwright", *rest, *(() if measures_nothing else smaller)]
    if first in ("python", ".venv/bin/python") and rest[0].endswith(".py"):
        return [sys.executable, str(ROOT / rest[0]), "--help"]
    if first == "torchrun":
        paths = [str(ROOT / each) if each.endswith(".py") else each for each in rest]
        return [sys.executable, "-m", "torch.distributed.run", *paths]
    if first == ".venv/bin/python" and rest[:2] == ["-m", "pytest"]:
        return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(ROOT / rest[2])]
    if first == ".venv/bin/python" and rest == ["-m", "build"]:
        return [sys.executable, "-m", "build", "--no-isolation", "--outdir", ".", str(ROOT)]
    raise AssertionError(f"a page has a command that no test knows how to run: {command}")


NAMED_FILE = re.compile(r"(?:#|//) (\w+\.(?:py|cu))\n")
"""The first line of a block that is a file of the reader's."""


@pytest.fixture
def prepared(own_directory):
    """What commands read that readers bring along."""
    (own_directory / "kernel.ptx").write_text(A_MODULE)
    (own_directory / "kernel.cu").write_text(
        "__global__ void k(float *x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 1; }"
    )
    for named in (NAMED_FILE.match(block.text) for blocks in PAGES.values() for block in blocks):
        if named is not None:
            (own_directory / named[1]).write_text(named.string)
    np.save(own_directory / "y.npy", np.ones(64, np.float32))
    (own_directory / "benchmarks/results").mkdir(parents=True)
    for name, result in (("bench.json", "bench_h200_bf16.json"), ("ladder.json", "ladder_h200.json")):
        shutil.copy(ROOT / "benchmarks/results" / result, own_directory / name)
    return own_directory


@pytest.mark.parametrize("command", commands(of_tutorial=True))
def test_the_tutorials_commands_run(command, prepared):
    run(command, prepared)


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(of_tutorial=False))
def test_the_pages_commands_run(command, prepared):
    run(command, prepared)


def test_every_command_is_one_that_tests_know_how_to_run():
    for parameter in (*commands(of_tutorial=True), *commands(of_tutorial=False)):
        assert arguments_of(parameter.values[0])
