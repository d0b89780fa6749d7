"""Which config computes a problem: the one requested, else what was measured fastest, else a rule of experience."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from flashwright.choice.lookup import forget_results, measured_result
from flashwright.choice.results import TunedResult
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import KernelConfig, KernelFamily, Occasion
from flashwright.kernels.registry import as_config, families, family_named, family_of
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import LONGEST, length_bucket, packed_rows_bucket
from flashwright.problem.shapes import HEAD_DIM_STEP
from flashwright.problem.window import Window

BACKWARD, DECODE = "backward", "decode"


@dataclass(frozen=True)
class Choice:
    """A config for a problem on a GPU, and where it comes from."""

    config: KernelConfig
    source: Literal["requested", "tuned", "shipped", "rule"]
    """The caller, the user's tuning, results that ship with the package, or a rule of experience."""
    gpu: GPUModel | None
    """None: no GPU."""
    measured: TunedResult | None = None
    """What was measured, of a tuned or shipped choice."""

    @property
    def family(self) -> KernelFamily:
        return family_of(self.config)


def chosen_config(
    dtype: DType,
    head_dim: int,
    window: Window,
    q_length: int,
    kv_length: int,
    *,
    gpu: GPUModel | None,
    config: KernelConfig | str | None = None,
    family: str | None = None,
    operation: str = "forward",
) -> KernelConfig:
    """The config of an operation that was requested, checked; or the default for the GPU and the problem."""
    return choose(
        dtype, head_dim, window, q_length, kv_length, gpu=gpu, config=config, family=family, operation=operation
    ).config


def choose(
    dtype: DType,
    head_dim: int,
    window: Window,
    q_length: int,
    kv_length: int,
    *,
    gpu: GPUModel | None,
    config: KernelConfig | str | None = None,
    family: str | None = None,
    operation: str = "forward",
) -> Choice:
    """The same with where the config comes from."""
    if config is None or config == "":
        return _default_choice(Occasion.of(dtype, head_dim, window, q_length, kv_length, gpu), family, operation)
    chosen: KernelConfig = as_config(config)
    if (of := family_of(chosen)).operation.name != operation:
        raise ValueError(f"config: {chosen} is of the operation {of.operation.name}, not {operation}")
    if family is not None and of.name != family:
        raise ValueError(f"config: {chosen} is not of the {family} family, which was requested too")
    if chosen.dtype != dtype:
        raise ValueError(f"config: {chosen} computes {chosen.dtype.name}, but q is {dtype.name}")
    if head_dim > chosen.d_head:
        raise ValueError(f"config: {chosen} computes head dimensions up to {chosen.d_head}, but q has {head_dim}")
    return Choice(chosen, "requested", gpu)


def default_config(
    dtype: DType,
    head_dim: int,
    *,
    causal: bool,
    q_length: int,
    kv_length: int,
    gpu: GPUModel | None,
    family: str | None = None,
    operation: str = "forward",
) -> KernelConfig:
    """A good config for a problem on a GPU (None: no GPU), of the best family there or of a given one.

    What was measured on such a GPU comes first: the user's own tuning and the results that ship with the package.
    """
    occasion = Occasion(dtype, head_dim, causal, length_bucket(q_length), length_bucket(kv_length), gpu)
    return _default_choice(occasion, family, operation).config


@cache
def _default_choice(occasion: Occasion, family: str | None, operation: str) -> Choice:
    chosen = family_named(family, operation) if family else best_family(occasion, operation)
    return choice_of_family(chosen, occasion)


def backward_config(occasion: Occasion, *, family: str | None = None, deterministic: bool = False) -> KernelConfig:
    """What differentiates such problems: by the family that was named for the forward, where it has a backward for
    them, and otherwise by the best. If `deterministic`, sums are added in a fixed order."""
    return backward_choice(occasion, family=family, deterministic=deterministic).config


def backward_choice(occasion: Occasion, *, family: str | None = None, deterministic: bool = False) -> Choice:
    """The same with where the config comes from."""
    named = next((each for each in families(BACKWARD) if each.name == family and _computes(each, occasion)), None)
    choice = _default_choice(replace(occasion, ordered=deterministic), named and named.name, BACKWARD)
    config: Any = choice.config
    return replace(choice, config=replace(config, ordered=True)) if deterministic else choice


def decode_choice(dtype: DType, head_dim: int, window: Window, packed_rows: int, *, gpu: GPUModel | None) -> Choice:
    """What decodes with so many rows of all heads that share a head of K and V."""
    bucket = packed_rows_bucket(packed_rows)
    occasion = Occasion(dtype, head_dim, window.right is not None, bucket, LONGEST, gpu, packed_rows)
    return _default_choice(occasion, None, DECODE)


def has_decode(head_dim: int, value_head_dim: int, *, values_in_keys: bool, gpu: GPUModel) -> bool:
    """Whether a kernel decodes with such head dimensions. Values may be the first columns of the keys."""
    if head_dim % HEAD_DIM_STEP or value_head_dim % HEAD_DIM_STEP:
        return False

    def takes(family: KernelFamily) -> bool:
        most = family.launch_rules.values_in_keys
        return most == 0 or (values_in_keys and value_head_dim <= most)

    widest = max(head_dim, value_head_dim)
    return any(
        takes(family) and family.runs_on(gpu.arch) and widest <= family.d_heads[-1] for family in families(DECODE)
    )


def tuned_or_default(family: KernelFamily, occasion: Occasion) -> KernelConfig:
    """The config of a family that was measured fastest for such problems, or else one that is good by experience."""
    return choice_of_family(family, occasion).config


def choice_of_family(family: KernelFamily, occasion: Occasion) -> Choice:
    """The same with where the config comes from."""
    occasion = occasion.with_native_d_head(family)
    if (measured := measured_result(family, occasion)) is not None:
        return Choice(measured.result.config, measured.source, occasion.gpu, measured.result)
    return Choice(untuned_config(family, occasion), "rule", occasion.gpu)


def best_family(occasion: Occasion, operation: str = "forward") -> KernelFamily:
    """Of the families that the GPU runs, the last registered that suits the problem; without a GPU, the first."""
    first, *others = families(operation)
    if occasion.gpu is None:
        return first
    for family in reversed(others):
        if _computes(family, occasion) and family.suits(occasion):
            return family
    return first


def _computes(family: KernelFamily, occasion: Occasion) -> bool:
    """Whether it has a kernel for the head dimension that runs on the GPU, if there is one."""
    return occasion.d_head <= family.d_heads[-1] and (occasion.gpu is None or family.runs_on(occasion.gpu.arch))


def untuned_config(family: KernelFamily, occasion: Occasion) -> KernelConfig:
    """What is good by experience."""
    config: KernelConfig = family.default_config(occasion)
    return config


def forget_choices() -> None:
    """The next call consults measured results anew."""
    forget_results()
    _default_choice.cache_clear()
