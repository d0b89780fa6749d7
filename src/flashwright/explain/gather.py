"""Gathering the facts about a config: arithmetic, the compiler, the disassembler and the simulator."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from flashwright.architectures import architecture
from flashwright.compiler import Kernel, compile_many
from flashwright.explain.arithmetic import arithmetic_of
from flashwright.explain.disassembly import DisassemblyError, disassemble
from flashwright.explain.execution import (
    FIRST_WARP,
    STEADY_ITERATION,
    Execution,
    TracedWarp,
    execute,
    simulation_facts,
    step_counts,
)
from flashwright.explain.facts import ConfigFacts, Effects, KVLoop, Neighbour, RegisterBudget, Verdict
from flashwright.explain.families import executed_family
from flashwright.explain.loop import ptx_loop, ptx_mix, sass_loop, sass_mix
from flashwright.explain.timeline import ITERATIONS_NEEDED
from flashwright.families import OLDEST, ForwardKernelConfig, family_of
from flashwright.occupancy import occupancy
from flashwright.progress import progress_bar

STEADY_ITERATIONS_NEEDED = STEADY_ITERATION + 2
"""So that the steady iteration is not the loop's last."""
SERIALISED = "instructions are serialized"
"""What the assembler says when it makes asynchronous products wait for one another."""


def explain_config(
    config: ForwardKernelConfig,
    arch: str = OLDEST,
    *,
    turning: Collection[str] | None = None,
    progress: bool = True,
) -> ConfigFacts:
    """All the facts about a config; raises `ValueError` for one that no kernel can be built from.

    `turning` names the knobs whose neighbours are compiled and simulated too; by default, all.
    """
    arch = family_of(config).target(arch)
    target = architecture(arch)
    of_config, executed = arithmetic_of(config), executed_family(config)
    shared = of_config.shared_map(config, target)
    knobs_to_turn = set(of_config.KNOBS_TO_TURN if turning is None else turning)
    changes = {change: values for change, values in of_config.neighbours(config) if values.keys() <= knobs_to_turn}
    candidates = {change: _changed(config, values) for change, values in changes.items()}
    built = [candidate for candidate in candidates.values() if not isinstance(candidate, ValueError)]

    drawn = (config, *executed.also_drawn(config))
    configs = list(dict.fromkeys([*drawn, *built]))
    kernels = dict(zip(configs, compile_many(configs, arch, progress=progress), strict=True))
    kernel = kernels[config]
    warps = executed.warps(config)
    runs = [(each, FIRST_WARP) for each in configs if each != config] + [(config, warp) for warp in warps]
    traced = _execute_all(kernels, runs, traced_longer=drawn, progress=progress)
    executions = {each: execution for (each, warp), execution in traced.items() if warp in (FIRST_WARP, warps[0])}
    effects = {each: _effects(kernels[each], executions.get(each)) for each in configs}
    own = executions.get(config)
    reason = of_config.rejection_reason(config)
    return ConfigFacts(
        config=config.short_form(),
        family=of_config.FAMILY,
        arch=arch,
        kernel=config.kernel_name(),
        knobs=of_config.knobs(config),
        shapes=of_config.shapes(config),
        verdict=Verdict(kept=reason is None, reason=reason),
        registers=RegisterBudget(
            phases=of_config.register_phases(config),
            limit=of_config.register_limit(config, target),
            used=kernel.registers,
            spill_bytes=kernel.spill_bytes,
            stack_bytes=kernel.stack_bytes,
            reallocations=of_config.reallocations(config),
        ),
        shared=shared,
        occupancy=occupancy(kernel, arch),
        buffering=of_config.buffering(config),
        loop=loop_facts(kernel, asynchronous=executed.has_asynchronous_products),
        simulation=simulation_facts(own, shared) if own else None,
        simulation_problem=_why_it_cannot_run(kernel),
        matrix_loads=executed.matrix_loads(config, executions, shared),
        timelines=tuple(
            executed.timeline(config, traced[config, warp], shared) for warp in warps if (config, warp) in traced
        ),
        effects=effects[config],
        neighbours=tuple(_neighbour(config, change, candidate, effects) for change, candidate in candidates.items()),
    )


def _changed(config: ForwardKernelConfig, values: dict[str, Any]) -> ForwardKernelConfig | ValueError:
    """The config with other values, or why no kernel can be built from it."""
    try:
        candidate = replace(config, **values)
        family_of(candidate).shapes(candidate)
    except ValueError as problem:
        return problem
    return candidate


def _why_it_cannot_run(kernel: Kernel[Any]) -> str | None:
    most = architecture(kernel.arch).shared_bytes_per_block
    if kernel.shared_bytes <= most:
        return None
    return f"a block needs {kernel.shared_bytes:,} bytes of shared memory; {kernel.arch} allows {most:,}"


def _execute_all(
    kernels: Mapping[ForwardKernelConfig, Kernel[Any]],
    runs: list[tuple[ForwardKernelConfig, TracedWarp]],
    *,
    traced_longer: tuple[ForwardKernelConfig, ...],
    progress: bool,
) -> dict[tuple[ForwardKernelConfig, TracedWarp], Execution]:
    """Runs every kernel that fits its architecture; those that will be drawn, for some steps more."""
    runnable = [(config, warp) for config, warp in runs if _why_it_cannot_run(kernels[config]) is None]
    executions = {}
    with progress_bar("simulating", len(runnable), enabled=progress) as advance:
        for config, warp in runnable:
            iterations = ITERATIONS_NEEDED if config in traced_longer else STEADY_ITERATIONS_NEEDED
            executions[config, warp] = execute(kernels[config], iterations, warp)
            advance()
    return executions


def loop_facts(kernel: Kernel[Any], *, asynchronous: bool) -> KVLoop:
    ptx = ptx_mix(ptx_loop(kernel.ptx, kernel.name))
    try:
        sass, problem = sass_mix(sass_loop(disassemble(kernel.cubin))), None
    except (DisassemblyError, ValueError) as error:
        sass, problem = None, str(error)
    return KVLoop(ptx, sass, problem, serialised=SERIALISED in kernel.program.log if asynchronous else None)


def _effects(kernel: Kernel[Any], execution: Execution | None) -> Effects:
    step = None
    if execution is not None:
        shared = arithmetic_of(kernel.config).shared_map(kernel.config, architecture(kernel.arch))
        step = step_counts(execution, shared)
    return Effects(
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        shared_bytes=kernel.shared_bytes,
        blocks_per_sm=occupancy(kernel, kernel.arch).blocks_per_sm,
        instructions_per_step=step.instructions if step else None,
        bank_conflicts_per_step=step.bank_conflicts if step else None,
    )


def _neighbour(
    config: ForwardKernelConfig,
    change: str,
    candidate: ForwardKernelConfig | ValueError,
    effects: Mapping[ForwardKernelConfig, Effects],
) -> Neighbour:
    if isinstance(candidate, ValueError):
        return Neighbour(change, config=None, problem=str(candidate), rejection=None, effects=None)
    of_config = arithmetic_of(config)
    return Neighbour(
        change=change,
        config=candidate.short_form(),
        problem=None,
        rejection=of_config.rejection_reason(candidate),
        effects=effects[candidate],
        same_work=of_config.work_per_step(candidate) == of_config.work_per_step(config),
        fewer_registers_are_better=not of_config.reallocations(config),
    )
