"""wgmma computes D = A·B + D for every shape, layout and operand form, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.hardware.tensor_map import Swizzle
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.matrix_descriptor import MatrixDescriptor

from .hopper_tools import BF16, descriptor, fragments_of, place, run_wgmma, wgmma_ptx

IMAGE_BYTES = 32 * 1024
LAYOUTS = list(Swizzle)


def operands(columns: int, dtype: np.dtype = BF16) -> tuple[np.ndarray, np.ndarray]:
    """Small integers, so that every order of addition gives the same sum."""
    rng = np.random.default_rng(columns)
    a, b = (rng.integers(-8, 9, (rows, 16)).astype(dtype) for rows in (64, columns))
    return a, b


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64).T


def k_major(image: np.ndarray, matrix: np.ndarray, start: int, swizzle: Swizzle = Swizzle.B128) -> int:
    """Place a K-major operand; its descriptor."""
    leading, stride = (128, 256) if swizzle is Swizzle.NONE else (16, swizzle.repeat_bytes)
    place(image, matrix, start, leading, stride, swizzle, is_mn_major=False)
    return descriptor(start, leading, stride, swizzle)


def mn_major(image: np.ndarray, matrix: np.ndarray, start: int, swizzle: Swizzle = Swizzle.B128) -> int:
    """Place an MN-major operand, groups of eight k next to each other; its descriptor."""
    leading, stride = (128, 256) if swizzle is Swizzle.NONE else (2 * swizzle.repeat_bytes, swizzle.repeat_bytes)
    place(image, matrix, start, leading, stride, swizzle, is_mn_major=True)
    return descriptor(start, leading, stride, swizzle)


@pytest.mark.parametrize("columns", range(8, 257, 8))
def test_every_number_of_columns_has_the_layout_of_the_isa(columns: int) -> None:
    a, b = operands(columns)
    image = np.zeros(IMAGE_BYTES * 2 // 2, np.uint16)
    desc_b = k_major(image, b, 0, Swizzle.B32)
    result = run_wgmma(
        wgmma_ptx(columns, "bf16", image.nbytes, a_in_registers=True, options="p, 1, 1, 0"),
        image, columns, 0, desc_b, fragments_of(a),
    )  # fmt: skip
    np.testing.assert_array_equal(result, product(a, b))


@pytest.mark.parametrize("swizzle", LAYOUTS)
@pytest.mark.parametrize("a_is_mn_major", [False, True])
@pytest.mark.parametrize("b_is_mn_major", [False, True])
def test_shared_operands_in_every_canonical_layout(swizzle: Swizzle, a_is_mn_major: bool, b_is_mn_major: bool) -> None:
    columns = 128
    a, b = operands(columns, np.dtype(np.float16))
    image = np.zeros(IMAGE_BYTES // 2, np.uint16)
    desc_a = (mn_major if a_is_mn_major else k_major)(image, a, 0, swizzle)
    desc_b = (mn_major if b_is_mn_major else k_major)(image, b, 16 * 1024, swizzle)
    options = f"p, 1, 1, {int(a_is_mn_major)}, {int(b_is_mn_major)}"
    result = run_wgmma(wgmma_ptx(columns, "f16", IMAGE_BYTES, options=options), image, columns, desc_a, desc_b)
    np.testing.assert_array_equal(result, product(a, b))


@pytest.mark.parametrize("swizzle", [Swizzle.B128, Swizzle.B64])
def test_a_descriptor_advances_along_k_inside_a_swizzled_row(swizzle: Swizzle) -> None:
    """The way kernels walk through a tile of a head: 32 bytes further for each 16 columns."""
    rng = np.random.default_rng(0)
    depth = swizzle.value // 2
    a, b = (rng.integers(-8, 9, (rows, depth)).astype(BF16) for rows in (64, 64))
    image = np.zeros(IMAGE_BYTES // 2, np.uint16)
    desc_a, desc_b = k_major(image, a, 0, swizzle), k_major(image, b, 16 * 1024, swizzle)
    ptx = wgmma_ptx(64, "bf16", IMAGE_BYTES)
    for k in range(depth // 16):
        columns = slice(16 * k, 16 * k + 16)
        result = run_wgmma(ptx, image, 64, desc_a + 2 * k, desc_b + 2 * k)
        np.testing.assert_array_equal(result, product(a[:, columns], b[:, columns]))


def test_a_transposing_descriptor_advances_along_k_by_groups_of_rows() -> None:
    """V as a bulk copy leaves it: panels of 64 columns, 32 rows of 128 bytes each; 16 rows of V per product."""
    rng = np.random.default_rng(1)
    v = rng.integers(-8, 9, (32, 128)).astype(BF16)  # [k, n]
    a, _ = operands(128)
    panel_bytes = 32 * 128
    image = np.zeros(IMAGE_BYTES // 2, np.uint16)
    place(image, np.ascontiguousarray(v.T), 2048, panel_bytes, 1024, Swizzle.B128, is_mn_major=True)
    desc = descriptor(2048, panel_bytes, 1024, Swizzle.B128)
    ptx = wgmma_ptx(128, "bf16", IMAGE_BYTES, a_in_registers=True, options="p, 1, 1, 1")
    for k in range(2):
        result = run_wgmma(ptx, image, 128, 0, desc + (k * 16 * 128 >> 4), fragments_of(a))
        expected = a.astype(np.float64) @ v[16 * k : 16 * k + 16].astype(np.float64)
        np.testing.assert_array_equal(result, expected)


def test_products_add_up_and_scales_negate() -> None:
    a, b = operands(16)
    image = np.zeros(IMAGE_BYTES // 2, np.uint16)
    desc_a, desc_b = k_major(image, a, 0), k_major(image, b, 16 * 1024)
    start = 1000 + np.add.outer(np.zeros(64), np.zeros(16))
    for register in range(8):  # accumulator r of a thread starts as 1000 + r
        rows = (np.arange(64) // 8 % 2 == register // 2 % 2)[:, None]
        columns = (np.arange(16) // 8 == register // 4) & (np.arange(16) % 2 == register % 2)
        start += register * (rows & columns)

    def run(options: str, scale_d: int, repeats: int = 1) -> np.ndarray:
        ptx = wgmma_ptx(16, "bf16", IMAGE_BYTES, options=options, scale_d=scale_d, repeats=repeats)
        return run_wgmma(ptx, image, 16, desc_a, desc_b)

    exact = product(a, b)
    np.testing.assert_array_equal(run("p, 1, 1, 0, 0", 1), start + exact)
    np.testing.assert_array_equal(run("p, 1, 1, 0, 0", 1, repeats=3), start + 3 * exact)
    np.testing.assert_array_equal(run("p, -1, 1, 0, 0", 1), start - exact)
    np.testing.assert_array_equal(run("p, 1, -1, 0, 0", 0), -exact)
    np.testing.assert_array_equal(run("p, -1, -1, 0, 0", 0), exact)


def test_a_tile_off_the_pattern_is_read_with_a_base_offset_and_refused_without() -> None:
    a, b = operands(8)
    image = np.zeros(IMAGE_BYTES // 2, np.uint16)
    desc_a = k_major(image, a, 0)
    pattern = np.zeros(IMAGE_BYTES // 2, np.uint16)
    k_major(pattern, b, 0)
    image[(16384 + 256) // 2 :][: 1024 // 2] = pattern[: 1024 // 2]  # the whole pattern, 256 bytes further
    ptx = wgmma_ptx(8, "bf16", IMAGE_BYTES)
    desc_b = descriptor(16384 + 256, 16, 1024, Swizzle.B128, base_offset=2)
    np.testing.assert_array_equal(run_wgmma(ptx, image, 8, desc_a, desc_b), product(a, b))
    with pytest.raises(SimulationError, match="base offset is 0") as caught:
        run_wgmma(ptx, image, 8, desc_a, descriptor(16384 + 256, 16, 1024, Swizzle.B128))
    assert caught.value.kind == "descriptor"


def test_descriptors_decode_to_what_was_encoded() -> None:
    bits = descriptor(0x12340, 8192, 1024, Swizzle.B64, base_offset=3)
    decoded = MatrixDescriptor.decode(bits)
    assert decoded == MatrixDescriptor(0x12340, 8192, 1024, 3, Swizzle.B64)
    assert decoded.encode() == bits


def test_an_operand_beyond_shared_memory_is_out_of_bounds() -> None:
    image = np.zeros(IMAGE_BYTES // 2, np.uint16)
    with pytest.raises(SimulationError, match="wgmma reads B at offset") as caught:
        run_wgmma(wgmma_ptx(8, "bf16", IMAGE_BYTES), image, 8, 0, descriptor(IMAGE_BYTES - 16, 128, 256, Swizzle.NONE))
    assert caught.value.kind == "out-of-bounds"


def test_flops_and_instructions_are_counted_per_warp() -> None:
    gpu = SimulatedGPU("sm_90a")
    out = gpu.to_device(np.zeros((32, 128), np.float32))
    image = gpu.to_device(np.zeros(IMAGE_BYTES // 2, np.uint16))
    module = gpu.load(wgmma_ptx(64, "bf16", IMAGE_BYTES, repeats=3))
    desc = descriptor(0, 16, 1024, Swizzle.B128)
    counters = module.launch("k", 1, 128, 0, [out, image, image, desc, desc]).counters
    assert counters.tensor_flops == 3 * 2 * 64 * 64 * 16
    assert counters.instructions["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"] == 3 * 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("f32.bf16.bf16", "f16.bf16.bf16"), "types"),
        (("m64n8k16", "m64n8k32"), "K is 16"),
        (("m64n8k16", "m64n12k16"), "accumulators"),
        (("p, 1, 1, 0, 0", "p, 2, 1, 0, 0"), "scales"),
        (("p, 1, 1, 0, 0", "p, 1, 1"), "immediate"),
    ],
)
def test_forms_it_does_not_execute_are_refused_at_load(change: tuple[str, str], reason: str) -> None:
    ptx = wgmma_ptx(8, "bf16", IMAGE_BYTES)
    with pytest.raises(SimulationError, match=reason):
        SimulatedGPU("sm_90a").load(ptx.replace(*change))


# Compilers rename accumulators with `mov` between two products; what is in flight goes along.
def check_renamed_accumulators(between: str) -> None:
    a, b = operands(8)
    image = np.zeros(IMAGE_BYTES // 2, np.uint16)
    desc_a, desc_b = k_major(image, a, 0), k_major(image, b, 16 * 1024)
    ptx = wgmma_ptx(8, "bf16", IMAGE_BYTES)
    first, last = ptx.index("wgmma.mma_async"), ptx.index("wgmma.commit_group")
    issued = ptx[first:last]
    again = issued.replace("%d", "%e").replace("%eesc", "%desc").replace("p, 1", "1, 1")
    moves = "".join(f"mov.f32 %e{i}, %d{i};\n" for i in range(4))
    back = "".join(f"mov.f32 %d{i}, %e{i};\n" for i in range(4))
    text = ptx[:last] + "wgmma.commit_group.sync.aligned;\n" + moves + between + again + ptx[last:]
    text = text.replace("wgmma.wait_group.sync.aligned 0;\n", "wgmma.wait_group.sync.aligned 0;\n" + back)
    result = run_wgmma(text, image, 8, desc_a, desc_b)
    np.testing.assert_array_equal(result, 2 * product(a, b))


def test_accumulators_in_flight_may_be_renamed_but_not_used() -> None:
    check_renamed_accumulators("")
    with pytest.raises(SimulationError, match="has not been waited for") as caught:
        check_renamed_accumulators("add.f32 %e1, %e1, %e1;\n")
    assert caught.value.kind == "wgmma"
    with pytest.raises(SimulationError, match="has not been waited for") as caught:
        check_renamed_accumulators("mov.f32 %e1, 0f00000000;\n")
    assert caught.value.kind == "wgmma"
