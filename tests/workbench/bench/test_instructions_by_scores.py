"""`benchmarks/instructions_by_scores.py`: what kinds of scores cost in instructions, with no GPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/instructions_by_scores.py"
SMALL = "hopper (BF16, 64, 128, 32): stages_2+overlap+ping_pong+persistent+lazy+guess"


def test_a_table_gives_each_kind_beside_normal_scores(monkeypatch, capsys):
    """Steps that search for maxima and rescale O take more instructions than those that guess."""
    pytest.importorskip("torch")
    monkeypatch.setattr(
        sys, "argv", [str(SCRIPT), SMALL, "--keys", "512", "--scores", "normal,rising-fast,falling-fast"]
    )
    runpy.run_path(str(SCRIPT), run_name="__main__")
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header == "| scores | hopper | ÷ normal |"
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows] == ["normal", "rising-fast", "falling-fast"]
    normal, rising, falling = (float(row[2]) for row in rows)
    assert normal == 1
    assert 0.95 < rising < 1.05
    assert 1.2 < falling < 2
