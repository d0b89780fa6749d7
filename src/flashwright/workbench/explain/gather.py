"""Gathering the facts about a config: arithmetic, the compiler, the disassembler and the simulator."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from flashwright.compiler.kernel import Kernel
from flashwright.compiler.occupancy import occupancy
from flashwright.hardware.architectures import architecture
from flashwright.kernels.explanation import ExecutedLoads, TracedWarp
from flashwright.kernels.family import OLDEST, KernelConfig
from flashwright.kernels.registry import as_config, family_of, rejection_reason, search_space_of, tile_shapes
from flashwright.runtime.compiling import compile_many
from flashwright.runtime.progress import progress_bar
from flashwright.workbench.explain.code_orders import code_orders, order_architectures
from flashwright.workbench.explain.core_matrices import core_matrix_facts
from flashwright.workbench.explain.disassembly import DisassemblyError, disassemble
from flashwright.workbench.explain.execution import (
    STEADY_ITERATION,
    Execution,
    execute,
    simulation_facts,
    step_counts,
)
from flashwright.workbench.explain.explanations import counted_warp, explanation_of, loop_kinds_of, shared_map_of
from flashwright.workbench.explain.facts import (
    ConfigFacts,
    Effects,
    KVLoop,
    MatrixLoad,
    Neighbour,
    RegisterBudget,
    UnbuiltFacts,
    Verdict,
)
from flashwright.workbench.explain.loop import ptx_loop, ptx_mix, sass_loop, sass_mix
from flashwright.workbench.explain.loop_code import loop_code
from flashwright.workbench.explain.matrix_load import matrix_load_facts
from flashwright.workbench.explain.measured import measured_effects
from flashwright.workbench.explain.tile_to_follow import TooFewSteps
from flashwright.workbench.explain.timeline import ITERATIONS_NEEDED, timeline_of
from flashwright.workbench.sample import PLAIN_SAMPLE, Sample

STEADY_ITERATIONS_NEEDED = STEADY_ITERATION + 2
"""So that the steady iteration is not the loop's last."""
SERIALISED = "instructions are serialized"
"""What the assembler reports when it makes asynchronous products wait for one another."""


def explain_config(
    config: KernelConfig | str,
    arch: str = OLDEST,
    *,
    turning: Collection[str] | None = None,
    sample: Sample = PLAIN_SAMPLE,
    progress: bool = True,
) -> ConfigFacts:
    """All the facts about a config, which may be given by its short form, and its kernel for a sample's options.

    Raises `ValueError` at once for one that no kernel can be built from.
    `turning` names the knobs whose neighbours are compiled and simulated too, and, of those that only the assembler
    sees, the ones whose other value's machine code is shown; by default, all.
    """
    known: KernelConfig = as_config(config)
    tile_shapes(known)
    return _explained(known, family_of(known).target_for(known, arch), turning, sample, progress=progress)


def unbuilt_facts(config: KernelConfig, problem: str) -> UnbuiltFacts:
    """The facts about a config that no kernel can be built from, for the reason given."""
    return UnbuiltFacts(
        config=config.short_form(),
        family=family_of(config).title,
        knobs=explanation_of(config).knobs(config),
        verdict=_verdict(config),
        problem=problem,
        operation=family_of(config).operation.name,
    )


def _explained(
    config: KernelConfig, arch: str, turning: Collection[str] | None, sample: Sample, *, progress: bool
) -> ConfigFacts:
    target = architecture(arch)
    of_config, shared = explanation_of(config), shared_map_of(config)
    knobs_to_turn = set(of_config.knobs_to_turn if turning is None else turning)
    changes = {change: values for change, values in of_config.neighbours(config) if values.keys() <= knobs_to_turn}
    candidates = {change: _changed(config, values) for change, values in changes.items()}
    built = [candidate for candidate in candidates.values() if not isinstance(candidate, ValueError)]

    drawn = (config, *of_config.also_drawn(config))
    configs = list(dict.fromkeys([*drawn, *built]))
    compiled = compile_many(configs, arch, sample.variant(config), progress=progress)
    kernels = dict(zip(configs, compiled, strict=True))
    kernel = kernels[config]
    warps = of_config.warps(config)
    runs = [(each, counted_warp(each)) for each in configs if each != config] + [(config, warp) for warp in warps]
    traced, problems = _execute_all(kernels, runs, sample, traced_longer=drawn, progress=progress)
    executions = {each: execution for (each, warp), execution in traced.items() if warp == counted_warp(each)}
    effects = {each: _effects(kernels[each], executions.get(each)) for each in configs}
    own = executions.get(config)
    return ConfigFacts(
        config=config.short_form(),
        family=family_of(config).title,
        arch=arch,
        sample=sample,
        kernel=config.kernel_name(),
        knobs=of_config.knobs(config),
        shapes=of_config.shapes(config),
        verdict=_verdict(config),
        estimate=of_config.estimate(config, arch),
        registers=RegisterBudget(
            phases=of_config.register_phases(config),
            limit=of_config.register_limit(config) or target.registers_per_thread,
            used=kernel.registers,
            spill_bytes=kernel.spill_bytes,
            stack_bytes=kernel.stack_bytes,
            reallocations=of_config.reallocations(config),
        ),
        shared=shared,
        shared_limit_bytes=target.shared_bytes_per_block,
        occupancy=occupancy(kernel, arch),
        buffering=of_config.buffering(config),
        loop=loop_facts(kernel),
        orders=code_orders(kernel, order_architectures(config, arch), knobs_to_turn),
        code=loop_code(kernel, {warp: traced.get((config, warp)) for warp in warps}),
        simulation=simulation_facts(config, own, shared) if own else None,
        simulation_problem=problems.get(config),
        matrix_loads=tuple(load for each in drawn for load in _matrix_loads(each, executions.get(each))),
        timelines=tuple(
            timeline_of(config, traced[config, warp], shared, kernel.variant)
            for warp in warps
            if (config, warp) in traced
        ),
        effects=effects[config],
        neighbours=tuple(
            _neighbour(config, change, candidate, effects, problems) for change, candidate in candidates.items()
        ),
        operation=family_of(config).operation.name,
        steps=family_of(config).operation.steps.name,
    )


def _verdict(config: KernelConfig) -> Verdict:
    reason = rejection_reason(config)
    return Verdict(reason is None, reason, search_space_of(config), measured_effects(config))


def _changed(config: KernelConfig, values: dict[str, Any]) -> KernelConfig | ValueError:
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
    kernels: Mapping[KernelConfig, Kernel[Any]],
    runs: list[tuple[KernelConfig, TracedWarp]],
    sample: Sample,
    *,
    traced_longer: tuple[KernelConfig, ...],
    progress: bool,
) -> tuple[dict[tuple[KernelConfig, TracedWarp], Execution], dict[KernelConfig, str]]:
    """Runs every kernel that can be run, those that will be drawn for some steps more; why the others cannot."""
    executions: dict[tuple[KernelConfig, TracedWarp], Execution] = {}
    problems = {config: problem for config, kernel in kernels.items() if (problem := _why_it_cannot_run(kernel))}
    with progress_bar("simulating", len(runs), enabled=progress) as advance:
        for config, warp in runs:
            iterations = ITERATIONS_NEEDED if config in traced_longer else STEADY_ITERATIONS_NEEDED
            if config not in problems:
                try:
                    executions[config, warp] = execute(kernels[config], iterations, warp, sample)
                except TooFewSteps as problem:
                    problems[config] = str(problem)
            advance()
    return executions, problems


def _matrix_loads(config: KernelConfig, execution: Execution | None) -> tuple[MatrixLoad, ...]:
    """What is drawn on the banks; of a kernel that was not executed, only what its descriptors say."""
    banks = explanation_of(config).banks(config)
    if banks is None:
        return ()
    if not isinstance(banks, ExecutedLoads):
        return core_matrix_facts(config, banks)
    return () if execution is None else (matrix_load_facts(config, banks, execution, shared_map_of(config)),)


def loop_facts(kernel: Kernel[Any]) -> KVLoop:
    kinds = loop_kinds_of(kernel.config)
    ptx = ptx_mix(ptx_loop(kernel.ptx, kernel.name, kinds))
    try:
        sass, problem = sass_mix(sass_loop(disassemble(kernel.cubin), kinds)), None
    except (DisassemblyError, ValueError) as error:
        sass, problem = None, str(error)
    asynchronous = any(opcode.startswith("wgmma.mma_async") for opcode in ptx.by_opcode)
    return KVLoop(ptx, sass, problem, serialised=SERIALISED in kernel.program.log if asynchronous else None)


def _effects(kernel: Kernel[Any], execution: Execution | None) -> Effects:
    step = None
    if execution is not None:
        step = step_counts(kernel.config, execution, shared_map_of(kernel.config))
    return Effects(
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        shared_bytes=kernel.shared_bytes,
        blocks_per_sm=occupancy(kernel, kernel.arch).blocks_per_sm,
        instructions_per_step=step.instructions if step else None,
        bank_conflicts_per_step=step.bank_conflicts if step else None,
        instructions_per_thousand_scores=step.instructions_per_thousand_scores if step else None,
        conflicts_per_thousand_scores=step.conflicts_per_thousand_scores if step else None,
    )


def _neighbour(
    config: KernelConfig,
    change: str,
    candidate: KernelConfig | ValueError,
    effects: Mapping[KernelConfig, Effects],
    problems: Mapping[KernelConfig, str],
) -> Neighbour:
    if isinstance(candidate, ValueError):
        return Neighbour(change, config=None, problem=str(candidate), rejection=None, effects=None)
    of_config = explanation_of(config)
    return Neighbour(
        change=change,
        config=candidate.short_form(),
        problem=None,
        rejection=rejection_reason(candidate),
        effects=effects[candidate],
        fewer_registers_are_better=not of_config.reallocations(config),
        simulation_problem=problems.get(candidate),
    )
