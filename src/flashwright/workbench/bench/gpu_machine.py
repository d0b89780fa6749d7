"""The machine that benchmarks run on: the current GPU, through PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from flashwright.attention import attention, choice
from flashwright.choice.choose import backward_config, best_family, tuned_or_default
from flashwright.integrations.kv_cache import flash_attn_with_kvcache
from flashwright.kernels.cache_use import in_pages
from flashwright.kernels.family import KernelConfig, Occasion
from flashwright.kernels.registry import family_named
from flashwright.operators.backward import family_for_gradients
from flashwright.operators.forward import config_chosen_for
from flashwright.problem.dtypes import DType
from flashwright.problem.flops import BACKWARD, DECODE, FORWARD
from flashwright.problem.lengths import LONGEST, length_bucket, packed_rows_bucket
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.decode_plans import CacheTensors
from flashwright.runtime.devices import gpu_model
from flashwright.workbench.bench.accuracy import gradient_error, largest, sampled_relative_error
from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.measure import reason
from flashwright.workbench.bench.peers import Inputs, PagedCache, Prepared
from flashwright.workbench.bench.scores import score_inputs
from flashwright.workbench.bench.timing import CapturedCall, Name, capture, host_us, replay_times_ms
from flashwright.workbench.bench.training import prepare_operation, with_gradients
from flashwright.workbench.kernel_calls import cached_decodes, kernel_calls

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
    if inputs.operation == DECODE:
        return _prepare_decode(inputs, options, config, family)
    if inputs.operation == BACKWARD and config:
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


def _prepare_decode(
    inputs: Inputs, options: AttentionOptions, config: KernelConfig | None, family: str | None
) -> Prepared:
    """`attention()`, or `flash_attn_with_kvcache` of a paged cache, as users call them; of a config or a family, the
    decode of its kernels."""
    q, k, v, cache = inputs.q, inputs.k, inputs.v, inputs.cache
    if config is None and family is None and cache is None:
        return Prepared(
            partial(attention, q, k, v, causal=inputs.causal), kernel=str(choice(q, k, causal=inputs.causal).config)
        )
    tensors = CacheTensors()
    if cache is not None:
        k, v = cache.k, cache.v
        tensors = CacheTensors(cache.lengths, page_table=cache.table)
    chosen = config or _decode_chosen_for(q, k, inputs.causal, family)
    if config is None and family is None and cache is not None:
        call = partial(
            flash_attn_with_kvcache, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            cache_seqlens=cache.lengths, block_table=cache.table, causal=inputs.causal,
        )  # fmt: skip
        return Prepared(call, rows_first=True, kernel=str(chosen))
    return Prepared(cached_decodes(q, k, v, tensors, window=options.window)(chosen), kernel=str(chosen))


def _decode_chosen_for(q: Any, k: Any, causal: bool, family: str | None) -> KernelConfig:
    gpu = gpu_model(q.device.index) if q.is_cuda else None
    packed_rows = q.shape[2] * q.shape[1] // k.shape[1]
    buckets = packed_rows_bucket(packed_rows), LONGEST
    occasion = Occasion(DType.parse(str(q.dtype)), q.shape[3], causal, *buckets, gpu, packed_rows)
    chosen = best_family(occasion, DECODE) if family is None else family_named(family, DECODE)
    return tuned_or_default(chosen, occasion)


def _backward_chosen_for(q: Any, k: Any, causal: bool, family: str | None) -> KernelConfig:
    buckets = length_bucket(q.shape[2]), length_bucket(k.shape[2])
    gpu = gpu_model(q.device.index) if q.is_cuda else None
    return backward_config(Occasion(DType.parse(str(q.dtype)), q.shape[3], causal, *buckets, gpu), family=family)


class GPUMachine:
    def __init__(self, device: str = "cuda", *, rounds: int = ROUNDS, replay_ms: float | None = None) -> None:
        """`replay_ms`: how long a turn lasts; None: `LAUNCHES` launches."""
        if rounds < 1:
            raise ValueError(f"rounds: {rounds} is not allowed; allowed: 1 or more")
        if replay_ms is not None and not 0 < replay_ms < math.inf:
            raise ValueError(f"replay_ms: {replay_ms} is not allowed; allowed: more than 0 milliseconds")
        self._device, self._rounds, self._replay_ms = device, rounds, replay_ms
        self._stream: Any = None

    def inputs(self, cell: Cell) -> Inputs:
        if cell.operation == DECODE:
            return self._cache_inputs(cell)
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

    def _cache_inputs(self, cell: Cell) -> Inputs:
        """Few rows of queries, on a cache that is contiguous or in pages."""
        import torch

        sizes = {"heads": cell.heads, "kv_heads": cell.kv_heads, "q_length": cell.rows, "d_head": cell.d_head}
        of_tensors: dict[str, Any] = {"dtype": torch_dtype(cell.dtype), "device": self._device}
        if not cell.uneven:
            q, k, v = score_inputs(cell.scores, batch=cell.batch, kv_length=cell.length, **sizes, **of_tensors)
            inputs = Inputs(q, k, v, cell.causal, DECODE)
            if not cell.page:
                return inputs
            order = torch.randperm(cell.batch * cell.length // cell.page, device=self._device)
            pages = [in_pages(x, cell.page, order) for x in (k, v)]
            table = order.view(cell.batch, -1).int()
        else:
            q, _, _ = score_inputs(cell.scores, batch=cell.batch, kv_length=1, **sizes, **of_tensors)
            counts = [-(-length // cell.page) for length in cell.lengths]
            order = torch.randperm(sum(counts), device=self._device)
            shape = (sum(counts), cell.page, cell.kv_heads, cell.d_head)
            pages = [torch.randn(shape, **of_tensors).transpose(1, 2) for _ in range(2)]
            table = torch.zeros(cell.batch, max(counts), dtype=torch.int32, device=self._device)
            for sequence, numbers in enumerate(order.split(counts)):
                table[sequence, : len(numbers)] = numbers
            of_last = order[-counts[-1] :]
            k, v = (x[of_last].transpose(0, 1).flatten(1, 2)[None, :, : cell.lengths[-1]] for x in pages)
            inputs = Inputs(q, k, v, cell.causal, DECODE)
        lengths = torch.tensor(cell.lengths, dtype=torch.int32, device=self._device)
        return replace(inputs, cache=PagedCache(pages[0], pages[1], table, lengths))

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
        if inputs.operation in (FORWARD, DECODE):
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
                    captured[name] = self._captured(implementation.run)
                except Exception as error:  # an implementation that cannot be captured in a CUDA graph
                    failures[name] = reason(error)
            return replay_times_ms(captured, self._stream, rounds=self._rounds), failures

    def _captured(self, run: Callable[[], None]) -> CapturedCall:
        if self._replay_ms is None:
            return capture(run, self._stream, LAUNCHES)
        return capture(run, self._stream, None, replay_ms=self._replay_ms)

    def host_us(self, prepared: Prepared, gpu_ms: float) -> float:
        calls = max(FEWEST_HOST_CALLS, min(MOST_HOST_CALLS, round(HOST_REPEAT_MS / gpu_ms)))
        with self._on_its_stream(), prepared.context():
            return host_us(prepared.call, calls, HOST_REPEATS, warm_up=calls)


def torch_dtype(dtype: DType) -> Any:
    import torch

    return {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[dtype]
