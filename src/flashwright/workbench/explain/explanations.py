"""What families say about their configs, found by the config."""

from __future__ import annotations

from flashwright.kernels.explanation import Explanation, SharedMap, TracedWarp
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of, tile_shapes
from flashwright.workbench.explain.instruction_kinds import Kind


def explanation_of(config: KernelConfig) -> Explanation:
    """Raises `ValueError` for a family that explains nothing."""
    family = family_of(config)
    if family.explanation is None:
        raise ValueError(f"the {family.name} family has no explanation of its configs")
    return family.explanation


def counted_warp(config: KernelConfig) -> TracedWarp:
    """The warp whose instructions are counted."""
    return explanation_of(config).warps(config)[0]


def loop_kinds_of(config: KernelConfig) -> list[Kind]:
    """What the loop has in it whose instructions are counted."""
    return [Kind[name] for name in counted_warp(config).loop_kinds]


def shared_map_of(config: KernelConfig) -> SharedMap:
    """Where blocks lie in shared memory; where the family gives no map, only how much there is of it."""
    of_config = explanation_of(config).shared_map
    return SharedMap((), tile_shapes(config).shared_bytes) if of_config is None else of_config(config)
