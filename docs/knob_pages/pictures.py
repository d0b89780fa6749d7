"""The pages' pictures: those of `flashwright explain`, and three that set a knob's values side by side, as SVG files.

A picture is drawn from a real kernel, compiled and executed on the simulated GPU, and stands alone: it carries the
colours, light and dark, that the pages of `explain` take from their stylesheet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib import resources
from itertools import pairwise
from typing import Any

from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.runtime.compiling import compile_kernel
from flashwright.workbench.explain.execution import execute
from flashwright.workbench.explain.facts import ConfigFacts, Phase, Span, Timeline
from flashwright.workbench.explain.gather import explain_config
from flashwright.workbench.explain.instruction_kinds import Kind
from flashwright.workbench.explain.pictures.banks import banks_picture
from flashwright.workbench.explain.pictures.fragments import fragments_picture
from flashwright.workbench.explain.pictures.order import order_picture
from flashwright.workbench.explain.pictures.registers import registers_picture
from flashwright.workbench.explain.pictures.shared_map import shared_map_picture
from flashwright.workbench.explain.pictures.svg import line, picture, rect, tag, text
from flashwright.workbench.explain.pictures.timeline import timeline_picture

from .kernel_facts import ARCH, KEYS, FactsFile, KernelFacts
from .knobs import AMPERE, HOPPER, KnobSet, KnobValue, values_of

Draw = Callable[[], str]

WIDTH, LEFT, RIGHT = 1160, 150, 16
BAR, GAP = 34, 16
LETTER = 7.4
"""About as wide as a letter is, to tell whether a label fits its bar."""


def pictures(facts: FactsFile) -> dict[str, Draw]:
    """By file name, how each picture is drawn."""
    explained: Callable[[Any], ConfigFacts] = cache(_explained)
    drawn: dict[str, Draw] = {"fragments": lambda: fragments_picture("Q (or P)", "Kᵀ (or V)", "S (or O)")}
    drawn |= _of_kernels(_KERNELS_DRAWN, AMPERE, explained)
    for base, knob, phase in _PRODUCTS_DRAWN:
        drawn[f"product-{base}-{knob}"] = partial(_product_of_values, explained, base, knob, phase)
    for base, knob in _ORDERS_DRAWN:
        drawn[f"order-{base}-{knob}"] = partial(_order_of_values, explained, base, knob)
    for base, knob in _MIXES_DRAWN:
        drawn[f"mix-{base}-{knob}"] = partial(_mix_of_values, facts, base, knob)
    drawn["launch-early-peeled_first_step"] = partial(_launch_of_values, "early", "peeled_first_step")
    drawn["traffic-early"] = lambda: traffic_picture(facts.of(_config("early", None, "")))
    return {f"{name}.svg": partial(_standalone_of, draw) for name, draw in drawn.items()}


def hopper_pictures() -> dict[str, Draw]:
    """The same of the pages about the Hopper family."""
    drawn = _of_kernels(_HOPPER_DRAWN, HOPPER, cache(partial(_explained, arch=HOPPER.arch)))
    return {f"{name}.svg": partial(_standalone_of, draw) for name, draw in drawn.items()}


_OF_ONE_KERNEL: dict[str, Callable[[ConfigFacts], str]] = {
    "timeline": lambda of: timeline_picture(_timeline(of)),
    "registers": lambda of: registers_picture(of.registers),
    "shared": lambda of: shared_map_picture(of.shared),
    "banks": lambda of: banks_picture(of.matrix_loads[0], "banks"),
}


def _of_kernels(
    wanted: Sequence[tuple[str, str, str | None, str]], of: KnobSet, explained: Callable[[Any], ConfigFacts]
) -> dict[str, Draw]:
    drawn: dict[str, Draw] = {}
    for kind, base, knob, value in wanted:
        name = f"{kind}-{base}" if knob is None else f"{kind}-{base}-{knob}-{value}"
        config = _config(base, knob, value, of)
        drawn[name] = lambda kind=kind, config=config: _OF_ONE_KERNEL[kind](explained(config))  # type: ignore[misc]
    return drawn


_KERNELS_DRAWN: tuple[tuple[str, str, str | None, str], ...] = (
    ("registers", "final", None, ""),
    ("registers", "final", "d_head", "256"),
    ("registers", "early", None, ""),
    ("registers", "early", "B_r", "128"),
    ("registers", "final", "B_c", "128"),
    ("registers", "final", "n_warps", "8"),
    ("registers", "early", "Q_mma_load_K_tiles", "2"),
    ("registers", "early", "assembler_reorders", "on"),
    ("timeline", "early", None, ""),
    ("timeline", "early", "async_copy", "off"),
    ("timeline", "early", "eager_load_blocks", "off"),
    ("timeline", "early", "reversed_kv", "on"),
    ("timeline", "early", "two_kv_stages", "on"),
    ("banks", "early", None, ""),
    ("banks", "early", "swizzled", "off"),
    ("shared", "early", None, ""),
    ("shared", "early", "two_kv_stages", "on"),
    ("shared", "early", "ring_stages", "3"),
)
_HOPPER_DRAWN: tuple[tuple[str, str, str | None, str], ...] = (
    ("banks", "early", None, ""),
    ("timeline", "early", None, ""),
    ("timeline", "early", "overlaps_softmax", "on"),
    ("timeline", "early", "lazy_rescale", "on"),
    ("timeline", "final", None, ""),
    ("timeline", "final", "ping_pong", "off"),
    ("timeline", "final", "guesses_maxima", "off"),
    ("timeline", "final", "first_block_leads", "on"),
    ("registers", "early", None, ""),
    ("registers", "early", "B_r", "192"),
    ("shared", "early", None, ""),
    ("shared", "early", "d_head", "256"),
    ("shared", "early", "kv_stages", "3"),
    ("shared", "early", "persistent", "on"),
    ("shared", "final", None, ""),
    ("shared", "final", "B_c", "160"),
)
_PRODUCTS_DRAWN = (
    ("early", "Q_mma_load_K_tiles", "S = QKᵀ"),
    ("early", "K_mma_load_K_tiles", "S = QKᵀ"),
    ("early", "V_mma_load_K_tiles", "O += PV"),
    ("early", "mma_double_buffer_loads", "S = QKᵀ"),
)
_ORDERS_DRAWN = (
    ("early", "K_mma_load_K_tiles"),
    ("early", "mma_double_buffer_loads"),
    ("early", "assembler_reorders"),
    ("early", "keep_order"),
)
_MIXES_DRAWN = (
    ("early", "optimized_softmax"),
    ("early", "static_row_stride"),
    ("final", "mma_row_sum"),
    ("final", "lazy_rescale"),
)


def _config(base_name: str, knob: str | None, value: str, of: KnobSet = AMPERE) -> Any:
    base = next(base for base in of.bases() if base.name == base_name)
    if knob is None:
        return base.config
    found = next(each.config for each in values_of(knob, only=base_name, of=of) if each.value == value)
    if found is None:
        raise ValueError(f"{base_name} with {knob} = {value} has no kernel to draw")
    return found


def _explained(config: Any, arch: str = ARCH) -> ConfigFacts:
    return explain_config(config, arch, turning=(), progress=False)


def _timeline(facts: ConfigFacts) -> Timeline:
    if facts.timeline is None:
        raise ValueError(f"{facts.config} was not simulated: {facts.simulation_problem}")
    return facts.timeline


# --- One file, standing alone ----------------------------------------------------------------------------------


def _standalone_of(draw: Draw) -> str:
    return standalone(draw())


def standalone(svg: str) -> str:
    """A picture with its size, its background and its stylesheet inside."""
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if size is None:
        raise ValueError("a picture without a viewBox cannot stand alone")
    width, height = size.groups()
    opening, rest = svg.split(">", 1)
    background = rect(0, 0, float(width), float(height), "background")
    style = " ".join([_stylesheet(), *_rules_of_some(svg)])
    return f'{opening} width="{width}" height="{height}"><style>{style}</style>{background}{rest}\n'


def _rules_of_some(svg: str) -> list[str]:
    """The rules for pictures that only some kernels have, as far as this one needs them."""
    some = re.search(r"/\* Those that only some kernels have \*/(.*?)/\* Those of all \*/", _css(), re.DOTALL)
    if some is None:
        raise ValueError("the stylesheet of explain has no rules for pictures of some kernels where they were expected")
    used = {name for names in re.findall(r'class="([^"]*)"', svg) for name in names.split()}
    rules = re.findall(r"\.([\w.-]+) (\{[^}]*\})", some[1])
    return [f".{names} {rule}" for names, rule in rules if used.issuperset(names.split("."))]


@cache
def _css() -> str:
    return (resources.files("flashwright.workbench.explain") / "page.css").read_text("utf-8")


@cache
def _stylesheet() -> str:
    """The colours and the rules for pictures out of the stylesheet of `explain`."""
    css = _css()
    colours = re.search(
        r":root \{.*?\n\}\n@media screen and \(prefers-color-scheme: dark\) \{.*?\n\}\n", css, re.DOTALL
    )
    rules = re.search(r"^\.picture text.*?(?=^@media)", css, re.DOTALL | re.MULTILINE)
    if colours is None or rules is None:
        raise ValueError("the stylesheet of explain has no colours, or no rules for pictures, where they were expected")
    background = ".background, .picture .on-mark { fill: var(--paper); }"
    font = "svg { font-family: system-ui, 'DejaVu Sans', sans-serif; }"
    return re.sub(r"\s+", " ", f"{colours[0]}{rules[0]}{background}{font}").strip()


# --- The values of a knob side by side -------------------------------------------------------------------------


def _built(base: str, knob: str) -> list[tuple[KnobValue, FlashForwardKernelConfig]]:
    return [(value, value.config) for value in values_of(knob, only=base) if value.config is not None]


def _product_of_values(
    explained: Callable[[FlashForwardKernelConfig], ConfigFacts], base: str, knob: str, phase: str
) -> str:
    rows = [(f"{knob}: {value.value}", _timeline(explained(config))) for value, config in _built(base, knob)]
    return product_picture(rows, phase)


def _order_of_values(explained: Callable[[FlashForwardKernelConfig], ConfigFacts], base: str, knob: str) -> str:
    """In PTX and in machine code."""
    rows = []
    for value, config in _built(base, knob):
        for found in explained(config).orders:
            if found.code in ("PTX", ARCH):
                rows.append((f"{knob}: {value.value}, {found.code}", found.order))
    return order_picture(rows)


def _mix_of_values(facts: FactsFile, base: str, knob: str) -> str:
    return mix_picture([(f"{value.value}", facts.of(config)) for value, config in _built(base, knob)], knob)


def _launch_of_values(base: str, knob: str) -> str:
    rows = []
    for value, config in _built(base, knob):
        execution = execute(compile_kernel(config, ARCH), KEYS // config.B_c - config.peeled_first_step)
        starts = [start for start, _ in execution.iterations]
        rows.append((value.value, [0, *starts, execution.iterations[-1][1], len(execution.trace)]))
    return launch_picture(rows, knob)


_PRODUCT_LANES = (
    ("ldmatrix Q", Kind.LOAD, "Q", "load"),
    ("ldmatrix K", Kind.LOAD, "K", "load"),
    ("ldmatrix V", Kind.LOAD, "V", "load"),
    ("mma", Kind.MMA, None, "mma"),
)
_LANE = 24


def product_picture(rows: Sequence[tuple[str, Timeline]], phase_name: str) -> str:
    """The loads and products of one matrix product, in the order of execution, for each of several kernels."""
    phases = [next(phase for phase in timeline.phases if phase.name == phase_name) for _, timeline in rows]
    scale = (WIDTH - LEFT - RIGHT) / max(phase.end - phase.start for phase in phases)
    parts: list[str] = []
    y = 8.0
    for (label, timeline), phase in zip(rows, phases, strict=True):
        spans = list(_clipped(timeline.spans, phase))
        parts.append(text(f"{label}, {phase.end - phase.start} instructions", LEFT, y + 14, "label strong"))
        y += 22
        for name, kind, operand, class_ in _PRODUCT_LANES:
            marks = [span for span in spans if span.kind == kind.value and operand in (None, span.operand)]
            if marks:
                parts += _product_lane(name, marks, class_, y, scale)
                y += _LANE
        y += 16
    parts.append(text("executed PTX instructions of the warp, from the product's first load", LEFT, y + 8, "label"))
    counts = "; ".join(f"{label}: {phase.end - phase.start}" for (label, _), phase in zip(rows, phases, strict=True))
    return picture(
        "product",
        WIDTH,
        y + 18,
        f"{phase_name} in PTX, as one warp executed it",
        f"Runs of ldmatrix and of mma in the order of execution. Instructions in all: {counts}.",
        parts,
    )


def _clipped(spans: Sequence[Span], phase: Phase) -> Iterator[Span]:
    for span in spans:
        start, end = max(span.start, phase.start), min(span.start + span.length, phase.end)
        if start < end:
            yield Span(start - phase.start, end - start, span.kind, span.operand)


def _product_lane(name: str, spans: Sequence[Span], class_: str, y: float, scale: float) -> Iterator[str]:
    yield line(LEFT, y + 18, WIDTH - RIGHT, y + 18, "rule")
    yield text(name, LEFT - 42, y + 15, "label", "end")
    yield text(sum(span.length for span in spans), LEFT - 10, y + 15, "label count", "end")
    marks = (f"M{LEFT + span.start * scale:.1f} {y + 4:g}h{span.length * scale:.1f}v14h-{span.length * scale:.1f}z"
             for span in spans)  # fmt: skip
    yield tag("path", d="".join(marks), class_=f"mark mark-{class_}")


_MIX_PARTS = (
    ("copies, waits, barriers", (Kind.COPY, Kind.GLOBAL, Kind.SHARED, Kind.WAIT, Kind.BARRIER, Kind.VOTE), "copy"),
    ("ldmatrix", (Kind.LOAD,), "load"),
    ("mma", (Kind.MMA,), "mma"),
    ("exponential", (Kind.EXPONENTIAL,), "exponential"),
    ("fp32 arithmetic", (Kind.FLOAT,), "float"),
    ("shuffle, convert", (Kind.SHUFFLE, Kind.CONVERT), "shuffle"),
    ("integers, moves, branches", (Kind.INTEGER, Kind.MOVE, Kind.CONTROL, Kind.LOCAL, Kind.OTHER), "other"),
)


def mix_picture(rows: Sequence[tuple[str, KernelFacts]], knob: str) -> str:
    """What the instructions of one KV step are for, as a bar for each value of a knob."""
    scale = (WIDTH - LEFT - 80) / max(facts.instructions for _, facts in rows)
    parts: list[str] = []
    for index, (label, facts) in enumerate(rows):
        y = 12 + index * (BAR + GAP)
        parts.append(text(f"{knob}:", LEFT - 10, y + 14, "label", "end"))
        parts.append(text(label, LEFT - 10, y + 30, "label strong", "end"))
        x = float(LEFT)
        for name, kinds, class_ in _MIX_PARTS:
            count = facts.count_of(*(kind.value for kind in kinds))
            if count:
                parts += _segment(x, y, count * scale, str(count), f"mark-{class_}", f"{name}: {count}")
                x += count * scale
        parts.append(text(facts.instructions, x + 6, y + 22, "label strong"))
    legend_y = 12 + len(rows) * (BAR + GAP) + 4
    for index, (name, _, class_) in enumerate(_MIX_PARTS):
        x, y = LEFT + index % 4 * 245, legend_y + index // 4 * 24
        parts += [rect(x, y, 14, 14, f"mark mark-{class_}"), text(name, x + 20, y + 12, "label")]
    totals = "; ".join(f"{label}: {facts.instructions}" for label, facts in rows)
    return picture(
        "mix",
        WIDTH,
        legend_y + 52,
        f"Instructions of one KV step of one warp, by {knob}",
        f"Executed PTX instructions in all: {totals}.",
        parts,
    )


def _segment(x: float, y: float, width: float, label: str, class_: str, tooltip: str) -> Iterator[str]:
    yield rect(x, y, max(width - 1, 0.5), BAR, f"mark {class_}", tooltip)
    if LETTER * len(label) < width:
        yield text(label, x + width / 2, y + 22, "bar-label on-mark" if "mark-" in class_ else "bar-label", "middle")


def launch_picture(rows: Sequence[tuple[str, Sequence[int]]], knob: str) -> str:
    """A warp's whole run, cut where the loop's iterations begin and where the loop ends."""
    scale = (WIDTH - LEFT - 80) / max(cuts[-1] for _, cuts in rows)
    parts: list[str] = []
    for index, (label, cuts) in enumerate(rows):
        y = 12 + index * (BAR + GAP)
        parts.append(text(f"{knob}:", LEFT - 10, y + 14, "label", "end"))
        parts.append(text(label, LEFT - 10, y + 30, "label strong", "end"))
        for number, (start, end) in enumerate(pairwise(cuts)):
            is_loop = 0 < number < len(cuts) - 2
            class_ = "operand operand-0" if is_loop else "operand operand-4"
            where = f"iteration {number} of the loop" if is_loop else "outside of the loop"
            parts += _segment(LEFT + start * scale, y, (end - start) * scale, str(end - start), class_, where)
        parts.append(text(cuts[-1], LEFT + cuts[-1] * scale + 6, y + 22, "label strong"))
    bottom = 12 + len(rows) * (BAR + GAP)
    for index, (name, class_) in enumerate((("an iteration of the loop", "0"), ("before and after the loop", "4"))):
        x = LEFT + index * 245
        parts += [rect(x, bottom, 14, 14, f"operand operand-{class_}"), text(name, x + 20, bottom + 12, "label")]
    parts.append(text("executed instructions of one warp", LEFT + 490, bottom + 12, "label"))
    totals = "; ".join(f"{label}: {cuts[-1]}" for label, cuts in rows)
    return picture(
        "launch",
        WIDTH,
        bottom + 26,
        f"The whole run of a warp against {KEYS} keys, by {knob}",
        f"Executed instructions, cut at the iterations of the loop. In all: {totals}.",
        parts,
    )


def traffic_picture(facts: KernelFacts) -> str:
    """What one thread block reads from global memory, and what it writes."""
    scale = (WIDTH - LEFT - 110) / facts.bytes_read
    parts: list[str] = []
    amounts = (("Q, K, V read", facts.bytes_read, "K"), ("O written", facts.bytes_written, "V"))
    for index, (label, amount, operand) in enumerate(amounts):
        y = 8 + index * (BAR + 8)
        parts += [
            text(label, LEFT - 10, y + 22, "label strong", "end"),
            rect(LEFT, y, amount * scale, BAR, f"region-{operand}"),
            text(f"{amount / 1024:g} KiB", LEFT + amount * scale + 6, y + 22, "label"),
        ]
    return picture(
        "traffic",
        WIDTH,
        8 + 2 * (BAR + 8),
        f"Global memory traffic of one thread block against {KEYS} keys",
        f"{facts.bytes_read} bytes are read, {facts.bytes_written} bytes are written.",
        parts,
    )
