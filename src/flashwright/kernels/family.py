"""A kernel family: one way of using the hardware for one operation, described by one value.

Everything that differs between families is in their descriptions. The compiler, the runtime, the choice of configs and
the workbench read descriptions, and hold no tables of families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from flashwright.hardware.architectures import ARCHITECTURES, GPUModel, architecture, parse_arch
from flashwright.kernels.explanation import Explanation
from flashwright.kernels.ladder import SMALL_SELF_ATTENTION, USUAL_SELF_ATTENTION, LadderRung, RungProblem
from flashwright.kernels.launch import Blocking, LaunchRules
from flashwright.kernels.operation import Operation
from flashwright.kernels.source import KernelSource
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import length_bucket
from flashwright.problem.variant import AttentionVariant
from flashwright.problem.window import Window

OLDEST = "oldest"
"""In the place of an architecture: the oldest that a config's family runs on."""


class KernelConfig(Blocking, Protocol):
    """What configs of all families have. They are frozen dataclasses of constants."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def n_warps(self) -> int: ...
    def __hash__(self) -> int: ...
    def short_form(self) -> str: ...
    def kernel_name(self) -> str: ...


class TileShapes(Protocol):
    """What follows from a config before anything is compiled."""

    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...


@dataclass(frozen=True)
class Occasion:
    """What a config is chosen for: a kind of problem on a GPU."""

    dtype: DType
    d_head: int
    causal: bool
    q_bucket: str
    kv_bucket: str
    gpu: GPUModel | None
    """None: no GPU."""
    packed_rows: int = 0
    """Rows of all heads of q that share a head of k and v, of a decode; 0: of another operation."""
    ordered: bool = False
    """Whether a backward adds to dQ in a fixed order."""

    @classmethod
    def of(
        cls, dtype: DType, head_dim: int, window: Window, q_length: int, kv_length: int, gpu: GPUModel | None
    ) -> Occasion:
        """That of a call with such lengths."""
        return cls(dtype, head_dim, window.right is not None, length_bucket(q_length), length_bucket(kv_length), gpu)

    def with_native_d_head(self, family: KernelFamily) -> Occasion:
        """The same for the family's own head dimension that holds this one."""
        return replace(self, d_head=family.native_d_head(self.d_head))


ConsideredConfigs = Callable[[DType, int], Iterator[tuple[Any, str | None]]]
"""Configs of a dtype and head dimension, each with the reason against it, or None."""
DEFAULT_SPACE, FULL_SPACE = SPACES = ("default", "full")
"""What a search may be over, by name."""


@dataclass(frozen=True)
class FullSpace:
    """A larger space than the default one, which it contains."""

    configs: ConsideredConfigs
    """As of `SearchSpace`."""
    has_values: Callable[[Any], bool]
    """Whether a config's values are among those that the space combines, so that the filter's verdict is an answer even
    where no kernel can be built."""


@dataclass(frozen=True)
class SearchSpace:
    """What there is to search in a family."""

    configs: ConsideredConfigs
    """Every config of a dtype and head dimension, with "rule: why it is not worth timing", or None."""
    is_promising: Callable[[Any], bool]
    rules: tuple[str, ...]
    """Those that are listed even if they remove nothing."""
    bearable_spill_bytes: int = 0
    """What a kernel may spill and still be timed."""
    full: FullSpace | None = None
    """None: there is none but the default space."""


@dataclass(frozen=True)
class FamilyLadder:
    """How a family is climbed."""

    rungs: Callable[[DType | str, int], list[LadderRung[Any]]]
    architectures: tuple[str, ...]
    """What is compiled for."""
    peers: tuple[str, ...]
    """What is timed beside it, by the names of the bench's peers; the first is what it has to reach."""
    simulated: RungProblem = SMALL_SELF_ATTENTION
    timed: RungProblem = USUAL_SELF_ATTENTION


@dataclass(frozen=True)
class Companion:
    """A kernel that runs before or after a family's own."""

    source: Callable[[Any, AttentionVariant], KernelSource]
    threads: int
    on_request: bool = False
    """Runs only where a call asks for what it does."""


@dataclass(frozen=True)
class KernelFamily:
    operation: Operation
    name: str
    title: str
    """The name as a reader sees it."""
    config_type: type
    d_heads: tuple[int, ...]
    """Head dimensions with a kernel of their own; others are padded up to the next inside the kernel."""
    parse: Callable[[str], Any]
    """A config from its short form or the C++ name of its kernel."""
    shapes: Callable[[Any], TileShapes]
    """Raises `ValueError` for a config that no kernel can be built from."""
    source: Callable[[Any, AttentionVariant], KernelSource]
    rejection_reason: Callable[[Any], str | None]
    """Why a config is not worth timing; None if it is."""
    default_config: Callable[[Occasion], Any]
    """What is good by experience, for problems that nobody has tuned."""
    launch_rules: LaunchRules = field(default_factory=LaunchRules)
    suits: Callable[[Occasion], bool] = lambda occasion: True
    """Whether it is worth choosing, on a GPU that runs it, for such problems."""
    oldest_arch: str = "sm_80"
    runs_on_later: bool = True
    """Whether it runs on every architecture from the oldest on; otherwise on that one alone."""
    space: SearchSpace | None = None
    ladder: FamilyLadder | None = None
    explanation: Explanation | None = None
    companions: Mapping[str, Companion] = field(default_factory=dict)
    """By name; the operation says when each of them runs."""

    @property
    def prefix(self) -> str:
        """What the short forms of its configs begin with. That of the first family may be left out."""
        return self.name if self.operation.name == "forward" else f"{self.name} {self.operation.name}"

    def launch(self, config: Any, *tensors: Any, **options: Any) -> Any:
        """How to compute with a config; tensors and options as of the operation's `launch`."""
        return self.operation.launch(self.launch_rules, config, *tensors, **options)

    def runs_on(self, arch: str) -> bool:
        try:
            self.target(arch)
        except ValueError:
            return False
        return True

    def target(self, arch: str) -> str:
        """What to compile for to run on an architecture: `sm_90a` has instructions that `sm_90` lacks."""
        if arch == OLDEST:
            return self.oldest_arch
        if not self.runs_on_later:
            if re.sub("a$", "", parse_arch(arch)) != re.sub("a$", "", self.oldest_arch):
                raise ValueError(f"arch: the {self.name} family runs on {self.oldest_arch} alone, not on {arch}")
            return self.oldest_arch
        return arch

    def target_for(self, config: Any, arch: str) -> str:
        """The same for one config: by default, the oldest architecture whose thread blocks have the shared memory that
        it needs."""
        if arch != OLDEST or not self.runs_on_later:
            return self.target(arch)
        needed = self.shapes(config).shared_bytes
        oldest = architecture(self.oldest_arch)
        fitting = (each.name for each in ARCHITECTURES.values() if each.shared_bytes_per_block >= needed)
        return oldest.name if needed <= oldest.shared_bytes_per_block else next(fitting, oldest.name)

    def native_d_head(self, head_dim: int) -> int:
        """The smallest head dimension with a kernel of its own that holds `head_dim` columns."""
        for d_head in self.d_heads:
            if head_dim <= d_head:
                return d_head
        raise ValueError(
            f"head_dim: {head_dim} is not allowed; allowed by the {self.name} family: multiples of 8 up to "
            f"{self.d_heads[-1]}"
        )
