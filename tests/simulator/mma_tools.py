"""One mma of any type: its PTX, its fragments written out from the PTX ISA's figures, and its exact result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from flashwright.simulator import SimulatedGPU

from .hopper_tools import HEADER_90A

BITS = {"b1": 1, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "f16": 16, "bf16": 16, "tf32": 32, "f64": 64}
STORED = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32, "f64": np.float64, "s8": np.int8, "u8": np.uint8,
}  # fmt: skip
ACCUMULATED = {"f32": np.float32, "f16": np.float16, "s32": np.int32, "f64": np.float64}


def raw_bits(values: np.ndarray, name: str) -> np.ndarray:
    """The bit pattern of each element, as an unsigned number."""
    if name in ("b1", "s4", "u4"):
        return values.astype(np.int64) & ((1 << BITS[name]) - 1)
    stored = values.astype(STORED[name])
    return stored.view(f"u{stored.dtype.itemsize}")


def values_of(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Small integers that the type holds, so that every sum of products is exact."""
    rng = np.random.default_rng(seed)
    low, high = {"b1": (0, 2), "u4": (0, 16), "s4": (-8, 8), "u8": (0, 256), "s8": (-128, 128)}.get(name, (-4, 5))
    return rng.integers(low, high, shape).astype(np.float64)


@dataclass(frozen=True)
class Mma:
    rows: int
    depth: int
    a_type: str
    b_type: str
    accumulator: str
    suffix: str = ""
    prefix: str = ""

    @property
    def opcode(self) -> str:
        types = f"{self.accumulator}.{self.a_type}.{self.b_type}.{self.accumulator}"
        return f"mma.sync.aligned.m{self.rows}n8k{self.depth}.row.col{self.prefix}.{types}{self.suffix}"

    @property
    def elements(self) -> int:
        return max(32 // BITS[self.a_type], 1)

    def a_registers(self, a: np.ndarray) -> np.ndarray:
        """[lane, register] of a rows×depth matrix."""
        bits, halves, e = raw_bits(a, self.a_type), self.rows // 8, self.elements
        return self._packed(
            [
                [
                    (r, lane, i, bits[lane // 4 + 8 * (r % halves), 4 * e * (r // halves) + e * (lane % 4) + i])
                    for i in range(e)
                ]
                for r in range(halves * self.depth // (4 * e))
                for lane in range(32)
            ]
        )

    def b_registers(self, b: np.ndarray) -> np.ndarray:
        """[lane, register] of a depth×8 matrix."""
        bits, e = raw_bits(b, self.b_type), self.elements
        return self._packed(
            [
                [(r, lane, i, bits[4 * e * r + e * (lane % 4) + i, lane // 4]) for i in range(e)]
                for r in range(self.depth // (4 * e))
                for lane in range(32)
            ]
        )

    def _packed(self, places: list[list[tuple[int, int, int, Any]]]) -> np.ndarray:
        width = BITS[self.a_type]
        count = places[-1][0][0] + 1
        registers = np.zeros((32, count), np.uint64 if width == 64 else np.uint32)
        for place in places:
            for register, lane, index, value in place:
                registers[lane, register] |= registers.dtype.type(int(value) << (width * index))
        return registers

    def c_registers(self, c: np.ndarray) -> np.ndarray:
        lanes = np.arange(32)
        fragment = np.stack(
            [c[lanes // 4 + 8 * (i // 2), 2 * (lanes % 4) + i % 2] for i in range(self.rows // 4)], axis=1
        )
        stored = np.ascontiguousarray(fragment.astype(ACCUMULATED[self.accumulator]))
        return stored.view(np.uint64 if self.accumulator == "f64" else np.uint32)

    def ptx(self, counts: tuple[int, int, int]) -> str:
        width = 64 if self.a_type == "f64" else 32
        size = width // 8
        names = [[f"%{letter}{i}" for i in range(count)] for letter, count in zip("abc", counts, strict=True)]
        loads = [
            f"ld.param.u64 %p, [{letter}]; mad.wide.u32 %p, %t, {size * count}, %p;\n"
            + "\n".join(f"ld.global.b{width} {name}, [%p+{size * i}];" for i, name in enumerate(group))
            for letter, count, group in zip("abc", counts, names, strict=True)
        ]
        results = [f"%d{i}" for i in range(counts[2])]
        groups = ", ".join("{" + ", ".join(group) + "}" for group in (results, *names))
        registers = ", ".join(f"%{letter}<{count}>" for letter, count in zip("abcd", (*counts, counts[2]), strict=True))
        return "\n".join(
            [
                HEADER_90A.replace("8.5", "8.7"),  # 8-bit floats with K = 16 or f16 accumulators
                ".visible .entry k(.param .u64 out, .param .u64 a, .param .u64 b, .param .u64 c) {",
                f".reg .b64 %p; .reg .b32 %t; .reg .b{width} {registers};",
                "mov.u32 %t, %laneid;",
                *loads,
                f"{self.opcode} {groups};",
                f"ld.param.u64 %p, [out]; mad.wide.u32 %p, %t, {size * counts[2]}, %p;",
                *(f"st.global.b{width} [%p+{size * i}], {name};" for i, name in enumerate(results)),
                "ret; }",
            ]
        )

    def run(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, gpu: SimulatedGPU | None = None) -> np.ndarray:
        """The registers [lane, …] of D, viewed as numbers of the accumulator's type."""
        gpu = gpu or SimulatedGPU("sm_90a")
        parts = self.a_registers(a), self.b_registers(b), self.c_registers(c)
        out = gpu.to_device(np.zeros_like(parts[2]))
        ptx = self.ptx((parts[0].shape[1], parts[1].shape[1], parts[2].shape[1]))
        gpu.load(ptx).launch("k", 1, 32, 0, [out, *map(gpu.to_device, parts)])
        return np.ascontiguousarray(gpu.to_host(out)).view(ACCUMULATED[self.accumulator])

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        a = values_of(self.a_type, (self.rows, self.depth), seed)
        b = values_of(self.b_type, (self.depth, 8), seed + 1)
        return a, b, values_of("s4", (self.rows, 8), seed + 2)


FORMS = [
    Mma(16, 16, "e4m3", "e4m3", "f32"), Mma(16, 32, "e4m3", "e5m2", "f32"), Mma(16, 32, "e5m2", "e4m3", "f16"),
    Mma(16, 16, "e5m2", "e5m2", "f16"), Mma(16, 8, "tf32", "tf32", "f32"), Mma(16, 4, "tf32", "tf32", "f32"),
    Mma(16, 16, "f16", "f16", "f16"), Mma(16, 16, "bf16", "bf16", "f32"),
    Mma(8, 16, "s8", "u8", "s32"), Mma(16, 16, "u8", "s8", "s32"), Mma(16, 32, "s8", "s8", "s32"),
    Mma(8, 32, "s4", "u4", "s32"), Mma(16, 32, "u4", "u4", "s32"), Mma(16, 64, "s4", "s4", "s32"),
    Mma(8, 4, "f64", "f64", "f64"), Mma(16, 4, "f64", "f64", "f64"), Mma(16, 8, "f64", "f64", "f64"),
    Mma(16, 16, "f64", "f64", "f64"),
    Mma(8, 128, "b1", "b1", "s32", ".xor.popc"), Mma(16, 128, "b1", "b1", "s32", ".and.popc"),
    Mma(16, 256, "b1", "b1", "s32", ".xor.popc"),
]  # fmt: skip
