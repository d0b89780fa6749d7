"""Instructions with edge cases, for the simulator and a GPU alike."""

from __future__ import annotations

import numpy as np

INF, NAN = np.inf, np.nan
F64 = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    3.0,
    -7.0,
    0.1,
    1e-310,
    -1e-310,
    5e-324,
    1.7e308,
    -1.7e308,
    2.0**-1022,
    INF,
    -INF,
    NAN,
    2 / 3,
]
F32 = [0.0, -0.0, 1.0, -1.0, 3.0, -7.0, 0.1, 1e-40, -1e-40, 1.4e-45, 3.4e38, -3.4e38, 2.0**-126, INF, -INF, NAN, 2 / 3]
HALF = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    448.0,
    449.0,
    464.0,
    465.0,
    500.0,
    -1000.0,
    2.0**-9,
    2.0**-10,
    1e-5,
    6e-8,
    INF,
    -INF,
    NAN,
    57344.0,
    61440.0,
    65504.0,
]
SMALL = [
    0.0,
    -0.0,
    2.0**-9,
    2.0**-10,
    3 * 2.0**-11,
    1e-5,
    1.1e-5,
    448.0,
    463.9,
    464.0,
    57344.0,
    61439.0,
    61440.0,
    1e9,
    -1e9,
    INF,
    -INF,
    NAN,
    0.3,
    -0.3,
]
INTEGERS = [
    0,
    1,
    -1,
    2,
    5,
    127,
    128,
    -128,
    -129,
    255,
    256,
    32767,
    32768,
    -32768,
    -32769,
    65535,
    65536,
    2**31 - 1,
    -(2**31),
]
LARGE = [0, 1, -1, 2**53 + 1, -(2**53) - 1, 2**62 + 1, -(2**62) - 1, 2**63 - 1, -(2**63), 123456789012345678]
THREE = [INTEGERS, INTEGERS[::-1], [0x1234ABCD] * len(INTEGERS)]
PAIRS = [0, 0x00010002, 0xFFFF0001, 0x80007FFF, 0x7FFF8000, 0xFFFFFFFF, 0x8000FFFE, 0x1234ABCD]


def product(*columns: list[object]) -> list[list[object]]:
    """Every combination, as columns."""
    grid = np.meshgrid(*(np.arange(len(column)) for column in columns), indexing="ij")
    return [[column[i] for i in indices.ravel()] for column, indices in zip(columns, grid, strict=True)]


MODES = ("rn", "rz", "rm", "rp")

U32 = [
    0, 1, 2, 31, 32, 33, 63, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678,
    0xDEADBEEF, 0xAAAAAAAA,
]  # fmt: skip
U64 = [0, 1, 63, 64, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
S32, S64 = ([x - 2**bits if x >> (bits - 1) else x for x in values] for values, bits in ((U32, 32), (U64, 64)))
WHOLE = {
    "u16": [0, 1, 5, 255, 0x7FFF, 0x8000, 0xFFFF], "s16": [0, 1, 5, -1, 255, -0x8000, 0x7FFF],
    "u32": U32, "s32": S32, "u64": U64, "s64": S64,
}  # fmt: skip
COUNTS = [0, 1, 5, 31, 32, 40, 255, 256, 0x1F1F, 0xFFFFFFFF]
SELECTORS = [0, 1, 2, 3, 0x3210, 0x7654, 0xFEDC, 0x8421, 0xFFFFFFFF]
HALVES = [0.0, -0.0, 1.0, -1.5, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, 0.1, 2049.0, INF, -INF, NAN]
NUMBERS = [
    0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 127.5, -128.5, 255.5, 3e9, -3e9, 1e-40, 5e9, 1e19, -1e19, 1e20, INF, -INF,
    NAN, 2147483520.0, 4294967040.0,
]  # fmt: skip
SIGNS = ("u32", "s32")
TO_INTEGRAL = ("rni", "rzi", "rmi", "rpi")

Case = tuple[str, str, tuple[str, ...], list[list[object]]]


def unary(opcode: str, result: str, operand: str, values: list[object]) -> Case:
    return f"{opcode} %d, %a;", result, (operand,), [values]


def binary(opcode: str, name: str, values: list[object], result: str | None = None) -> Case:
    """All pairs of values of a type."""
    return f"{opcode} %d, %a, %b;", result or name, (name, name), product(values, values)


def ternary(opcode: str, types: tuple[str, ...], *columns: list[object]) -> Case:
    """``types`` of the result and of three operands."""
    return f"{opcode} %d, %a, %b, %c;", types[0], types[1:], product(*columns)


INTEGER_CASES: list[Case] = [
    *(binary(f"{op}.{t}", t, WHOLE[t]) for t in WHOLE for op in ("mul.lo", "mul.hi", "min", "max", "div", "rem")),
    *(binary(f"{op}.u32", "u32", U32) for op in ("add", "sub", "mul24.lo", "mul24.hi", "shr")),
    *(binary(f"{op}.s32", "s32", S32) for op in ("add.sat", "sub.sat", "mul24.lo", "mul24.hi")),
    *((f"dp4a.{x}.{y} %d, %a, %b, 100;", "s32", ("b32", "b32"), product(U32, U32)) for x in SIGNS for y in SIGNS),
    *(
        (f"dp2a.{h}.{x}.{y} %d, %a, %b, 100;", "s32", ("b32", "b32"), product(U32, U32))
        for h in ("lo", "hi")
        for x in SIGNS
        for y in SIGNS
    ),
    *(binary(f"set.{c}.s32.{t}", t, WHOLE[t], "s32") for c in ("lt", "ge") for t in SIGNS),
    *(
        (f"{op}.{t} %d, %a, %b;", t, (t, "u32"), product(WHOLE[t.replace("b", "u")], COUNTS))
        for op, t in (("shl", "b32"), ("shr", "s32"), ("shl", "b64"), ("shr", "s64"))
    ),
    *(
        (f"szext.{m}.{t} %d, %a, %b;", t, (t, "u32"), product(WHOLE[t], COUNTS))
        for m in ("clamp", "wrap")
        for t in ("u32", "s32")
    ),
    *((f"bmsk.{m}.b32 %d, %a, %b;", "b32", ("u32", "u32"), product(COUNTS, COUNTS)) for m in ("clamp", "wrap")),
    *(
        ternary(f"shf.{s}.{m}.b32", ("b32", "b32", "b32", "u32"), U32[:9], U32[9:], COUNTS)
        for s in "lr"
        for m in ("clamp", "wrap")
    ),
    *(ternary(f"bfe.{t}", (t, t, "u32", "u32"), WHOLE[t], COUNTS, COUNTS) for t in ("u32", "s32", "u64", "s64")),
    *(
        (f"bfi.{t} %d, %a, 0x5A5A5A5A, %b, %c;", t, (t, "u32", "u32"), product(v, COUNTS, COUNTS))
        for t, v in (("b32", U32), ("b64", U64))
    ),
    *(
        ternary(f"prmt.b32{m}", ("b32", "b32", "b32", "u32"), U32[12:], U32[12:], SELECTORS)
        for m in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")
    ),
    *((f"sad.{t} %d, %a, %b, 7;", t, (t, t), product(WHOLE[t], WHOLE[t])) for t in ("u32", "s32")),
    *(unary(f"bfind{s}.{t}", "u32", t, WHOLE[t]) for s in ("", ".shiftamt") for t in ("u32", "s32", "u64", "s64")),
    *(unary(f"{op}.b32", "u32", "b32", U32) for op in ("popc", "clz", "brev", "not", "cnot")),
    *(unary(f"{op}.b64", "u32", "b64", U64) for op in ("popc", "clz")),
    ternary("fns.b32", ("b32", "b32", "u32", "s32"), U32, [0, 5, 31], [-3, -1, 0, 1, 2, 9]),
    (
        "sub.cc.u32 %r1, %a, %b; subc.cc.u32 %r2, %b, %a; addc.u32 %d, %r1, %r2;",
        "u32",
        ("u32", "u32"),
        product(U32, U32),
    ),
    ("mad.lo.cc.u32 %r1, %a, %b, %a; madc.hi.u32 %d, %a, %b, %b;", "u32", ("u32", "u32"), product(U32, U32)),
]

FLOAT_CASES: list[Case] = [
    *(
        binary(f"{op}.{t}", t, HALVES)
        for t in ("f16", "bf16")
        for op in (
            "add.rn",
            "sub.rn",
            "mul.rn",
            "min",
            "max",
            "min.NaN",
            "max.NaN",
            "min.xorsign.abs",
            "max.NaN.xorsign.abs",
        )
    ),
    *(
        binary(f"{op}.f16", "f16", HALVES)
        for op in ("add.sat", "mul.ftz", "add.ftz.sat", "min.ftz", "max.ftz.NaN", "sub.sat")
    ),
    *(
        ternary(f"fma.rn{m}.{t}", (t,) * 4, HALVES, HALVES[:6], HALVES)
        for t, m in (("f16", ""), ("f16", ".ftz"), ("f16", ".sat"), ("f16", ".relu"), ("bf16", ""), ("bf16", ".relu"))
    ),
    *(unary(f"{op}.{t}", t, t, HALVES) for t in ("f16", "bf16") for op in ("neg", "abs")),
    *(
        binary(f"{op}.f32", "f32", F32)
        for op in (
            "min",
            "max",
            "min.NaN",
            "max.NaN",
            "min.ftz",
            "max.ftz",
            "mul.rn",
            "mul.rz",
            "mul.ftz.rn",
            "add.ftz",
            "sub.sat",
            "add.ftz.sat",
            "div.rn",
            "div.rz",
            "min.xorsign.abs",
            "max.NaN.xorsign.abs",
            "copysign",
        )
    ),
    *(ternary(f"fma.rn.{m}.f32", ("f32",) * 4, F32, F32[:6], F32) for m in ("ftz", "sat", "ftz.sat")),
    *(binary(f"{op}.f64", "f64", F64) for op in ("min", "max", "mul.rn", "mul.rz", "mul.rm", "mul.rp", "copysign")),
    *(unary(f"{op}.{m}.f32", "f32", "f32", F32) for op in ("sqrt", "rcp") for m in MODES),
    *(
        (f"testp.{p}.{t} %p1, %a; selp.u32 %d, 1, 0, %p1;", "u32", (t,), [v])
        for t, v in (("f32", F32), ("f64", F64))
        for p in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    ),
    *(
        binary(f"set.{c}.u32.f32", "f32", F32, "u32")
        for c in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
    ),
    *(binary(f"set.{c}.ftz.f32.f32", "f32", F32) for c in ("eq", "lt", "geu")),
    *(binary(f"set.{c}.u32.{t}", t, HALVES, "u32") for c in ("eq", "ltu", "nan") for t in ("f16", "bf16")),
    ternary("slct.f32.f32", ("f32",) * 4, F32[:4], F32[4:6], F32),
    ternary("slct.ftz.u32.f32", ("u32", "u32", "u32", "f32"), U32[:2], U32[2:4], F32),
]

CONVERSION_CASES: list[Case] = [
    *(
        unary(f"cvt.{m}.{t}.{f}", t, f, HALVES if f == "f16" else NUMBERS)
        for f in ("f32", "f64", "f16")
        for m in TO_INTEGRAL
        for t in WHOLE
    ),
    *((f"cvt.rzi.{t}.f32 %r1, %a; mov.u32 %d, %r1;", "s32", ("f32",), [NUMBERS]) for t in ("u8", "s8")),
    unary("cvt.rni.ftz.s32.f32", "s32", "f32", NUMBERS),
    *(unary(f"cvt.{m}.{s}f32.f32", "f32", "f32", NUMBERS) for m in TO_INTEGRAL for s in ("", "sat.", "ftz.")),
    *(unary(f"cvt.{m}.{t}.{t}", t, t, v) for m in TO_INTEGRAL for t, v in (("f64", NUMBERS), ("f16", HALVES))),
    *(unary(f"cvt.{m}.f32.f64", "f32", "f64", F64 + NUMBERS) for m in MODES),
    *(unary(f"cvt.{m}.f16.f64", "f16", "f64", F64 + HALVES) for m in MODES),
    *(
        unary(f"cvt.{m}.{t}.f32", t, "f32", F32 + HALVES + NUMBERS)
        for t in ("f16", "bf16")
        for m in ("rn", "rz", "rn.satfinite")
    ),
    *(
        (f"cvt.rn{s}.{t}x2.f32 %d, %a, %b;", "b32", ("f32", "f32"), [F32, F32[::-1]])
        for t in ("f16", "bf16")
        for s in ("", ".satfinite")
    ),
    *(
        unary(f"cvt.{t}", t.split(".")[-2], t.split(".")[-1], HALVES)
        for t in ("sat.f32.f16", "f32.f16", "f32.bf16", "f64.f16")
    ),
    *(unary(f"cvt.sat.{t}.{f}", t, f, WHOLE[f]) for f in ("s32", "u32") for t in ("u16", "s16")),
    *(unary(f"cvt.sat.{t}.s64", t, "s64", S64) for t in ("u32", "s32")),
    *(unary(f"cvt.{m}.f32.{f}", "f32", f, WHOLE[f]) for m in MODES for f in ("s32", "u32", "s64", "u64")),
]

# (body, type of %d, types of %a, %b, …, columns of values)
CASES: list[Case] = [
    *INTEGER_CASES,
    *FLOAT_CASES,
    *CONVERSION_CASES,
    *((f"div.{m}.f64 %d, %a, %b;", "f64", ("f64", "f64"), product(F64, F64)) for m in MODES),
    *((f"fma.{m}.f64 %d, %a, %b, %c;", "f64", ("f64",) * 3, product(F64, F64[:8], F64)) for m in MODES),
    *((f"add.{m}.f64 %d, %a, %b;", "f64", ("f64", "f64"), product(F64, F64)) for m in MODES),
    *((f"rcp.{m}.f64 %d, %a;", "f64", ("f64",), [F64]) for m in MODES),
    *((f"sqrt.{m}.f64 %d, %a;", "f64", ("f64",), [F64]) for m in MODES),
    *((f"add.{m}.f32 %d, %a, %b;", "f32", ("f32", "f32"), product(F32, F32)) for m in MODES),
    *((f"fma.{m}.f32 %d, %a, %b, %c;", "f32", ("f32",) * 3, product(F32, F32[:8], F32)) for m in MODES),
    *((f"cvt.{m}.bf16.f32 %d, %a;", "bf16", ("f32",), [F32]) for m in ("rn", "rz")),
    *((f"cvt.{m}.f64.s64 %d, %a;", "f64", ("s64",), [LARGE]) for m in MODES),
    *((f"cvt.{m}.bf16.s64 %d, %a;", "bf16", ("s64",), [LARGE]) for m in MODES),
    *((f"cvt.{m}.f16.s32 %d, %a;", "f16", ("s32",), [INTEGERS]) for m in MODES),
    *((f"cvt.{m}.bf16.f64 %d, %a;", "bf16", ("f64",), [F64]) for m in MODES),
    *(
        (f"cvt.rn.satfinite{r}.{t}.f32 %d, %a, %b;", "b16", ("f32", "f32"), [SMALL, SMALL[::-1]])
        for t in ("e4m3x2", "e5m2x2")
        for r in ("", ".relu")
    ),
    *(
        (f"mov.b32 %r1, {{%a, %b}}; cvt.rn.satfinite{r}.{t}.f16x2 %d, %r1;", "b16", ("f16", "f16"), [HALF, HALF[::-1]])
        for t in ("e4m3x2", "e5m2x2")
        for r in ("", ".relu")
    ),
    *(
        (f"cvt.rn{r}.f16x2.{t} %d, %a;", "f16x2", ("b16",), [list(range(i, 65536, 1024))])
        for t in ("e4m3x2", "e5m2x2")
        for r in ("", ".relu")
        for i in (0, 99, 355, 611, 867)
    ),
    *((f"cvt.rn.relu.{t}.f32 %d, %a;", "b16", ("f32",), [F32]) for t in ("f16", "bf16")),
    *((f"cvt.rn.relu.{t}.f32 %d, %a, %b;", "b32", ("f32",) * 2, [F32, F32[::-1]]) for t in ("f16x2", "bf16x2")),
    *((f"cvt.{m}.relu.tf32.f32 %d, %a;", "b32", ("f32",), [F32]) for m in ("rn", "rz")),
    *((f"cvt.{m}.tf32.f32 %d, %a;", "b32", ("f32",), [F32]) for m in ("rn", "rz", "rna")),
    *(
        (f"fma.rn.relu.{t} %d, %a, %b, %c;", "b16", (t,) * 3, product([-0.0, 2.0, -3.0, NAN], [-0.0, 1.0], [0.0, -0.0]))
        for t in ("f16", "bf16")
    ),
    *(
        (f"cvt.pack.sat.{t}.s32 %d, %a, %b;", "b32", ("s32", "s32"), [INTEGERS, INTEGERS[::-1]])
        for t in ("u16", "s16")
    ),
    *(
        (f"cvt.pack.sat.{t}.s32.b32 %d, %a, %b, %c;", "b32", ("s32", "s32", "b32"), THREE)
        for t in ("u8", "s8", "u4", "s4", "u2", "s2")
    ),
    *((f"{op}.u16x2 %d, %a, %b;", "b32", ("b32", "b32"), product(PAIRS, PAIRS)) for op in ("add", "min", "max")),
    *(
        (f"{op}.s16x2 %d, %a, %b;", "b32", ("b32", "b32"), product(PAIRS, PAIRS))
        for op in ("add", "min", "max", "min.relu", "max.relu")
    ),
    *((f"{op}.relu.s32 %d, %a, %b;", "s32", ("s32", "s32"), product(INTEGERS, INTEGERS[:4])) for op in ("min", "max")),
    ("mad.hi.sat.s32 %d, %a, %b, %c;", "s32", ("s32",) * 3, product(INTEGERS[-2:], INTEGERS[-2:], INTEGERS)),
    *(
        (
            f"setp.ne.u32 %p1, %c, 0; lop3.{op}.b32 %r1|%p2, %a, %b, 255, {table}, %p1; selp.u32 %d, 1, 0, %p2; "
            "add.u32 %d, %d, %r1;",
            "u32", ("b32", "b32", "u32"), product(PAIRS, PAIRS, [0, 1]),
        )
        for op in ("or", "and")
        for table in (0x80, 0x96, 0x1B, 0x00)
    ),
]  # fmt: skip
