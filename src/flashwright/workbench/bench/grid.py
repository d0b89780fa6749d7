"""The cells of a benchmark: by default a fixed number of tokens and a fixed hidden size, over lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashwright.problem.dtypes import DType
from flashwright.problem.flops import FORWARD, cache_bytes, checked_operation, operation_flops
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
    rows: int = 0
    """Of queries, where they attend to a cache of `length` keys; 0: as many as keys."""
    page: int = 0
    """Keys of a page of the cache, in shuffled order; 0: it is contiguous."""
    uneven: bool = False
    """Whether sequences have from 1 to `length` keys in the cache."""

    @property
    def q_length(self) -> int:
        return self.rows or self.length

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each sequence. Uneven ones are drawn evenly from powers of two, and sorted."""
        if not self.uneven:
            return (self.length,) * self.batch
        draw = random.Random(0)
        most = math.log2(self.length + 1)
        return tuple(sorted(min(self.length, max(1, int(2 ** draw.uniform(0, most)))) for _ in range(self.batch)))

    @property
    def problem(self) -> Cell:
        """The cell of normal scores: what cells of the same problem have in common."""
        return replace(self, scores=NORMAL)

    @property
    def flops(self) -> float:
        """Of the matrix products; a causal mask is counted as half of them, except of few rows on a cache."""
        full = operation_flops(self.operation, 1, self.heads, self.q_length, sum(self.lengths), self.d_head)
        return full / 2 if self.causal and not self.rows else full

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    def tflops(self, time_ms: float) -> float:
        return self.flops / time_ms / 1e9

    @property
    def unit(self) -> str:
        """Of speeds: what is read, where that takes the time."""
        return "TB/s" if self.rows else "TFLOP/s"

    def speed(self, time_ms: float) -> float:
        if not self.rows:
            return self.tflops(time_ms)
        return cache_bytes(sum(self.lengths), self.kv_heads, self.d_head) / time_ms / 1e9

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.d_head} {self.mask} {length_text(self.length)}"
        parts = [f"b{self.batch} {self.heads}/{self.kv_heads} s{length_text(self.length)} d{self.d_head}"]
        parts += [f"{self.rows} rows"] if self.rows > 1 else []
        parts += [f"pages of {self.page}"] if self.page else []
        parts += ["uneven"] if self.uneven else []
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self) | {"dtype": self.dtype.name}
        return document if self.rows else {name: document[name] for name in document if name not in OF_CACHES}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        names = ("d_head", "length", "batch", "heads", "kv_heads")
        numbers: dict[str, Any] = {name: positive(name, values[name]) for name in names}
        scores = str(values.get("scores", NORMAL))  # a file from before there were kinds has normal scores
        operation = checked_operation(str(values.get("operation", FORWARD)))  # and before there were operations, this
        dtype, causal = DType.parse(values["dtype"]), bool(values["causal"])
        cache: dict[str, Any] = {name: kind(values.get(name, 0)) for name, kind in OF_CACHES.items()}
        return cls(dtype=dtype, causal=causal, scores=scores, operation=operation, **numbers, **cache)


CACHE_NAMES = "b: sequences, heads of q / of k and v, s: keys of each, d: head dimension"
"""What the names of cells of decoding are made of."""
OF_CACHES = {"rows": int, "page": int, "uneven": bool}
"""Fields of cells that read a cache, and their types."""


def length_text(length: int) -> str:
    """512, 1k, 2k, 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


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
        positive(name, value)
    for name, given in (("batch", batch), ("heads", heads), ("kv_heads", kv_heads)):
        if given is not None:
            positive(name, given)
    check_d_head(d_head)
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


def check_d_head(d_head: int) -> None:
    if d_head % HEAD_DIM_STEP or not 0 < d_head <= MAX_D_HEAD:
        raise ValueError(
            f"d_head: {d_head} is not allowed; allowed: multiples of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to "
            f"{MAX_D_HEAD}"
        )


def positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {value!r} is not allowed; allowed: whole numbers from 1")
    return value
