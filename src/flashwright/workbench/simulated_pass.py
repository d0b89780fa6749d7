"""One pass of a config's operation on the simulated GPU, checked against float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of
from flashwright.problem.options import AttentionOptions
from flashwright.problem.reference import reference_backward, reference_forward, relative_error
from flashwright.runtime.simulated import simulate_backward, simulate_forward
from flashwright.simulator.run import Run

GRADIENT_SEED = 1


@dataclass(frozen=True)
class SimulatedPass:
    run: Run
    """Of the family's own kernel."""
    relative_error: float
    """Of the pass's results the largest."""
    companions: Mapping[str, Run] = field(default_factory=dict)
    """Of the kernels before and after it, by name."""


def simulate_pass(
    config: KernelConfig,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    options: AttentionOptions | None = None,
    **simulation: Any,
) -> SimulatedPass:
    """The operation of a config; the gradient of an output is standard normal. `simulation` is what `simulate_forward`
    and `simulate_backward` both take: `arch`, `check_hazards`, options of a launch."""
    operation = family_of(config).operation.name
    if operation not in _PASSES:
        raise ValueError(f"the simulator's checks know no operation {operation!r}; known: {', '.join(_PASSES)}")
    return _PASSES[operation](config, q, k, v, options or AttentionOptions(), simulation)


Pass = Callable[[KernelConfig, np.ndarray, np.ndarray, np.ndarray, AttentionOptions, dict[str, Any]], SimulatedPass]


def _forward(
    config: KernelConfig,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    options: AttentionOptions,
    simulation: dict[str, Any],
) -> SimulatedPass:
    found = simulate_forward(config, q, k, v, options=options, **simulation)
    expected, _ = reference_forward(q, k, v, **_definition(options))
    return SimulatedPass(found.run, relative_error(found.output, expected))


def _backward(
    config: KernelConfig,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    options: AttentionOptions,
    simulation: dict[str, Any],
) -> SimulatedPass:
    out, lse = reference_forward(q, k, v, **_definition(options))
    do = np.empty_like(q)  # its strides, too
    do[...] = np.random.default_rng(GRADIENT_SEED).standard_normal(q.shape)
    found = simulate_backward(config, do, q, k, v, out.astype(q.dtype), lse, options=options, **simulation)
    expected = reference_backward(do, q, k, v, **_definition(options))
    errors = [relative_error(*pair) for pair in zip((found.dq, found.dk, found.dv), expected, strict=True)]
    return SimulatedPass(found.run, float(np.max(errors)), found.companions)


def _definition(options: AttentionOptions) -> dict[str, Any]:
    return {"scale": options.scale, "window": options.window, "softcap": options.softcap}


_PASSES: dict[str, Pass] = {"forward": _forward, "backward": _backward}
