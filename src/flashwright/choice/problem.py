"""What is tuned: one problem stands for all of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

from flashwright.kernels.family import KernelConfig
from flashwright.kernels.forward.launch import MAX_BLOCKS, forward_variant
from flashwright.kernels.registry import family_names, family_with_prefix
from flashwright.problem.dtypes import DType
from flashwright.problem.flops import FORWARD, operation_flops
from flashwright.problem.lengths import MAX_LENGTH, length_bucket
from flashwright.problem.options import AttentionOptions
from flashwright.problem.variant import AttentionVariant
from flashwright.problem.window import FULL, Window

TOKENS, HIDDEN = 16_384, 2_048
"""The size of the problems that are tuned unless given: rows over all sequences, columns over all heads."""
STANDARD_LENGTHS = (512, 2_048, 8_192)


class ProblemKind(NamedTuple):
    """What a tuned config is found by, GPU apart: problems of one kind share it."""

    family: str
    """The prefix of its configs' short forms: its name and, unless that is the forward, its operation."""
    dtype: DType
    d_head: int
    causal: bool
    q_bucket: str
    kv_bucket: str


@dataclass(frozen=True)
class TuningProblem:
    """A pass to time: heads of a native dimension, (batch, rows, heads, d_head) in memory."""

    family: str
    """As of `ProblemKind`."""
    dtype: DType
    d_head: int
    causal: bool
    batch: int
    heads: int
    q_length: int
    kv_length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        d_heads = family_with_prefix(self.family).d_heads
        if not isinstance(self.d_head, int) or self.d_head not in d_heads:
            allowed = ", ".join(map(str, d_heads))
            raise ValueError(f"d_head: {self.d_head!r} has no kernel of its own to tune; allowed: {allowed}")
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal: {self.causal!r} is not allowed; allowed: True, False")
        limits = {"batch": MAX_BLOCKS, "heads": MAX_BLOCKS, "q_length": MAX_LENGTH, "kv_length": MAX_LENGTH}
        for name, most in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name}: {value!r} is not allowed; allowed: 1 to {most}")

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        lengths = f"{self.q_length}" if self.q_length == self.kv_length else f"{self.q_length}×{self.kv_length}"
        shape = f"batch {self.batch}, {self.heads} heads, {lengths} rows"
        operation = "" if self.operation == FORWARD else f"{self.operation}, "
        return f"{operation}{self.dtype.name}, d_head {self.d_head}, {mask}, {shape}"

    @property
    def kind(self) -> ProblemKind:
        buckets = length_bucket(self.q_length), length_bucket(self.kv_length)
        return ProblemKind(self.family, self.dtype, self.d_head, self.causal, *buckets)

    @property
    def window(self) -> Window:
        return Window(right=0) if self.causal else FULL

    @property
    def flops(self) -> float:
        """Of the operation's matrix products; half of them under a causal mask, as benchmarks of attention count."""
        flops = operation_flops(self.operation, self.batch, self.heads, self.q_length, self.kv_length, self.d_head)
        return flops / 2 if self.causal else flops

    @property
    def operation(self) -> str:
        return family_with_prefix(self.family).operation.name

    def tflops(self, time_ms: float) -> float:
        return self.flops / time_ms / 1e9

    def variant(self, config: KernelConfig) -> AttentionVariant:
        """The variant of a config's kernel that computes this problem."""
        return forward_variant(
            config,
            AttentionOptions(self.window),
            head_dim=self.d_head,
            grouped_heads=False,
            packed=False,
            returns_lse=False,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": self.dtype.name}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> TuningProblem:
        return cls(**document)


# --- Usual problems -----------------------------------------------------------------------------------------------


def problem_of(
    *,
    family: str | None = None,
    dtype: DType | str = DType.BF16,
    d_head: int = 128,
    causal: bool = False,
    q_length: int = 4096,
    kv_length: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
) -> TuningProblem:
    """A problem of the usual size where none is given, of the first family unless another is named."""
    family = family or family_names()[0]
    if batch is None:
        batch = max(1, TOKENS // max(q_length, 1))
    if heads is None:
        heads = max(1, HIDDEN // max(d_head, 1))
    kv_length = q_length if kv_length is None else kv_length
    return TuningProblem(family, DType.parse(dtype), d_head, causal, batch, heads, q_length, kv_length)


def standard_problems(
    *,
    dtype: DType | str | None = None,
    d_head: int | None = None,
    causal: bool | None = None,
    length: int | None = None,
    family: str | None = None,
) -> Iterator[TuningProblem]:
    """Every native head dimension, dtype, mask and standard length; or those of them that are requested."""
    family = family or family_names()[0]
    dtypes = tuple(DType) if dtype is None else (DType.parse(dtype),)
    d_heads = family_with_prefix(family).d_heads if d_head is None else (d_head,)
    masks = (False, True) if causal is None else (causal,)
    lengths = STANDARD_LENGTHS if length is None else (length,)
    for some_dtype, some_d_head, some_causal, some_length in product(dtypes, d_heads, masks, lengths):
        yield problem_of(family=family, dtype=some_dtype, d_head=some_d_head, causal=some_causal, q_length=some_length)
