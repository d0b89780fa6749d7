"""What a call costs on the host: attention() beside an empty launch of its kernel, and beside PyTorch's SDPA.

    python benchmarks/host_overhead.py [--calls 200] [--repeats 21] [--json]

Needs a GPU. The problem is so small that the GPU is never behind the host, so the time of many calls in a row is the
host's. Each number is the median over repeats of the mean over the calls of a repeat, after a warm-up. "Launch" is
cuLaunchKernel of a prepared kernel: the floor for any function that launches one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashwright.attention import attention, chosen_config
from flashwright.bench.timing import host_us
from flashwright.gpu import device_tensor, loaded_kernel
from flashwright.integrations.flash_attn import flash_attn_func
from flashwright.integrations.sdpa import scaled_dot_product_attention
from flashwright.launch_arguments import forward_launch
from flashwright.runtime import run_forward
from flashwright.variant import FULL

LIMIT_US = 15.0
"""Of attention() over the launch."""


def calls_to_time(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    config = chosen_config(q, k, FULL, None)
    out = torch.empty_like(q)
    views = [device_tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))]
    launch = forward_launch(config, *views)
    kernel = loaded_kernel(config, launch.variant, q.device.index)
    stream = torch.cuda.current_stream().cuda_stream
    rows_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    training = [x.clone().requires_grad_() for x in (q, k, v)]

    def pytorchs() -> Any:
        return functional.scaled_dot_product_attention(q, k, v)

    return {
        "launch": lambda: kernel.launch(launch.grid, ctypes.addressof(launch.arguments), stream),
        "run_forward": lambda: run_forward(config, q, k, v),
        "attention": lambda: attention(q, k, v),
        "attention, causal": lambda: attention(q, k, v, causal=True),
        "attention, with log-sum-exp": lambda: attention(q, k, v, return_lse=True),
        "flash_attn_func": lambda: flash_attn_func(*rows_first),
        "scaled_dot_product_attention": lambda: scaled_dot_product_attention(q, k, v),
        "PyTorch's scaled_dot_product_attention": pytorchs,
        "attention, forward of training": lambda: attention(*training),
        "PyTorch's, forward of training": lambda: functional.scaled_dot_product_attention(*training),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no CUDA GPU on this machine")

    q, k, v = (torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    times = {}
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        for name, call in calls_to_time(q, k, v).items():
            times[name] = host_us(call, arguments.calls, arguments.repeats)
    over_launch = {name: us - times["launch"] for name, us in times.items()}
    if arguments.json:
        report = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "limit_us": LIMIT_US,
            "host_us": times,
            "over_launch_us": over_launch,
        }
        print(json.dumps(report, indent=2))
        return
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; microseconds of host time per call")
    print(f"{'':40}{'call':>9}{'over launch':>13}")
    for name, us in times.items():
        print(f"{name:40}{us:9.2f}{over_launch[name]:13.2f}")
    verdict = "within" if over_launch["attention"] <= LIMIT_US else "above"
    print(f"attention() is {verdict} the limit of {LIMIT_US:.0f} µs over the launch")


if __name__ == "__main__":
    main()
