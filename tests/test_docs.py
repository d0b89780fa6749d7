"""The documentation: pages say what the results say, pictures stand alone, links lead somewhere, commands exist."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import flashwright

from flashwright import FlashForwardKernelConfig, HopperForwardKernelConfig, compile_kernel
from flashwright.kernels.registry import families
from flashwright.workbench.bench.grid import cell_of, grid
from flashwright.workbench.bench.knob_effects import AGAIN, PEER, KnobEffects, bases, configs_of
from flashwright.workbench.bench.result_files import write_document
from flashwright.workbench.bench.results import BenchResult, CellResult, Measurement, ours_of, write_result

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

from knob_pages.blocks import block_names, filled
from knob_pages.distributed import distributed_pictures
from knob_pages.kernel_facts import ARCH, facts_of, installed_nvrtc
from knob_pages.knobs import HOPPER, HOPPER_KNOBS, KNOBS, values_of
from knob_pages.machine_code import digest, machine_code
from knob_pages.measured import ampere_table, read_ampere_grid
from knob_pages.pages import DISTRIBUTED_PICTURES, HOPPER_PICTURES, PICTURES, page_paths, read_inputs, stale_pages
from knob_pages.pictures import hopper_pictures, pictures, standalone
from knob_pages.tables import Inputs, failures, renderers

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
KNOB_PAGES = [DOCS / "knobs" / f"{knob}.md" for knob in KNOBS]
HOPPER_PAGES = [DOCS / "hopper_knobs" / f"{knob}.md" for knob in HOPPER_KNOBS]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return read_inputs()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- What the pages say ----------------------------------------------------------------------------------------


def test_the_pages_say_what_the_committed_results_say(inputs):
    assert not stale_pages(inputs), "run `docs/generate.py --pages`, or `make docs` if a kernel changed"


def test_the_readme_says_what_searches_bear_to_be_spilled():
    bears = {
        family.prefix or family.name: family.space.bearable_spill_bytes
        for operation in ("forward", "backward", "decode")
        for family in families(operation)
    }
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert (
        f"({bears['ampere']} bytes in the Ampere family, {bears['hopper']} in the Hopper family; "
        f"{bears['ampere backward']} and {bears['hopper backward']} in their backwards; none in decodes)"
    ) in text
    assert {each for name, each in bears.items() if name.endswith("decode")} == {0}


def test_every_field_of_the_config_has_a_page():
    assert set(KNOBS) == {field.name for field in fields(FlashForwardKernelConfig)}
    assert sorted(path.stem for path in (DOCS / "knobs").glob("*.md")) == sorted([*KNOBS, "diagnosing"])
    assert set(HOPPER_KNOBS) == {field.name for field in fields(HopperForwardKernelConfig)}
    assert sorted((DOCS / "hopper_knobs").glob("*.md")) == sorted(HOPPER_PAGES)


@pytest.mark.parametrize("page", [*KNOB_PAGES, *HOPPER_PAGES], ids=name_of)
def test_a_knobs_page_has_a_picture_and_all_three_kinds_of_numbers(page):
    text = page.read_text()
    measured = "tuned" if page in HOPPER_PAGES else "measured"
    assert {"navigation", "compiled", "simulated", measured, "command"} <= set(block_names(text))
    assert "pictures/" in text
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "What it changes", "On an H200", "When it helps, when it hurts", "How to diagnose",
    ]  # fmt: skip


def test_the_facts_are_those_of_the_installed_compiler_and_the_simulator(inputs):
    """Of one kernel, for all of them would take a minute: if it is up to date, so was `make docs`."""
    if inputs.facts.nvrtc != installed_nvrtc():
        pytest.skip(f"the facts are of NVRTC {inputs.facts.nvrtc}, and {installed_nvrtc()} is installed")
    config = next(value.config for value in values_of("swizzled", only="early") if not value.is_own)
    assert facts_of(compile_kernel(config, ARCH)) == inputs.facts.of(config), "the kernel has changed: run `make docs`"
    early, _ = HOPPER.bases()
    facts = facts_of(compile_kernel(early.config), HOPPER.keys)
    assert facts == inputs.hopper_facts.of(early.config), "the kernel has changed: run `make docs`"


def test_machine_code_is_told_apart_from_the_names_around_it(compiled):
    plain = compiled("(BF16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax")
    code = machine_code(plain.cubin)
    assert 0 < len(code) < len(plain.cubin)
    assert len(code) % 16 == 0, "instructions have 16 bytes"
    assert plain.name.encode() not in code
    other = compiled(plain.config.short_form(), streaming_stores=True)
    assert digest(machine_code(other.cubin)) != digest(code)


# --- Measurements, which are made on a GPU ---------------------------------------------------------------------


def fake_effects(failing: FlashForwardKernelConfig | None = None) -> KnobEffects:
    """2 ms for every kernel, 3 ms for the peer; the bases' second timing is 5% off."""
    starts = bases()
    cells = []
    for dtype, d_head in dict.fromkeys((config.dtype, config.d_head) for config in configs_of(starts)):
        for length in (512, 4096):
            names = [str(c) for c in configs_of(starts) if (c.dtype, c.d_head) == (dtype, d_head) and c != failing]
            times = dict.fromkeys(names, 2.0) | {PEER: 3.0, str(starts[0].config) + AGAIN: 2.0 / 1.05}
            measured = {name: Measurement(ms, 10.0, 1e-3) for name, ms in times.items()}
            failed = {str(failing): "RuntimeError: too hot"} if failing is not None else {}
            cells.append(CellResult(cell_of(dtype, d_head, False, length), measured, failed))
    return KnobEffects({"gpu": "NVIDIA Fake", "date": "2030-01-02T03:04:05"}, starts, tuple(cells))


def test_measured_effects_fill_the_tables(inputs):
    measured = renderers(replace(inputs, effects=fake_effects()), "swizzled")["measured"]("")
    rows = [line.split(" | ") for line in measured.splitlines() if line.startswith("| early")]
    assert [row[1] for row in rows] == ["**on**", "off"]
    for row in rows:
        assert (row[3], row[4]) == ("1.000", "1.500")
    assert "NVIDIA Fake" in measured
    assert "differed by up to 5.0%" in measured


def test_effects_of_another_problem_are_told_by_their_ratio_to_the_peer(inputs):
    with_effects = replace(inputs, effects=fake_effects())
    turned = [line for line in renderers(with_effects, "dtype")["measured"]("").splitlines() if "| FP16 |" in line]
    assert len(turned) == 2
    assert all("| – | 1.500 |" in line for line in turned)
    index = renderers(with_effects, None)["index"]("")
    assert "FP16: (1.500 × FA-2)" in index
    assert "off: 1.00" in index


def test_a_kernel_that_failed_on_the_gpu_is_shown_with_its_reason(inputs):
    failing = next(value.config for value in values_of("swizzled", only="final") if not value.is_own)
    with_effects = replace(inputs, effects=fake_effects(failing))
    assert "failed: RuntimeError: too hot" in renderers(with_effects, "swizzled")["measured"]("")
    assert failures(with_effects) == {str(failing): "RuntimeError: too hot"}


def test_without_measurements_the_pages_say_so_and_how_to_make_them(inputs):
    unmeasured = renderers(replace(inputs, effects=None), "swizzled")["measured"]("")
    assert "Not measured yet" in unmeasured
    assert "benchmarks/knob_effects.py" in unmeasured
    assert "not measured yet" in renderers(replace(inputs, effects=None), None)["index"]("")


ENVIRONMENT = {"gpu": "NVIDIA Fake", "driver": "1", "torch": "2", "nvrtc": "3", "date": "2030-01-02T03:04:05"}


def family_result(operation: str = "forward", *, ours: str = "ampere", peer: str = "sdpa-fa2") -> BenchResult:
    """A family and its peer, on normal scores and with a sink."""
    cells = []
    for cell in grid(lengths=(512, 1024), scores=("normal", "sink"), operation=operation):
        times = {ours_of(ours): 2.0 if cell.scores == "normal" else 2.5, peer: 3.0}
        cells.append(CellResult(cell, {name: Measurement(ms, 10.0, 1e-3) for name, ms in times.items()}))
    return BenchResult(ENVIRONMENT, {}, tuple(cells))


def test_speeds_by_kind_of_scores_are_beside_the_peer_of_their_family(inputs):
    of_families = {"ampere": family_result(), "hopper": family_result(ours="hopper", peer="sdpa-cudnn")}
    changed = replace(inputs, scores=of_families, best_peers=dict.fromkeys(inputs.best_peers, 1.2))
    table_of = renderers(changed, None)["scores-table"]
    assert "| ÷ FlashAttention-2 (SDPA), mean (worst) | ÷ normal scores, worst cell |" in table_of("ampere")
    assert "| `sink` | 1.20 (1.20) | 0.80 (64, full, 512) |" in table_of("ampere")
    assert "| ÷ cuDNN (SDPA), mean (worst) | ÷ the fastest of four, mean | worst cell |" in table_of("hopper")
    assert "| `sink` | 1.20 (1.20) | 1.00 | 1.00 (64, full, 512) | 0.80 (64, full, 512) |" in table_of("hopper")
    assert "12 cells a kind. NVIDIA Fake" in table_of("hopper")


def test_a_grid_of_the_ampere_family_is_a_result_of_bench_or_of_the_fastest_configs(tmp_path):
    path = tmp_path / "result.json"
    for operation, timed in {"forward": "", "backward": "gradients of "}.items():
        write_result(path, family_result(operation))
        table = ampere_table(read_ampere_grid(path))
        assert "(1.50) |" in table
        assert f'Timed: {timed}`attention(family="ampere")`. 1.500 in the geometric mean' in table
    cell = {"dtype": "BF16", "d_head": 64, "causal": False, "length": 512, "tflops": 300.0, "ratio": 1.25, "best": "x"}
    write_document(path, {"environment": ENVIRONMENT, "cells": [cell]})
    table = ampere_table(read_ampere_grid(path))
    assert "| 64 | full | 300 (1.25) |" in table
    assert "Timed: the fastest of several configs in each cell. 1.250" in table


# --- Generated blocks ------------------------------------------------------------------------------------------


def test_only_what_is_between_the_marks_is_rewritten():
    page = "before\n<!-- begin generated: shout: hello -->\nold\n<!-- end generated -->\nafter\n"
    once = filled(page, {"shout": str.upper})
    assert once == "before\n<!-- begin generated: shout: hello -->\n\nHELLO\n\n<!-- end generated -->\nafter\n"
    assert filled(once, {"shout": str.upper}) == once


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- begin generated: whisper -->\n<!-- end generated -->", "'whisper' is not known; allowed: shout"),
        ("<!-- begin generated: shout -->\nnever closed", "not closed"),
    ],
)
def test_a_block_that_cannot_be_filled_is_named(page, message):
    with pytest.raises(ValueError, match=message):
        filled(page, {"shout": str.upper})


@pytest.mark.parametrize(
    ("block", "arguments", "message"),
    [
        ("simulated", "teraflops", "no count is called 'teraflops'; allowed: instructions"),
        ("code", "types.cuh ;; no such line ;; 3", "types.cuh has no line with 'no such line'"),
        ("ladder", "", "no rung of the ladder turns streaming_stores"),
    ],
)
def test_a_block_of_something_that_does_not_exist_is_refused(inputs, block, arguments, message):
    with pytest.raises(ValueError, match=message):
        renderers(inputs, "streaming_stores")[block](arguments)


def test_the_generator_checks_without_changing_anything(monkeypatch, capsys):
    before = {path: (ROOT / path).read_bytes() for path in page_paths()}
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert runpy.run_path(str(DOCS / "generate.py"))["main"]() == 0
    assert "all pages are up to date" in capsys.readouterr().out
    assert {path: (ROOT / path).read_bytes() for path in page_paths()} == before


# --- Pictures --------------------------------------------------------------------------------------------------


def test_the_pictures_are_those_that_the_generator_draws_and_each_is_on_a_page(inputs):
    sets = (
        (PICTURES, pictures(inputs.facts), KNOB_PAGES),
        (HOPPER_PICTURES, hopper_pictures(), HOPPER_PAGES),
        (DISTRIBUTED_PICTURES, distributed_pictures(), [DOCS / "distributed.md"]),
    )
    for folder, drawings, pages in sets:
        drawn = set(drawings)
        assert {path.name for path in (ROOT / folder).iterdir()} == drawn
        text = "".join(page.read_text() for page in pages)
        assert {name for name in drawn if f"pictures/{name}" in text} == drawn


@pytest.mark.parametrize(
    "path",
    [
        path
        for folder in (PICTURES, HOPPER_PICTURES, DISTRIBUTED_PICTURES)
        for path in sorted((ROOT / folder).glob("*.svg"))
    ],
    ids=lambda path: f"{path.parent.parent.name}/{path.stem}",
)
def test_a_picture_stands_alone(path):
    """A size, a title, and colours of its own for light and dark: nothing is fetched from elsewhere."""
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert float(root.get("width", "0")) > 0 and float(root.get("height", "0")) > 0
    assert root.find(f"{SVG}title") is not None and root.find(f"{SVG}desc") is not None
    style = root.findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme: dark" in style
    used = set(re.findall(r"var\((--[\w-]+)\)", style))
    assert used <= set(re.findall(r"(--[\w-]+):", style)), "every colour is defined"
    filled_shapes = set(re.findall(r'class="[^"]*\b(region-[\w-]+|reallocated)', text))
    assert all(f".{name} " in style for name in filled_shapes), "every shape has a colour"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_pictures_that_need_no_compiler_are_up_to_date(inputs):
    drawings = pictures(inputs.facts)
    for name in (name for name in drawings if name.startswith(("mix-", "traffic-", "fragments"))):
        assert (ROOT / PICTURES / name).read_text() == drawings[name](), f"{name}: run `make docs`"
    for name, draw in distributed_pictures().items():
        assert (ROOT / DISTRIBUTED_PICTURES / name).read_text() == draw(), f"{name}: run `make docs`"


def test_a_picture_without_a_size_cannot_stand_alone():
    with pytest.raises(ValueError, match="without a viewBox"):
        standalone("<svg></svg>")


# --- Links and commands ----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link} does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: {target.name} has no such heading"


def commands_in(page: Path) -> list[str]:
    """`flashwright …` in code blocks for a shell, and between backticks."""
    text = page.read_text()
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`(flashwright [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line for line in (*lines, *spans) if line.startswith("flashwright ")]


COMMANDS = [pytest.param(command, id=f"{name_of(page)}: {command}") for page in PAGES for command in commands_in(page)]


def test_the_pages_show_commands():
    assert len(COMMANDS) > len(KNOBS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_is_shown_exists_with_its_options(command):
    _, *arguments = shlex.split(command.replace("…", ""), comments=True)
    code, _, error = flashwright(*arguments, "--help")
    assert code == 0, error
