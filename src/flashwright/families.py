"""The kernel families: what each is made of, found by the type of its config.

A family is a config type, its static shapes, the source of its kernel and how a launch of it is put together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from flashwright.architectures import parse_arch
from flashwright.hopper.config import D_HEADS, HopperForwardKernelConfig, parse_hopper_config
from flashwright.hopper.launch import hopper_launch
from flashwright.hopper.shapes import HopperTileShapes
from flashwright.hopper.source import hopper_kernel_source
from flashwright.kernel_configs import FlashForwardKernelConfig, parse_kernel_name_into_config
from flashwright.kernel_source import KernelSource, forward_kernel_source
from flashwright.launch_arguments import ForwardLaunch, forward_launch
from flashwright.tile_shapes import ForwardKernelTileShapes

OLDEST = "oldest"
"""In the place of an architecture: the oldest that a config's family runs on."""

ForwardKernelConfig = FlashForwardKernelConfig | HopperForwardKernelConfig


class TileShapes(Protocol):
    """What follows from a config of any family."""

    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...


@dataclass(frozen=True)
class KernelFamily:
    name: str
    config_type: type
    d_heads: tuple[int, ...]
    """Head dimensions with a kernel of their own; others are padded up to the next inside the kernel."""
    parse: Callable[[str], Any]
    """A config from its short form."""
    shapes: Callable[[Any], TileShapes]
    source: Callable[..., KernelSource]
    """Of a config and a variant."""
    launch: Callable[..., ForwardLaunch]
    """Of a config, q, k, v, o and what `forward_launch` takes; `multiprocessors` of the GPU."""
    oldest_arch: str = "sm_80"
    runs_on_later: bool = True
    """Whether it runs on every architecture from the oldest on; otherwise on that one alone."""

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


def _ampere_launch(*arguments: Any, multiprocessors: int, **options: Any) -> ForwardLaunch:
    return forward_launch(*arguments, **options)


AMPERE = KernelFamily(
    "ampere",
    FlashForwardKernelConfig,
    (32, 64, 96, 128, 160, 192, 256),
    parse_kernel_name_into_config,
    ForwardKernelTileShapes,
    forward_kernel_source,
    _ampere_launch,
)
HOPPER = KernelFamily(
    "hopper",
    HopperForwardKernelConfig,
    D_HEADS,
    parse_hopper_config,
    HopperTileShapes,
    hopper_kernel_source,
    hopper_launch,
    oldest_arch="sm_90a",
    runs_on_later=False,
)
FAMILIES = {family.name: family for family in (AMPERE, HOPPER)}


def family_named(name: str) -> KernelFamily:
    """Raises `ValueError` for anything else than the name of a family."""
    if name not in tuple(FAMILIES):  # which also takes what cannot be hashed, as a stored result may hold
        raise ValueError(f"family: {name!r} is not known; allowed: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_of(config: ForwardKernelConfig) -> KernelFamily:
    for family in FAMILIES.values():
        if isinstance(config, family.config_type):
            return family
    raise TypeError(f"config: {type(config).__name__} is not a config of any kernel family: {', '.join(FAMILIES)}")


def parse_config(text: str) -> ForwardKernelConfig:
    """The config of any family that a text names."""
    family = HOPPER if "hopper" in text.lower() else AMPERE
    config: ForwardKernelConfig = family.parse(text)
    return config
