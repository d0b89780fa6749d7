"""Rules that all device code obeys, read from its text; and its constants, which Python has too."""

from __future__ import annotations

import re

import pytest
from device_code import compile_device_code

from flashwright.hardware import units
from flashwright.kernels.forward.hopper import shapes as hopper_shapes
from flashwright.kernels.forward.hopper.config import WARPGROUP_ROWS
from flashwright.kernels.source import device_headers

HEADERS = dict(device_headers())
SHARED = [name for name in HEADERS if name.split("/")[0] in ("ptx", "tile", "attention", "pipeline")]
KERNELS = [name for name in HEADERS if name.startswith("forward/")]

# --- Markers: what an instruction is about, for `explain` --------------------------------------------------------

MARKER = re.compile(r"// @(\w+) (.+)$")
VALUES = {"operand": {"Q", "K", "V"}, "product": {"S", "O"}, "phase": {"softmax", "rescale O"}}


def markers(name: str) -> list[tuple[str, str]]:
    return [match.groups() for line in HEADERS[name].splitlines() if (match := MARKER.search(line))]  # type: ignore[misc]


@pytest.mark.parametrize("name", HEADERS)
def test_every_marker_has_a_known_key_and_value(name):
    assert all(value in VALUES.get(key, ()) for key, value in markers(name))
    assert sum("// @" in line for line in HEADERS[name].splitlines()) == len(markers(name))


@pytest.mark.parametrize("name", HEADERS)
def test_a_marker_stands_on_the_line_where_its_statement_begins(name):
    """The compiler gives a statement's instructions the line of its beginning."""
    lines = [line.split("//")[0].strip() for line in HEADERS[name].splitlines()]
    for number, line in enumerate(HEADERS[name].splitlines()):
        if MARKER.search(line):
            before = next((text for text in reversed(lines[:number]) if text and not text.startswith("#")), "")
            assert before.endswith((";", "{", "}", ")", ":")), line
            assert before.count("(") == before.count(")"), line


@pytest.mark.parametrize("family", ["ampere", "hopper"])
def test_both_families_mark_every_operand_and_product_and_the_softmax(family):
    found = {marker for name in KERNELS if name.split("/")[1].startswith(family) for marker in markers(name)}
    wanted = {("operand", tile) for tile in "QKV"} | {("product", "S"), ("product", "O"), ("phase", "softmax")}
    assert wanted <= found


# --- Sharing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHARED)
def test_shared_pieces_read_no_constants_of_a_config(name):
    """What differs between kernels is a parameter of the template or the function."""
    assert not re.findall(r"\b(?:cfg|shape)::\w+", HEADERS[name])


@pytest.mark.parametrize("name", HEADERS)
def test_headers_are_included_by_their_path_and_no_toolkit_header_is(name):
    included = re.findall(r"#include (.+)", HEADERS[name])
    generated = {'"wgmma_products.cuh"'}
    assert all(path in generated or path.strip('"') in HEADERS for path in included)


def test_lower_folders_include_no_higher_ones():
    """ptx and tile know nothing of attention; pieces know nothing of kernels."""
    order = ["types.cuh", "ptx", "tile", "attention", "pipeline", "forward"]
    for name, text in HEADERS.items():
        for path in re.findall(r'#include "(\w+)/', text):
            assert order.index(path) <= order.index(name.split("/")[0]), f"{name} includes {path}"


# --- Constants ---------------------------------------------------------------------------------------------------


def test_sizes_are_those_that_python_computes_with():
    sizes = {
        "element_bytes": units.ELEMENT_BYTES,
        "vector_bytes": units.VECTOR_BYTES,
        "fragment": units.FRAGMENT,
        "mma_rows": units.MMA_ROWS,
        "mma_depth": units.MMA_K,
        "warp_threads": units.WARP_THREADS,
        "bank_line_bytes": units.BANK_LINE_BYTES,
        "warpgroup_threads": hopper_shapes.WARPGROUP_THREADS,
        "warpgroup_rows": WARPGROUP_ROWS,
        "panel_columns": hopper_shapes.PANEL_COLUMNS,
        "panel_row_bytes": hopper_shapes.PANEL_ROW_BYTES,
        "Slot::barrier_pair_bytes": hopper_shapes.BARRIER_PAIR_BYTES,
        "sizeof(Vector16B)": hopper_shapes.TILE_BYTES,
    }
    checks = "\n".join(f"static_assert({name} == {value});" for name, value in sizes.items())
    compile_device_code("pipeline/ring.cuh", checks + '\nextern "C" __global__ void kernel() {}')
