"""Decoding: few query rows on long caches, beside PyTorch's SDPA, in one process.

    PYTHONPATH=src python benchmarks/decode.py [--config SHORT_FORM …] [--rows decode,chunk,paged,uneven]
        [--only PATTERN] [--json FILE]

Needs a GPU. Each call is captured in a CUDA graph; graphs are replayed in turns, in random order. Results are checked
against PyTorch's first. "decode" and "chunk" are contiguous caches, "paged" the same in shuffled pages, "uneven"
sequences of very different lengths. TB/s are of keys and values read once.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashwright.integrations.kv_cache import flash_attn_with_kvcache
from flashwright.kernels.registry import parse_config
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.decode_plans import CacheTensors, DecodeKind
from flashwright.workbench.bench.timing import gpu_times_ms
from flashwright.workbench.environment import environment_record


class Problem(NamedTuple):
    kind: str
    name: str
    batch: int
    heads: tuple[int, int]
    rows: int
    keys: int
    head_dim: int
    page: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def bytes_read(self) -> int:
        keys = sum(self.lengths) if self.lengths else self.batch * self.keys
        return 2 * 2 * keys * self.heads[1] * self.head_dim


def problems() -> list[Problem]:
    decode = [
        Problem("decode", f"b{b} {q}/{kv} s{s} d{d}", b, (q, kv), 1, s, d)
        for b, q, kv, s, d in (
            (1, 32, 8, 1024, 128), (1, 32, 8, 8192, 128), (1, 32, 8, 131072, 128), (16, 32, 8, 8192, 128),
            (64, 32, 8, 8192, 128), (32, 64, 8, 4096, 64), (16, 128, 1, 8192, 128), (8, 16, 16, 8192, 128),
        )
    ]  # fmt: skip
    chunk = [Problem("chunk", f"{n} rows on 32k", 4, (32, 8), n, 32768, 128) for n in (4, 16, 128, 512)]
    paged = [Problem("paged", f"b16 32/8 s8192, pages of {p}", 16, (32, 8), 1, 8192, 128, p) for p in (16, 64, 256)]
    draw = random.Random(0)
    lengths = tuple(sorted(min(65536, max(1, int(2 ** draw.uniform(0, 16)))) for _ in range(64)))
    even = sum(lengths) // 64
    uneven = [
        Problem("uneven", f"b64 32/8, 1 … 64k, {sum(lengths)} keys", 64, (32, 8), 1, 65536, 128, 64, lengths),
        Problem("uneven", f"b64 32/8, {even} each", 64, (32, 8), 1, 65536, 128, 64, (even,) * 64),
    ]
    return [*decode, *chunk, *paged, *uneven]


def tensors_of(problem: Problem) -> tuple[Any, Any, Any, dict[str, Any]]:
    """As the drop-in takes them."""
    batch, (heads, kv_heads), head_dim = problem.batch, problem.heads, problem.head_dim
    some = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q = some(batch, problem.rows, heads, head_dim)
    arguments: dict[str, Any] = {"causal": problem.rows > 1}
    lengths = problem.lengths or (problem.keys,) * batch
    if not problem.page:
        return (
            q,
            some(batch, problem.keys, kv_heads, head_dim),
            some(batch, problem.keys, kv_heads, head_dim),
            arguments,
        )
    counts = [-(-n // problem.page) for n in lengths]
    order = torch.randperm(sum(counts), device="cuda", dtype=torch.int32)
    table = torch.zeros(batch, max(counts), dtype=torch.int32, device="cuda")
    first = 0
    for b, count in enumerate(counts):
        table[b, :count] = order[first : first + count]
        first += count
    arguments |= {"block_table": table, "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device="cuda")}
    shape = (sum(counts), problem.page, kv_heads, head_dim)
    return q, some(*shape), some(*shape), arguments


def peers_of(problem: Problem, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """PyTorch's backends that take the problem."""
    if problem.page:
        return {}
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    mask = None
    if problem.rows > 1:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(problem.rows, problem.keys)

    def run(backend: SDPBackend) -> Any:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)

    found = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        try:
            run(backend)
        except RuntimeError:
            continue
        found[name] = partial(run, backend)
    return found


def with_config(short_form: str, q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
    config = parse_config(short_form)
    kind = DecodeKind(
        AttentionOptions.of(arguments["causal"]), lambda *sizes: config, returns_lse=False, device_index=q.device.index
    )
    cache = CacheTensors(arguments.get("cache_seqlens"), page_table=arguments.get("block_table"))
    tensors = [x.transpose(1, 2) for x in (q, k, v, torch.empty_like(q))]
    return lambda: kind.run(*tensors, cache)[0].transpose(1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", default=[], help="a decode config by its short form, beside ours")
    parser.add_argument("--rows", default="decode,chunk,paged,uneven")
    parser.add_argument("--only", default="", help="a regular expression that the names of problems match")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for problem in problems():
        if problem.kind not in options.rows.split(",") or not re.search(options.only, problem.name):
            continue
        torch.manual_seed(0)
        q, k, v, arguments = tensors_of(problem)
        ours = partial(flash_attn_with_kvcache, q, k, v, **arguments)
        candidates: dict[str, Callable[[], Any]] = {"ours": ours}
        fitting = [text for text in options.config if parse_config(text).d_head == problem.head_dim]
        candidates |= {text: with_config(text, q, k, v, arguments) for text in fitting}
        candidates |= peers_of(problem, q, k, v)
        wanted = ours().float()
        for name, call in candidates.items():
            found = call().float()
            found = found.transpose(1, 2) if found.shape != wanted.shape else found
            error = (found - wanted).abs().max().item()
            if not error < 2e-2:
                print(f"{problem.name}: {name} differs by {error}")
        times = gpu_times_ms(candidates)
        results.append({"problem": problem._asdict(), "times_ms": times})
        rates = {name: problem.bytes_read / ms / 1e9 for name, ms in times.items()}
        cells = "  ".join(f"{name} {1e3 * times[name]:8.1f} us {rate:5.2f} TB/s" for name, rate in rates.items())
        print(f"{problem.kind:7s} {problem.name:32s} {cells}", flush=True)
        del q, k, v, arguments, ours, candidates
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"results": results, "environment": environment_record()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
