"""What a call costs on the host: attention() beside an empty launch of its kernel, and beside PyTorch's SDPA.

    PYTHONPATH=src python benchmarks/host_overhead.py [--calls 200] [--repeats 21] [--json]

Needs a GPU. Kernels are compiled first, on all cores. The problems are so small that the GPU is never behind the host,
so the time of many calls in a row is the host's. Each number is the median over repeats, in which the calls take turns,
of the mean over the calls of a repeat. "Launch" is cuLaunchKernel of a prepared kernel: the floor for any function that
launches one. "Nothing" is an autograd function that allocates and saves what a training step does, and launches no
kernel: the floor for any that is written in Python.

The second table is of calls whose lengths change every time, in a process that has the kernel: lengths that no call had
before, the same a second time (where a schedule of tiles may be improved), and again (a plan hit); beside PyTorch's
SDPA on the same tensors. It comes first: the tensors of a call are in the host's caches, as those that a program has
just made. Decoding has one query row and growing keys of a cache; prefill has as many rows as keys.
Where transformers is installed, decoding is timed as its models call it, too, with four heads for each of the cache's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashwright.attention import attention
from flashwright.hardware.tensor_map import TensorMap
from flashwright.integrations.flash_attn import flash_attn_func
from flashwright.integrations.sdpa import scaled_dot_product_attention
from flashwright.integrations.transformers import attention_forward
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import families, family_of
from flashwright.operators.forward import config_chosen_for
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.devices import gpu_model, multiprocessors
from flashwright.runtime.forward import run_forward
from flashwright.runtime.loaded import loaded_kernel
from flashwright.runtime.tensor_maps import encoded_words
from flashwright.runtime.tensors import device_tensor

LIMIT_US = 15.0
"""Of attention() over the launch."""
NEW_LENGTH_LIMIT = 1.3
"""Of a call with a new length over a plan hit."""
HEADS, D_HEAD = 4, 64
WARM_UP_LENGTHS = range(65, 100)
LENGTHS = range(100, 1000)
"""All of one bucket: the same kernel serves them."""
LENGTHS_PER_REPEAT = 100

Views = Sequence[tuple[Any, Any, Any]]


# --- The same call again and again ---------------------------------------------------------------------------------


def prepared_launch(config: KernelConfig, q: Any, k: Any, v: Any) -> Callable[[], None]:
    """cuLaunchKernel of the kernel, and nothing else."""
    out = torch.empty_like(q)
    views = [device_tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))]
    launch = family_of(config).launch(config, *views, multiprocessors=multiprocessors(q.device.index))
    kernel = loaded_kernel(config, launch.variant, q.device.index)
    encoded = [encoded_words(each) if isinstance(each, TensorMap) else each for each in launch.parameters]
    addresses = array("Q", [_address(each) for each in encoded])
    at, stream = _address(addresses), torch.cuda.current_stream().cuda_stream

    def run() -> None:
        kernel.launch(launch.grid, at, stream)

    run.keeps = (out, encoded, addresses)  # type: ignore[attr-defined]
    return run


def _address(parameter: Any) -> int:
    return int(parameter.buffer_info()[0] if isinstance(parameter, array) else ctypes.addressof(parameter))


class Nothing(torch.autograd.Function):
    """Tensors of a training step, of which none is computed."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        torch.empty_like(q, dtype=torch.float32)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def calls_to_time(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    config = config_chosen_for(q, k, AttentionOptions(), None)
    rows_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    training = [x.clone().requires_grad_() for x in (q, k, v)]
    grad = torch.randn_like(q)

    def differentiated(out: Any) -> Any:
        return torch.autograd.grad(out, training, grad)

    return {
        "launch": prepared_launch(config, q, k, v),
        "run_forward": lambda: run_forward(config, q, k, v),
        "attention": lambda: attention(q, k, v),
        "attention, causal": lambda: attention(q, k, v, causal=True),
        "attention, with log-sum-exp": lambda: attention(q, k, v, return_lse=True),
        "flash_attn_func": lambda: flash_attn_func(*rows_first),
        "scaled_dot_product_attention": lambda: scaled_dot_product_attention(q, k, v),
        "PyTorch's scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(q, k, v),
        "attention, forward of training": lambda: attention(*training),
        "PyTorch's, forward of training": lambda: functional.scaled_dot_product_attention(*training),
        "nothing, a training step": lambda: differentiated(Nothing.apply(*training)),
        "attention, a training step": lambda: differentiated(attention(*training)),
        "PyTorch's, a training step": lambda: differentiated(functional.scaled_dot_product_attention(*training)),
    }


def same_calls(to_time: dict[str, Callable[[], Any]], calls: int, repeats: int) -> dict[str, float]:
    """Microseconds of each, whose plans are at hand."""
    times: dict[str, list[float]] = {name: [] for name in to_time}
    order = list(to_time)
    for repeat in range(repeats + 1):  # the first warms up
        random.Random(repeat).shuffle(order)
        for name in order:
            times[name].append(us_per_call(to_time[name], [()] * calls))
    return {name: statistics.median(each[1:]) for name, each in times.items()}


# --- A new length each time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LengthCosts:
    """Microseconds of host time of one call."""

    family: str
    problem: str
    new_us: float
    second_us: float
    hit_us: float
    sdpa_us: float
    new_over_hit: float
    """The median over rounds: within one, the clock of the host moves little."""
    new_over_sdpa: float


@dataclass(frozen=True)
class Lengths:
    """Calls that differ in their lengths alone."""

    family: str
    problem: str
    ours: Callable[..., Any]
    pytorchs: Callable[..., Any]
    decoding: bool
    heads: tuple[int, int] = (HEADS, HEADS)

    def views(self, lengths: Iterable[int]) -> Views:
        q_heads, kv_heads = self.heads
        q, k, v = (_random(LENGTHS.stop, heads)[0] for heads in (q_heads, kv_heads, kv_heads))
        return [(q[:, :, : 1 if self.decoding else n], k[:, :, :n], v[:, :, :n]) for n in lengths]


def lengths_to_time() -> list[Lengths]:
    """As attention() chooses by itself, of every family that this GPU runs, and through transformers."""
    arch = gpu_model(torch.cuda.current_device()).arch
    names = [None, *(family.name for family in families() if family.runs_on(arch))]
    problems = (("decoding", True, False), ("prefill", False, False), ("prefill, causal", False, True))
    found = [
        Lengths(
            name or "chosen",
            problem,
            partial(attention, causal=causal, family=name),
            # A step of decoding attends to all keys; PyTorch's causal mask would be aligned to the first.
            partial(functional.scaled_dot_product_attention, is_causal=causal),
            decoding,
        )
        for name in names
        for problem, decoding, causal in problems
    ]
    return [*found, *through_transformers()]


def through_transformers() -> list[Lengths]:
    """A step of a generation as a model calls its attention; nothing where transformers is not installed."""
    try:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError:
        return []
    module = SimpleNamespace(is_causal=True, num_key_value_groups=4, layer_idx=0, config=SimpleNamespace())

    def step(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v: forward(module, q, k, v, None, dropout=0.0, scaling=D_HEAD**-0.5)

    ours, pytorchs = step(attention_forward), step(sdpa_attention_forward)
    return [Lengths("transformers", "decoding", ours, pytorchs, decoding=True, heads=(4 * HEADS, HEADS))]


def measured(of: Lengths, repeats: int) -> LengthCosts:
    for call in (of.ours, of.pytorchs):
        us_per_call(call, of.views(WARM_UP_LENGTHS))
    lengths = list(LENGTHS)
    random.Random(0).shuffle(lengths)
    views = of.views(lengths)
    most = len(lengths) // LENGTHS_PER_REPEAT
    rounds = []
    for number in range(min(repeats, most)):
        part = views[number * LENGTHS_PER_REPEAT : (number + 1) * LENGTHS_PER_REPEAT]
        sdpa, new, second, hit = (us_per_call(call, part) for call in (of.pytorchs, of.ours, of.ours, of.ours))
        rounds.append((new, second, hit, sdpa, new / hit, new / sdpa))
    columns = zip(*rounds, strict=True)
    return LengthCosts(of.family, of.problem, *map(statistics.median, columns))


# --- Both ----------------------------------------------------------------------------------------------------------


def compile_together(calls: Iterable[Callable[[], Any]]) -> None:
    """Makes each call once, all at the same time: most compile kernels."""
    with ThreadPoolExecutor(32) as pool:
        for made in [pool.submit(call) for call in calls]:
            made.result()
    torch.cuda.synchronize()


def us_per_call(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> float:
    """The mean over calls, of each arguments once."""
    torch.cuda.synchronize()
    gc.disable()
    try:
        start = time.perf_counter()
        for each in arguments:
            call(*each)
        seconds = time.perf_counter() - start
    finally:
        gc.enable()
    torch.cuda.synchronize()
    return seconds / len(arguments) * 1e6


def _random(rows: int, heads: int = HEADS) -> tuple[Any, Any, Any]:
    q, k, v = (torch.randn(1, heads, rows, D_HEAD, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


# --- Reports -------------------------------------------------------------------------------------------------------


def print_same_calls(times: dict[str, float], over_launch: dict[str, float]) -> None:
    print(f"{'':40}{'call':>9}{'over launch':>13}")
    for name, us in times.items():
        print(f"{name:40}{us:9.2f}{over_launch[name]:13.2f}")
    verdict = "within" if over_launch["attention"] <= LIMIT_US else "above"
    print(f"attention() is {verdict} the limit of {LIMIT_US:.0f} µs over the launch")


def print_changing_lengths(costs: Sequence[LengthCosts]) -> None:
    print(f"\n{'lengths change':28}{'new':>8}{'second':>8}{'hit':>8}{'SDPA':>8}{'new/hit':>9}{'new/SDPA':>10}")
    for cost in costs:
        print(
            f"{cost.family + ', ' + cost.problem:28}{cost.new_us:8.2f}{cost.second_us:8.2f}{cost.hit_us:8.2f}"
            f"{cost.sdpa_us:8.2f}{cost.new_over_hit:9.2f}{cost.new_over_sdpa:10.2f}"
        )
    worst = max(cost.new_over_hit for cost in costs)
    verdict = "within" if worst <= NEW_LENGTH_LIMIT else "above"
    print(f"a new length costs up to {worst:.2f} × a plan hit, {verdict} the limit of {NEW_LENGTH_LIMIT}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no CUDA GPU on this machine")

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        same, changing = calls_to_time(*_random(64)), lengths_to_time()
        first_calls = [partial(of.ours, *of.views(WARM_UP_LENGTHS[:1])[0]) for of in changing]
        compile_together([*same.values(), *first_calls])
        gc.collect()
        gc.freeze()  # what was imported is not searched again
        times = same_calls(same, arguments.calls, arguments.repeats)
        costs = [measured(of, arguments.repeats) for of in changing]
    over_launch = {name: us - times["launch"] for name, us in times.items()}
    if arguments.json:
        report = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "limit_us": LIMIT_US,
            "host_us": times,
            "over_launch_us": over_launch,
            "new_length_limit": NEW_LENGTH_LIMIT,
            "changing_lengths": [asdict(cost) for cost in costs],
        }
        print(json.dumps(report, indent=2))
        return
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; microseconds of host time per call")
    print_same_calls(times, over_launch)
    print_changing_lengths(costs)


if __name__ == "__main__":
    main()
