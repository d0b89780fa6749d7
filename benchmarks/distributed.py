"""Context-parallel attention as far as one GPU can show it: errors by ranks, overlap with copies, speeds of kernels.

    PYTHONPATH=src python benchmarks/distributed.py [--output benchmarks/results/distributed_h200.json] [errors …]

- `errors`: every rank's part of a sequence in turn, by the same rounds, kernels and merging that ranks use; against
  float64, beside partial results merged in bf16.
- `overlap`: all rounds of one of eight ranks, keys and values copied between buffers on a second stream meanwhile;
  beside the same rounds without copies, and one launch of as much work.
- `speeds`: forward and backward of one launch, which `flashwright plan` computes with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from flashwright.distributed.layouts import holdings
from flashwright.distributed.parts import Kernels, no_keys_yet
from flashwright.distributed.rounds import RING, Round, rounds_of
from flashwright.distributed.sequence import SharedSequence, packed
from flashwright.distributed.visibility import Launch, Mask, Span
from flashwright.operators.backward import differentiate_on_gpu
from flashwright.operators.forward import run_on_gpu
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import FULL, Window
from flashwright.runtime.reference import attention_gradients, attention_reference
from flashwright.workbench.bench.timing import gpu_times_ms
from flashwright.workbench.environment import environment_record

CAUSAL = Window(None, 0, bottom_right=False)
NAMES = ("out", "dq", "dk", "dv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["errors", "overlap", "speeds"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    measured = {"errors": errors, "overlap": overlap, "speeds": speeds}
    document: dict[str, Any] = {"environment": environment_record()}
    for name in arguments.parts:
        document[name] = measured[name]()
        for row in document[name]:
            print(name, json.dumps(row), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


# --- Errors --------------------------------------------------------------------------------------------------------


def errors(length: int = 8192, heads: tuple[int, int] = (8, 2), head_dim: int = 128) -> list[dict[str, Any]]:
    q, k, v, do = _tensors(length, heads, head_dim)
    options = AttentionOptions(CAUSAL)
    exact = [x.double() for x in (q, k, v, do)]
    out, _ = attention_reference(*exact[:3], options=options)
    expected = [out, *attention_gradients(exact[3], None, *exact[:3], options=options)]
    kernels = Kernels(options, "gpu", deterministic=True)
    whole = Launch(Span(0, length), Span(0, length), CAUSAL)
    alone, lse = kernels.forward(q, k, v, whole)
    gradients = differentiate_on_gpu(do, None, q, k, v, alone, lse, options, deterministic=True)
    found = [_errors("one launch", 1, (alone, *gradients), expected)]
    for merging in ("fp32", "bf16"):
        for ranks in (1, 2, 4, 8, 16):
            found.append(_errors(merging, ranks, _by_ranks(ranks, merging, q, k, v, do, kernels), expected))
    return found


def _errors(merging: str, ranks: int, actual: Any, expected: Any) -> dict[str, Any]:
    relative = {
        name: float((x.double() - y).norm() / y.norm()) for name, x, y in zip(NAMES, actual, expected, strict=True)
    }
    return {"merging": merging, "ranks": ranks, **relative}


def _by_ranks(ranks: int, merging: str, q: Any, k: Any, v: Any, do: Any, kernels: Kernels) -> Any:
    """What `ranks` ranks compute in a zigzag ring, one after the other."""
    length = q.shape[2]
    by_rank = holdings("zigzag", length, ranks)
    mask = Mask(Window(None, 0), (0, length), (0, length))
    rounded = (lambda x: x.to(q.dtype).to(x.dtype)) if merging == "bf16" else (lambda x: x)
    out = torch.empty_like(q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    places = [torch.cat([torch.arange(*chunk, device=q.device) for chunk in chunks]) for chunks in by_rank]
    for rank, rows in enumerate(places):
        mine = [x[:, :, rows].contiguous() for x in (q, do)]
        sums = no_keys_yet(mine[0], all_come_first=False)
        rounds = rounds_of(RING, rank, by_rank, by_rank, mask, k.shape[1])
        for step, each in enumerate(rounds):
            keys = places[(rank - step) % ranks][_order(each)]
            for tile in each.tiles:
                at = keys[tile.keys.slice]
                inner = (slice(None), slice(None), tile.rows.slice)
                known = (sums[0][inner], sums[1][inner])
                kernels.forward(mine[0][inner], k[:, :, at], v[:, :, at], Launch(*tile), known)
                known[0].copy_(rounded(known[0]))
        rank_out, rank_lse = sums
        out[:, :, rows] = rank_out.to(q.dtype)
        for step, each in enumerate(rounds):
            keys = places[(rank - step) % ranks][_order(each)]
            for tile in each.tiles:
                at, here = keys[tile.keys.slice], rows[tile.rows.slice]
                inner = (slice(None), slice(None), tile.rows.slice)
                totals = (dq[:, :, here], dk[:, :, at], dv[:, :, at])
                kernels.backward(
                    mine[1][inner], None, mine[0][inner], k[:, :, at], v[:, :, at], out[:, :, here],
                    rank_lse[inner], Launch(*tile), totals,
                )  # fmt: skip
                for whole, place, total in zip((dq, dk, dv), (here, at, at), totals, strict=True):
                    whole[:, :, place] = rounded(total)
    return out, *(x.to(q.dtype) for x in (dq, dk, dv))


def _order(each: Round) -> Any:
    """Rows of the owner in the order of a round's buffer."""
    if each.in_place:
        return slice(None)
    return [row for transfer in each.receives for row in range(*transfer.rows)]


# --- Overlap -------------------------------------------------------------------------------------------------------


class CopyingTransport:
    """In the place of a transport: what arrives is copied from another buffer of the same GPU, on a second stream."""

    def __init__(self, source: torch.Tensor, copies: bool) -> None:
        self.rank, self.size = 0, 8
        self._source = source
        self._copies = copies
        self._stream = torch.cuda.Stream()

    def start(self, sends: Any, receives: Any) -> CopyingTransport:
        if self._copies:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _, tensor in receives:
                    source = self._source.view(-1)[: tensor.numel() * tensor.element_size() // 2].view(tensor.dtype)
                    tensor.copy_(source.view(tensor.shape), non_blocking=True)
        return self

    def wait(self) -> None:
        if self._copies:
            torch.cuda.current_stream().wait_stream(self._stream)


def overlap(rows: int = 8192, ranks: int = 8, heads: tuple[int, int] = (32, 8), head_dim: int = 128) -> Any:
    """All rounds of rank 3 of 8, 8192 rows of Llama-3.1-8B's heads each: forward, and backward."""
    length = rows * ranks
    mask = Mask(Window(None, 0), (0, length), (0, length))
    by_rank = holdings("zigzag", length, ranks)
    rounds = rounds_of(RING, 3, by_rank, by_rank, mask, heads[1])
    q, k, v, do = _tensors(rows, heads, head_dim)
    kernels = Kernels(AttentionOptions(), "gpu")
    source = torch.cat((packed(k, v).flatten(), packed(k, v).flatten()))
    calls: dict[str, Any] = {}
    with_copies, without = (
        SharedSequence(CopyingTransport(source, copies), rounds, kernels)  # type: ignore[arg-type]
        for copies in (True, False)
    )
    out, lse = with_copies.forward(q, k, v)
    out = out.to(q.dtype)
    whole_k, whole_v = (torch.randn(1, heads[1], length, head_dim, dtype=q.dtype, device="cuda") for _ in "kv")
    half = whole_k[:, :, : length // 2], whole_v[:, :, : length // 2]
    at_once = Launch(Span(0, rows), Span(0, length // 2), FULL)
    half_out, half_lse = kernels.forward(q, *half, at_once)
    calls["forward, copies meanwhile"] = lambda: with_copies.forward(q, k, v)
    calls["forward, no copies"] = lambda: without.forward(q, k, v)
    calls["forward, one launch"] = lambda: kernels.forward(q, *half, at_once)
    calls["backward, copies meanwhile"] = lambda: with_copies.backward(do, None, q, k, v, out, lse)
    calls["backward, no copies"] = lambda: without.backward(do, None, q, k, v, out, lse)
    calls["backward, one launch"] = lambda: differentiate_on_gpu(
        do, None, q, *half, half_out, half_lse, kernels.options
    )
    for call in calls.values():
        call()
    times = gpu_times_ms(calls, launches=1)
    scores = sum(each.scores for each in rounds)
    found = []
    for name, time_ms in times.items():
        operation, how = name.split(", ")
        products = 4 if operation == "forward" else 10
        done = rows * length / 2 if how == "one launch" else scores
        flops = products * heads[0] * head_dim * done
        found.append({"operation": operation, "how": how, "time_ms": time_ms, "tflops": flops / time_ms / 1e9})
    return found


# --- Speeds --------------------------------------------------------------------------------------------------------


def speeds(length: int = 8192) -> list[dict[str, Any]]:
    found = []
    for head_dim in (64, 128, 256):
        heads = 2048 // head_dim
        q, k, v, do = _tensors(length, (heads, heads), head_dim)
        calls: dict[Any, Any] = {}
        for mask, window in (("full", FULL), ("causal", CAUSAL)):
            options = AttentionOptions(window)
            out, lse = run_on_gpu(q, k, v, options, with_lse=True)

            def forward(options: Any = options) -> Any:
                return run_on_gpu(q, k, v, options, with_lse=True)  # noqa: B023

            def backward(options: Any = options, out: Any = out, lse: Any = lse) -> Any:
                return differentiate_on_gpu(do, None, q, k, v, out, lse, options)  # noqa: B023

            calls["forward", mask], calls["backward", mask] = forward, backward
        for (operation, mask), time_ms in gpu_times_ms(calls, launches=None).items():
            products = (4 if operation == "forward" else 10) * (0.5 if mask == "causal" else 1)
            tflops = products * heads * head_dim * length**2 / time_ms / 1e9
            found.append(
                {"operation": operation, "mask": mask, "head_dim": head_dim, "time_ms": time_ms, "tflops": tflops}
            )
    return found


def _tensors(rows: int, heads: tuple[int, int], head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1, count, rows, head_dim, generator=generator, device="cuda").bfloat16()
        for count in (heads[0], heads[1], heads[1], heads[0])
    ]


if __name__ == "__main__":
    main()
