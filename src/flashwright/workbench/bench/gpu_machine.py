"""The machine that benchmarks run on: the current GPU, through PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from flashwright.attention import attention
from flashwright.kernels.family import KernelConfig
from flashwright.operators.forward import config_chosen_for
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.workbench.bench.accuracy import sampled_relative_error
from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.measure import reason
from flashwright.workbench.bench.peers import Inputs, Prepared
from flashwright.workbench.bench.timing import CapturedCall, capture, gpu_times_ms, host_us, replay_times_ms

ROUNDS = 7
LAUNCHES = 20
"""Launches of one implementation in a row: as in a model, enough for the clock to settle under the power limit."""
HOST_REPEATS = 5
HOST_REPEAT_MS = 10.0
"""GPU time that one repeat of a host measurement may queue; it bounds the time of a grid."""
FEWEST_HOST_CALLS, MOST_HOST_CALLS = 8, 50
PEAK_SIZE = 8192


def prepare_ours(config: KernelConfig | None, inputs: Inputs) -> Prepared:
    """`attention()`, with the config it chooses or the one given."""
    q, k, v = inputs.q, inputs.k, inputs.v
    options = AttentionOptions.of(inputs.causal)
    chosen = config or config_chosen_for(q, k, options, family=None)
    return Prepared(partial(attention, q, k, v, causal=inputs.causal, config=config), kernel=str(chosen))


class GPUMachine:
    def __init__(self, device: str = "cuda") -> None:
        self._device = device

    def inputs(self, cell: Cell) -> Inputs:
        import torch

        generator = torch.Generator(self._device).manual_seed(0)
        q, k, v = (
            torch.randn(
                (cell.batch, cell.length, heads, cell.d_head),
                dtype=torch_dtype(cell.dtype),
                device=self._device,
                generator=generator,
            ).transpose(1, 2)
            for heads in (cell.heads, cell.kv_heads, cell.kv_heads)
        )
        return Inputs(q, k, v, cell.causal)

    def relative_error(self, prepared: Prepared, inputs: Inputs) -> float:
        return sampled_relative_error(prepared.output(), inputs)

    def gpu_times_ms(self, prepared: Mapping[str, Prepared]) -> tuple[dict[str, float], dict[str, str]]:
        import torch

        stream = torch.cuda.Stream()
        captured: dict[str, CapturedCall] = {}
        failures: dict[str, str] = {}
        for name, implementation in prepared.items():
            try:
                captured[name] = capture(implementation.run, stream, LAUNCHES)
            except Exception as error:  # an implementation that cannot be captured in a CUDA graph
                failures[name] = reason(error)
        return replay_times_ms(captured, stream, rounds=ROUNDS), failures

    def host_us(self, prepared: Prepared, gpu_ms: float) -> float:
        calls = max(FEWEST_HOST_CALLS, min(MOST_HOST_CALLS, round(HOST_REPEAT_MS / gpu_ms)))
        with prepared.context():
            return host_us(prepared.call, calls, HOST_REPEATS, warm_up=calls)

    def peak_tflops(self, dtype: DType) -> float:
        """TFLOP/s of a large matrix product on random data, at the clock of a warm GPU."""
        import torch

        n = PEAK_SIZE
        a, b = (torch.randn(n, n, dtype=torch_dtype(dtype), device=self._device) for _ in range(2))
        out = torch.empty_like(a)
        times = gpu_times_ms({"product": partial(torch.matmul, a, b, out=out)}, launches=LAUNCHES)
        return 2 * n**3 / times["product"] / 1e9


def torch_dtype(dtype: DType) -> Any:
    import torch

    return {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[dtype]
