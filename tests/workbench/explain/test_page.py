"""The HTML page of `explain`: its pictures as documents, and the whole of it in a real browser."""

from __future__ import annotations

import io
import os
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from browser import REQUIRED_VARIABLE, find_browser, open_page
from explain_cases import (
    AMPERE_BACKWARD,
    DECODE,
    EAGER,
    HOPPER_BACKWARD,
    HOPPER_DECODE,
    HOPPER_GUESSING,
    HOPPER_OVERLAPPED,
    HOPPER_PLAIN,
    HOPPER_RESCALING,
    LATE,
    LATENT_DECODE,
    REJECTED,
    SOME_KNOBS,
    THROUGH_REGISTERS,
    TWO_STAGES,
    explained,
)
from matplotlib.image import imread

from flashwright.kernels.explanation import OperandRegisters, Product, RegisterPhase
from flashwright.kernels.family import OLDEST
from flashwright.kernels.registry import families, parse_config, tile_shapes
from flashwright.problem.dtypes import DType
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.workbench.explain import linked_pages
from flashwright.workbench.explain.compare import compare_facts
from flashwright.workbench.explain.comparison_page import comparison_page
from flashwright.workbench.explain.explanations import explanation_of, shared_map_of
from flashwright.workbench.explain.facts import Flight, Phase, RegisterBudget
from flashwright.workbench.explain.fragments import a_layout, b_layout, c_layout
from flashwright.workbench.explain.gather import unbuilt_facts
from flashwright.workbench.explain.markup import breakable, document, figure, short_form
from flashwright.workbench.explain.order import CodeMark, LoadOrder
from flashwright.workbench.explain.page import config_page, unbuilt_page
from flashwright.workbench.explain.pictures.banks import banks_picture
from flashwright.workbench.explain.pictures.fragments import fragments_picture
from flashwright.workbench.explain.pictures.order import order_picture
from flashwright.workbench.explain.pictures.registers import paired_registers_picture, registers_picture
from flashwright.workbench.explain.pictures.shared_map import shared_map_picture
from flashwright.workbench.explain.pictures.timeline import LEFT, RIGHT, WIDTH, timeline_picture

SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 1_500_000


LARGE_BUDGET = RegisterBudget(
    phases=(RegisterPhase("O += PV", tuple(OperandRegisters(f"operand {i}", 300, "") for i in range(6))),),
    limit=255,
    used=255,
    spill_bytes=6576,
    stack_bytes=6576,
)
"""What no kernel should have, but may."""


def _pair_of_budgets():
    small = replace(explained(EAGER).registers, limit=240)
    return figure(paired_registers_picture((LARGE_BUDGET, small), ("large", "small")))


def pictures_of(facts):
    return {
        **{timeline.warp: timeline_picture(timeline) for timeline in facts.timelines},
        "registers": registers_picture(facts.registers),
        "shared map": shared_map_picture(facts.shared),
        "banks": banks_picture(facts.matrix_loads[0], "banks"),
        "fragments": fragments_picture("Q", "Kᵀ", "S"),
    }


def texts_of(picture):
    return [element.text for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@pytest.mark.parametrize("config", [EAGER, LATE, TWO_STAGES, THROUGH_REGISTERS, HOPPER_PLAIN, HOPPER_OVERLAPPED])
def test_pictures_are_well_formed_and_described_in_words(config):
    for name, picture in pictures_of(explained(config)).items():
        root = ElementTree.fromstring(picture)
        assert root.tag == f"{SVG}svg", name
        assert root.get("role") == "img"
        labels = root.get("aria-labelledby").split()
        texts = {element.get("id"): element.text for element in root if element.get("id")}
        assert all(texts[label] for label in labels), name


def test_the_timeline_names_the_blocks_under_way_and_the_phases():
    texts = texts_of(timeline_picture(explained(EAGER).timeline))
    assert {"V block 1", "K block 2", "V block 2"} <= set(texts)
    assert texts.count("softmax") == 2


def test_names_of_phases_that_would_touch_are_below_each_other():
    timeline = replace(explained(EAGER).timeline, phases=(Phase("S = QKᵀ", 0, 80), Phase("softmax", 80, 150)))
    picture = timeline_picture(timeline, instructions_across=1300)
    names = {e.text: e for e in ElementTree.fromstring(picture).iter(f"{SVG}text")}
    first, second = names["S = QKᵀ"], names["softmax"]
    letters = len("S = QKᵀ" + "softmax") / 2
    assert float(second.get("x")) - float(first.get("x")) < 9 * letters  # bold letters are about that wide
    assert first.get("y") != second.get("y")


def test_steps_that_a_common_scale_makes_narrow_have_short_names():
    timeline = explained(EAGER).timeline
    first, size = timeline.first_step, timeline.step_starts[1]
    assert f"KV step {first}: {size:,} instructions" in texts_of(timeline_picture(timeline))
    assert f"step {first}: {size:,}" in texts_of(timeline_picture(timeline, instructions_across=10 * size))
    assert f"step {first}" in texts_of(timeline_picture(timeline, instructions_across=20 * size))


def test_names_of_blocks_cross_no_line_between_steps():
    timeline = explained(EAGER).timeline
    second = timeline.step_starts[1]
    at_the_end = Flight("K block 7", "K", second - 12, second - 8, second - 2, asynchronous=True)
    root = ElementTree.fromstring(timeline_picture(replace(timeline, flights=(at_the_end,))))
    (name,) = (e for e in root.iter(f"{SVG}text") if e.text == "K block 7")
    (bar,) = (e for e in root.iter(f"{SVG}rect") if e.get("class").startswith("flight"))
    assert name.get("text-anchor") == "end"
    assert float(name.get("x")) < float(bar.get("x"))


def test_names_of_phases_cross_neither_a_line_between_steps_nor_the_edge():
    timeline = explained(EAGER).timeline
    second, end = timeline.step_starts[1], timeline.instructions
    short = [Phase("O += PV", last - 4, last) for last in (second, end)]
    root = ElementTree.fromstring(timeline_picture(replace(timeline, phases=tuple(short))))
    names = [float(e.get("x")) for e in root.iter(f"{SVG}text") if e.text == "O += PV"]
    line = LEFT + second / end * (WIDTH - LEFT - RIGHT)
    half_of_name = 32  # in bold letters of this size
    assert names[0] + half_of_name <= line and names[1] + half_of_name <= WIDTH


def test_the_count_at_launch_crosses_no_operand_of_warps_that_get_more_registers():
    root = ElementTree.fromstring(registers_picture(explained(HOPPER_PLAIN).registers))
    (line,) = (e for e in root.iter(f"{SVG}line") if e.get("class") == "compiler-line")
    operands = [e for e in root.iter(f"{SVG}rect") if e.get("class").startswith("operand") and len(e)]
    assert float(line.get("y1")) >= max(float(e.get("y")) + float(e.get("height")) for e in operands)


def test_names_of_short_phases_are_left_out_where_two_lines_are_full():
    phases = tuple(Phase("gradients of scores", start, start + 10) for start in range(0, 100, 10))
    picture = timeline_picture(replace(explained(EAGER).timeline, phases=phases))
    root = ElementTree.fromstring(picture)
    shown = [e for e in root.iter(f"{SVG}text") if e.get("class") == "phase-name"]
    drawn = [e for e in root.iter(f"{SVG}rect") if e.get("class").startswith("phase")]
    assert len({e.get("y") for e in shown}) == 2 and len(shown) < len(drawn) == len(phases)
    assert all(e.find(f"{SVG}title").text.startswith("gradients of scores: from ") for e in drawn)


def test_what_does_not_fit_a_bar_of_registers_stands_behind_it():
    root = ElementTree.fromstring(registers_picture(LARGE_BUDGET))
    (bar,) = (e for e in root.iter(f"{SVG}rect") if e.get("class") == "compiler")
    (label,) = (e for e in root.iter(f"{SVG}text") if e.text == "255 used, and 6,576 bytes spilled to memory")
    assert float(label.get("x")) > float(bar.get("x")) + float(bar.get("width"))


def test_the_bank_picture_shows_eight_lanes_in_one_place_or_in_eight():
    swizzled, plain = explained(EAGER).matrix_loads
    for load, result in ((swizzled, "1 wavefront for this matrix, 4 for all four"), (plain, "8 wavefronts for this")):
        assert any(text.startswith(result) for text in texts_of(banks_picture(load, "banks")))


def test_the_register_picture_has_a_bar_as_long_as_each_count():
    budget = explained(EAGER).registers
    root = ElementTree.fromstring(registers_picture(budget))
    bars = {e.find(f"{SVG}title").text: float(e.get("width")) for e in root.iter(f"{SVG}rect") if len(e)}
    (compiler,) = [float(e.get("width")) for e in root.iter(f"{SVG}rect") if e.get("class") == "compiler"]
    for operand in budget.operands:
        (width,) = [width for title, width in bars.items() if title.startswith(f"{operand.operand}: ")]
        assert width + 1 == pytest.approx(compiler * operand.registers / budget.used, abs=0.1)


MMA_PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry multiply(.param .u64 a, .param .u64 b, .param .u64 d)
{
    .reg .b32 %r<10>;
    .reg .b64 %rd<10>;
    .reg .f32 %f<6>;
    ld.param.u64 %rd1, [a];
    ld.param.u64 %rd2, [b];
    ld.param.u64 %rd3, [d];
    mov.u32 %r9, %tid.x;
    mul.wide.u32 %rd4, %r9, 16;
    mul.wide.u32 %rd5, %r9, 8;
    add.s64 %rd6, %rd1, %rd4;
    add.s64 %rd7, %rd2, %rd5;
    add.s64 %rd8, %rd3, %rd4;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd6];
    ld.global.v2.b32 {%r5, %r6}, [%rd7];
    mov.f32 %f5, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f5, %f5, %f5, %f5};
    st.global.v4.f32 [%rd8], {%f1, %f2, %f3, %f4};
    ret;
}
"""  # noqa: E501


def test_the_fragment_layout_is_that_of_the_executed_instruction():
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-4, 5, shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    a_registers, b_registers = np.zeros((32, 4, 2), np.float16), np.zeros((32, 2, 2), np.float16)
    for matrix, registers, layout in ((a, a_registers, a_layout()), (b, b_registers, b_layout())):
        for index, value in np.ndenumerate(matrix):
            holder = layout[index[0]][index[1]]
            registers[holder.lane, holder.register, holder.half] = value
    gpu = SimulatedGPU("sm_80")
    result = gpu.to_device(np.zeros((32, 4), np.float32))
    arguments = [gpu.to_device(a_registers), gpu.to_device(b_registers), result]
    gpu.load(MMA_PTX).launch("multiply", grid=1, block=32, args=arguments)
    held = gpu.to_host(result)
    c = np.array([[held[holder.lane, holder.register] for holder in row] for row in c_layout()])
    assert np.array_equal(c, a.astype(np.float32) @ b.astype(np.float32))


# --- The whole page --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page_files(tmp_path_factory):
    pages = {
        "explain": config_page(explained(EAGER, turning=SOME_KNOBS)),
        "rejected": config_page(explained(REJECTED)),
        "hopper": config_page(explained(HOPPER_OVERLAPPED)),
        "rescaling": comparison_page(compare_facts(explained(HOPPER_RESCALING), explained(HOPPER_OVERLAPPED))),
        "budgets": document("", "", figure(registers_picture(LARGE_BUDGET)) + _pair_of_budgets(), ""),
        "families": comparison_page(compare_facts(explained(EAGER), explained(HOPPER_PLAIN))),
        "compare": comparison_page(compare_facts(explained(EAGER), explained(LATE))),
    }
    directory = tmp_path_factory.mktemp("pages")
    for name, page in pages.items():
        (directory / f"{name}.html").write_text(page, "utf-8")
    return {name: directory / f"{name}.html" for name in pages}


def test_the_page_is_one_small_file_that_refers_to_nothing_outside(page_files):
    for file in page_files.values():
        page = file.read_text("utf-8")
        assert len(page.encode()) < MOST_BYTES
        assert "@import" not in page and "url(" not in page
        references = re.findall(r'\b(?:href|src)="([^"]*)"', page)
        assert all(reference.startswith(("#", "data:")) for reference in references)
        assert re.findall(r"https?://[^\"'<> ]+", page.replace("http://www.w3.org/2000/svg", "")) == []


def test_ids_are_unique_and_links_lead_somewhere(page_files):
    for file in page_files.values():
        page = file.read_text("utf-8")
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert len(ids) == len(set(ids))
        assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)


def test_pages_of_configs_have_a_script_of_their_own_and_others_none(page_files):
    scripts = {name: file.read_text("utf-8").count("<script") for name, file in page_files.items()}
    assert scripts == {name: 2 if name in ("explain", "rejected", "hopper") else 0 for name in page_files}


def test_a_page_links_to_those_of_its_neighbours_and_they_back(monkeypatch, tmp_path):
    monkeypatch.setattr(linked_pages, "explain_config", lambda config, arch, **_: explained(config, arch))
    own, neighbour = linked_pages.write_linked_pages(explained(EAGER, turning=("eager_load_blocks",)), tmp_path)
    assert 'href="eager_load_blocks-on-off.html"' in own.read_text("utf-8")
    assert neighbour.name == "eager_load_blocks-on-off.html"
    page = neighbour.read_text("utf-8")
    assert f"<h1>{short_form(LATE)}</h1>" in page
    assert f'One knob away from <a href="index.html">{short_form(EAGER)}</a>' in page


def test_a_page_without_a_simulation_says_why_where_its_counts_would_be():
    facts = explained(EAGER)
    effects = replace(
        facts.effects,
        instructions_per_step=None,
        instructions_per_thousand_scores=None,
        bank_conflicts_per_step=None,
        conflicts_per_thousand_scores=None,
    )
    page = config_page(
        replace(facts, effects=effects, simulation=None, timelines=(), simulation_problem="a block needs too much")
    )
    assert page.count("<p>Not simulated: a block needs too much.</p>") == 2
    assert "Counted while" not in page
    assert page.count("<small>not simulated</small>") == 2


def test_lines_of_a_page_break_between_the_words_of_a_name():
    assert breakable("Q_mma_load_K_tiles") == "Q_<wbr>mma_<wbr>load_<wbr>K_<wbr>tiles"
    assert breakable("async+eager: O += PV & S") == "async+<wbr>eager: O += PV &amp; S"


def test_pages_name_no_product_of_warpgroups_that_does_not_exist():
    """A wgmma has at most 256 columns (PTX ISA, "Asynchronous Warpgroup Level Matrix Shape")."""
    described = [family for each in ("forward", "decode") for family in families(each) if family.explanation]
    drawn = [family for family in described if family.explanation.product is Product.WGMMA]
    assert drawn and all(max(family.d_heads) <= 256 for family in drawn)


def test_a_rejected_config_says_so_at_the_top(page_files):
    assert "Rejected by the autotuning filter: rule 5" in page_files["rejected"].read_text("utf-8")


@pytest.fixture(scope="module")
def browser_page():
    browser = find_browser()
    if browser is None:
        missing = "no Chromium on the PATH (Debian: apt-get install chromium)"
        if os.environ.get(REQUIRED_VARIABLE):
            pytest.fail(missing)
        pytest.skip(missing)
    with open_page(browser) as page:
        yield page


PAGES = ("explain", "compare", "hopper", "families", "rescaling", "budgets")


@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_fits_its_window(browser_page, page_files, name, width):
    browser_page.open(page_files[name], width=width)
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= width
    assert browser_page.evaluate("window.innerWidth") == width  # a phone would zoom out of a page that is too wide
    assert browser_page.complaints() == []
    assert [url for url in browser_page.requests() if not url.startswith("data:")] == [page_files[name].as_uri()]


TEXTS_OUTSIDE_THEIR_PICTURE = """
[...document.querySelectorAll('svg text')].filter(text => {
    const box = text.getBBox(), view = text.ownerSVGElement.viewBox.baseVal;
    return box.x < 0 || box.y < 0 || box.x + box.width > view.width || box.y + box.height > view.height;
}).map(text => text.ownerSVGElement.classList[1] + ': ' + text.textContent)
"""
OVERLAPPING_TEXTS = """
[...document.querySelectorAll('svg')].flatMap(svg => {
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBBox()]);
    // Words of one line have a gap between them.
    const overlap = (a, b) => Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x) > -2
        && Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > 6;
    return texts.flatMap(([name, box], i) => texts.slice(i + 1).filter(([, other]) => overlap(box, other))
        .map(([other]) => svg.classList[1] + ': ' + name + ' / ' + other));
})
"""


SHAPES_WITHOUT_A_STYLE = """
[...document.querySelectorAll('svg :is(rect, path, circle)')].filter(shape =>
    getComputedStyle(shape).fill === 'rgb(0, 0, 0)'
).map(shape => shape.ownerSVGElement.classList[1] + ': ' + shape.outerHTML.slice(0, 120))
"""
CLIPPED_TEXTS = """
[...document.querySelectorAll('p, li, dt, dd, small, th, td, h1, h2, h3, figcaption, code')].filter(element =>
    element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0
    && getComputedStyle(element).display !== 'inline'
).map(element => element.tagName + ': ' + element.textContent.slice(0, 80))
"""


@pytest.mark.parametrize("name", PAGES)
def test_no_text_is_cut_off_or_written_over_and_every_shape_has_a_colour(browser_page, page_files, name):
    check_texts_and_shapes(browser_page, page_files[name])


def test_a_page_without_a_kernel_fits_its_window(browser_page, tmp_path):
    config = "(BF16, 256, 128, 64, 8): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax+mma_sum+lazy+ring_3"
    with pytest.raises(ValueError) as problem:
        tile_shapes(config)
    page = tmp_path / "page.html"
    page.write_text(unbuilt_page(unbuilt_facts(parse_config(config), str(problem.value))), "utf-8")
    for width in (1400, 420):
        browser_page.open(page, width=width)
        assert browser_page.evaluate("document.documentElement.scrollWidth") <= width
        assert browser_page.evaluate(CLIPPED_TEXTS) == []


def test_names_of_lanes_stand_apart_from_counts_of_any_size(browser_page, tmp_path):
    marks = (CodeMark(0, 1024, True), CodeMark(1024, 10_240, False))
    drawn = order_picture([("PTX", LoadOrder(12_000, marks, ()))])
    page = tmp_path / "page.html"
    page.write_text(document("", "", figure(drawn), ""), "utf-8")
    browser_page.open(page, width=1400)
    assert browser_page.evaluate(OVERLAPPING_TEXTS) == []


SLICES = "ampere backward (BF16, 64, 64, 128, 4): stages_1_1+slices_2+swizzled"
LATE_DQ = "ampere backward (BF16, 256, 64, 64, 8): stages_1_1+parts_4+swizzled+late_dQ"
KEYS_AHEAD = "hopper backward (BF16, 64, 128, 128, 2): stages_2_2+register_P+bulk_dQ+persistent+keys_ahead"
PAIRED = "hopper backward (BF16, 256, 64, 64, 2): stages_2_1+paired+persistent"
SPILLING = "(BF16, 256, 128, 128, 4): async+eager+swizzled+load_0_0_0_tiles"


@pytest.mark.slow
@pytest.mark.parametrize(
    "configs",
    [
        (HOPPER_GUESSING,), (AMPERE_BACKWARD,), (HOPPER_BACKWARD,), (DECODE,), (HOPPER_DECODE,), (LATENT_DECODE,),
        (SLICES,), (LATE_DQ,), (KEYS_AHEAD,), (PAIRED,), (SPILLING,), (SLICES, KEYS_AHEAD), (HOPPER_PLAIN, PAIRED),
        (AMPERE_BACKWARD, HOPPER_BACKWARD), (DECODE, DECODE.replace("4)", "2)")), (HOPPER_DECODE, DECODE),
    ],
)  # fmt: skip
def test_neither_on_pages_of_other_kernels(browser_page, tmp_path, configs):
    facts = [explained(config, "sm_90a" if len(configs) > 1 else OLDEST) for config in configs]
    page = tmp_path / "page.html"
    page.write_text(config_page(*facts) if len(facts) == 1 else comparison_page(compare_facts(*facts)), "utf-8")
    check_texts_and_shapes(browser_page, page)
    assert browser_page.evaluate(WITHOUT_A_HINT) == []


def test_nor_in_the_pictures_of_the_pages_in_docs(browser_page):
    drawn = sorted((Path(__file__).parents[3] / "docs").rglob("*.svg"))
    assert drawn
    for file in drawn:
        browser_page.open(file, width=1400)
        for found in (TEXTS_OUTSIDE_THEIR_PICTURE, OVERLAPPING_TEXTS, SHAPES_WITHOUT_A_STYLE):
            assert browser_page.evaluate(found) == [], file.name


@pytest.mark.parametrize("operation", ["forward", "backward", "decode"])
def test_maps_of_shared_memory_and_budgets_of_registers_have_room_for_all_they_say(browser_page, tmp_path, operation):
    figures = []
    for family in families(operation):
        for d_head in sorted({family.d_heads[0], family.d_heads[-1]}):
            kept = (config for config, reason in family.space.configs(DType.BF16, d_head) if reason is None)
            for config in islice(kept, 0, 30, 4):
                drawn = shared_map_picture(shared_map_of(config)) + registers_picture(budget_of(config))
                number = len(figures)
                figures.append(figure(re.sub("shared-map|registers(?=[ -])", rf"\g<0>-{number}", drawn)))
    page = tmp_path / "page.html"
    page.write_text(document("", "", "".join(figures), ""), "utf-8")
    check_texts_and_shapes(browser_page, page)


def budget_of(config):
    """As far as arithmetic goes."""
    words = explanation_of(config)
    return RegisterBudget(words.register_phases(config), 255, 168, 0, 0, words.reallocations(config))


def check_texts_and_shapes(browser_page, file):
    for width in (1400, 420):
        browser_page.open(file, width=width)
        assert browser_page.evaluate("document.documentElement.scrollWidth") <= width
        assert browser_page.evaluate("document.querySelectorAll('svg text').length") > 25
        assert browser_page.evaluate(TEXTS_OUTSIDE_THEIR_PICTURE) == []
        assert browser_page.evaluate(OVERLAPPING_TEXTS) == []
        assert browser_page.evaluate(SHAPES_WITHOUT_A_STYLE) == []
        assert browser_page.evaluate(CLIPPED_TEXTS) == []


POINTED_AT = """
(selector => {
    const row = document.querySelector(selector);
    row.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));
    const hits = listing => document.querySelectorAll(`.listing.${listing} .hit`).length;
    return [hits('source'), hits('ptx'), hits('sass')];
})
"""


def test_pointing_at_a_line_marks_what_belongs_to_it(browser_page, page_files):
    code = explained(EAGER, turning=SOME_KNOBS).code
    browser_page.open(page_files["explain"], width=1400)
    for index, line in enumerate(code.lines):
        if "// @product S" in line.text:
            assert browser_page.evaluate(f"{POINTED_AT}('[data-source=\"{index}\"]')") == [
                1,
                line.ptx,
                line.machine_code,
            ]
    instruction = next(each for each in code.ptx if each.text.startswith("ex2"))
    alike = [each for each in code.machine_code if each.sources == instruction.sources]
    marked = browser_page.evaluate(f"{POINTED_AT}('[data-ptx=\"{instruction.place}\"]')")
    assert marked == [len(instruction.sources), 1, len(alike)]


def test_clicking_a_line_brings_what_belongs_to_it_into_view(browser_page, page_files):
    browser_page.open(page_files["explain"], width=1400)
    visible = browser_page.evaluate("""(() => {
        const rows = document.querySelectorAll('[data-ptx]');
        rows[rows.length - 40].click();
        return ['source', 'sass'].map(name => {
            const listing = document.querySelector(`.listing.${name}`), frame = listing.getBoundingClientRect();
            return [...listing.querySelectorAll('.hit')].some(row => {
                const box = row.getBoundingClientRect();
                return box.top >= frame.top && box.bottom <= frame.bottom;
            });
        });
    })()""")
    assert visible[0] and (visible[1] or not explained(EAGER, turning=SOME_KNOBS).code.machine_code)


@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("name", ["explain", "hopper"])
def test_a_timeline_names_the_instruction_that_is_pointed_at(browser_page, page_files, name, width):
    facts = explained(EAGER, turning=SOME_KNOBS) if name == "explain" else explained(HOPPER_OVERLAPPED)
    texts = {int(each.place): each.text for each in facts.code.ptx}
    browser_page.open(page_files[name], width=width)
    assert browser_page.evaluate("document.querySelectorAll('.cursor-slider').length") == len(facts.timelines)
    for number, timeline in enumerate(facts.timelines):
        index = timeline.instructions // 3
        share = (LEFT + (index + 0.5) / timeline.instructions * (WIDTH - LEFT - RIGHT)) / WIDTH
        pointed, slid = browser_page.evaluate(f"""(() => {{
            const figure = document.querySelectorAll('.cursor-slider')[{number}].closest('figure');
            const picture = figure.querySelector('svg'), box = picture.getBoundingClientRect();
            const place = {{clientX: box.left + {share} * box.width, clientY: box.top + 90, bubbles: true}};
            picture.dispatchEvent(new PointerEvent('pointermove', place));
            const pointed = figure.querySelector('.readout').textContent;
            const slider = figure.querySelector('.cursor-slider');
            slider.value = {index + 1};
            slider.dispatchEvent(new Event('input'));
            return [pointed, figure.querySelector('.readout').textContent];
        }})()""")
        lines = timeline.ptx_lines
        assert pointed.startswith(
            f"Instruction {index} of {timeline.instructions}: {texts[lines[index]]} (PTX line {lines[index]}"
        )
        assert slid.startswith(f"Instruction {index + 1} of {timeline.instructions}: {texts[lines[index + 1]]} (PTX")
    assert browser_page.complaints() == []


WITHOUT_A_HINT = """
[...document.querySelectorAll('.scroll')].filter(area => area.scrollWidth > area.clientWidth + 1
    && !getComputedStyle(area.parentElement, '::before').content.includes('scroll')
).map(area => area.innerHTML.slice(0, 80))
"""


@pytest.mark.parametrize("name", PAGES)
def test_what_is_wider_than_a_narrow_window_says_that_it_scrolls(browser_page, page_files, name):
    browser_page.open(page_files[name], width=420)
    assert browser_page.evaluate(WITHOUT_A_HINT) == []


@pytest.mark.parametrize(("colour_scheme", "darkest", "lightest"), [("light", 0.85, 1.0), ("dark", 0.0, 0.25)])
@pytest.mark.parametrize("name", ["explain", "hopper"])
def test_the_page_follows_the_colour_scheme(browser_page, page_files, name, colour_scheme, darkest, lightest):
    browser_page.open(page_files[name], width=1280, colour_scheme=colour_scheme)
    image = imread(io.BytesIO(browser_page.screenshot()))[..., :3]
    assert image.shape[0] > 3000 and image.shape[1] == 1280
    assert darkest < np.median(image) < lightest
    colours = np.unique((image[::3, ::3] * 15).round().astype(int) @ (1, 16, 256))
    assert len(colours) > 60


@pytest.mark.parametrize("name", ["explain", "hopper"])
def test_the_page_prints(browser_page, page_files, name):
    browser_page.open(page_files[name], width=1280, colour_scheme="dark")
    pdf = browser_page.pdf()
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 50_000
