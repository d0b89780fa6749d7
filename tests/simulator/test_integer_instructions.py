"""Integer instructions agree with Python's integers, for all values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .tools import apply, compile_cuda, launch


def wrap(value: int, name: str) -> int:
    """To the range of u16, s32, …"""
    bits = int(name[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if name[0] == "s" and value >> (bits - 1) else value


def values(name: str) -> st.SearchStrategy[int]:
    bits = int(name[1:])
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if name[0] == "s" else (0, (1 << bits) - 1)
    edges = [v for v in (low, low + 1, -1, 0, 1, 2, 31, 32, 33, 63, 64, high - 1, high) if low <= v <= high]
    return st.integers(low, high) | st.sampled_from(edges)


def rows(*names: str) -> st.SearchStrategy[list[tuple[int, ...]]]:
    return st.lists(st.tuples(*(values(name) for name in names)), min_size=1, max_size=64)


def check(body: str, result: str, names: tuple[str, ...], reference: Callable[..., int]) -> None:
    @settings(max_examples=12, deadline=None)
    @given(rows(*names))
    def property_(cases: list[tuple[int, ...]]) -> None:
        columns = list(zip(*cases, strict=True))
        found = apply(body, result, *zip(names, columns, strict=True))
        expected = [wrap(reference(*case), result) for case in cases]
        assert [int(x) for x in found] == expected

    property_()


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


ARITHMETIC = ("u16", "s16", "u32", "s32", "u64", "s64")


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize(
    ("opcode", "reference"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul.lo", lambda a, b: a * b),
        ("min", min),
        ("max", max),
        ("div", lambda a, b: truncated(a, b) if b else -1),
        ("rem", lambda a, b: a - truncated(a, b) * b if b else -1),
    ],
)
def test_binary_arithmetic(name: str, opcode: str, reference: Callable[..., int]) -> None:
    check(f"{opcode}.{name} %d, %a, %b;", name, (name, name), reference)


@pytest.mark.parametrize("name", ARITHMETIC)
def test_high_and_fused_products(name: str) -> None:
    bits = int(name[1:])
    check(f"mul.hi.{name} %d, %a, %b;", name, (name, name), lambda a, b: (a * b) >> bits)
    check(f"mad.lo.{name} %d, %a, %b, %c;", name, (name,) * 3, lambda a, b, c: a * b + c)
    check(f"mad.hi.{name} %d, %a, %b, %c;", name, (name,) * 3, lambda a, b, c: ((a * b) >> bits) + c)
    if bits < 64:
        wide = f"{name[0]}{2 * bits}"
        check(f"mul.wide.{name} %d, %a, %b;", wide, (name, name), lambda a, b: a * b)
        check(f"mad.wide.{name} %d, %a, %b, %c;", wide, (name, name, wide), lambda a, b, c: a * b + c)


@pytest.mark.parametrize("name", ["s16", "s32", "s64"])
def test_negation_and_magnitude(name: str) -> None:
    check(f"neg.{name} %d, %a;", name, (name,), lambda a: -a)
    check(f"abs.{name} %d, %a;", name, (name,), abs)


def test_saturating_addition() -> None:
    def clamp(value: int) -> int:
        return max(-(2**31), min(2**31 - 1, value))

    check("add.sat.s32 %d, %a, %b;", "s32", ("s32", "s32"), lambda a, b: clamp(a + b))
    check("sub.sat.s32 %d, %a, %b;", "s32", ("s32", "s32"), lambda a, b: clamp(a - b))


def test_absolute_difference_and_24_bit_products() -> None:
    check("sad.s32 %d, %a, %b, %c;", "u32", ("s32", "s32", "u32"), lambda a, b, c: c + abs(a - b))
    check("mul24.lo.u32 %d, %a, %b;", "u32", ("u32", "u32"), lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF))


@pytest.mark.parametrize(
    ("body", "reference"),
    [
        ("add.cc.u32 %r1, %a, %b; addc.u32 %d, %c, 0;", lambda a, b, c: c + ((a + b) >> 32)),
        ("sub.cc.u32 %r1, %a, %b; subc.u32 %d, %c, 0;", lambda a, b, c: c - (a < b)),
        # The carry of a subtraction is that of adding the complement: 1 where nothing is borrowed.
        ("sub.cc.u32 %r1, %a, %b; addc.u32 %d, %c, 0;", lambda a, b, c: c + (a >= b)),
        (
            "sub.cc.u32 %r1, %a, %b; subc.cc.u32 %r2, %b, %c; addc.u32 %d, 0, 0;",
            lambda a, b, c: int(b - c - (a < b) >= 0),
        ),
        (
            "add.cc.u32 %r1, %a, %b; addc.cc.u32 %r2, %c, %c; addc.u32 %d, 0, 0;",
            lambda a, b, c: (2 * c + ((a + b) >> 32)) >> 32,
        ),
        ("mad.lo.cc.u32 %r1, %a, %b, %c; madc.hi.u32 %d, %a, %b, 0;", lambda a, b, c: (a * b + c) >> 32),
    ],
)
def test_carry_chains(body: str, reference: Callable[..., int]) -> None:
    check(body, "u32", ("u32", "u32", "u32"), reference)


def test_128_bit_division() -> None:
    """The compiler's division carries from subtractions into additions."""
    ptx = compile_cuda(
        """using Wide = unsigned __int128;
        extern "C" __global__ void k(unsigned long long *out, const unsigned long long *in) {
            in += 4 * threadIdx.x, out += 4 * threadIdx.x;
            Wide a = (Wide)in[1] << 64 | in[0], b = (Wide)in[3] << 64 | in[2], q = a / b, r = a % b;
            out[0] = q, out[1] = q >> 64, out[2] = r, out[3] = r >> 64; }""",
        "sm_80",
        "--device-int128",
    )
    words = np.random.default_rng(0).integers(0, 2**64, (32, 4), np.uint64)
    words[::2, 3] >>= np.uint64(40)
    words[::3, 3] = 0
    outputs = {"out": np.zeros_like(words)}
    launch(ptx, 32, outputs, words)
    for (a0, a1, b0, b1), (q0, q1, r0, r1) in zip(words.tolist(), outputs["out"].tolist(), strict=True):
        assert (q0 | q1 << 64, r0 | r1 << 64) == divmod(a0 | a1 << 64, b0 | b1 << 64)


@pytest.mark.parametrize("name", ["b16", "b32", "b64"])
def test_logic(name: str) -> None:
    check(f"and.{name} %d, %a, %b;", name, (name, name), lambda a, b: a & b)
    check(f"or.{name} %d, %a, %b;", name, (name, name), lambda a, b: a | b)
    check(f"xor.{name} %d, %a, %b;", name, (name, name), lambda a, b: a ^ b)
    check(f"not.{name} %d, %a;", name, (name,), lambda a: ~a)
    check(f"cnot.{name} %d, %a;", name, (name,), lambda a: int(a == 0))


@pytest.mark.parametrize("table", [0x00, 0x80, 0xF8, 0xEA, 0x96, 0x78, 0x6A, 0xFE, 0xCA, 0xE8, 0x1B, 0xFF])
def test_lop3_computes_its_table(table: int) -> None:
    def reference(a: int, b: int, c: int) -> int:
        bits = [(table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1))) & 1 for i in range(32)]
        return sum(bit << i for i, bit in enumerate(bits))

    check(f"lop3.b32 %d, %a, %b, %c, {table};", "b32", ("b32",) * 3, reference)


@pytest.mark.parametrize("name", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_shifts_clamp_at_the_width(name: str) -> None:
    bits = int(name[1:])
    check(f"shl.b{bits} %d, %a, %b;", name, (name, "u32"), lambda a, b: a << b if b < bits else 0)
    check(f"shr.{name} %d, %a, %b;", name, (name, "u32"), lambda a, b: a >> min(b, bits))


@pytest.mark.parametrize(("mode", "limit"), [("wrap", lambda c: c & 31), ("clamp", lambda c: min(c, 32))])
def test_funnel_shifts(mode: str, limit: Callable[[int], int]) -> None:
    def left(a: int, b: int, c: int) -> int:
        return ((((b << 32) | a) << limit(c)) >> 32) & 0xFFFFFFFF

    check(f"shf.l.{mode}.b32 %d, %a, %b, %c;", "b32", ("b32", "b32", "u32"), left)
    check(
        f"shf.r.{mode}.b32 %d, %a, %b, %c;", "b32", ("b32", "b32", "u32"), lambda a, b, c: ((b << 32) | a) >> limit(c)
    )


@pytest.mark.parametrize("name", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(name: str) -> None:
    bits = int(name[1:])

    def reference(a: int, b: int, c: int) -> int:
        # As on an H200: of more than 8 bits, 64-bit fields take all.
        position, length = (b & 255, c & 255) if bits == 32 else (b, c)
        raw = a & ((1 << bits) - 1)
        sign = raw >> min(position + length - 1, bits - 1) & 1 if name[0] == "s" and length else 0
        chosen = [raw >> (position + i) & 1 if i < length and position + i < bits else sign for i in range(bits)]
        return sum(bit << i for i, bit in enumerate(chosen))

    check(f"bfe.{name} %d, %a, %b, %c;", name, (name, "u32", "u32"), reference)
    small = ("u32", "u32")
    check(
        f"and.b32 %r1, %b, 63; and.b32 %r2, %c, 63; bfe.{name} %d, %a, %r1, %r2;",
        name,
        (name, *small),
        lambda a, b, c: reference(a, b & 63, c & 63),
    )


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_field_insert(bits: int) -> None:
    def reference(a: int, b: int, c: int, d: int) -> int:
        position, length = c & 255, d & 255
        for i in range(length):
            if position + i < bits:
                b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
        return b

    name = f"b{bits}"
    body = f"and.b32 %r1, %c, 71; shr.u32 %r2, %c, 25; bfi.{name} %d, %a, %b, %r1, %r2;"
    check(body, name, (name, name, "u32"), lambda a, b, c: reference(a, b, c & 71, c >> 25))


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_bits(bits: int) -> None:
    name = f"b{bits}"
    check(f"popc.{name} %d, %a;", "u32", (name,), lambda a: bin(a).count("1"))
    check(f"clz.{name} %d, %a;", "u32", (name,), lambda a: bits - a.bit_length())
    check(f"brev.{name} %d, %a;", name, (name,), lambda a: int(f"{a:0{bits}b}"[::-1], 2))
    check(f"bfind.u{bits} %d, %a;", "u32", (f"u{bits}",), lambda a: a.bit_length() - 1)
    check(f"bfind.s{bits} %d, %a;", "u32", (f"s{bits}",), lambda a: (a if a >= 0 else ~a).bit_length() - 1)


def test_byte_permute() -> None:
    def reference(a: int, b: int, c: int) -> int:
        data = (a | b << 32).to_bytes(8, "little")
        result = []
        for i in range(4):
            select = c >> (4 * i) & 15
            byte = data[select & 7]
            result.append((255 if byte & 128 else 0) if select & 8 else byte)
        return int.from_bytes(result, "little")

    check("prmt.b32 %d, %a, %b, %c;", "b32", ("b32",) * 3, reference)
    for selector in (0x5410, 0x7632, 0x3210, 0x0123, 0xBA98):
        check(f"prmt.b32 %d, %a, %b, {selector};", "b32", ("b32",) * 2, lambda a, b, s=selector: reference(a, b, s))


@pytest.mark.parametrize(
    ("mode", "selectors"),
    [
        ("f4e", ["3210", "4321", "5432", "6543"]),
        ("b4e", ["5670", "6701", "7012", "0123"]),
        ("rc8", ["0000", "1111", "2222", "3333"]),
        ("ecl", ["3210", "3211", "3222", "3333"]),
        ("ecr", ["0000", "1110", "2210", "3210"]),
        ("rc16", ["1010", "3232", "1010", "3232"]),
    ],
)
def test_byte_permute_modes(mode: str, selectors: list[str]) -> None:
    data = [0x10, 0x91, 0x22, 0xB3, 0x44, 0xD5, 0x66, 0xF7]
    a, b = (int.from_bytes(bytes(part), "little") for part in (data[:4], data[4:]))
    found = apply(f"prmt.b32.{mode} %d, %a, %b, %c;", "b32", ("b32", [a] * 4), ("b32", [b] * 4), ("b32", range(4)))
    expected = [int.from_bytes(bytes(data[int(d)] for d in reversed(text)), "little") for text in selectors]
    assert found.tolist() == expected


def test_dot_products_of_bytes() -> None:
    def signed_bytes(value: int) -> list[int]:
        return list(np.array([value], np.uint32).view(np.int8).astype(int))

    check(
        "dp4a.s32.s32 %d, %a, %b, %c;",
        "s32",
        ("b32", "b32", "s32"),
        lambda a, b, c: c + sum(x * y for x, y in zip(signed_bytes(a), signed_bytes(b), strict=True)),
    )


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize(
    ("operator", "reference"),
    [
        ("eq", lambda a, b: a == b), ("ne", lambda a, b: a != b), ("lt", lambda a, b: a < b),
        ("le", lambda a, b: a <= b), ("gt", lambda a, b: a > b), ("ge", lambda a, b: a >= b),
    ],
)  # fmt: skip
def test_comparisons(name: str, operator: str, reference: Callable[..., bool]) -> None:
    body = f"setp.{operator}.{name} %p1, %a, %b; selp.u32 %d, 1, 0, %p1;"
    check(body, "u32", (name, name), lambda a, b: int(reference(a, b)))


def test_comparison_with_combination_and_complement() -> None:
    body = (
        "setp.ne.u32 %p3, %c, 0; setp.lt.and.s32 %p1|%p2, %a, %b, !%p3;"
        "selp.u32 %r1, 1, 0, %p1; selp.u32 %r2, 2, 0, %p2; or.b32 %d, %r1, %r2;"
    )
    check(
        body,
        "u32",
        ("s32", "s32", "u32"),
        lambda a, b, c: int(a < b and not c) + 2 * int(a >= b and not c),
    )


def test_set_gives_numbers() -> None:
    check("set.gt.u32.s32 %d, %a, %b;", "u32", ("s32", "s32"), lambda a, b: -1 if a > b else 0)
    found = apply("set.gt.f32.s32 %d, %a, %b;", "f32", ("s32", [1, 2, -3]), ("s32", [0, 2, 5]))
    assert found.tolist() == [1.0, 0.0, 0.0]


def test_selection() -> None:
    check(
        "setp.ne.u32 %p1, %c, 0; selp.b32 %d, %a, %b, %p1;", "b32", ("b32", "b32", "u32"), lambda a, b, c: a if c else b
    )
    check("slct.b32.s32 %d, %a, %b, %c;", "b32", ("b32", "b32", "s32"), lambda a, b, c: a if c >= 0 else b)


def test_packing_and_unpacking_registers() -> None:
    check("mov.b64 %d, {%a, %b};", "b64", ("b32", "b32"), lambda a, b: a | b << 32)
    check("mov.b64 {%r1, %d}, %a;", "b32", ("b64",), lambda a: a >> 32)
    check("mov.b64 {%d, _}, %a;", "b32", ("b64",), lambda a: a)
    check("mov.b32 {_, %d}, %a;", "b16", ("b32",), lambda a: a >> 16)
    check("mov.b32 %d, {%a, %b};", "b32", ("b16", "b16"), lambda a, b: a | b << 16)
    check("mov.b64 %d, {%a, %b, %b, %a};", "b64", ("b16", "b16"), lambda a, b: a | b << 16 | b << 32 | a << 48)


@pytest.mark.parametrize(
    ("result", "source"),
    [("s32", "s16"), ("u32", "u16"), ("s64", "s32"), ("u64", "u32"), ("u16", "u32"), ("s16", "s64"), ("u32", "s16")],
)
def test_integer_conversions(result: str, source: str) -> None:
    check(f"cvt.{result}.{source} %d, %a;", result, (source,), lambda a: a)


def test_narrow_conversions_use_the_low_bits_and_extend() -> None:
    check("cvt.s32.s8 %d, %a;", "s32", ("b32",), lambda a: wrap(a, "s8"))
    check("cvt.u32.u8 %d, %a;", "u32", ("b32",), lambda a: a & 255)
    check("cvt.s8.s32 %d, %a;", "s32", ("s32",), lambda a: wrap(a, "s8"))
    check("cvt.sat.u8.s32 %d, %a;", "u32", ("s32",), lambda a: max(0, min(255, a)))
    check("cvt.sat.s16.s32 %d, %a;", "s16", ("s32",), lambda a: max(-32768, min(32767, a)))
    check("cvt.sat.u32.s32 %d, %a;", "u32", ("s32",), lambda a: max(0, a))
