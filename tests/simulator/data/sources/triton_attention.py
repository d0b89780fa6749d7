"""Causal attention in Triton, with pointers and with tensor descriptors; `ptx_of` compiles both without a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def attention_forward(
    q, k, v, out, lse, length, scale, HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Causal attention of [heads, length, HEAD] tensors; grid (length / BLOCK_M, heads)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    base = tl.program_id(1).to(tl.int64) * length * HEAD
    columns = tl.arange(0, HEAD)
    keys = tl.arange(0, BLOCK_N)
    q_block = tl.load(q + base + rows[:, None] * HEAD + columns[None, :])
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
    factor = scale * 1.4426950408889634
    for start in tl.range(0, (tl.program_id(0) + 1) * BLOCK_M, BLOCK_N):
        k_block = tl.load(k + base + (start + keys)[None, :] * HEAD + columns[:, None])
        scores = tl.dot(q_block, k_block) * factor
        scores = tl.where(rows[:, None] >= (start + keys)[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.math.exp2(scores - new_maximum[:, None])
        correction = tl.math.exp2(maximum - new_maximum)
        total = total * correction + tl.sum(p, 1)
        acc = acc * correction[:, None]
        v_block = tl.load(v + base + (start + keys)[:, None] * HEAD + columns[None, :])
        acc = tl.dot(p.to(v_block.dtype), v_block, acc)
        maximum = new_maximum
    tl.store(out + base + rows[:, None] * HEAD + columns[None, :], (acc / total[:, None]).to(out.dtype.element_ty))
    tl.store(lse + tl.program_id(1) * length + rows, (maximum + tl.math.log2(total)) * 0.6931471805599453)


@triton.jit
def attention_descriptors(
    q, k, v, out, length, scale, HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The same with tensor descriptors (bulk copies)."""
    first = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1) * length
    rows = first + tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    q_block = q.load([head + first, 0])
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
    factor = scale * 1.4426950408889634
    for start in tl.range(0, first + BLOCK_M, BLOCK_N):
        k_block = k.load([head + start, 0]).T
        scores = tl.dot(q_block, k_block) * factor
        scores = tl.where(rows[:, None] >= (start + keys)[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.math.exp2(scores - new_maximum[:, None])
        correction = tl.math.exp2(maximum - new_maximum)
        total = total * correction + tl.sum(p, 1)
        acc = acc * correction[:, None]
        v_block = v.load([head + start, 0])
        acc = tl.dot(p.to(tl.bfloat16), v_block, acc)
        maximum = new_maximum
    out.store([head + first, 0], (acc / total[:, None]).to(tl.bfloat16))


_BLOCKS = {"HEAD": "constexpr", "BLOCK_M": "constexpr", "BLOCK_N": "constexpr"}
_ALIGNED = [["tt.divisibility", 16]]


def _compiled(kernel: object, capability: int, signature: dict[str, str]) -> str:
    names = list(signature)
    source = ASTSource(
        fn=kernel,
        signature=signature | _BLOCKS,
        constexprs={(len(names) + index,): 64 for index in range(len(_BLOCKS))},
        attrs={(index,): _ALIGNED for index, name in enumerate(names) if signature[name][0] in "*i"},
    )
    options = {"num_warps": 4, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


def ptx_of() -> dict[str, str]:
    """Name → PTX."""
    numbers = {"length": "i32", "scale": "fp32"}
    pointers = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"lse": "*fp32"} | numbers
    descriptors = dict.fromkeys(("q", "k", "v", "out"), "tensordesc<bf16[64, 64]>") | numbers
    return {
        "triton_attention_sm80": _compiled(attention_forward, 80, pointers),
        "triton_attention_sm90": _compiled(attention_forward, 90, pointers),
        "triton_attention_tma_sm90": _compiled(attention_descriptors, 90, descriptors),
    }
