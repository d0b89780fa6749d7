"""Gathering the facts about a config: arithmetic, the compiler, the disassembler and the simulator."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from flashwright.architectures import architecture
from flashwright.compiler import Kernel, compile_many
from flashwright.explain import ampere
from flashwright.explain.disassembly import DisassemblyError, disassemble
from flashwright.explain.execution import STEADY_ITERATION, Execution, execute, simulation_facts, step_counts
from flashwright.explain.facts import ConfigFacts, Effects, KVLoop, Neighbour, RegisterBudget, Verdict
from flashwright.explain.loop import largest_loop, ptx_listing, ptx_mix, sass_listing, sass_mix
from flashwright.explain.matrix_load import matrix_load_facts
from flashwright.explain.timeline import ITERATIONS_NEEDED, timeline_facts
from flashwright.kernel_configs import FlashForwardKernelConfig, rejection_reason
from flashwright.occupancy import occupancy
from flashwright.progress import progress_bar
from flashwright.tile_shapes import ForwardKernelTileShapes

STEADY_ITERATIONS_NEEDED = STEADY_ITERATION + 2
"""So that the steady iteration is not the loop's last."""


def explain_config(
    config: FlashForwardKernelConfig,
    arch: str = "sm_80",
    *,
    turning: Collection[str] = ampere.KNOBS_TO_TURN,
    progress: bool = True,
) -> ConfigFacts:
    """All the facts about a config; raises `ValueError` for one that no kernel can be built from.

    `turning` names the knobs whose neighbours are compiled and simulated too.
    """
    target = architecture(arch)
    shared = ampere.shared_map(config, target)
    turned = ampere.without_or_with_swizzle(config)
    changes = {change: values for change, values in ampere.neighbours(config) if values.keys() <= set(turning)}
    candidates = {change: _changed(config, values) for change, values in changes.items()}
    built = [candidate for candidate in candidates.values() if isinstance(candidate, FlashForwardKernelConfig)]

    configs = list(dict.fromkeys([config, turned, *built]))
    kernels = dict(zip(configs, compile_many(configs, arch, progress=progress), strict=True))
    kernel = kernels[config]
    problem = _why_it_cannot_run(kernel)
    executions = _execute_all(kernels, traced_longer=(config, turned), progress=progress)
    effects = {each: _effects(kernels[each], executions.get(each)) for each in configs}
    own = executions.get(config)
    reason = rejection_reason(config)
    return ConfigFacts(
        config=config.short_form(),
        family=ampere.FAMILY,
        arch=arch,
        kernel=config.kernel_name(),
        knobs=ampere.knobs(config),
        shapes=ampere.shapes(config),
        verdict=Verdict(kept=reason is None, reason=reason),
        registers=RegisterBudget(
            phases=ampere.register_phases(config),
            limit=target.registers_per_thread,
            used=kernel.registers,
            spill_bytes=kernel.spill_bytes,
            stack_bytes=kernel.stack_bytes,
        ),
        shared=shared,
        occupancy=occupancy(kernel, arch),
        buffering=ampere.buffering(config),
        loop=_loop_facts(kernel),
        simulation=simulation_facts(own, shared) if own else None,
        simulation_problem=problem,
        matrix_loads=tuple(matrix_load_facts(each, executions[each], shared) for each in (config, turned) if own),
        timeline=timeline_facts(config, own, shared) if own else None,
        effects=effects[config],
        neighbours=tuple(_neighbour(config, change, candidate, effects) for change, candidate in candidates.items()),
    )


def _changed(config: FlashForwardKernelConfig, values: dict[str, Any]) -> FlashForwardKernelConfig | ValueError:
    """The config with other values, or why no kernel can be built from it."""
    try:
        candidate = replace(config, **values)
        ForwardKernelTileShapes(candidate)
    except ValueError as problem:
        return problem
    return candidate


def _why_it_cannot_run(kernel: Kernel[FlashForwardKernelConfig]) -> str | None:
    most = architecture(kernel.arch).shared_bytes_per_block
    if kernel.shared_bytes <= most:
        return None
    return f"a block needs {kernel.shared_bytes:,} bytes of shared memory; {kernel.arch} allows {most:,}"


def _execute_all(
    kernels: Mapping[FlashForwardKernelConfig, Kernel[FlashForwardKernelConfig]],
    *,
    traced_longer: tuple[FlashForwardKernelConfig, ...],
    progress: bool,
) -> dict[FlashForwardKernelConfig, Execution]:
    """Runs every kernel that fits its architecture; those that will be drawn, for some steps more."""
    runnable = [config for config, kernel in kernels.items() if _why_it_cannot_run(kernel) is None]
    executions = {}
    with progress_bar("simulating", len(runnable), enabled=progress) as advance:
        for config in runnable:
            iterations = ITERATIONS_NEEDED if config in traced_longer else STEADY_ITERATIONS_NEEDED
            executions[config] = execute(kernels[config], iterations)
            advance()
    return executions


def _loop_facts(kernel: Kernel[FlashForwardKernelConfig]) -> KVLoop:
    ptx = ptx_mix(largest_loop(ptx_listing(kernel.ptx, kernel.name)))
    try:
        sass, problem = sass_mix(largest_loop(sass_listing(disassemble(kernel.cubin)))), None
    except (DisassemblyError, ValueError) as error:
        sass, problem = None, str(error)
    return KVLoop(ptx, sass, problem)


def _effects(kernel: Kernel[FlashForwardKernelConfig], execution: Execution | None) -> Effects:
    step = None
    if execution is not None:
        step = step_counts(execution, ampere.shared_map(kernel.config, architecture(kernel.arch)))
    return Effects(
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        shared_bytes=kernel.shared_bytes,
        blocks_per_sm=occupancy(kernel, kernel.arch).blocks_per_sm,
        instructions_per_step=step.instructions if step else None,
        bank_conflicts_per_step=step.bank_conflicts if step else None,
    )


def _neighbour(
    config: FlashForwardKernelConfig,
    change: str,
    candidate: FlashForwardKernelConfig | ValueError,
    effects: Mapping[FlashForwardKernelConfig, Effects],
) -> Neighbour:
    if isinstance(candidate, ValueError):
        return Neighbour(change, config=None, problem=str(candidate), rejection=None, effects=None)
    return Neighbour(
        change=change,
        config=candidate.short_form(),
        problem=None,
        rejection=rejection_reason(candidate),
        effects=effects[candidate],
        same_work=ampere.work_per_step(candidate) == ampere.work_per_step(config),
    )
