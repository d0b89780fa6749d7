"""What a call would run on a GPU, and why: the choice of `attention()` as a value to read."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashwright.choice.choose import Choice, backward_choice, choose, decode_choice
from flashwright.choice.currency import Currency, currency
from flashwright.choice.few_rows import decodes
from flashwright.choice.results import TunedResult
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import KernelConfig, Occasion
from flashwright.kernels.forward.launch import forward_variant
from flashwright.operators.backward import family_for_gradients
from flashwright.operators.forward import lengths_to_choose_for
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import LONGEST, length_bucket, packed_rows_bucket
from flashwright.problem.options import AttentionOptions
from flashwright.problem.variant import AttentionVariant

_MEASURED_BY = {"tuned": "your tuning", "shipped": "a result that ships with flashwright"}
_KERNELS = {
    Currency.CURRENT: "of the installed kernels",
    Currency.OTHER: "of other kernel sources than the installed ones",
    Currency.UNKNOWN: "of kernel sources that it does not name",
}


@dataclass(frozen=True)
class CallProblem:
    """What a choice depends on: sizes and options of a call."""

    dtype: DType
    head_dim: int
    q_length: int
    kv_length: int
    options: AttentionOptions
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    returns_lse: bool = False
    row_invariant: bool = False
    training: bool = False
    """Whether gradients will be computed."""
    deterministic: bool = False
    """Of gradients: whether they have the same bits in every run."""

    @property
    def grouped_heads(self) -> bool:
        return self.heads != self.kv_heads

    @property
    def packed_rows(self) -> int:
        """Rows of all heads of q that share a head of k and v."""
        return self.q_length * (self.heads // self.kv_heads)

    @property
    def is_decoded(self) -> bool:
        """Whether a decode kernel computes it, where the call names no kernel."""
        sizes = (self.batch, self.heads, self.kv_heads, self.q_length, self.kv_length)
        return not self.row_invariant and not self.training and decodes(self.options.window, *sizes)

    def __str__(self) -> str:
        (left, right, _), softcap = self.options.window, self.options.softcap
        mask = "full" if (left, right) == (None, None) else "causal" if (left, right) == (None, 0) else "window"
        cap = f", softcap {softcap:g}" if softcap else ""
        return (
            f"{self.dtype.name}, head_dim {self.head_dim}, {mask}{cap}, {self.q_length} × {self.kv_length} rows × keys"
        )


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that `attention()` runs for a call, and where its config comes from."""

    problem: CallProblem
    gpu: GPUModel
    config: KernelConfig
    source: str
    """"requested" (by the call), "tuned" (your results), "shipped" (the package's), or "rule" (of experience)."""
    reason: str
    variant: AttentionVariant
    """What is compiled into the kernel beside the config: masks, cap, grouping, log-sum-exp, padded columns."""
    family: str
    measured: TunedResult | None
    """The result behind a tuned or shipped config."""
    gradients: KernelChoice | None = None
    """In training: the kernel that computes the gradients, chosen likewise."""

    @property
    def explain_command(self) -> str:
        """The command that shows all there is to know about the kernel; it needs no GPU."""
        words = ["flashwright", "explain", self.config.short_form(), "--arch", self.gpu.arch]
        return shlex.join([*words, *_flags(self.problem)])

    def __str__(self) -> str:
        gradients = f"; gradients: {self.gradients}" if self.gradients else ""
        return f"{self.config} on {self.gpu.name or self.gpu.arch} ({self.source}: {self.reason}){gradients}"

    def to_dict(self) -> dict[str, Any]:
        window = self.problem.options.window
        gradients = self.gradients
        return {
            "gpu": {"name": self.gpu.name or None, "arch": self.gpu.arch},
            "problem": {
                "dtype": self.problem.dtype.name,
                "batch": self.problem.batch,
                "heads": self.problem.heads,
                "kv_heads": self.problem.kv_heads,
                "head_dim": self.problem.head_dim,
                "rows": self.problem.q_length,
                "keys": self.problem.kv_length,
                "window": [window.left, window.right],
                "softcap": self.problem.options.softcap,
                "grouped_heads": self.problem.grouped_heads,
                "row_invariant": self.problem.row_invariant,
                "training": self.problem.training,
                "deterministic": self.problem.deterministic,
            },
            **self._kernel(),
            "gradients": None if gradients is None else gradients._kernel(),
        }

    def _kernel(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "config": self.config.short_form(),
            "source": self.source,
            "reason": self.reason,
            "variant": asdict(self.variant),
            "measured": None if self.measured is None else self.measured.to_dict(),
            "explain": self.explain_command,
        }


def kernel_choice(
    problem: CallProblem, gpu: GPUModel, *, family: str | None = None, config: KernelConfig | str | None = None
) -> KernelChoice:
    """What a call computes on a GPU with; by the same steps as the call itself."""
    lengths = lengths_to_choose_for(
        problem.dtype,
        problem.head_dim,
        problem.options.window,
        problem.q_length,
        problem.kv_length,
        family=family,
        row_invariant=problem.row_invariant,
    )
    is_decoded = config is None and family is None and problem.is_decoded
    if is_decoded:
        buckets = packed_rows_bucket(problem.packed_rows), LONGEST
        choice = decode_choice(problem.dtype, problem.head_dim, problem.options.window, problem.packed_rows, gpu=gpu)
    else:
        buckets = length_bucket(lengths[0]), length_bucket(lengths[1])
        choice = choose(
            problem.dtype, problem.head_dim, problem.options.window, *lengths, gpu=gpu, config=config, family=family
        )
    reason = f"{'few rows on many keys are decoded; ' if is_decoded else ''}{_reason(choice, buckets)}"
    found = _kernel_choice(problem, gpu, choice, reason, returns_lse=problem.returns_lse or problem.training)
    if not problem.training:
        return found
    occasion = Occasion.of(
        problem.dtype, problem.head_dim, problem.options.window, problem.q_length, problem.kv_length, gpu
    )
    buckets = occasion.q_bucket, occasion.kv_bucket
    choice = backward_choice(occasion, family=family_for_gradients(config, family), deterministic=problem.deterministic)
    return replace(found, gradients=_kernel_choice(problem, gpu, choice, _reason(choice, buckets), returns_lse=False))


def _kernel_choice(
    problem: CallProblem, gpu: GPUModel, choice: Choice, reason: str, *, returns_lse: bool
) -> KernelChoice:
    choice.family.target(gpu.arch)  # raises for a family that the GPU does not run
    variant = forward_variant(
        choice.config,
        problem.options,
        head_dim=problem.head_dim,
        grouped_heads=problem.grouped_heads,
        packed=False,
        returns_lse=returns_lse,
    )
    return KernelChoice(
        problem=problem,
        gpu=gpu,
        config=choice.config,
        source=choice.source,
        reason=reason,
        variant=variant,
        family=choice.family.name,
        measured=choice.measured,
    )


def _reason(choice: Choice, buckets: tuple[str, str]) -> str:
    if choice.source == "requested":
        return "the call names it"
    result = choice.measured
    if result is None:
        where = choice.gpu.name if choice.gpu and choice.gpu.name else "such a GPU"
        of = f"{' × '.join(buckets)} rows × keys"
        return f"no result is measured on {where} for {of}; the {choice.family.name} family's default"
    nearest = ""
    if (measured_keys := result.problem.kind.kv_bucket) != buckets[1]:
        nearest = f", the nearest to {buckets[1]} keys measured: {measured_keys}"
    whose = f"{_MEASURED_BY[choice.source]}, {result.date[:10]}, {_KERNELS[currency(result)]}"
    return f"{whose}: {result.best.time_ms:.3g} ms for {result.problem}{nearest}"


def _flags(problem: CallProblem) -> list[str]:
    """The options of `flashwright explain` that name the same variant."""
    left, right, _ = problem.options.window
    flags = []
    if left is None and right == 0:
        flags.append("--causal")
    elif left is not None or right is not None:
        flags += ["--window", ",".join("-1" if side is None else str(side) for side in (left, right))]
    if problem.options.softcap:
        flags += ["--softcap", f"{problem.options.softcap:g}"]
    if problem.grouped_heads:
        flags += ["--kv-heads", "1"]
    return flags
