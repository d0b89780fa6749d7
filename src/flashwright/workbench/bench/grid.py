"""The cells of a benchmark: by default a fixed number of tokens and a fixed hidden size, over lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashwright.problem.dtypes import DType
from flashwright.problem.flops import FORWARD, checked_operation, operation_flops
from flashwright.problem.shapes import HEAD_DIM_STEP, MAX_D_HEAD
from flashwright.workbench.bench.scores import NORMAL

TOKENS, HIDDEN = 16_384, 2_048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
D_HEADS = (64, 128, 256)
MASKS = (False, True)
"""Whether causal."""


@dataclass(frozen=True)
class Cell:
    """One problem, self-attention of `batch` sequences of one length, and what its scores look like."""

    dtype: DType
    d_head: int
    causal: bool
    length: int
    batch: int
    heads: int
    kv_heads: int
    scores: str = NORMAL
    """A kind of scores, by its name."""
    operation: str = FORWARD

    @property
    def problem(self) -> Cell:
        """The cell of normal scores: what cells of the same problem have in common."""
        return replace(self, scores=NORMAL)

    @property
    def flops(self) -> float:
        """Of the matrix products; a causal mask is counted as half of them."""
        full = operation_flops(self.operation, self.batch, self.heads, self.length, self.length, self.d_head)
        return full / 2 if self.causal else full

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    def tflops(self, time_ms: float) -> float:
        return self.flops / time_ms / 1e9

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": self.dtype.name}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        names = ("d_head", "length", "batch", "heads", "kv_heads")
        numbers = {name: _positive(name, values[name]) for name in names}
        scores = str(values.get("scores", NORMAL))  # a file from before there were kinds has normal scores
        operation = checked_operation(str(values.get("operation", FORWARD)))  # and before there were operations, this
        dtype, causal = DType.parse(values["dtype"]), bool(values["causal"])
        return cls(dtype=dtype, causal=causal, scores=scores, operation=operation, **numbers)


def cell_of(
    dtype: DType,
    d_head: int,
    causal: bool,
    length: int,
    *,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    scores: str = NORMAL,
    operation: str = FORWARD,
) -> Cell:
    """A cell; batch and heads, unless given, fill the tokens and the hidden size."""
    for name, value in (("seqlen", length), ("tokens", tokens), ("hidden", hidden)):
        _positive(name, value)
    for name, given in (("batch", batch), ("heads", heads), ("kv_heads", kv_heads)):
        if given is not None:
            _positive(name, given)
    if d_head % HEAD_DIM_STEP or not 0 < d_head <= MAX_D_HEAD:
        raise ValueError(
            f"d_head: {d_head} is not allowed; allowed: multiples of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to "
            f"{MAX_D_HEAD}"
        )
    if batch is None and length > tokens:
        raise ValueError(f"seqlen: {length} is more than the {tokens} tokens in all; give more tokens, or a batch")
    heads = heads or max(1, hidden // d_head)
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise ValueError(f"kv_heads: {kv_heads} does not divide the {heads} heads of d_head {d_head}")
    batch = batch or tokens // length
    return Cell(dtype, d_head, causal, length, batch, heads, kv_heads, scores, checked_operation(operation))


def grid(
    dtype: DType = DType.BF16,
    d_heads: Sequence[int] = D_HEADS,
    masks: Sequence[bool] = MASKS,
    lengths: Sequence[int] = LENGTHS,
    scores: Sequence[str] = (NORMAL,),
    operation: str = FORWARD,
    **sizes: int | None,
) -> list[Cell]:
    """Every cell of head dimensions × masks × lengths × kinds of scores; `sizes` are `cell_of`'s, None its default."""
    given = {name: value for name, value in sizes.items() if value is not None}
    return [
        cell_of(dtype, d_head, causal, length, scores=kind, operation=operation, **given)
        for d_head in dict.fromkeys(d_heads)
        for causal in masks
        for length in sorted(set(lengths))
        for kind in dict.fromkeys(scores)
    ]


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {value!r} is not allowed; allowed: whole numbers from 1")
    return value
