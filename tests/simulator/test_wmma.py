"""wmma: fragments are loaded, multiplied and stored, in every layout."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashwright.simulator import SimulatedGPU

from .hopper_tools import HEADER_90A

STORED = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "s8": np.int8, "u8": np.uint8, "tf32": np.float32, "f64": np.float64,
    "f32": np.float32, "s32": np.int32,
}  # fmt: skip


def kernel(
    shape: str, types: str, layouts: tuple[str, str, str], counts: tuple[int, int, int], name: str, sums: str
) -> str:
    """D = A·B + C with leading dimensions of 40; C and D have the third layout."""
    width = 64 if name == "f64" else 32
    a, b, c = (
        "{" + ", ".join(f"%{letter}{i}" for i in range(n)) + "}" for letter, n in zip("abc", counts, strict=True)
    )
    registers = ", ".join(f"%{letter}<{n}>" for letter, n in zip("abc", counts, strict=True))
    row_a, row_b, row_c = layouts
    return (
        HEADER_90A
        + f"""
.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc) {{
.reg .b64 %pa, %pb, %pc; .reg .b32 %ld; .reg .b{width} {registers};
ld.param.u64 %pa, [pa]; ld.param.u64 %pb, [pb]; ld.param.u64 %pc, [pc]; mov.b32 %ld, 40;
wmma.load.a.sync.aligned.{row_a}.{shape}.global.{name} {a}, [%pa], %ld;
wmma.load.b.sync.aligned.{row_b}.{shape}.global.{name} {b}, [%pb], %ld;
wmma.load.c.sync.aligned.{row_c}.{shape}.global.{sums} {c}, [%pc], %ld;
wmma.mma.sync.aligned.{row_a}.{row_b}.{shape}.{types} {c}, {a}, {b}, {c};
wmma.store.d.sync.aligned.{row_c}.{shape}.global.{sums} [%pc], {c}, %ld;
ret; }}"""
    )


FORMS = [
    # shape, (m, n, k), types of wmma.mma, type of A and B, of the sums, registers of A, B and C
    ("m16n16k16", (16, 16, 16), "f32.f32", "f16", "f32", (8, 8, 8)),
    ("m32n8k16", (32, 8, 16), "f16.f16", "f16", "f16", (8, 8, 4)),
    ("m8n32k16", (8, 32, 16), "f32.bf16.bf16.f32", "bf16", "f32", (2, 8, 8)),
    ("m16n16k16", (16, 16, 16), "f32.bf16.bf16.f32", "bf16", "f32", (4, 4, 8)),
    ("m16n16k16", (16, 16, 16), "s32.s8.s8.s32", "s8", "s32", (2, 2, 8)),
    ("m32n8k16", (32, 8, 16), "s32.u8.u8.s32", "u8", "s32", (4, 1, 8)),
    ("m16n16k8", (16, 16, 8), "f32.tf32.tf32.f32", "tf32", "f32", (4, 4, 8)),
    ("m8n8k4", (8, 8, 4), "rn.f64.f64.f64.f64", "f64", "f64", (1, 1, 2)),
]


@pytest.mark.parametrize("layouts", [("row", "col", "row"), ("col", "row", "col"), ("row", "row", "col")], ids="-".join)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}.{form[2]}")
def test_wmma_multiplies_and_accumulates(form: tuple, layouts: tuple[str, str, str]) -> None:
    shape, (m, n, k), types, name, sums, counts = form
    rng = np.random.default_rng(0)
    low = 0 if name == "u8" else -4
    matrices = [rng.integers(low, 5, size).astype(np.float64) for size in ((m, k), (k, n), (m, n))]
    gpu = SimulatedGPU("sm_90a")
    addresses = []
    for matrix, layout, stored in zip(matrices, layouts, (name, name, sums), strict=True):
        memory = np.zeros((40, 40), STORED[stored])
        lines = matrix if layout == "row" else matrix.T
        memory[: lines.shape[0], : lines.shape[1]] = lines
        addresses.append(gpu.to_device(memory))
    run = gpu.load(kernel(shape, types, layouts, counts, name, sums)).launch("k", 1, 32, 0, addresses)
    a, b, c = matrices
    expected = a @ b + c
    lines = gpu.to_host(addresses[2]).astype(np.float64)
    found = lines[:m, :n] if layouts[2] == "row" else lines[:n, :m].T
    np.testing.assert_array_equal(found, expected)
    assert run.counters.tensor_flops == 2 * m * n * k
