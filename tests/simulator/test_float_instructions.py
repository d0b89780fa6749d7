"""Floating-point instructions agree with exact rational arithmetic, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .tools import DTYPES, apply, rounded

WIDTH = {"f16": 16, "f32": 32, "f64": 64, "bf16": 16}
NAN, INF = math.nan, math.inf


def as_float(raw: int, name: str) -> float:
    return float(np.array([raw], f"uint{WIDTH[name]}").view(DTYPES[name])[0])


def finite(name: str) -> st.SearchStrategy[float]:
    """Any finite value, subnormal ones included, and values near one another so that sums cancel and tie."""
    bits = WIDTH[name]
    anything = st.integers(0, 2**bits - 1).map(lambda raw: as_float(raw, name)).filter(math.isfinite)
    near_one = st.integers(-40, 40).map(lambda n: float(DTYPES[name](1 + n * 2.0 ** -{16: 7, 32: 23, 64: 52}[bits])))
    powers = st.integers(-14, 14).map(lambda n: 2.0**n)
    return anything | near_one | powers


def rows(name: str, count: int) -> st.SearchStrategy[list[tuple[float, ...]]]:
    return st.lists(st.tuples(*[finite(name)] * count), min_size=1, max_size=32)


def check(opcode: str, name: str, count: int, exact: Callable[..., Fraction], mode: str = "rn") -> None:
    operands = ", ".join(["%d", "%a", "%b", "%c"][: count + 1])

    @settings(max_examples=15, deadline=None)
    @given(rows(name, count))
    def property_(cases: list[tuple[float, ...]]) -> None:
        columns = list(zip(*cases, strict=True))
        found = apply(f"{opcode} {operands};", name, *((name, column) for column in columns))
        for case, value in zip(cases, found, strict=True):
            expected = rounded(exact(*(Fraction(x) for x in case)), name, mode)
            assert float(value) == expected, (opcode, case, float(value), expected)

    property_()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["f32", "f64"])
def test_sums_and_products_in_every_rounding_mode(name: str, mode: str) -> None:
    check(f"add.{mode}.{name}", name, 2, lambda a, b: a + b, mode)
    check(f"sub.{mode}.{name}", name, 2, lambda a, b: a - b, mode)
    if name == "f32" or mode == "rn":
        check(f"mul.{mode}.{name}", name, 2, lambda a, b: a * b, mode)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_f32_rounds_once(mode: str) -> None:
    check(f"fma.{mode}.f32", "f32", 3, lambda a, b, c: a * b + c, mode)


def test_fma_f64_rounds_once() -> None:
    check("fma.rn.f64", "f64", 3, lambda a, b, c: a * b + c)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_sixteen_bit_arithmetic_rounds_once(name: str) -> None:
    check(f"add.rn.{name}", name, 2, lambda a, b: a + b)
    check(f"sub.rn.{name}", name, 2, lambda a, b: a - b)
    check(f"mul.rn.{name}", name, 2, lambda a, b: a * b)
    check(f"fma.rn.{name}", name, 3, lambda a, b, c: a * b + c)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_an_infinite_addend_outweighs_a_product_that_is_too_large(mode: str) -> None:
    """The results of an H200."""
    a, b, c = [1.7e308, 1.7e308, -1.7e308, -1.7e308], [3.0, -7.0, 3.0, -7.0], [-math.inf, math.inf, math.inf, -math.inf]
    assert apply(f"fma.{mode}.f64 %d, %a, %b, %c;", "f64", ("f64", a), ("f64", b), ("f64", c)).tolist() == c


@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_the_sign_of_a_zero_from_fma(name: str, mode: str) -> None:
    tiny = {"f32": 1e-40, "f64": 1e-310}[name]
    factors, addends = [0.0, -0.0, 1.0, -1.0, tiny], [0.0, -0.0]
    triples = [(a, b, c) for a in factors for b in factors for c in addends] + [(1.0, 1.0, -1.0), (-1.0, 1.0, 1.0)]
    found = apply(
        f"fma.{mode}.{name} %d, %a, %b, %c;", name, *((name, column) for column in zip(*triples, strict=True))
    )
    for (a, b, c), value in zip(triples, found.tolist(), strict=True):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        product_is_negative = (np.copysign(1, a) < 0) != (np.copysign(1, b) < 0)
        if exact:
            negative = exact < 0
        elif a * b == 0 and product_is_negative == bool(np.signbit(c)):
            negative = product_is_negative
        else:
            negative = mode == "rm"
        assert np.signbit(value) == negative, (a, b, c, value)


def test_fma_f32_where_a_double_would_round_twice() -> None:
    # 1 + 2^-24 is a tie of single precision; the rest of the product decides which way it goes.
    cases = [(2.0**-12, 2.0**-12 * (1 + 2.0**-23), 1.0), (-(2.0**-12), 2.0**-12 * (1 + 2.0**-23), 1.0)]
    found = apply("fma.rn.f32 %d, %a, %b, %c;", "f32", *(("f32", column) for column in zip(*cases, strict=True)))
    expected = [rounded(Fraction(x) * Fraction(y) + Fraction(z), "f32") for x, y, z in cases]
    assert found.tolist() == expected


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_division_and_reciprocal(mode: str) -> None:
    nonzero = finite("f32").filter(lambda x: x != 0)

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.tuples(finite("f32"), nonzero), min_size=1, max_size=32))
    def property_(cases: list[tuple[float, float]]) -> None:
        a, b = zip(*cases, strict=True)
        quotients = apply(f"div.{mode}.f32 %d, %a, %b;", "f32", ("f32", a), ("f32", b))
        assert quotients.tolist() == [rounded(Fraction(x) / Fraction(y), "f32", mode) for x, y in cases]
        reciprocals = apply(f"rcp.{mode}.f32 %d, %a;", "f32", ("f32", b))
        assert reciprocals.tolist() == [rounded(1 / Fraction(y), "f32", mode) for y in b]

    property_()


def test_square_root() -> None:
    squares = np.array([0.0, 1.0, 2.0, 1e-40, 3.0e38, 7.0], np.float32)
    assert (apply("sqrt.rn.f32 %d, %a;", "f32", ("f32", squares)) == np.sqrt(squares)).all()
    down = apply("sqrt.rm.f32 %d, %a;", "f32", ("f32", squares)).astype(np.float64)
    up = apply("sqrt.rp.f32 %d, %a;", "f32", ("f32", squares)).astype(np.float64)
    assert (down**2 <= squares.astype(np.float64)).all() and (up**2 >= squares.astype(np.float64)).all()


@pytest.mark.parametrize("name", ["f32", "f64", "f16"])
def test_minimum_and_maximum_skip_nan_and_order_zeros(name: str) -> None:
    a, b = [1.0, NAN, 2.0, NAN, -0.0, 0.0], [2.0, 3.0, NAN, NAN, 0.0, -0.0]
    smallest = apply(f"min.{name} %d, %a, %b;", name, (name, a), (name, b)).astype(float)
    largest = apply(f"max.{name} %d, %a, %b;", name, (name, a), (name, b)).astype(float)
    assert smallest[:3].tolist() == [1.0, 3.0, 2.0] and largest[:3].tolist() == [2.0, 3.0, 2.0]
    assert math.isnan(smallest[3]) and math.isnan(largest[3])
    assert np.signbit(smallest[4:]).all() and not np.signbit(largest[4:]).any()


def test_minimum_that_propagates_nan() -> None:
    found = apply("min.NaN.f32 %d, %a, %b;", "f32", ("f32", [NAN, 1.0]), ("f32", [1.0, 2.0]))
    assert math.isnan(found[0]) and found[1] == 1.0


def test_flush_to_zero_keeps_the_sign_of_inputs_and_results() -> None:
    tiny = 1e-40
    found = apply("add.ftz.f32 %d, %a, %b;", "f32", ("f32", [tiny, -tiny, 1.0]), ("f32", [0.0, -0.0, tiny]))
    assert found.tolist() == [0.0, 0.0, 1.0] and np.signbit(found).tolist() == [False, True, False]
    product = apply("mul.ftz.f32 %d, %a, %b;", "f32", ("f32", [1e-30, -1e-30]), ("f32", [1e-10, 1e-10]))
    assert (product == 0).all() and np.signbit(product).tolist() == [False, True]
    assert apply("mul.f32 %d, %a, %b;", "f32", ("f32", [1e-30]), ("f32", [1e-10]))[0] > 0


def test_saturation_clamps_to_the_unit_interval() -> None:
    found = apply("add.sat.f32 %d, %a, %b;", "f32", ("f32", [0.75, -2.0, 0.25, NAN]), ("f32", [0.75, 1.0, 0.25, 0.0]))
    assert found.tolist() == [1.0, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("packed", ["f16x2", "bf16x2"])
def test_packed_pairs_compute_like_two_single_ones(packed: str) -> None:
    dtype = np.float16 if packed == "f16x2" else ml_dtypes.bfloat16
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(128).astype(dtype) for _ in range(3))
    raw = [(packed, x.view(np.uint32)) for x in (a, b, c)]
    total = apply(f"add.rn.{packed} %d, %a, %b;", packed, *raw[:2]).view(dtype)
    fused = apply(f"fma.rn.{packed} %d, %a, %b, %c;", packed, *raw).view(dtype)
    largest = apply(f"max.{packed} %d, %a, %b;", packed, *raw[:2]).view(dtype)
    negated = apply(f"neg.{packed} %d, %a;", packed, raw[0]).view(dtype)
    assert (total == a + b).all() and (largest == np.maximum(a, b)).all() and (negated == -a).all()
    exact = (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(dtype)
    assert (fused == exact).all()


def test_relu_of_packed_fma() -> None:
    raw = np.array([1.0, -1.0], np.float16).view(np.uint32)
    one, zero = (np.array([x, x], np.float16).view(np.uint32) for x in (1.0, 0.0))
    found = apply("fma.rn.relu.f16x2 %d, %a, %b, %c;", "f16x2", *(("f16x2", x) for x in (raw, one, zero)))
    assert found.view(np.float16).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("opcode", "function", "inputs"),
    [
        ("ex2.approx.ftz.f32", np.exp2, [-INF, -200.0, -1.5, 0.0, 3.25, 200.0]),
        ("lg2.approx.f32", np.log2, [0.0, 0.5, 1.0, 10.0, INF]),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), [0.25, 1.0, 3.0]),
        ("rcp.approx.ftz.f32", lambda x: 1 / x, [0.25, -3.0, INF, 0.0]),
        ("sin.approx.f32", np.sin, [-1.0, 0.0, 2.0]),
        ("cos.approx.f32", np.cos, [-1.0, 0.0, 2.0]),
        ("tanh.approx.f32", np.tanh, [-INF, -1.0, 0.0, 2.0]),
        ("sqrt.approx.f32", np.sqrt, [0.0, 2.0, INF]),
    ],
)
def test_approximations(opcode: str, function: Callable[..., np.ndarray], inputs: list[float]) -> None:
    values = np.array(inputs, np.float32)
    with np.errstate(all="ignore"):
        expected = function(values.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(apply(f"{opcode} %d, %a;", "f32", ("f32", values)), expected, rtol=2e-7)


def test_approximations_of_sixteen_bit_floats() -> None:
    x = np.linspace(-3, 3, 64).astype(np.float16)
    found = apply("ex2.approx.f16x2 %d, %a;", "f16x2", ("f16x2", x.view(np.uint32))).view(np.float16)
    assert (found == np.exp2(x.astype(np.float32)).astype(np.float16)).all()


@pytest.mark.parametrize(
    ("operator", "with_nan", "reference"),
    [
        ("lt", False, lambda a, b: a < b), ("ge", False, lambda a, b: a >= b), ("eq", False, lambda a, b: a == b),
        ("ne", False, lambda a, b: a != b), ("ltu", True, lambda a, b: a < b), ("neu", True, lambda a, b: a != b),
        ("num", False, lambda a, b: True), ("nan", True, lambda a, b: False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_comparisons_with_nan(name: str, operator: str, with_nan: bool, reference: Callable[..., bool]) -> None:
    a, b = [1.0, 2.0, 2.0, NAN, 1.0], [2.0, 1.0, 2.0, 1.0, NAN]
    body = f"setp.{operator}.{name} %p1, %a, %b; selp.u32 %d, 1, 0, %p1;"
    found = apply(body, "u32", (name, a), (name, b)).tolist()
    expected = [with_nan if math.isnan(x) or math.isnan(y) else reference(x, y) for x, y in zip(a, b, strict=True)]
    assert found == [int(x) for x in expected]


def test_packed_comparison_sets_two_predicates() -> None:
    a, b = (np.array(x, np.float16).view(np.uint32) for x in ([1.0, 5.0], [2.0, 3.0]))
    body = "setp.lt.f16x2 %p1|%p2, %a, %b; selp.u32 %r1, 1, 0, %p1; selp.u32 %r2, 2, 0, %p2; or.b32 %d, %r1, %r2;"
    assert apply(body, "u32", ("f16x2", a), ("f16x2", b)).tolist() == [1]


def test_sign_and_class() -> None:
    assert apply("copysign.f32 %d, %a, %b;", "f32", ("f32", [-1.0]), ("f32", [3.0])).tolist() == [-3.0]
    body = "testp.subnormal.f32 %p1, %a; selp.u32 %d, 1, 0, %p1;"
    assert apply(body, "u32", ("f32", [1e-40, 1.0, 0.0, NAN])).tolist() == [1, 0, 0, 0]
