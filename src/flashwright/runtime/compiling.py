"""Configs to kernels: a family's source, compiled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

from flashwright.compiler.kernel import Kernel
from flashwright.compiler.nvrtc import compile_source
from flashwright.compiler.program_cache import ProgramCache
from flashwright.kernels.family import OLDEST, KernelConfig
from flashwright.kernels.registry import as_config, family_of
from flashwright.kernels.source import KernelSource
from flashwright.problem.variant import PLAIN, AttentionVariant
from flashwright.runtime.progress import progress_bar

Edit = Callable[[KernelSource], KernelSource]


def compile_kernel(
    config: KernelConfig | str,
    arch: str = OLDEST,
    variant: AttentionVariant = PLAIN,
    *,
    edit: Edit | None = None,
    cache: ProgramCache | None = None,
) -> Kernel[Any]:
    """The kernel of a config of any family, by default for the oldest architecture that runs it.

    `edit` changes its source before it is compiled: `lambda source: source.edited(header, old, new)`.
    Raises `ValueError` for an invalid config, `CompileError` for broken code."""
    known = as_config(config)
    family = family_of(known)
    shapes = family.shapes(known)
    source = family.source(known, variant)
    if edit is not None:
        source = edit(source)
    return Kernel(
        config=known,
        variant=variant,
        program=compile_source(source, family.target(arch), cache=cache),
        shared_bytes=shapes.shared_bytes,
        threads=shapes.threads,
        source=source.flattened(),
    )


def compile_companion(
    config: KernelConfig,
    name: str,
    arch: str = OLDEST,
    variant: AttentionVariant = PLAIN,
    *,
    cache: ProgramCache | None = None,
) -> Kernel[Any]:
    """The kernel that runs before or after a config's own, by its name in the family."""
    family = family_of(config)
    companion = family.companions[name]
    source = companion.source(config, variant)
    return Kernel(
        config=config,
        variant=variant,
        program=compile_source(source, family.target(arch), cache=cache),
        shared_bytes=0,
        threads=companion.threads,
        source=source.flattened(),
    )


def compile_one(
    config: KernelConfig | str,
    variant: AttentionVariant,
    companion: str | None = None,
    *,
    arch: str = OLDEST,
    cache: ProgramCache | None = None,
) -> Kernel[Any]:
    """A config's own kernel, or its companion of that name."""
    if companion is None:
        return compile_kernel(config, arch, variant, cache=cache)
    return compile_companion(as_config(config), companion, arch, variant, cache=cache)


def compile_many(
    configs: Sequence[KernelConfig | str],
    arch: str = OLDEST,
    variant: AttentionVariant = PLAIN,
    *,
    cache: ProgramCache | None = None,
    progress: bool = True,
) -> list[Kernel[Any]]:
    """The kernels of many configs, in their order, compiled on all cores with a progress bar."""
    if isinstance(configs, str) or not isinstance(configs, Iterable):
        raise TypeError(f"configs: expected a list of configs or short forms, got {configs!r}")
    return compile_all([(config, variant) for config in configs], arch, cache=cache, progress=progress)


def compile_all(
    wanted: Iterable[tuple[KernelConfig | str, AttentionVariant] | tuple[KernelConfig, AttentionVariant, str | None]],
    arch: str = OLDEST,
    *,
    cache: ProgramCache | None = None,
    progress: bool = True,
) -> list[Kernel[Any]]:
    """The kernels of configs and variants, in their order, compiled on all cores with a progress bar. Companions are
    wanted by their names."""
    wanted = list(wanted)
    shared_cache = cache or ProgramCache()
    workers = min(len(wanted), os.cpu_count() or 1) or 1
    with (
        progress_bar(f"compiling for {arch}", len(wanted), enabled=progress) as advance,
        ThreadPoolExecutor(workers) as pool,
    ):
        one = partial(compile_one, arch=arch, cache=shared_cache)
        try:
            futures = [pool.submit(one, *each) for each in wanted]
            for future in as_completed(futures):
                future.result()
                advance()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]
