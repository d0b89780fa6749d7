"""Markers in the source say what instructions are about, whatever functions and variables are called."""

from __future__ import annotations

import re

import pytest
from explain_cases import EAGER, HOPPER_GUESSING, HOPPER_OVERLAPPED, HOPPER_PLAIN, explained

from flashwright.kernels.registry import family_of, parse_config
from flashwright.kernels.source import KernelSource, device_headers
from flashwright.runtime.compiling import compile_kernel
from flashwright.simulator.ptx.syntax import SourceLocation
from flashwright.workbench.explain import explain_config
from flashwright.workbench.explain.markers import OPERAND, PHASE, PRODUCT, Markers

INNER = "void wait();\nload(K); // all of it @operand K\n"
OUTER = "step(); // @phase softmax @operand V\nstep();\n// an address: a@b.c\n"
SOURCE = KernelSource(OUTER, (("inner.cuh", INNER),), "kernel", "outer.cu")


@pytest.mark.parametrize(
    ("inner_line", "outer_line", "key", "value"),
    [
        (2, 1, OPERAND, "K"),  # the innermost line decides
        (1, 1, OPERAND, "V"),
        (2, 1, PHASE, "softmax"),
        (1, 2, OPERAND, None),
        (2, 2, PRODUCT, None),
        (9, 3, OPERAND, None),
    ],
)
def test_the_innermost_line_that_carries_a_key_decides(inner_line, outer_line, key, value):
    place = SourceLocation("inner.cuh", inner_line, 1, SourceLocation("outer.cu", outer_line, 1))
    assert Markers(SOURCE).value(place, key) == value


def test_lines_of_no_known_file_are_about_nothing():
    assert Markers(SOURCE).value(SourceLocation("other.cuh", 1, 1), OPERAND) is None
    assert Markers(SOURCE).value(None, OPERAND) is None


# --- Renaming ------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"|[A-Za-z_]\w*')
_DEFINITION = re.compile(
    r"\bstruct (\w+) *[:{]"  # types
    r"|\bDEVICE [\w<>:,&* ]*?\b(\w+)\("  # functions
    r"|\b(?:auto|int|int64|uint32|uint64|bool|float|char|Slot|Window|KVRange|Sequence) [&*]?(\w+)(?= *[=;,{()[])"
)
_ELSEWHERE = ("cfg::", "shape::", "layout::", "variant::", "Idx.", "operator")


def renamed_headers() -> tuple[tuple[tuple[str, str], ...], set[str]]:
    """The device code with everything called otherwise that the kernels themselves define, and the names it had."""
    headers = device_headers()
    kernels = [text for name, text in headers if re.search("ampere|consumer|producer", name)]
    code = re.sub(r"//[^\n]*", "", "\n".join(kernels))
    names = {name for match in _DEFINITION.finditer(code) for name in match.groups() if name}

    def rename(match: re.Match[str]) -> str:
        before = match.string[: match.start()]
        is_ours = match[0] in names and not before.endswith(_ELSEWHERE)
        return f"{match[0]}_renamed" if is_ours else match[0]

    return tuple((name, _TOKEN.sub(rename, text)) for name, text in headers), names


@pytest.mark.parametrize("config", [EAGER, HOPPER_PLAIN, HOPPER_OVERLAPPED, HOPPER_GUESSING])
def test_other_names_in_the_source_give_the_same_timelines(config, monkeypatch):
    timelines = explained(config).timelines
    headers, names = renamed_headers()
    assert len(names) > 40
    source = family_of(parse_config(config)).source
    monkeypatch.setattr(f"{source.__module__}.device_headers", lambda: headers)
    assert compile_kernel(config).source.count("_renamed") > 100
    assert explain_config(config, turning=(), progress=False).timelines == timelines
