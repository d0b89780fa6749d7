"""mma of every type gives the exact result where it is a number of the accumulator's type."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.simulator import SimulatedGPU, SimulationError

from .mma_tools import FORMS, Mma


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.opcode)
def test_mma_multiplies_and_accumulates(form: Mma) -> None:
    a, b, c = form.operands()
    product = a @ b
    if form.suffix == ".xor.popc":
        product = np.abs(a[:, :, None] - b[None]).sum(axis=1)
    found = form.run(a, b, c)
    np.testing.assert_array_equal(found, form.c_registers(product + c).view(found.dtype))


@pytest.mark.parametrize(("prefix", "expected"), [("", -(2**31) + 3 * 127**2 - 1), (".satfinite", 2**31 - 1)])
def test_integer_sums_wrap_or_saturate(prefix: str, expected: int) -> None:
    form = Mma(16, 16, "s8", "s8", "s32", prefix=prefix)
    a, b, _ = form.operands()
    a[...], b[...] = 0, 127
    a[:, :3] = 127
    assert (form.run(a, b, np.full((16, 8), 2**31 - 1)) == expected).all()


def test_products_of_doubles_are_fused() -> None:
    """(1 + ε)² − 1 loses ε² in a product that is rounded by itself."""
    form = Mma(8, 4, "f64", "f64", "f64")
    epsilon = 2.0**-30
    a, b = np.zeros((8, 4)), np.zeros((4, 8))
    a[:, 0], b[0] = 1 + epsilon, 1 + epsilon
    assert (form.run(a, b, np.full((8, 8), -1.0)) == 2 * epsilon + epsilon**2).all()


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (Mma(16, 16, "bf16", "bf16", "f16"), r"mma of \.bf16 and \.bf16 in \.f16 and \.f16"),
        (Mma(16, 32, "s8", "s4", "s32"), r"mma of \.s8 and \.s4"),
        (Mma(8, 4, "f16", "f16", "f32"), r"mma of \.f16 and \.f16 in \.f32 and \.f32 of this shape"),
    ],
)
def test_forms_that_do_not_exist_are_refused_in_words(form: Mma, words: str) -> None:
    known = Mma(16, 32, "s8", "s8", "s32")
    with pytest.raises(SimulationError, match=words):
        SimulatedGPU("sm_90a").load(known.ptx((4, 2, 4)).replace(known.opcode, form.opcode))
