"""Rules that all device code obeys, read from its text; and its constants, which Python has too."""

from __future__ import annotations

import ctypes
import re

import pytest
from device_code import compile_device_code

from flashwright.hardware import units
from flashwright.kernels.backward.hopper import shapes as hopper_backward_shapes
from flashwright.kernels.backward.launch import BackwardArguments
from flashwright.kernels.forward.hopper import shapes as hopper_shapes
from flashwright.kernels.forward.hopper.config import WARPGROUP_ROWS
from flashwright.kernels.forward.launch import ForwardArguments
from flashwright.kernels.source import device_headers

HEADERS = dict(device_headers())
SHARED = [name for name in HEADERS if name.split("/")[0] in ("ptx", "tile", "attention", "pipeline")]
OPERATIONS = ("forward", "backward", "decode")

# --- Markers: what an instruction is about, for `explain` --------------------------------------------------------

MARKER = re.compile(r"// @(\w+) (.+)$")
FORWARD_PARTS = {"operand": {"Q", "K", "V"}, "product": {"S", "O"}, "phase": {"softmax", "rescale O"}}
PARTS = {
    "forward": FORWARD_PARTS,
    "backward": {
        "operand": {"Q", "K", "V", "dO"},
        "product": {"S", "dP", "dV", "dK", "dQ"},
        "phase": {"gradients of scores"},
    },
    "decode": FORWARD_PARTS,
}
"""What kernels of an operation are made of. A forward may do without rescaling O."""
KERNELS = sorted({tuple(re.split("[/_.]", name)[:2]) for name in HEADERS if re.match(r"\w+/(ampere|hopper)", name)})
"""(operation, family)"""


def markers(name: str) -> list[tuple[str, str]]:
    return [match.groups() for line in HEADERS[name].splitlines() if (match := MARKER.search(line))]  # type: ignore[misc]


@pytest.mark.parametrize("name", HEADERS)
def test_every_marker_has_a_known_key_and_value(name):
    parts = PARTS.get(name.split("/")[0], {})
    assert all(value in parts.get(key, ()) for key, value in markers(name))
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


@pytest.mark.parametrize(("operation", "family"), KERNELS)
def test_every_family_marks_every_operand_product_and_phase(operation, family):
    found = {marker for name in HEADERS if name.startswith(f"{operation}/{family}") for marker in markers(name)}
    wanted = {(key, value) for key, values in PARTS[operation].items() for value in values}
    assert wanted - {("phase", "rescale O")} <= found


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
    layers = [("types.cuh",), ("ptx",), ("tile",), ("attention",), ("pipeline",), OPERATIONS]
    height = {folder: height for height, folders in enumerate(layers) for folder in folders}
    for name in HEADERS:
        for path in included_folders(name):
            assert height[path] <= height[name.split("/")[0]], f"{name} includes {path}"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_of_an_operation_include_none_of_another(operation):
    others = set(OPERATIONS) - {operation}
    included = {path for name in HEADERS if name.startswith(operation) for path in included_folders(name)}
    assert included and not included & others


def included_folders(name: str) -> list[str]:
    return re.findall(r'#include "(\w+)/', HEADERS[name])


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
    check_constants("pipeline/ring.cuh", sizes)


def test_the_backward_counts_with_the_same_sizes():
    forward, backward = hopper_shapes, hopper_backward_shapes
    for name in ("WARPGROUP_THREADS", "PANEL_COLUMNS", "BARRIER_PAIR_BYTES"):
        assert getattr(backward, name) == getattr(forward, name), name
    assert backward.WARPGROUP_ROWS == WARPGROUP_ROWS


@pytest.mark.parametrize("struct", [ForwardArguments, BackwardArguments], ids=lambda struct: struct.__name__)
def test_arguments_lie_where_python_packs_them(struct):
    name = struct.__name__
    places = {f"sizeof({name})": ctypes.sizeof(struct)}
    for field, *_ in struct._fields_:
        places[f"__builtin_offsetof({name}, {field})"] = getattr(struct, field).offset
    check_constants("attention/backward_arguments.cuh", places)


def check_constants(header: str, values: dict[str, int]) -> None:
    checks = "\n".join(f"static_assert({name} == {value});" for name, value in values.items())
    compile_device_code(header, checks + '\nextern "C" __global__ void kernel() {}')
