"""The ladder's results: stored, read again, tabled and drawn, with a GPU's times and without."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import flashwright
from rich.console import Console

from flashwright import get_kernel_progression
from flashwright.cli.ladder import _print_ladder
from flashwright.workbench.bench.figures import save_figure
from flashwright.workbench.bench.results import short_label_of
from flashwright.workbench.ladder import (
    Compiled,
    Ladder,
    RungResult,
    Simulated,
    Timed,
    ladder_of,
    read_ladder,
    write_ladder,
)
from flashwright.workbench.ladder_plot import ladder_figure

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("ladder*.json"))


def a_ladder(*, timed: bool) -> Ladder:
    """Each timed rung takes half the time of the one before."""
    compiled = dict.fromkeys(("sm_80", "sm_90"), Compiled(246, 0, 96 * 1024, 2, "registers"))
    rungs = [
        RungResult(
            rung,
            compiled,
            Simulated(145_696, 1_000.0 + rung.number, 243_712, 40_960, 2.1e-3, scores=131_072),
            Timed(64.0 / 2**rung.number, 100.0 * rung.number, {"sdpa-fa2": 0.1 * rung.number}) if timed else None,
        )
        for rung in get_kernel_progression()
    ]
    return Ladder(tuple(rungs), {"gpu": "NVIDIA Imaginary"} if timed else {})


@pytest.fixture(params=[False, True], ids=["simulated", "timed"])
def ladder(request) -> Ladder:
    return a_ladder(timed=request.param)


@pytest.fixture
def stored(ladder, tmp_path) -> str:
    path = tmp_path / "ladder.json"
    write_ladder(path, ladder)
    return str(path)


def texts_of(svg: Path) -> str:
    return "\n".join("".join(element.itertext()) for element in ElementTree.parse(svg).iter() if "text" in element.tag)


@pytest.mark.parametrize(("family", "title"), [(None, "The ladder"), ("hopper", "The Hopper ladder")])
def test_a_ladder_is_titled_by_its_family_but_for_the_first(family, title):
    progression = get_kernel_progression() if family is None else ladder_of(family).rungs("BF16", 128)
    untimed = a_ladder(timed=False)
    ladder = Ladder(tuple(replace(untimed.rungs[0], rung=rung) for rung in progression))
    assert ladder.title == title
    assert ladder_figure(ladder).get_suptitle() == f"{title}: BF16, d_head 128"


def test_peers_have_short_names_where_there_is_little_room():
    assert [short_label_of(name) for name in ("sdpa-fa2", "sdpa-cudnn", "flex", "unknown")] == [
        "FA-2", "cuDNN", "flex", "unknown",
    ]  # fmt: skip


def test_a_ladder_is_read_back_as_it_was_written(ladder, stored):
    assert read_ladder(Path(stored)) == ladder


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_ladders_are_read(path):
    ladder = read_ladder(path)
    assert ladder.timed == path.stem.endswith("_h200")  # the others are simulated, and named after no GPU
    assert ladder.wrong == []


def test_the_gain_of_a_rung_is_over_the_rung_before():
    timed = a_ladder(timed=True)
    assert timed.gains == [None] + [2.0] * (len(timed.rungs) - 1)
    assert [rung["gain_over_previous"] for rung in timed.to_dict()["rungs"]] == timed.gains
    assert a_ladder(timed=False).gains == []


def test_the_table_shows_time_share_of_flash_attention_2_and_gain():
    console = Console(width=200, record=True, file=io.StringIO())
    _print_ladder(console, a_ladder(timed=True))
    text = console.export_text()
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    third = next(row for row in rows if row[1] == "3")
    assert third[-5:-1] == ["8.000", "300", "30.0", "2.00"]
    assert "NVIDIA Imaginary" in text


def test_the_ladder_fits_80_columns_with_nothing_cut_off(ladder):
    console = Console(width=80, record=True, file=io.StringIO())
    _print_ladder(console, ladder)
    tables = [line for line in console.export_text().splitlines() if line.startswith(("┃", "│", "┏"))]
    assert max(map(len, tables)) <= 80
    assert not any("…" in line for line in tables)
    assert any("243,712" in line for line in tables)


def test_a_stored_ladder_is_shown_and_drawn_anywhere(ladder, stored, tmp_path):
    code, out, error = flashwright("ladder", "--from", stored, "--plot", str(tmp_path))
    assert code == 0, error
    assert "swizzled shared memory" in out
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    texts = texts_of(tmp_path / "ladder.svg")
    assert "swizzled shared memory" in texts
    if ladder.timed:
        for text in ("FlashAttention-2", "TFLOP/s", "NVIDIA Imaginary", "× rung"):
            assert text in texts
    else:
        for text in ("instructions per 1,000 scores", "bank conflicts", "243,712"):
            assert text in texts


def test_a_stored_ladder_is_printed_as_the_same_json(ladder, stored):
    code, out, _ = flashwright("ladder", "--from", stored, "--json")
    assert code == 0
    assert json.loads(out) == {"schema": "ladder/1"} | json.loads(Path(stored).read_text())


def test_the_same_ladder_gives_the_same_picture(ladder, tmp_path):
    for name in ("a.svg", "b.svg"):
        save_figure(ladder_figure(ladder), [tmp_path / name])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"rungs": [', "is damaged or incomplete"),
        ('{"cells": []}', "is not a result of `flashwright ladder`"),
        ('{"rungs": [{"rung": 1}]}', "entry 1 of 'rungs' lacks 'gpu'"),
        ('{"rungs": [3]}', "entry 1 of 'rungs' is damaged"),
    ],
)
def test_a_damaged_ladder_is_refused_with_the_place(content, message, tmp_path):
    path = tmp_path / "ladder.json"
    path.write_text(content)
    code, out, error = flashwright("ladder", "--from", str(path))
    assert (code, out) == (1, "")
    assert message in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--plot", "ladder.gif"), ".png or .svg"),
        (("--output", "/nowhere/at/all/ladder.json"), "does not exist"),
        (("--from", "x.json", "--dtype", "FP16"), "do not go with it"),
    ],
)
def test_bad_options_are_one_message_before_anything_is_compiled(options, message):
    code, out, error = flashwright("ladder", *options)
    assert (code, out) == (1, "")
    assert message in error
