"""Rounding modes, packed integers and predicates, against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright.simulator.numerics import root_of

from .instruction_cases import F32, F64, HALF, INF, INTEGERS, LARGE, MODES, NAN, PAIRS, SMALL, product
from .tools import apply, rounded


def applied(body: str, result: str, types: tuple[str, ...], columns: list[list[Any]]) -> np.ndarray:
    """Any number of elements, 64 at a time."""
    parts = [
        apply(body, result, *((t, c[i : i + 64]) for t, c in zip(types, columns, strict=True)))
        for i in range(0, len(columns[0]), 64)
    ]
    return np.concatenate(parts)


def check(body: str, name: str, types: tuple[str, ...], columns: list[list[Any]], exact: Any, mode: str) -> None:
    """Where everything is finite and the result is not zero."""
    with np.errstate(all="ignore"):
        found = applied(body, name, types, columns)
    for value, *operands in zip(found, *columns, strict=True):
        if not all(map(math.isfinite, operands)):
            continue
        operands = [Fraction(float(np.float32(x))) if name == "f32" else Fraction(x) for x in operands]
        try:
            expected = exact(*operands)
        except ZeroDivisionError:
            continue
        if expected:
            assert float(value) == rounded(expected, name, mode), (body, operands)


@pytest.mark.parametrize("mode", MODES)
def test_double_precision_in_every_rounding_mode(mode: str) -> None:
    pairs = product(F64, F64)
    check(f"div.{mode}.f64 %d, %a, %b;", "f64", ("f64", "f64"), pairs, lambda a, b: a / b, mode)
    check(f"add.{mode}.f64 %d, %a, %b;", "f64", ("f64", "f64"), pairs, lambda a, b: a + b, mode)
    check(f"mul.{mode}.f64 %d, %a, %b;", "f64", ("f64", "f64"), pairs, lambda a, b: a * b, mode)
    triples = product(F64, F64[:8], F64)
    check(f"fma.{mode}.f64 %d, %a, %b, %c;", "f64", ("f64",) * 3, triples, lambda a, b, c: a * b + c, mode)
    check(f"rcp.{mode}.f64 %d, %a;", "f64", ("f64",), [F64], lambda a: 1 / a, mode)
    check(f"sqrt.{mode}.f64 %d, %a;", "f64", ("f64",), [F64], root_of, mode)
    check(f"cvt.{mode}.f64.s64 %d, %a;", "f64", ("s64",), [LARGE], Fraction, mode)
    check(f"cvt.{mode}.bf16.s64 %d, %a;", "bf16", ("s64",), [LARGE], Fraction, mode)
    check(f"cvt.{mode}.bf16.f64 %d, %a;", "bf16", ("f64",), [F64], Fraction, mode)
    check(f"cvt.{mode}.f16.s32 %d, %a;", "f16", ("s32",), [INTEGERS], Fraction, mode)


@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize("mode", MODES)
def test_numbers_that_cancel_leave_minus_zero_only_when_rounding_down(name: str, mode: str) -> None:
    values = F32 if name == "f32" else F64
    finite = [value for value in values if math.isfinite(value)]
    opposite = [-value for value in finite]
    total = apply(f"add.{mode}.{name} %d, %a, %b;", name, (name, finite), (name, opposite))
    fused = apply(
        f"fma.{mode}.{name} %d, %a, %b, %c;", name, (name, finite), (name, [1.0] * len(finite)), (name, opposite)
    )
    for result in (total, fused):
        assert not result.any()
        assert np.signbit(result).all() == (mode == "rm")
        assert np.signbit(result).any() == (mode == "rm")
    assert not np.signbit(apply(f"add.{mode}.{name} %d, %a, %b;", name, (name, [0.0]), (name, [0.0]))).any()


def test_the_high_half_of_a_product_is_added_with_saturation() -> None:
    columns = product(INTEGERS[-2:], INTEGERS[-2:], INTEGERS)
    found = applied("mad.hi.sat.s32 %d, %a, %b, %c;", "s32", ("s32",) * 3, columns)
    expected = [min(max((a * b >> 32) + c, -(2**31)), 2**31 - 1) for a, b, c in zip(*columns, strict=True)]
    assert found.tolist() == expected


def test_a_root_is_exact_or_lies_between_doubles() -> None:
    assert root_of(Fraction(9, 4)) == Fraction(3, 2)
    assert Fraction(math.nextafter(math.sqrt(2), 0)) < root_of(Fraction(2)) < Fraction(math.nextafter(math.sqrt(2), 2))
    assert root_of(Fraction(2)) != Fraction(math.sqrt(2))


@pytest.mark.parametrize("name", ["u16x2", "s16x2"])
@pytest.mark.parametrize("operation", ["add", "min", "max"])
def test_pairs_of_16_bit_integers(name: str, operation: str) -> None:
    columns = product(PAIRS, PAIRS)
    dtype = np.int16 if name == "s16x2" else np.uint16
    a, b = (np.array(column, np.uint32).view(dtype) for column in columns)
    expected = {"add": np.add, "min": np.minimum, "max": np.maximum}[operation](a, b).view(np.uint32)
    found = applied(f"{operation}.{name} %d, %a, %b;", "b32", ("b32", "b32"), columns)
    assert found.tolist() == expected.tolist()
    if name == "s16x2" and operation != "add":
        found = applied(f"{operation}.relu.{name} %d, %a, %b;", "b32", ("b32", "b32"), columns)
        assert found.tolist() == np.maximum(expected.view(np.int16), 0).view(np.uint32).tolist()


def test_pairs_take_constants() -> None:
    found = apply("add.u16x2 %d, %a, 0x00010002;", "b32", ("b32", [0xFFFFFFFF, 5]))
    assert found.tolist() == [0x00000001, 0x00010007]


@pytest.mark.parametrize("table", [0x80, 0x96, 0x1B, 0x00])
@pytest.mark.parametrize("operation", ["or", "and"])
def test_lop3_has_a_predicate_for_results_other_than_zero(table: int, operation: str) -> None:
    a, b, q = product(PAIRS, PAIRS, [0, 1])
    plain = applied(f"lop3.b32 %d, %a, %b, 255, {table};", "u32", ("b32", "b32"), [a, b])
    body = f"setp.ne.u32 %p1, %c, 0; lop3.{operation}.b32 %r1|%p2, %a, %b, 255, {table}, %p1; selp.u32 %d, 1, 0, %p2;"
    found = applied(body, "u32", ("b32", "b32", "u32"), [a, b, q])
    combine = {"or": np.logical_or, "and": np.logical_and}[operation]
    assert found.tolist() == combine(plain != 0, np.array(q) != 0).astype(int).tolist()
    unwanted = body.replace("%r1|%p2", "_|%p2")
    assert applied(unwanted, "u32", ("b32", "b32", "u32"), [a, b, q]).tolist() == found.tolist()


@pytest.mark.parametrize(
    ("name", "bits"), [("u16", 16), ("s16", 16), ("u8", 8), ("s8", 8), ("u4", 4), ("s4", 4), ("s2", 2)]
)
def test_two_integers_are_packed_with_saturation(name: str, bits: int) -> None:
    low, high = (0, 2**bits - 1) if name[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    a, b, c = INTEGERS, INTEGERS[::-1], [0x1234ABCD] * len(INTEGERS)
    has_c = bits < 16
    body = f"cvt.pack.sat.{name}.s32{'.b32' if has_c else ''} %d, %a, %b{', %c' if has_c else ''};"
    types: tuple[str, ...] = ("s32", "s32", "b32") if has_c else ("s32", "s32")
    found = applied(body, "b32", types, [a, b, c][: len(types)])
    for value, x, y, z in zip(found, a, b, c, strict=True):
        first, second = (min(max(item, low), high) & (2**bits - 1) for item in (x, y))
        assert int(value) == (first << bits | second | (z << 2 * bits if has_c else 0)) & 0xFFFFFFFF


FP8 = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_eight_bit_floats_round_and_saturate(name: str, relu: str) -> None:
    largest = float(ml_dtypes.finfo(FP8[name]).max)

    def expected(values: list[float]) -> np.ndarray:
        clipped = np.clip(np.array(values, np.float32), 0 if relu else -largest, largest)
        return np.where(np.isnan(values), 0x7F, clipped.astype(FP8[name]).view(np.uint8)).astype(np.uint16)

    found = apply(f"cvt.rn.satfinite{relu}.{name}.f32 %d, %a, %b;", "b16", ("f32", SMALL), ("f32", SMALL[::-1]))
    assert (found & 0x7F7F).tolist() == ((expected(SMALL) << 8 | expected(SMALL[::-1])) & 0x7F7F).tolist()
    body = f"mov.b32 %r1, {{%a, %b}}; cvt.rn.satfinite{relu}.{name}.f16x2 %d, %r1;"
    found = apply(body, "b16", ("f16", HALF), ("f16", HALF[::-1]))
    assert (found & 0x7F7F).tolist() == ((expected(HALF[::-1]) << 8 | expected(HALF)) & 0x7F7F).tolist()


def test_packed_conversions_from_eight_bit_floats_can_rectify() -> None:
    raw = np.arange(256, dtype=np.uint8)
    pairs = (raw[::4].astype(np.uint16) << 8) | raw[1::4]
    for name, dtype in FP8.items():
        found = apply(f"cvt.rn.relu.f16x2.{name} %d, %a;", "f16x2", ("b16", pairs)).view(np.float16)
        expected = pairs.view(dtype).astype(np.float16)
        np.testing.assert_array_equal(found, np.where(expected < 0, 0, expected))


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_sums_of_16_bits_and_singles_are_rounded_once(name: str, mode: str) -> None:
    halves, singles = [1.0, -2.5, 1000.0, 2.0**-14, 0.25], [1e-9, 3.0, 2.0**-30, -7e5, 2.0**25]
    types: tuple[str, ...] = (name, "f32")
    columns = product(halves, singles)
    numbers = [np.array(column, np.float32) for column in columns]
    for opcode, exact in (("add", lambda a, c: a + c), ("sub", lambda a, c: a - c)):
        found = applied(f"{opcode}.{mode}.f32.{name} %d, %a, %b;", "f32", types, columns)
        expected = [
            rounded(exact(Fraction(float(a)), Fraction(float(c))), "f32", mode) for a, c in zip(*numbers, strict=True)
        ]
        assert found.tolist() == expected
    found = applied(
        f"fma.{mode}.f32.{name} %d, %a, %b, %c;", "f32", (name, name, "f32"), [columns[0], columns[0], columns[1]]
    )
    expected = [
        rounded(Fraction(float(a)) ** 2 + Fraction(float(c)), "f32", mode) for a, c in zip(*numbers, strict=True)
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_pairs_of_singles(mode: str) -> None:
    a, b = (np.array(column[:64], np.float32) for column in product(F32[:12], F32[:12]))
    packed = [array.view(np.uint64) for array in (a, b)]
    for opcode in ("add", "sub", "mul"):
        single = np.concatenate([apply(f"{opcode}.{mode}.f32 %d, %a, %b;", "f32", ("f32", a), ("f32", b))])
        found = apply(f"{opcode}.{mode}.f32x2 %d, %a, %b;", "b64", ("b64", packed[0]), ("b64", packed[1]))
        assert found.tobytes() == single.tobytes()
    single = apply(f"fma.{mode}.f32 %d, %a, %b, %a;", "f32", ("f32", a), ("f32", b))
    found = apply(f"fma.{mode}.f32x2 %d, %a, %b, %a;", "b64", ("b64", packed[0]), ("b64", packed[1]))
    assert found.tobytes() == single.tobytes()


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@pytest.mark.parametrize("name", ["s32", "u32"])
def test_bits_are_extended(mode: str, name: str) -> None:
    values, lengths = product([0, 0x12345678, 0x89ABCDEF, 0xFFFFFFFF], [0, 1, 4, 8, 31, 32, 33, 255])
    found = applied(f"szext.{mode}.{name} %d, %a, %b;", "u32", ("u32", "u32"), [values, lengths])
    for result, value, length in zip(found, values, lengths, strict=True):
        bits = length & 31 if mode == "wrap" else min(length, 32)
        expected = value & ((1 << bits) - 1)
        if name == "s32" and bits and expected >> (bits - 1):
            expected |= 0xFFFFFFFF & ~((1 << bits) - 1)
        assert int(result) == expected


def test_the_nth_bit_that_is_set_is_found() -> None:
    masks, bases, offsets = product([0, 0x80000001, 0x0F0F0F0F, 0xFFFFFFFF], [0, 5, 31], [-9, -1, 0, 1, 2, 9, 40])

    def reference(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        places = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [place for place in places if mask >> place & 1]
        return found[abs(offset) - 1] if abs(offset) <= len(found) else 0xFFFFFFFF

    found = applied("fns.b32 %d, %a, %b, %c;", "u32", ("u32", "u32", "s32"), [masks, bases, offsets])
    assert found.tolist() == [reference(*case) for case in zip(masks, bases, offsets, strict=True)]


def test_products_of_24_bits_are_added_with_saturation() -> None:
    columns = product([0x7FFFFF, -0x800000, 5], [0x7FFFFF, -0x800000], INTEGERS)
    found = applied("mad24.hi.sat.s32 %d, %a, %b, %c;", "s32", ("s32",) * 3, columns)
    expected = [min(max((a * b >> 16) + c, -(2**31)), 2**31 - 1) for a, b, c in zip(*columns, strict=True)]
    assert found.tolist() == expected


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("operation", ["min", "max"])
def test_the_sign_of_a_minimum_of_magnitudes_is_the_product_of_signs(operation: str, name: str) -> None:
    columns = product([1.0, -2.0, 0.5, -0.0, NAN], [3.0, -0.5, -4.0, 0.0])
    found = applied(f"{operation}.xorsign.abs.{name} %d, %a, %b;", name, (name, name), columns).astype(float)
    for value, a, b in zip(found, *columns, strict=True):
        magnitude = {"min": np.fmin, "max": np.fmax}[operation](abs(a), abs(b))
        assert value == magnitude * (-1 if math.copysign(1, a) != math.copysign(1, b) else 1)


def test_a_magnitude_may_be_a_constant() -> None:
    found = apply("min.xorsign.abs.f32 %d, %a, 0fBF800000;", "f32", ("f32", [2.0, -0.5]))
    assert found.tolist() == [-1.0, 0.5]


def test_comparisons_of_halves_flush_subnormals_on_request() -> None:
    tiny = float(np.float16(6e-8))
    for flush, expected in (("", [1, 0]), (".ftz", [0, 0])):
        found = apply(
            f"setp.gt{flush}.f16 %p1, %a, %b; selp.u32 %d, 1, 0, %p1;",
            "u32",
            ("f16", [tiny, 0.0]),
            ("f16", [0.0, tiny]),
        )
        assert found.tolist() == expected
        body = "mov.b32 %r1, {%a, %a}; mov.b32 %r2, {%b, %b};"
        body += f"setp.gt{flush}.f16x2 %p1|%p2, %r1, %r2; selp.u32 %d, 1, 0, %p2;"
        assert apply(body, "u32", ("f16", [tiny, 0.0]), ("f16", [0.0, tiny])).tolist() == expected


def test_powers_of_bfloat16_flush_subnormals() -> None:
    found = apply("ex2.approx.ftz.bf16 %d, %a;", "bf16", ("bf16", [-126.0, -127.0, 3.0])).astype(float)
    assert found.tolist() == [2.0**-126, 0.0, 8.0]


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_conversions_to_16_bits_saturate_at_the_largest_number(name: str) -> None:
    largest = 65504.0 if name == "f16" else 255.0 * 2**120
    values = [3.4e38, -3.4e38, INF, -INF, 1.5]
    found = apply(f"cvt.rn.satfinite.{name}.f32 %d, %a;", name, ("f32", values)).astype(float)
    assert found.tolist() == [largest, -largest, largest, -largest, 1.5]


@pytest.mark.parametrize("mode", ["rn", "rz", "rna"])
def test_singles_become_tf32(mode: str) -> None:
    tie, above = 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-20
    values = [1.0, tie, above, -above, 3 + 2.0**-10, INF, -INF, 3.4e38]
    found = apply(f"cvt.{mode}.tf32.f32 %d, %a;", "b32", ("f32", values)).view(np.float32)
    step = 2.0**-10
    expected = {
        "rn": [1.0, 1.0, 1 + step, -1 - step, 3.0],
        "rz": [1.0, 1.0, 1.0, -1.0, 3.0],
        "rna": [1.0, 1 + step, 1 + step, -1 - step, 3 + 2 * step],
    }[mode]
    assert found[:5].tolist() == expected
    assert found[5:7].tolist() == [INF, -INF]
    finite = apply(f"cvt.{mode}.satfinite.tf32.f32 %d, %a;", "b32", ("f32", values)).view(np.float32)
    assert (
        np.isfinite(finite).all() and finite[5] == -finite[6] == np.array([0x7F7FE000], np.uint32).view(np.float32)[0]
    )
    rectified = apply(f"cvt.{mode}.relu.tf32.f32 %d, %a;", "b32", ("f32", values)).view(np.float32)
    assert (rectified >= 0).all()


@pytest.mark.parametrize(
    ("body", "result", "operands", "expected"),
    [
        ("rem.u32 %d, %a, 0;", "u32", [("u32", [0, 1, 7])], [0xFFFFFFFF] * 3),
        ("rem.s64 %d, %a, 0;", "s64", [("s64", [0, 63, -5])], [-1] * 3),
        ("bfe.u64 %d, %a, %b, %c;", "u64", [("u64", [1, 1]), ("u32", [0, 256]), ("u32", [256, 1])], [1, 0]),
        ("bfe.s64 %d, %a, %b, %c;", "s64", [("s64", [1, 1]), ("u32", [0, 256]), ("u32", [256, 5])], [1, 0]),
        ("bfi.b64 %d, %a, %a, %b, %c;", "b64", [("b64", [1, 1]), ("u32", [1, 5]), ("u32", [256, 256])], [3, 33]),
        ("testp.normal.f32 %p1, %a; selp.u32 %d, 1, 0, %p1;", "u32", [("f32", [0.0, -0.0, 1e-40, NAN])], [1, 1, 0, 0]),
        ("slct.ftz.u32.f32 %d, 0, 2, %a;", "u32", [("f32", [-1e-40, -1.0])], [0, 2]),
        ("cvt.sat.f32.f16 %d, %a;", "f32", [("f16", [-0.0, -1.0, NAN, 2.0])], [0.0, 0.0, 0.0, 1.0]),
    ],
)  # fmt: skip
def test_cases_that_the_isa_leaves_open(
    body: str, result: str, operands: list[tuple[str, list[Any]]], expected: list[Any]
) -> None:
    """As an H200 answers them."""
    found = apply(body, result, *operands)
    assert found.tolist() == expected and not np.signbit(found[found == 0]).any()
