"""Matrix products and sums in Triton that use one instruction family each; `ptx_of` compiles them without a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr):
    """C = A·Bᵀ of [M, K] and [N, K]; grid (M / BM, N / BN)."""
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], ACC)
    for k in range(0, K, BK):
        x = tl.load(a + rows[:, None] * K + (k + depth)[None, :])
        y = tl.load(b + (k + depth)[:, None] + columns[None, :] * K)
        acc = tl.dot(x, y, acc)
    tl.store(c + rows[:, None] * N + columns[None, :], acc)


@triton.jit
def product_by_descriptors(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr):
    """The same with tensor descriptors that the kernel makes."""
    a_tensor = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    b_tensor = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    c_tensor = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros([BM, BN], ACC)
    for k in range(0, K, BK):
        acc = tl.dot(a_tensor.load([row, k]), b_tensor.load([column, k]).T, acc)
    c_tensor.store([row, column], acc)


@triton.jit
def add_rows(x, out, B: tl.constexpr):
    """out[i] += x[row, i], a row per block."""
    place = tl.arange(0, B)
    tl.atomic_add(out + place, tl.load(x + tl.program_id(0) * B + place))


def _compiled(kernel: object, signature: dict[str, str], constants: dict[str, object], ctas: int = 1) -> str:
    names = [*signature, *constants]
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in signature},
    )
    options = {"num_warps": 4, "num_stages": 3, "num_ctas": ctas}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def _product(kernel: object, inputs: str, output: str, accumulator: object, block: int = 64, ctas: int = 1) -> str:
    signature = {"a": f"*{inputs}", "b": f"*{inputs}", "c": f"*{output}", "M": "i32", "N": "i32", "K": "i32"}
    return _compiled(kernel, signature, {"BM": block, "BN": block, "BK": 64, "ACC": accumulator}, ctas)


def ptx_of() -> dict[str, str]:
    """Name → PTX."""
    return {
        "triton_product_f16": _product(product, "fp16", "fp16", tl.float16),
        "triton_product_e4m3": _product(product, "fp8e4nv", "fp32", tl.float32),
        "triton_product_s8": _product(product, "i8", "i32", tl.int32),
        "triton_product_tf32": _product(product, "fp32", "fp32", tl.float32),
        "triton_product_cluster": _product(product, "fp16", "fp32", tl.float32, 128, ctas=2),
        "triton_product_descriptors": _product(product_by_descriptors, "fp16", "fp32", tl.float32),
        "triton_vector_atomics": _compiled(add_rows, {"x": "*fp16", "out": "*fp16"}, {"B": 512}),
    }
