"""wgmma of every type gives the exact result where it is a number of the accumulator's type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from flashwright.hardware.tensor_map import Swizzle
from flashwright.simulator import SimulatedGPU

from .hopper_tools import HEADER_90A, descriptor
from .mma_tools import ACCUMULATED, BITS, raw_bits, values_of

THREADS = 128


@dataclass(frozen=True)
class Wgmma:
    columns: int
    a_type: str
    b_type: str
    accumulator: str
    suffix: str = ""
    prefix: str = ""

    @property
    def depth(self) -> int:
        return 256 // BITS[self.a_type]

    @property
    def opcode(self) -> str:
        types = f"{self.accumulator}.{self.a_type}.{self.b_type}"
        return f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{self.depth}{self.prefix}.{types}{self.suffix}"

    @property
    def starts(self) -> tuple[int, int, int]:
        """Where the matrices of `image` begin."""
        return 0, 2048, 2048 + 32 * self.columns

    def immediates(self, a_in_registers: bool) -> str:
        if self.accumulator == "s32":
            return ""
        transpositions = {"f16": 1 if a_in_registers else 2}.get(self.a_type, 0)
        return ", 1, 1" + ", 0" * transpositions

    def rows_of_bytes(self, matrix: np.ndarray, name: str) -> np.ndarray:
        """[rows, 32] bytes of a [rows, depth] matrix."""
        bits = raw_bits(matrix, name)
        if BITS[name] >= 8:
            return np.ascontiguousarray(bits).view(np.uint8).reshape(len(matrix), 32)
        return np.packbits(bits.astype(np.uint8), axis=1, bitorder="little")

    def image(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """A, then B, then B with its rows reversed: K-major without swizzle.

        The second 16 bytes of a group of eight rows lie 128 bytes after the first.
        """
        image = np.zeros(self.starts[-1] + 32 * self.columns, np.uint8)
        matrices = (a, self.a_type), (b, self.b_type), (b[::-1], self.b_type)
        for start, matrix in zip(self.starts, matrices, strict=True):
            for row, data in enumerate(self.rows_of_bytes(*matrix)):
                for chunk in range(2):
                    at = start + 256 * (row // 8) + 128 * chunk + 16 * (row % 8)
                    image[at : at + 16] = data[16 * chunk : 16 * chunk + 16]
        return np.pad(image, (0, -len(image) % 2048))

    def fragments(self, a: np.ndarray) -> np.ndarray:
        """[thread, register] of A, from the PTX ISA's figures."""
        words = self.rows_of_bytes(a, self.a_type).view(np.uint32)  # [64, 8]
        registers = np.zeros((THREADS, 4), np.uint32)
        for thread in range(THREADS):
            warp, lane = divmod(thread, 32)
            for register in range(4):
                row, word = 16 * warp + lane // 4 + 8 * (register % 2), 4 * (register // 2) + lane % 4
                registers[thread, register] = words[row, word]
        return registers

    def accumulators(self, matrix: np.ndarray) -> np.ndarray:
        """[register, thread] of a [64, N] matrix."""
        stored = matrix.astype(ACCUMULATED[self.accumulator])
        pairs = stored.dtype.itemsize == 2
        registers = np.zeros((self.columns // (4 if pairs else 2), THREADS), np.uint32)
        for register, thread in np.ndindex(registers.shape):
            warp, lane = divmod(thread, 32)
            octet, half = (register // 2, register % 2) if pairs else (register // 4, register // 2 % 2)
            row, column = 16 * warp + lane // 4 + 8 * half, 8 * octet + 2 * (lane % 4)
            value = stored[row, column : column + 2] if pairs else stored[row, [column + register % 2]]
            registers[register, thread] = np.ascontiguousarray(value).view(np.uint32)[0]
        return registers

    def ptx(self, image_bytes: int, a_in_registers: bool) -> str:
        count = self.columns // (4 if self.accumulator == "f16" else 2)
        d = "{" + ", ".join(f"%d{i}" for i in range(count)) + "}"
        a = "{%a0, %a1, %a2, %a3}" if a_in_registers else "%desc_a"
        vector = "{%v0, %v1, %v2, %v3}"
        return HEADER_90A + "\n".join(
            [
                ".visible .entry k(.param .u64 out, .param .u64 image, .param .u64 a, .param .u64 desc_a,",
                "                  .param .u64 desc_b, .param .u64 desc_c, .param .u64 c) {",
                f".shared .align 1024 .b8 memory[{image_bytes}]; .reg .b32 %v<4>, %a<4>, %t, %place, %d<{count}>;",
                ".reg .b64 %image, %out, %pa, %pc, %desc_a, %desc_b, %desc_c, %off; .reg .pred p;",
                "ld.param.u64 %out, [out]; ld.param.u64 %image, [image]; ld.param.u64 %pa, [a]; ld.param.u64 %pc, [c];",
                "ld.param.u64 %desc_a, [desc_a]; ld.param.u64 %desc_b, [desc_b]; ld.param.u64 %desc_c, [desc_c];",
                "mov.u32 %place, memory; shr.u32 %place, %place, 4; cvt.u64.u32 %off, %place;",
                "add.u64 %desc_a, %desc_a, %off; add.u64 %desc_b, %desc_b, %off; add.u64 %desc_c, %desc_c, %off;",
                "mov.u32 %t, %tid.x; mul.wide.u32 %off, %t, 16; add.u64 %image, %image, %off; add.u64 %pa, %pa, %off;",
                "mov.u32 %place, memory; mad.lo.u32 %place, %t, 16, %place;",
                *(
                    f"ld.global.v4.b32 {vector}, [%image+{at}]; st.shared.v4.b32 [%place+{at}], {vector};"
                    for at in range(0, image_bytes, THREADS * 16)
                ),
                "ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%pa];",
                "mul.wide.u32 %off, %t, 4; add.u64 %out, %out, %off; add.u64 %pc, %pc, %off;",
                *(f"ld.global.b32 %d{i}, [%pc+{4 * THREADS * i}];" for i in range(count)),
                "fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned; setp.ne.u32 p, 1, 0;",
                # Two: the second product finds its accumulators in flight. The assembler merges two that are the same.
                *(f"{self.opcode} {d}, {a}, %desc_{b}, p{self.immediates(a_in_registers)};" for b in "bc"),
                "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
                *(f"st.global.b32 [%out+{4 * THREADS * i}], %d{i};" for i in range(count)),
                "ret; }",
            ]
        )

    def run(
        self, a: np.ndarray, b: np.ndarray, c: np.ndarray, a_in_registers: bool, gpu: SimulatedGPU | None = None
    ) -> np.ndarray:
        """[register, thread] of the accumulators after C + A·Bᵀ, and the columns of A·Bᵀ in reverse added to that."""
        gpu = gpu or SimulatedGPU("sm_90a")
        image, start = self.image(a, b), self.accumulators(c)
        out = gpu.to_device(np.zeros_like(start))
        descriptors = [descriptor(at, 128, 256, Swizzle.NONE) for at in self.starts]
        arguments = [out, gpu.to_device(image), gpu.to_device(self.fragments(a)), *descriptors, gpu.to_device(start)]
        gpu.load(self.ptx(image.nbytes, a_in_registers)).launch("k", 1, THREADS, 0, arguments)
        return gpu.to_host(out)

    def operands(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        a, b = values_of(self.a_type, (64, self.depth), 0), values_of(self.b_type, (self.columns, self.depth), 1)
        return a, b, values_of("s4", (64, self.columns), 2)


FORMS = [
    Wgmma(24, "e4m3", "e5m2", "f32"), Wgmma(16, "e5m2", "e4m3", "f16"), Wgmma(64, "e4m3", "e4m3", "f32"),
    Wgmma(40, "tf32", "tf32", "f32"), Wgmma(32, "s8", "u8", "s32"), Wgmma(16, "u8", "s8", "s32"),
    Wgmma(64, "f16", "f16", "f16"), Wgmma(8, "b1", "b1", "s32", ".and.popc"),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.opcode)
@pytest.mark.parametrize("a_in_registers", [False, True])
def test_wgmma_multiplies_and_accumulates(form: Wgmma, a_in_registers: bool) -> None:
    a, b, c = form.operands()
    np.testing.assert_array_equal(form.run(a, b, c, a_in_registers), form.accumulators(c + a @ b.T + a @ b[::-1].T))


@pytest.mark.parametrize(("prefix", "expected"), [("", -(2**31) + 2 * 32 * 127**2 - 1), (".satfinite", 2**31 - 1)])
def test_integer_sums_wrap_or_saturate(prefix: str, expected: int) -> None:
    form = Wgmma(8, "s8", "s8", "s32", prefix=prefix)
    a, b, c = np.full((64, 32), 127), np.full((8, 32), 127), np.full((64, 8), 2**31 - 1)
    assert (form.run(a, b, c, False).view(np.int32) == expected).all()
