"""What is tuned: one problem stands for all of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import KernelConfig, Occasion
from flashwright.kernels.forward.launch import MAX_BLOCKS, forward_variant
from flashwright.kernels.registry import family_names, family_with_prefix
from flashwright.problem.dtypes import DType
from flashwright.problem.flops import FORWARD, cache_bytes, operation_flops
from flashwright.problem.lengths import LONGEST, MAX_LENGTH, length_bucket, packed_rows_bucket
from flashwright.problem.options import AttentionOptions
from flashwright.problem.variant import AttentionVariant
from flashwright.problem.window import FULL, Window

TOKENS, HIDDEN = 16_384, 2_048
"""The size of the problems that are tuned unless given: rows over all sequences, columns over all heads."""
USUAL_LENGTH = 4_096
STANDARD_LENGTHS = (512, 2_048, 8_192)
CACHE_BATCH, CACHE_HEADS, CACHE_GROUP, CACHED_KEYS = 16, 32, 4, 8_192
"""Of problems that read a cache: sequences, heads of q, how many of them share one of k and v, keys of a sequence."""
STANDARD_CACHE_ROWS = (1, 8, 16)
"""Rows of q: 4, 32 and 64 packed ones."""
CACHE_BUCKET = LONGEST
"""The bucket of keys of all problems that read a cache: how many there are is known on the device alone."""


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
    kv_heads: int = 0
    """Heads of k and v; 0: as many as of q."""

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
        if isinstance(self.kv_heads, bool) or not isinstance(self.kv_heads, int) or self.kv_heads < 0:
            raise ValueError(
                f"kv_heads: {self.kv_heads!r} is not allowed; allowed: divisors of the heads, {self.heads}"
            )
        if self.heads % self.heads_of_kv:
            raise ValueError(f"kv_heads: {self.kv_heads} does not divide the {self.heads} heads")
        if self.kv_heads and not self.reads_cache:
            raise ValueError(
                f"kv_heads: {self.kv_heads} is not allowed; {self.operation} is tuned without grouped heads"
            )

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        lengths = f"{self.q_length}" if self.q_length == self.kv_length else f"{self.q_length}×{self.kv_length}"
        if self.reads_cache:
            lengths = f"{self.q_length} on {self.kv_length}"
        heads = f"{self.heads} heads" if not self.kv_heads else f"{self.heads} heads on {self.kv_heads}"
        shape = f"batch {self.batch}, {heads}, {lengths} rows"
        operation = "" if self.operation == FORWARD else f"{self.operation}, "
        return f"{operation}{self.dtype.name}, d_head {self.d_head}, {mask}, {shape}"

    @property
    def kind(self) -> ProblemKind:
        buckets = length_bucket(self.q_length), length_bucket(self.kv_length)
        if self.reads_cache:  # its lengths are known on the device alone
            buckets = packed_rows_bucket(self.packed_rows), CACHE_BUCKET
        return ProblemKind(self.family, self.dtype, self.d_head, self.causal, *buckets)

    def occasion(self, gpu: GPUModel | None) -> Occasion:
        """Of choosing a config for such problems."""
        kind = self.kind
        return Occasion(
            self.dtype,
            self.d_head,
            self.causal,
            kind.q_bucket,
            kind.kv_bucket,
            gpu,
            self.packed_rows if self.reads_cache else 0,
        )

    @property
    def heads_of_kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def packed_rows(self) -> int:
        """Rows of all heads that share a head of k and v."""
        return self.q_length * self.heads // self.heads_of_kv

    @property
    def reads_cache(self) -> bool:
        return family_with_prefix(self.family).operation.reads_cache

    @property
    def values_in_keys(self) -> int:
        """Columns of k, from the first on, that are v; 0: v is a tensor of its own."""
        return family_with_prefix(self.family).launch_rules.values_in_keys

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

    @property
    def unit(self) -> str:
        """Of speeds: what is read, where that takes the time."""
        return "TB/s" if self.reads_cache else "TFLOP/s"

    def speed(self, time_ms: float) -> str:
        if self.reads_cache:
            keys, in_keys = self.batch * self.kv_length, self.values_in_keys > 0
            read = cache_bytes(keys, self.heads_of_kv, self.d_head, values_in_keys=in_keys)
            return f"{read / time_ms / 1e9:.2f}"
        return f"{self.tflops(time_ms):.0f}"

    def variant(self, config: KernelConfig) -> AttentionVariant:
        """The variant of a config's kernel that computes this problem."""
        variant = forward_variant(
            config,
            AttentionOptions(self.window),
            head_dim=self.d_head,
            grouped_heads=self.heads_of_kv != self.heads,
            packed=False,
            returns_lse=False,
        )
        return replace(variant, value_head_dim=self.values_in_keys)

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self) | {"dtype": self.dtype.name}
        if not self.kv_heads:
            del document["kv_heads"]
        return document

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
    q_length: int | None = None,
    kv_length: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> TuningProblem:
    """A problem of the usual size where none is given, of the first family unless another is named."""
    family = family or family_names()[0]
    if family_with_prefix(family).operation.reads_cache:
        q_length, kv_length = q_length or 1, kv_length or CACHED_KEYS
        batch, heads = batch or CACHE_BATCH, heads or CACHE_HEADS
        if kv_heads is None and heads % CACHE_GROUP == 0:
            kv_heads = heads // CACHE_GROUP
    else:
        q_length = USUAL_LENGTH if q_length is None else q_length
        if batch is None:
            batch = max(1, TOKENS // max(q_length, 1))
        if heads is None:
            heads = max(1, HIDDEN // max(d_head, 1))
        kv_length = q_length if kv_length is None else kv_length
    return TuningProblem(family, DType.parse(dtype), d_head, causal, batch, heads, q_length, kv_length, kv_heads or 0)


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
    usual = STANDARD_CACHE_ROWS if family_with_prefix(family).operation.reads_cache else STANDARD_LENGTHS
    lengths = usual if length is None else (length,)
    for some_dtype, some_d_head, some_causal, some_length in product(dtypes, d_heads, masks, lengths):
        yield problem_of(family=family, dtype=some_dtype, d_head=some_d_head, causal=some_causal, q_length=some_length)
