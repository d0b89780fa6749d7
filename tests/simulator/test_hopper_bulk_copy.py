"""Bulk tensor copies move boxes of tensors: swizzled, filled outside of the tensor, clipped when they store."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashwright.hardware.tensor_map import Fill, Swizzle, TensorMap
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.memory.global_memory import GlobalMemory
from flashwright.simulator.tensor_boxes import TensorBox

from .bulk_copies import CASES, copy_source, run_copy, tensor_map
from .hopper_tools import BF16, run_cuda, swizzled


def reference_box(array: np.ndarray, start: tuple[int, ...], tensor: TensorMap) -> np.ndarray:
    """The box element by element, C-ordered, zeros outside."""
    result = np.zeros(tensor.box_elements[::-1], array.dtype)
    for place in product(*(range(size) for size in result.shape)):
        steps = zip(place, start[::-1], tensor.element_strides[::-1], strict=True)
        where = tuple(first + step * stride for step, first, stride in steps)
        if all(0 <= index < size for index, size in zip(where, array.shape, strict=True)):
            result[place] = array[where]
    return result


@pytest.mark.parametrize(("shape", "start", "box"), CASES)
def test_a_box_arrives_in_its_order_with_zeros_outside_of_the_tensor(
    shape: tuple[int, ...], start: tuple[int, ...], box: tuple[int, ...]
) -> None:
    array = (1 + np.arange(np.prod(shape)) % 31).astype(BF16).reshape(shape)
    stores = min(start) >= 0
    shared, stored, run = run_copy(array, start, box, stores=stores)
    tensor = tensor_map(array, 0, box)
    expected = reference_box(array, start, tensor)
    np.testing.assert_array_equal(shared.view(BF16), expected.ravel())
    # The store changed exactly what the box and the tensor have in common.
    inside = np.zeros(shape, bool)
    window = tuple(
        slice(max(first, 0), max(first + size, 0)) for first, size in zip(start[::-1], box[::-1], strict=True)
    )
    inside[window] = True
    np.testing.assert_array_equal(stored, np.where(inside & stores, array, 7))
    moved = int(np.count_nonzero(inside)) * 2
    assert run.counters.bytes_global_to_shared == moved
    assert run.counters.bytes_shared_to_global == moved * stores


def test_swizzled_rows_narrower_than_the_pattern_are_refused() -> None:
    """A Hopper GPU does not pack them: it was seen to write beyond the box's own bytes."""
    with pytest.raises(SimulationError, match="rows of 64 bytes are narrower than the swizzle's 128") as caught:
        run_copy(np.ones((24, 32), BF16), (0, 0), (32, 16), swizzle=Swizzle.B128)
    assert caught.value.kind == "unsupported"


@pytest.mark.parametrize("start", [(0, -4), (-8, 0)])
def test_a_box_that_begins_before_the_tensor_cannot_be_stored(start: tuple[int, int]) -> None:
    """A Hopper GPU stops with an illegal instruction."""
    array = np.ones((24, 64), BF16)
    with pytest.raises(SimulationError, match=r"stored at .*; only loads may begin before the tensor") as caught:
        run_copy(array, start, (64, 16), stores=True)
    assert caught.value.kind == "tensor-map"


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape (C order); coordinates, box and element strides (innermost first)."""
    rank = draw(st.integers(1, 4))
    shape = (*(draw(st.integers(1, 6)) for _ in range(rank - 1)), 4 * draw(st.integers(1, 6)))
    start = tuple(draw(st.integers(-5, 9)) for _ in range(rank))
    box = (4 * draw(st.integers(1, 4)), *(draw(st.integers(1, 5)) for _ in range(rank - 1)))
    strides = (1, *(draw(st.integers(1, 3)) for _ in range(rank - 1)))
    return shape, start, box, strides


@settings(max_examples=60, deadline=None)
@given(boxes())
def test_any_box_reads_the_tensor_inside_and_zeros_outside_and_writes_it_back(case: Any) -> None:
    shape, start, box, strides = case
    array = 1 + np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    memory = GlobalMemory()
    tensor = tensor_map(array, memory.allocate(array.nbytes), box, element_strides=strides)
    memory.write(tensor.address, array)
    copied = TensorBox(tensor, start).read(memory)
    expected = reference_box(array, start, tensor)
    np.testing.assert_array_equal(copied.view(np.uint32), expected.ravel())
    memory.write(tensor.address, np.zeros_like(array))
    TensorBox(tensor, start).write(memory, copied)
    stored = np.frombuffer(memory.read(tensor.address, array.nbytes), np.uint32)
    assert set(stored[stored > 0]) == set(expected[expected > 0])
    np.testing.assert_array_equal(stored[stored > 0], array.ravel()[stored > 0])


@pytest.mark.parametrize("swizzle", [Swizzle.B128, Swizzle.B64, Swizzle.B32])
def test_swizzled_boxes_have_their_chunks_exchanged_and_stores_undo_it(swizzle: Swizzle) -> None:
    columns = swizzle.value // 2
    array = np.arange(32 * columns, dtype=np.uint16).reshape(32, columns)
    shared, stored, _ = run_copy(array, (0, 4), (columns, 24), stores=True, swizzle=swizzle)
    expected = np.zeros(24 * columns, np.uint16)
    for (row, column), value in np.ndenumerate(array[4:28]):
        expected[swizzled(row * swizzle.value + 2 * column, swizzle) // 2] = value
    np.testing.assert_array_equal(shared.view(np.uint16), expected)
    np.testing.assert_array_equal(stored[4:28], array[4:28])
    assert (stored[:4] == 7).all() and (stored[28:] == 7).all()


def test_128_byte_swizzle_is_chunk_xor_row() -> None:
    """The form in which kernels use it: 16-byte chunk c of row r is at chunk c ^ (r % 8)."""
    array = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
    shared, _, _ = run_copy(array, (0, 0), (64, 16), swizzle=Swizzle.B128)
    chunks = shared.view(np.uint16).reshape(16, 8, 8)
    for row in range(16):
        for chunk in range(8):
            np.testing.assert_array_equal(chunks[row, chunk ^ (row % 8)], array[row, 8 * chunk : 8 * chunk + 8])


def test_element_strides_visit_every_nth_row() -> None:
    array = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)
    shared, _, _ = run_copy(array, (0, 3), (8, 15), element_strides=(1, 4))
    expected = reference_box(array, (0, 3), tensor_map(array, 0, (8, 15), element_strides=(1, 4)))
    assert expected.shape == (4, 8)
    np.testing.assert_array_equal(shared.view(np.float32), expected.ravel())


def test_a_cache_policy_changes_nothing() -> None:
    array = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
    plain, _, _ = run_copy(array, (0, 8), (64, 8))
    hinted, _, _ = run_copy(
        array, (0, 8), (64, 8), change=('complete_tx::bytes "\n                 "[%0], [%1, {%3, %4}], [%2];"',
                                        'complete_tx::bytes.L2::cache_hint "\n "[%0], [%1, {%3, %4}], [%2], 0;"')
    )  # fmt: skip
    np.testing.assert_array_equal(hinted, plain)


def test_what_is_outside_can_be_filled_with_nan() -> None:
    array = np.ones((4, 8), np.float16)
    shared, _, _ = run_copy(array, (0, 2), (8, 4), fill=Fill.NAN)
    values = shared.view(np.float16).reshape(4, 8)
    assert (values[:2] == 1).all() and np.isnan(values[2:]).all()


def test_sectors_of_a_box_are_those_of_its_rows() -> None:
    array = np.zeros((64, 128), np.uint16)  # rows of 256 bytes
    _, _, run = run_copy(array, (64, 0), (64, 32))
    assert run.counters.bytes_global_to_shared == 32 * 128
    # The kernel's own stores of 4096 bytes to `out` are the other 128 sectors.
    assert run.counters.global_sectors == 32 * 4 + 128


def test_plain_bulk_copies_move_bytes_both_ways() -> None:
    source = r"""
extern "C" __global__ void k(const char *in, char *out, int bytes) {
  extern __shared__ __align__(128) char s[];
  __shared__ u64 bar;
  const u32 b = addr(&bar), tile = addr(s);
  if (threadIdx.x == 0) {
    init(b, 1); init_fence();
    expect(b, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(tile), "l"(in), "r"(bytes), "r"(b) : "memory");
    wait(b, 0);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(out), "r"(tile), "r"(bytes) : "memory");
    bulk_commit(); bulk_wait_read();
  }
}"""
    gpu = SimulatedGPU("sm_90a")
    data = np.arange(512, dtype=np.uint32)
    out = gpu.to_device(np.zeros_like(data))
    run = run_cuda(source, 32, [gpu.to_device(data), out, np.int32(data.nbytes)], gpu, shared_bytes=data.nbytes)
    np.testing.assert_array_equal(gpu.to_host(out), data)
    assert run.counters.bytes_global_to_shared == run.counters.bytes_shared_to_global == data.nbytes


def test_tensor_maps_can_be_part_of_a_structure() -> None:
    source = copy_source(2).replace(
        "const __grid_constant__ Map source, const __grid_constant__ Map target,",
        "const __grid_constant__ Both both,",
    ).replace("&source", "&both.source").replace("&target", "&both.target")  # fmt: skip
    source = "struct Both { long first; Map source, target; };\n" + source
    gpu = SimulatedGPU("sm_90a")
    array = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
    tensor = tensor_map(array, gpu.to_device(array), (64, 8))
    encoded = gpu.tensor_maps.encode(tensor)
    out = gpu.to_device(np.zeros(1024, np.uint8))
    zero = np.int32(0)
    args = [bytes(64) + encoded + encoded, out, zero, np.int32(8), zero, zero, np.int32(1024), zero]
    run_cuda(source, 32, args, gpu, shared_bytes=1024)
    np.testing.assert_array_equal(gpu.to_host(out).view(np.uint16), array[8:].ravel())


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("misaligned", ('"r"(tile), "l"(&source)', '"r"(tile + 64), "l"(&source)'), "multiple of 128"),
        ("tensor-map", ('"l"(&source)', '"l"((const char *)&source + 64)'), "no tensor map"),
        ("out-of-bounds", ('"r"(tile), "l"(&source)', '"r"(tile + 1024), "l"(&source)'), "shared memory"),
        ("mbarrier", ("init(b, 1); init_fence();", ""), "no initialised mbarrier"),
    ],
)
def test_faulty_copies_are_explained(kind: str, change: tuple[str, str], message: str) -> None:
    source = copy_source(2)
    assert change[0] in source
    gpu = SimulatedGPU("sm_90a")
    array = np.zeros((16, 64), np.uint16)
    tensor = tensor_map(array, gpu.to_device(array), (64, 8))
    out = gpu.to_device(np.zeros(1024, np.uint8))
    args = [tensor, tensor, out, *[np.int32(0)] * 4, np.int32(1024), np.int32(0)]
    with pytest.raises(SimulationError, match=message) as caught:
        run_cuda(source.replace(*change), 32, args, gpu, shared_bytes=1024)
    assert caught.value.kind == kind
    assert caught.value.thread_block == (0, 0, 0) and caught.value.ptx_line is not None


def test_a_tensor_map_beyond_its_allocation_is_out_of_bounds() -> None:
    gpu = SimulatedGPU("sm_90a")
    tensor = TensorMap(gpu.allocate(8 * 128), np.dtype(np.uint16), (64, 16), (128,), (64, 16))
    args = [tensor, tensor, gpu.allocate(2048), *[np.int32(0)] * 4, np.int32(2048), np.int32(0)]
    with pytest.raises(SimulationError, match="not allocated"):
        run_cuda(copy_source(2), 32, args, gpu, shared_bytes=2048)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 8}, "multiple of 16"),
        ({"strides": (130,)}, "multiple of 16"),
        ({"strides": ()}, "needs 1"),
        ({"box": (64, 257)}, "1 to 256"),
        ({"box": (64, 0)}, "1 to 256"),
        ({"box": (4, 8)}, "8 bytes; a multiple of 16"),
        ({"box": (128, 8), "swizzle": Swizzle.B128}, "256 bytes; swizzle B128 allows at most 128"),
        ({"box": (64, 8), "swizzle": Swizzle.B64}, "at most 64"),
        ({"shape": (64,), "strides": (), "box": (64, 8)}, "needs 1"),
        ({"shape": (1,) * 6, "strides": (16,) * 5, "box": (1,) * 6}, "6 dimensions"),
        ({"shape": (64, 0)}, "1 to 2"),
        ({"element_strides": (1, 9)}, "1 to 8"),
        ({"element_strides": (2, 1)}, "innermost must be 1"),
        ({"dtype": np.dtype(np.complex64)}, "complex64 is not allowed"),
        ({"dtype": np.dtype(np.int32), "fill": Fill.NAN}, "floating-point"),
    ],
)
def test_a_tensor_map_that_hardware_would_refuse_cannot_be_made(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "address": 4096, "dtype": BF16, "shape": (64, 32), "strides": (128,), "box": (64, 8),
    }  # fmt: skip
    TensorMap(**good)
    with pytest.raises(ValueError, match=message):
        TensorMap(**{**good, **change})
