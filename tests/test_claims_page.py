"""The page of the documents' claims: what the generator makes of a result, and of none."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from flashwright.workbench.bench.claims import ClaimResults, claims, configs_by_cell, write_claims
from flashwright.workbench.bench.knob_effects import AGAIN
from flashwright.workbench.bench.results import CellResult, Measurement

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from knob_pages.claims import claim_table
from knob_pages.pages import CLAIMS, read_inputs, stale_pages, write_pages

PAGE = Path("docs/claims.md")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of all that the generator reads, without a result of the claims."""
    for folder in ("docs", "benchmarks/results", "src/flashwright/cuda"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.svg", "*.png", "__pycache__")
        )
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / CLAIMS).unlink(missing_ok=True)
    return tmp_path


def made_up_results() -> ClaimResults:
    """2 ms for every kernel, 1 ms for double-buffered ones; one kernel failed."""
    cells = []
    for cell, configs in configs_by_cell(claims()).items():
        times = {str(config): 1.0 if config.mma_double_buffer_loads else 2.0 for config in configs}
        times[f"{configs[0]}{AGAIN}"] = times[str(configs[0])] * 1.02
        failures = {}
        if cell.d_head == 256 and cell.dtype.name == "FP16":
            failures = {str(configs[0]): "RuntimeError: too hot"}
            del times[str(configs[0])]
        measured = {name: Measurement(ms, 10.0, 1e-3) for name, ms in times.items()}
        cells.append(CellResult(cell, measured, failures))
    return ClaimResults(
        {"gpu": "NVIDIA Fake", "date": "2030-01-02T03:04:05", "driver": "1.2", "rounds": 9}, tuple(cells)
    )


def test_without_a_result_the_page_says_that_nothing_was_measured_and_how_to(tree):
    write_pages(read_inputs(tree))
    text = (tree / PAGE).read_text("utf-8")
    assert text.count("Not measured yet. On a GPU: `PYTHONPATH=src python benchmarks/claims.py") == 1 + len(claims())
    assert "TFLOP/s" not in text


def test_a_result_fills_the_page_with_figures_and_verdicts(tree):
    write_claims(tree / CLAIMS, made_up_results())
    assert PAGE in write_pages(read_inputs(tree))
    text = (tree / PAGE).read_text("utf-8")
    assert "ot measured yet" not in text
    assert "NVIDIA Fake, 2030-01-02 (driver 1.2)" in text
    assert "medians of GPU time over 9 turns" in text
    assert "differed by up to 2.0%" in text
    assert "| BF16, d_head 128, B_c 64, optimised softmax | faster | 275 | 550 | 2.000 | faster | as claimed |" in text
    assert (
        "| BF16, d_head 64, B_c 32, plain softmax | little gain, or a loss | 275 | 550 | 2.000 | faster | not as"
        in text
    )
    assert "| – | – | – | RuntimeError: too hot | – |" in text
    assert stale_pages(read_inputs(tree)) == []
    knob = (tree / "docs/knobs/eager_load_blocks.md").read_text("utf-8")
    verdict = "holds in 3 of 8 conditions (in none of 5 that should be faster, all 3 that should gain little)"
    verdict += "; 1.00 to 1.00 × the speed without"
    assert f"- [Eager loading by length](../claims.md#eager-loading-by-length): {verdict}" in knob


def test_the_page_says_which_gpus_were_not_timed_and_how_to_tune():
    text = (ROOT / PAGE).read_text("utf-8")
    assert "No A100 and no RTX 3090" in text
    assert "flashwright tune" in text


def test_a_claim_that_nobody_made_is_refused():
    with pytest.raises(ValueError, match="no claim is called 'Faster than light'; allowed: Eager loading by length;"):
        claim_table(None, "Faster than light")
