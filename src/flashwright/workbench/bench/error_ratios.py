"""Errors against float64 beside PyTorch's: what an implementation may lose on any kind of scores.

The largest error is compared with that of eager attention in the same dtype, the root mean square with that of
FlashAttention-2. Where a single score dominates, a peer may hit a value of v exactly; an error is therefore never
compared with less than that of rounding results of this size once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashwright.problem.options import AttentionOptions
from flashwright.runtime.reference import attention_reference, visible_keys
from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.measure import Prepare, reason
from flashwright.workbench.bench.peers import Inputs, flash_attention_2
from flashwright.workbench.bench.scores import NORMAL

LARGEST_LIMIT = 2.0
RMS_LIMIT = 1.2
NORMAL_RMS_LIMIT = 1.06
EAGER_ROWS = 1024
"""Rows of scores that eager attention forms at a time."""
GENERIC_FACTOR = 1.1
"""Takes values of a 16-bit type to values between those of the type."""


@dataclass(frozen=True)
class Errors:
    """Of all elements of an output; infinite if one is not finite."""

    largest: float
    rms: float

    @classmethod
    def of(cls, out: Any, expected: Any) -> Errors:
        difference = out.double() - expected
        if not difference.isfinite().all():
            return cls(math.inf, math.inf)
        return cls(float(difference.abs().max()), float(difference.square().mean().sqrt()))

    @classmethod
    def of_rounding(cls, expected: Any, dtype: Any) -> Errors:
        """Of rounding results of this size, none of which the dtype happens to hold."""
        generic = expected * GENERIC_FACTOR
        rounded = cls.of(generic.to(dtype), generic)
        return cls(rounded.largest / GENERIC_FACTOR, rounded.rms / GENERIC_FACTOR)


@dataclass(frozen=True)
class ErrorRatios:
    """One implementation's errors on one cell, and what they are compared with."""

    cell: Cell
    name: str
    errors: Errors
    eager: Errors
    flash_attention_2: Errors
    rounding: Errors

    @property
    def largest_ratio(self) -> float:
        return _ratio(self.errors.largest, max(self.eager.largest, self.rounding.largest))

    @property
    def rms_ratio(self) -> float:
        return _ratio(self.errors.rms, max(self.flash_attention_2.rms, self.rounding.rms))

    @property
    def rms_limit(self) -> float:
        return NORMAL_RMS_LIMIT if self.cell.scores == NORMAL else RMS_LIMIT

    @property
    def within_limits(self) -> bool:
        return self.largest_ratio <= LARGEST_LIMIT and self.rms_ratio <= self.rms_limit

    def to_dict(self) -> dict[str, Any]:
        """JSON has no infinity: an error that is not finite is null."""
        sources = ("errors", "eager", "flash_attention_2", "rounding")
        return (
            self.cell.to_dict()
            | {"implementation": self.name}
            | {name: {k: _finite(v) for k, v in asdict(getattr(self, name)).items()} for name in sources}
            | {
                "largest_ratio": _finite(self.largest_ratio),
                "rms_ratio": _finite(self.rms_ratio),
                "within_limits": self.within_limits,
            }
        )


def _ratio(error: float, usual: float) -> float:
    if math.isinf(error):
        return math.inf
    return error / usual if usual else (math.inf if error else 1.0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Failure:
    """An implementation without an output on a cell, and why."""

    cell: Cell
    name: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return self.cell.to_dict() | {"implementation": self.name, "reason": self.reason}


def error_ratios(
    make_inputs: Callable[[Cell], Inputs],
    cells: Iterable[Cell],
    implementations: Mapping[str, Prepare],
    *,
    advance: Callable[[], None] = lambda: None,
) -> tuple[list[ErrorRatios], list[Failure]]:
    """Of every implementation on every cell. One that fails is listed, and the others go on."""
    found: list[ErrorRatios] = []
    failures: list[Failure] = []
    for cell in cells:
        inputs = make_inputs(cell)
        expected = float64_attention(inputs)
        compared_with = (
            Errors.of(eager_attention(inputs), expected),
            Errors.of(flash_attention_2(inputs.q, inputs.k, inputs.v, causal=inputs.causal), expected),
            Errors.of_rounding(expected, inputs.q.dtype),
        )
        for name, prepare in implementations.items():
            try:
                found.append(ErrorRatios(cell, name, Errors.of(prepare(inputs).output(), expected), *compared_with))
            except Exception as problem:  # a kernel that cannot be compiled or launched, for one
                failures.append(Failure(cell, name, reason(problem)))
        advance()
    return found, failures


def worst_by_kind(found: Sequence[ErrorRatios]) -> dict[tuple[str, str], tuple[ErrorRatios, ErrorRatios]]:
    """By implementation and kind of scores: where the largest error is worst, and where the root mean square is."""
    kinds: dict[tuple[str, str], list[ErrorRatios]] = {}
    for each in found:
        kinds.setdefault((each.name, each.cell.scores), []).append(each)
    return {
        kind: (max(some, key=lambda each: each.largest_ratio), max(some, key=lambda each: each.rms_ratio))
        for kind, some in kinds.items()
    }


# --- What is compared with -----------------------------------------------------------------------------------------


def float64_attention(inputs: Inputs) -> Any:
    """The definition; scores are formed for some rows at a time."""
    q, k, v = inputs.q.double(), inputs.k.double(), inputs.v.double()
    return attention_reference(q, k, v, options=AttentionOptions.of(inputs.causal))[0]


def eager_attention(inputs: Inputs) -> Any:
    """Two matrix products and a softmax, each rounded to the dtype of the inputs."""
    import torch

    q, k, v = inputs.q, inputs.k, inputs.v
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    options = AttentionOptions.of(inputs.causal)
    rows, keys = q.shape[2], k.shape[2]
    parts = []
    for first in range(0, rows, EAGER_ROWS):
        some = slice(first, min(first + EAGER_ROWS, rows))
        scores = (q[:, :, some] * options.scale_of(q.shape[-1])) @ k.mT
        visible = visible_keys(options.window, rows, keys, rows=some, device=q.device)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        parts.append(torch.softmax(scores, dim=-1) @ v)
    return torch.cat(parts, dim=2)
