"""cvt between floats, integers and packed types."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .tools import DTYPES, apply, rounded

NAN, INF = math.nan, math.inf
ANY_F32 = st.integers(0, 2**32 - 1).map(lambda raw: float(np.array([raw], np.uint32).view(np.float32)[0]))
FINITE_F32 = (ANY_F32 | st.integers(-3000, 3000).map(lambda n: n / 8)).filter(math.isfinite)


@pytest.mark.parametrize(("result", "mode"), [("f16", "rn"), ("f16", "rz"), ("bf16", "rn"), ("bf16", "rz")])
@settings(max_examples=25, deadline=None)
@given(values=st.lists(FINITE_F32, min_size=1, max_size=64))
def test_single_to_sixteen_bits(result: str, mode: str, values: list[float]) -> None:
    found = apply(f"cvt.{mode}.{result}.f32 %d, %a;", result, ("f32", values)).astype(float)
    assert found.tolist() == [rounded(Fraction(x), result, mode) for x in values]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_double_to_single(mode: str, values: list[float]) -> None:
    found = apply(f"cvt.{mode}.f32.f64 %d, %a;", "f32", ("f64", values)).astype(float)
    assert found.tolist() == [rounded(Fraction(x), "f32", mode) for x in values]


@pytest.mark.parametrize("packed", ["f16x2", "bf16x2"])
@settings(max_examples=25, deadline=None)
@given(pairs=st.lists(st.tuples(FINITE_F32, FINITE_F32), min_size=1, max_size=64))
def test_two_singles_to_a_packed_pair(packed: str, pairs: list[tuple[float, float]]) -> None:
    high, low = zip(*pairs, strict=True)
    found = apply(f"cvt.rn.{packed}.f32 %d, %a, %b;", packed, ("f32", high), ("f32", low))
    name = packed[:-2]
    halves = found.view(DTYPES[name]).astype(float).reshape(-1, 2)
    assert halves[:, 1].tolist() == [rounded(Fraction(x), name) for x in high]
    assert halves[:, 0].tolist() == [rounded(Fraction(x), name) for x in low]


def test_nan_becomes_the_canonical_nan() -> None:
    found = apply("cvt.rn.bf16x2.f32 %d, %a, %b;", "bf16x2", ("f32", [NAN]), ("f32", [1.0]))
    assert found.tolist() == [0x7FFF3F80]
    assert apply("cvt.rn.f16.f32 %d, %a;", "f16", ("f32", [NAN])).view(np.uint16).tolist() == [0x7FFF]


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_sixteen_bits_to_single_is_exact(name: str) -> None:
    raw = np.arange(0, 65536, 1031, dtype=np.uint16)
    values = raw.view(DTYPES[name])
    found = apply(f"cvt.f32.{name} %d, %a;", "f32", (name, values))
    np.testing.assert_array_equal(found, values.astype(np.float32))


@pytest.mark.parametrize(
    ("modifier", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
@pytest.mark.parametrize("result", ["s32", "u32", "s16", "u16", "s64", "u64", "s8"])
def test_float_to_integer_rounds_and_clamps(modifier: str, function: np.ufunc, result: str) -> None:
    values = [0.0, -0.5, 0.5, 1.5, 2.5, -2.5, 100.7, -100.7, 70000.0, -70000.0, 3e9, -3e9, 5e9, 1e19, -1e19, 1e20,
              INF, -INF]  # fmt: skip
    limits = np.iinfo(DTYPES[result])
    register = "s32" if result == "s8" else result
    found = apply(f"cvt.{modifier}.{result}.f64 %d, %a;", register, ("f64", values))
    whole = [x if math.isinf(x) else int(function(x)) for x in values]
    assert [int(x) for x in found] == [int(max(limits.min, min(limits.max, x))) for x in whole]


def test_nan_to_integer() -> None:
    assert apply("cvt.rzi.s32.f32 %d, %a;", "s32", ("f32", [NAN])).tolist() == [0]
    assert apply("cvt.rzi.s64.f32 %d, %a;", "s64", ("f32", [NAN])).tolist() == [-(2**63)]
    assert apply("cvt.rzi.s32.f64 %d, %a;", "s32", ("f64", [NAN])).tolist() == [-(2**31)]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(("result", "source"), [("f32", "s32"), ("f32", "u64"), ("f32", "s64"), ("f16", "s32")])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_integer_to_float(result: str, source: str, mode: str, data: st.DataObject) -> None:
    limits = np.iinfo(DTYPES[source])
    values = data.draw(
        st.lists(st.integers(int(limits.min), int(limits.max)) | st.integers(0, 9), min_size=1, max_size=32)
    )
    found = apply(f"cvt.{mode}.{result}.{source} %d, %a;", result, (source, values)).astype(float)
    assert found.tolist() == [rounded(Fraction(x), result, mode) for x in values]


def test_integer_to_bfloat16() -> None:
    values = [0, 1, -1, 257, 258, 259, 2**31 - 1, -(2**31)]
    found = apply("cvt.rn.bf16.s32 %d, %a;", "bf16", ("s32", values)).astype(float)
    assert found.tolist() == [rounded(Fraction(x), "bf16") for x in values]


def test_rounding_to_an_integral_float_and_saturation() -> None:
    assert apply("cvt.rni.f32.f32 %d, %a;", "f32", ("f32", [2.5, -1.5, 0.3])).tolist() == [2.0, -2.0, 0.0]
    assert apply("cvt.sat.f32.f32 %d, %a;", "f32", ("f32", [2.5, -1.5, 0.25, NAN])).tolist() == [1.0, 0.0, 0.25, 0.0]


def test_tensor_float_32_has_ten_bits_of_mantissa() -> None:
    values = np.array([1 + 2.0**-11, 1 + 2.0**-10 + 2.0**-11, 1 + 2.0**-12, INF], np.float32)
    away = apply("cvt.rna.tf32.f32 %d, %a;", "f32", ("f32", values))
    assert away.tolist() == [1 + 2.0**-10, 1 + 2.0**-9, 1.0, INF]
    even = apply("cvt.rn.tf32.f32 %d, %a;", "f32", ("f32", values))
    assert even.tolist() == [1.0, 1 + 2.0**-9, 1.0, INF]


PAIR_WITH_ZERO = [("f32", [-0.0, 0.3]), ("f32", [0.3, -0.0])]


@pytest.mark.parametrize(
    ("body", "result", "operands", "expected"),
    [
        ("cvt.rn.satfinite.relu.e4m3x2.f32 %d, %a, %b;", "b16", PAIR_WITH_ZERO, [0x2A, 0x2A00]),
        ("cvt.rn.satfinite.relu.e5m2x2.f32 %d, %a, %b;", "b16", PAIR_WITH_ZERO, [0x35, 0x3500]),
        ("cvt.rn.satfinite.relu.e4m3x2.f16x2 %d, %a;", "b16", [("b32", [0x7B808000, 0x80007B80])], [0x7E00, 0x7E]),
        ("cvt.rn.satfinite.relu.e5m2x2.f16x2 %d, %a;", "b16", [("b32", [0x7B808000, 0x80007B80])], [0x7B00, 0x7B]),
        ("cvt.rn.f16x2.e4m3x2 %d, %a;", "b32", [("b16", [0x7F63, 0xFF63])], [0x7FFF5180, 0x7FFF5180]),
        ("cvt.rn.relu.f16x2.e4m3x2 %d, %a;", "b32", [("b16", [0x8000, 0x8063, 0xFF63])], [0, 0x5180, 0x7FFF5180]),
        ("cvt.rn.f16x2.e5m2x2 %d, %a;", "b32", [("b16", [0x7D63, 0xFE63, 0x7F63])], [0x7FFF6300] * 3),
        ("cvt.rn.relu.f16x2.e5m2x2 %d, %a;", "b32", [("b16", [0x8000, 0x8063, 0xFD63])], [0, 0x6300, 0x7FFF6300]),
    ],
)  # fmt: skip
def test_zeros_and_nans_of_eight_bit_floats(
    body: str, result: str, operands: list[tuple[str, list[float]]], expected: list[int]
) -> None:
    """The bits that an H200 gives."""
    assert apply(body, result, *operands).tolist() == expected


@pytest.mark.parametrize("name", ["f16", "bf16", "f16x2", "bf16x2", "tf32"])
def test_relu_makes_zeros_positive(name: str) -> None:
    operands = ", ".join(["%d", *["%a"] * (2 if name.endswith("x2") else 1)])
    bits = "b16" if name in ("f16", "bf16") else "b32"
    body = f"cvt.rn.relu.{name}.f32 {operands};"
    assert apply(body, bits, ("f32", [-0.0, -1.0, -INF])).tolist() == [0, 0, 0]


@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_nans_of_tensor_float_32_are_canonical(mode: str) -> None:
    """The bits that an H200 gives."""
    for relu in ("", ".relu"):
        assert apply(f"cvt.{mode}{relu}.tf32.f32 %d, %a;", "b32", ("f32", [NAN])).tolist() == [0x7FFFE000]
    assert apply("cvt.rna.tf32.f32 %d, %a;", "b32", ("f32", [NAN])).tolist() == [0x7FC00000]


@pytest.mark.parametrize(("name", "dtype"), [("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)])
def test_eight_bit_floats(name: str, dtype: type) -> None:
    high, low = [1.0, 1e9, -0.3, 20.0], [0.5, -1e9, 2.0, 3.0]
    packed = apply(f"cvt.rn.satfinite.{name}.f32 %d, %a, %b;", "b16", ("f32", high), ("f32", low))
    largest = float(ml_dtypes.finfo(dtype).max)
    expected = np.clip(np.stack([low, high], axis=1), -largest, largest).astype(np.float32).astype(dtype)
    assert (packed.view(dtype).astype(float) == expected.reshape(-1).astype(float)).all()
    back = apply(f"cvt.rn.f16x2.{name} %d, %a;", "b32", ("b16", packed)).view(np.float16)
    assert (back.astype(float) == expected.reshape(-1).astype(float)).all()
