"""What is executed and drawn of each kernel family, found by the type of a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flashwright.explain.ampere import without_or_with_swizzle
from flashwright.explain.core_matrices import core_matrix_facts
from flashwright.explain.execution import FIRST_WARP, Execution, TracedWarp
from flashwright.explain.facts import MatrixLoad, SharedMap, Timeline
from flashwright.explain.hopper_timeline import hopper_timeline, hopper_warps
from flashwright.explain.matrix_load import matrix_load_facts
from flashwright.explain.timeline import timeline_facts
from flashwright.families import AMPERE, HOPPER, ForwardKernelConfig, family_of
from flashwright.hopper.config import HopperForwardKernelConfig
from flashwright.kernel_configs import FlashForwardKernelConfig

Executions = Mapping[Any, Execution]
"""By config, of the first warp."""


@dataclass(frozen=True)
class ExecutedFamily:
    warps: Callable[[Any], tuple[TracedWarp, ...]]
    """One of each kind; the first is the one whose instructions are counted."""
    also_drawn: Callable[[Any], tuple[Any, ...]]
    """Configs that the pictures set beside a config."""
    matrix_loads: Callable[[Any, Executions, SharedMap], tuple[MatrixLoad, ...]]
    timeline: Callable[[Any, Execution, SharedMap], Timeline]
    has_asynchronous_products: bool = False


def _ampere_warps(config: FlashForwardKernelConfig) -> tuple[TracedWarp, ...]:
    return (FIRST_WARP,)


def _ampere_also_drawn(config: FlashForwardKernelConfig) -> tuple[FlashForwardKernelConfig, ...]:
    return (without_or_with_swizzle(config),)


def _ampere_matrix_loads(
    config: FlashForwardKernelConfig, executions: Executions, shared: SharedMap
) -> tuple[MatrixLoad, ...]:
    drawn = (config, *_ampere_also_drawn(config))
    return tuple(matrix_load_facts(each, executions[each], shared) for each in drawn if each in executions)


def _hopper_also_drawn(config: HopperForwardKernelConfig) -> tuple[HopperForwardKernelConfig, ...]:
    return ()


def _hopper_matrix_loads(
    config: HopperForwardKernelConfig, executions: Executions, shared: SharedMap
) -> tuple[MatrixLoad, ...]:
    return core_matrix_facts(config)


def _hopper_timeline(config: HopperForwardKernelConfig, execution: Execution, shared: SharedMap) -> Timeline:
    return hopper_timeline(config, execution)


_EXECUTED = {
    AMPERE.name: ExecutedFamily(_ampere_warps, _ampere_also_drawn, _ampere_matrix_loads, timeline_facts),
    HOPPER.name: ExecutedFamily(
        hopper_warps, _hopper_also_drawn, _hopper_matrix_loads, _hopper_timeline, has_asynchronous_products=True
    ),
}


def executed_family(config: ForwardKernelConfig) -> ExecutedFamily:
    return _EXECUTED[family_of(config).name]
