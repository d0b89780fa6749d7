"""The machine that benchmarks run on: the current GPU, through PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from flashwright.attention import attention
from flashwright.choice.choose import backward_config
from flashwright.kernels.family import KernelConfig, Occasion
from flashwright.operators.backward import family_for_gradients
from flashwright.operators.forward import config_chosen_for
from flashwright.problem.dtypes import DType
from flashwright.problem.flops import BACKWARD, FORWARD
from flashwright.problem.lengths import length_bucket
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.devices import gpu_model
from flashwright.workbench.bench.accuracy import gradient_error, largest, sampled_relative_error
from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.measure import reason
from flashwright.workbench.bench.peers import Inputs, Prepared
from flashwright.workbench.bench.scores import score_inputs
from flashwright.workbench.bench.timing import CapturedCall, Name, capture, host_us, replay_times_ms
from flashwright.workbench.bench.training import prepare_operation, with_gradients
from flashwright.workbench.kernel_calls import kernel_calls

ROUNDS = 7
LAUNCHES = 20
"""Launches of one implementation in a row: as in a model, enough for the clock to settle under the power limit."""
HOST_REPEATS = 5
HOST_REPEAT_MS = 10.0
"""GPU time that one repeat of a host measurement may queue; it bounds the time of a grid."""
FEWEST_HOST_CALLS, MOST_HOST_CALLS = 8, 50


def prepare_ours(inputs: Inputs, *, config: KernelConfig | None = None, family: str | None = None) -> Prepared:
    """`attention()` as users call it, with gradients where they are timed; the config is the one that it chooses, for a
    family if one is given."""
    options = AttentionOptions.of(inputs.causal)
    if inputs.operation == BACKWARD and (config or family):
        config = config or _backward_chosen_for(inputs.q, inputs.k, inputs.causal, family)
        run = kernel_calls(BACKWARD, inputs.q, inputs.k, inputs.v, inputs.do, window=options.window)
        return Prepared(run(config), kernel=str(config))
    q, k, v = inputs.q, inputs.k, inputs.v
    chosen = config or config_chosen_for(q, k, options, family)
    call = partial(attention, q, k, v, causal=inputs.causal, config=config, family=family)
    kernels = {FORWARD: str(chosen)}
    if inputs.operation != FORWARD:
        kernels[BACKWARD] = str(_backward_chosen_for(q, k, inputs.causal, family_for_gradients(config, family)))
    kernel = kernels.get(inputs.operation, "; ".join(kernels.values()))
    return prepare_operation(lambda inputs: Prepared(call, kernel=kernel), inputs)


def _backward_chosen_for(q: Any, k: Any, causal: bool, family: str | None) -> KernelConfig:
    buckets = length_bucket(q.shape[2]), length_bucket(k.shape[2])
    gpu = gpu_model(q.device.index) if q.is_cuda else None
    return backward_config(Occasion(DType.parse(str(q.dtype)), q.shape[3], causal, *buckets, gpu), family=family)


class GPUMachine:
    def __init__(self, device: str = "cuda", *, rounds: int = ROUNDS) -> None:
        if rounds < 1:
            raise ValueError(f"rounds: {rounds} is not allowed; allowed: 1 or more")
        self._device, self._rounds = device, rounds
        self._stream: Any = None

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
        inputs = Inputs(q, k, v, cell.causal)
        return inputs if cell.operation == FORWARD else with_gradients(inputs, cell.operation)

    def _on_its_stream(self) -> AbstractContextManager[Any]:
        """Every call is made on one stream: autograd adds up the gradients of a leaf on the stream of the leaf's first
        use, and a graph that is captured on another stream cannot hold that."""
        import torch

        if self._device == "cpu":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def relative_error(self, prepared: Prepared, inputs: Inputs) -> float:
        with self._on_its_stream():
            return self._relative_error(prepared, inputs)

    def _relative_error(self, prepared: Prepared, inputs: Inputs) -> float:
        if inputs.operation == FORWARD:
            return sampled_relative_error(prepared.output(), inputs)
        with prepared.context():
            *out, dq, dk, dv = prepared.call()
        errors = [sampled_relative_error(each.detach(), inputs) for each in out]
        return largest([*errors, gradient_error((dq, dk, dv), inputs)])

    def gpu_times_ms(self, prepared: Mapping[Name, Prepared]) -> tuple[dict[Name, float], dict[Name, str]]:
        captured: dict[Name, CapturedCall] = {}
        failures: dict[Name, str] = {}
        with self._on_its_stream():
            for name, implementation in prepared.items():
                try:
                    captured[name] = capture(implementation.run, self._stream, LAUNCHES)
                except Exception as error:  # an implementation that cannot be captured in a CUDA graph
                    failures[name] = reason(error)
            return replay_times_ms(captured, self._stream, rounds=self._rounds), failures

    def host_us(self, prepared: Prepared, gpu_ms: float) -> float:
        calls = max(FEWEST_HOST_CALLS, min(MOST_HOST_CALLS, round(HOST_REPEAT_MS / gpu_ms)))
        with self._on_its_stream(), prepared.context():
            return host_us(prepared.call, calls, HOST_REPEATS, warm_up=calls)


def torch_dtype(dtype: DType) -> Any:
    import torch

    return {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[dtype]
