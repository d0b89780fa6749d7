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

# (body, type of %d, types of %a, %b, …, columns of values)
CASES: list[tuple[str, str, tuple[str, ...], list[list[object]]]] = [
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
