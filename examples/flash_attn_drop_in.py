"""The functions of `flash_attn`, from flashwright: the same names, arguments and layouts, nothing to build.

python examples/flash_attn_drop_in.py

Sequences of different lengths, padded in one call and packed in another, give the same rows.
"""

from __future__ import annotations

import torch

# from flash_attn import flash_attn_func, flash_attn_varlen_func
from flashwright import flash_attn_func, flash_attn_varlen_func

LENGTHS, HEADS, KV_HEADS, HEAD_DIM = (37, 100, 5), 4, 2, 64


def main() -> None:
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(total, n, HEAD_DIM, device=device, dtype=dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=device)

    packed = flash_attn_varlen_func(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), causal=True)

    worst = 0.0
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        one = flash_attn_func(*(x[None, begin:end] for x in (q, k, v)), causal=True)
        worst = max(worst, (one[0] - packed[begin:end]).abs().max().item())
    print(f"{len(LENGTHS)} sequences, {total} rows on {device}: packed and one by one differ by at most {worst:.1e}")


if __name__ == "__main__":
    main()
