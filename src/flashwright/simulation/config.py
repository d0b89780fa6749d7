"""A config's kernel, of any operation, on random inputs, beside the float64 definition of what it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashwright.kernels.cache_use import CacheUse, each_head_by_itself, in_pages
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of
from flashwright.problem.options import AttentionOptions
from flashwright.problem.reference import random_inputs, reference_backward, reference_forward, relative_error
from flashwright.runtime.simulated import simulate_backward, simulate_decode, simulate_forward
from flashwright.simulator.run import Run


@dataclass(frozen=True)
class SimulatedConfig:
    """A config's kernel, and how far its results are from float64."""

    config: str
    relative_error: float
    """The largest, where there are several results."""
    run: Run
    companions: Mapping[str, Run] = field(default_factory=dict)
    """Kernels that run before and after it."""

    def to_dict(self) -> dict[str, Any]:
        companions = {name: run.to_dict() for name, run in self.companions.items()}
        document = {"config": self.config, "relative_error": self.relative_error, **self.run.to_dict()}
        return {**document, "companions": companions} if companions else document

    def report(self) -> str:
        runs = [self.run, *self.companions.values()]
        head = f"config: {self.config}\nrelative error: {self.relative_error:.3g}"
        return "\n\n".join([f"{head}\n{runs[0].report()}", *(run.report() for run in runs[1:])])


def simulate_config(
    config: KernelConfig,
    *,
    rows: int,
    keys: int | None = None,
    heads: int,
    kv_heads: int | None = None,
    options: AttentionOptions | None = None,
    **simulation_options: Any,
) -> SimulatedConfig:
    """The kernel of a config on random inputs; ``simulation_options`` are those of `simulate_forward` and its like."""
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(f"kv_heads: {kv_heads} heads of k and v do not divide {heads} heads of q")
    inputs = random_inputs(config, heads=heads, rows=rows, kv_heads=kv_heads, keys=keys)
    return simulate_config_on(config, inputs, options=options, **simulation_options)


Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]


def simulate_config_on(
    config: KernelConfig, inputs: Inputs, *, options: AttentionOptions | None = None, **simulation_options: Any
) -> SimulatedConfig:
    """The same on q, k and v of one's own."""
    operation = family_of(config).operation.name
    if operation not in _OPERATIONS:
        raise ValueError(f"{config}: kernels of {operation} are not simulated; those of {', '.join(_OPERATIONS)} are")
    return _OPERATIONS[operation](config, inputs, options or AttentionOptions(), simulation_options)


def _forward(config: KernelConfig, inputs: Inputs, options: AttentionOptions, rest: dict[str, Any]) -> SimulatedConfig:
    return _of_output(config, inputs, options, simulate_forward(config, *inputs, options=options, **rest))


def _decode(
    config: KernelConfig,
    inputs: Inputs,
    options: AttentionOptions,
    rest: dict[str, Any],
) -> SimulatedConfig:
    """With `use` among the rest, as that meets a cache. Values that are columns of the keys are taken from there."""
    use: CacheUse = rest.pop("use", None) or CacheUse()
    if most := family_of(config).launch_rules.values_in_keys:
        inputs = (*inputs[:2], inputs[1][..., :most])
    (q, k, v), table = inputs, None
    if not use.packs_heads:
        q, k, v = each_head_by_itself(q, k, v)
    elif use.page_rows:
        order = np.random.default_rng(2).permutation(k.shape[0] * k.shape[2] // use.page_rows)
        k, v = (in_pages(x, use.page_rows, order) for x in (k, v))
        table = order.reshape(q.shape[0], -1)
    done = simulate_decode(config, q, k, v, options=options, page_table=table, split_units=use.split_units, **rest)
    return _of_output(config, inputs, options, done)


def _of_output(config: KernelConfig, inputs: Inputs, options: AttentionOptions, done: Any) -> SimulatedConfig:
    expected, _ = reference_forward(*inputs, window=options.window, softcap=options.softcap)
    error = relative_error(done.output.reshape(expected.shape), expected)
    return SimulatedConfig(config.short_form(), error, done.run)


def _backward(config: KernelConfig, inputs: Inputs, options: AttentionOptions, rest: dict[str, Any]) -> SimulatedConfig:
    window, softcap = options.window, options.softcap
    out, lse = reference_forward(*inputs, window=window, softcap=softcap)
    dtype = inputs[0].dtype
    do = np.random.default_rng(1).standard_normal(out.shape).astype(dtype)
    done = simulate_backward(config, do, *inputs, out.astype(dtype), lse, options=options, **rest)
    expected = reference_backward(do, *inputs, window=window, softcap=softcap)
    errors = [relative_error(*pair) for pair in zip((done.dq, done.dk, done.dv), expected, strict=True)]
    return SimulatedConfig(config.short_form(), max(errors), done.run, done.companions)


_OPERATIONS: dict[str, Callable[..., SimulatedConfig]] = {"forward": _forward, "backward": _backward, "decode": _decode}
