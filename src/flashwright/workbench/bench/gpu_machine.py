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
from flashwright.workbench.bench.scores import score_inputs
from flashwright.workbench.bench.timing import CapturedCall, Name, capture, host_us, replay_times_ms

ROUNDS = 7
LAUNCHES = 20
"""Launches of one implementation in a row: as in a model, enough for the clock to settle under the power limit."""
HOST_REPEATS = 5
HOST_REPEAT_MS = 10.0
"""GPU time that one repeat of a host measurement may queue; it bounds the time of a grid."""
FEWEST_HOST_CALLS, MOST_HOST_CALLS = 8, 50


def prepare_ours(inputs: Inputs, *, config: KernelConfig | None = None, family: str | None = None) -> Prepared:
    """`attention()` as users call it; the config is the one that it chooses, for a family if one is given."""
    q, k, v = inputs.q, inputs.k, inputs.v
    options = AttentionOptions.of(inputs.causal)
    chosen = config or config_chosen_for(q, k, options, family)
    call = partial(attention, q, k, v, causal=inputs.causal, config=config, family=family)
    return Prepared(call, kernel=str(chosen))


class GPUMachine:
    def __init__(self, device: str = "cuda", *, rounds: int = ROUNDS) -> None:
        if rounds < 1:
            raise ValueError(f"rounds: {rounds} is not allowed; allowed: 1 or more")
        self._device, self._rounds = device, rounds

    def inputs(self, cell: Cell) -> Inputs:
        q, k, v = score_inputs(
            cell.scores,
            batch=cell.batch,
            heads=cell.heads,
            kv_heads=cell.kv_heads,
            q_length=cell.length,
            d_head=cell.d_head,
            dtype=torch_dtype(cell.dtype),
            device=self._device,
        )
        return Inputs(q, k, v, cell.causal)

    def relative_error(self, prepared: Prepared, inputs: Inputs) -> float:
        return sampled_relative_error(prepared.output(), inputs)

    def gpu_times_ms(self, prepared: Mapping[Name, Prepared]) -> tuple[dict[Name, float], dict[Name, str]]:
        import torch

        stream = torch.cuda.Stream()
        captured: dict[Name, CapturedCall] = {}
        failures: dict[Name, str] = {}
        for name, implementation in prepared.items():
            try:
                captured[name] = capture(implementation.run, stream, LAUNCHES)
            except Exception as error:  # an implementation that cannot be captured in a CUDA graph
                failures[name] = reason(error)
        return replay_times_ms(captured, stream, rounds=self._rounds), failures

    def host_us(self, prepared: Prepared, gpu_ms: float) -> float:
        calls = max(FEWEST_HOST_CALLS, min(MOST_HOST_CALLS, round(HOST_REPEAT_MS / gpu_ms)))
        with prepared.context():
            return host_us(prepared.call, calls, HOST_REPEATS, warm_up=calls)


def torch_dtype(dtype: DType) -> Any:
    import torch

    return {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[dtype]
