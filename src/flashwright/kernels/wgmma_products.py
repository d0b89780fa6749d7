"""The products of a warpgroup as generated device functions.

An instruction names each of its accumulator's registers, up to 128 of them, so that the text depends on their number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashwright.problem.dtypes import DType

PRODUCTS_HEADER = "wgmma_products.cuh"


@dataclass(frozen=True)
class Product:
    """D of so many columns from A and B: which of them lie in shared memory with a row per index summed over."""

    columns: int
    A_in_registers: bool = False
    A_summed_over_rows: bool = False
    B_summed_over_rows: bool = False

    @property
    def name(self) -> str:
        """Of the function that adds to D."""
        A = "registers" if self.A_in_registers else "rows" if self.A_summed_over_rows else "columns"
        B = "rows" if self.B_summed_over_rows else "columns"
        return f"wgmma_{A}_{B}"


def wgmma_products(dtype: DType, products: Iterable[Product]) -> str:
    """A header with two functions for each product: `…_first` ignores what D was, the other adds to it."""
    functions = "\n".join(_functions(dtype, product) for product in dict.fromkeys(products))
    return f"""// Generated: products of 64 rows, 16 deep (PTX: wgmma.mma_async). An operand is in registers, or in
// shared memory and summed over its rows or its columns there.
#pragma once
#include "ptx/wgmma.cuh"

{functions}"""


def _functions(dtype: DType, product: Product) -> str:
    columns = product.columns
    registers = columns // 2
    a_type, a_operands, a_count = "uint64 a", '"l"(a)', 1
    if product.A_in_registers:
        a_type, a_operands, a_count = "const uint32 (&a)[4]", ", ".join(f'"r"(a[{i}])' for i in range(4)), 4
    a_text = f"%{registers}" if a_count == 1 else f"{{{_numbered(registers, 4)}}}"
    element = {DType.FP16: "f16", DType.BF16: "bf16"}[dtype]
    instruction = (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} "
        f"{{{_numbered(0, registers)}}}, {a_text}, %{registers + a_count}"
    )
    transposed = [] if product.A_in_registers else [str(int(product.A_summed_over_rows))]
    immediates = ", ".join(["1", "1", *transposed, str(int(product.B_summed_over_rows))])

    def operands(constraint: str) -> str:
        return ", ".join(f'"{constraint}"(d[{n}][{i}])' for n in range(columns // 8) for i in range(4))

    return f"""DEVICE void {product.name}_first(float (&d)[{columns // 8}][4], {a_type}, uint64 b) {{
    asm volatile("{{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, 0, 0;\\n"
                 "{instruction}, accumulate, {immediates};\\n}}"
                 : {operands("=f")}
                 : {a_operands}, "l"(b));
}}

DEVICE void {product.name}(float (&d)[{columns // 8}][4], {a_type}, uint64 b) {{
    asm volatile("{instruction}, 1, {immediates};"
                 : {operands("+f")}
                 : {a_operands}, "l"(b));
}}
"""


def _numbered(first: int, count: int) -> str:
    return ", ".join(f"%{i}" for i in range(first, first + count))
