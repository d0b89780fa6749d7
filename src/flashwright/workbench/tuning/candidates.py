"""What a search may time: the configs that fit the GPU and compile well, and the problems to check them on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashwright.choice.problem import TuningProblem
from flashwright.compiler.kernel import Kernel
from flashwright.compiler.occupancy import occupancy
from flashwright.hardware.architectures import architecture
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of
from flashwright.runtime.compiling import compile_all
from flashwright.workbench.tuning.space import space_of


@dataclass(frozen=True)
class Candidate:
    """What the compiler reports of a config's kernel for a problem."""

    config: KernelConfig
    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int | None
    """None where the GPU's architecture is not known to this version, as `limited_by`."""
    limited_by: str | None

    @classmethod
    def of(cls, kernel: Kernel) -> Candidate:
        try:
            resident = occupancy(kernel, kernel.arch)
        except ValueError:
            blocks, limit = None, None
        else:
            blocks, limit = resident.blocks_per_sm, resident.limited_by
        return cls(kernel.config, kernel.registers, kernel.spill_bytes, kernel.shared_bytes, blocks, limit)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"config": self.config.short_form()}


@dataclass(frozen=True)
class Candidates:
    """The configs that may be timed, and those that may not."""

    survivors: tuple[Candidate, ...]
    spilling: tuple[Candidate, ...]
    too_large: tuple[KernelConfig, ...]
    """Those whose blocks need more shared memory than the GPU gives to one."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "too_large": [
                {"config": config.short_form(), "shared_bytes": family_of(config).shapes(config).shared_bytes}
                for config in self.too_large
            ],
            "spilling": [candidate.to_dict() for candidate in self.spilling],
            "survivors": [candidate.to_dict() for candidate in self.survivors],
        }


def compile_candidates(
    configs: Sequence[KernelConfig],
    incumbents: Iterable[KernelConfig],
    problem: TuningProblem,
    arch: str,
    *,
    shared_bytes_per_block: int | None = None,
    progress: bool = True,
) -> Candidates:
    """Compiles for a problem on all cores and drops what spills (more than its family bears); an incumbent stays, so
    that it can be beaten."""
    most = architecture(arch).shared_bytes_per_block if shared_bytes_per_block is None else shared_bytes_per_block
    wanted = list(dict.fromkeys((*incumbents, *configs)))
    too_large = [config for config in wanted if family_of(config).shapes(config).shared_bytes > most]
    fitting = [config for config in wanted if config not in set(too_large)]
    kernels = compile_all([(config, problem.variant(config)) for config in fitting], arch, progress=progress)
    candidates = [Candidate.of(kernel) for kernel in kernels]
    bearable = space_of(problem.family).bearable_spill_bytes
    spilling = [c for c in candidates if c.spill_bytes > bearable and c.config not in set(incumbents)]
    survivors = [c for c in candidates if c not in spilling]
    return Candidates(tuple(survivors), tuple(spilling), tuple(too_large))


# --- Problems to check on ----------------------------------------------------------------------------------------

_CHECKED_LENGTH = 256
"""About how many rows a check has: several blocks of most sizes."""
_CHECKED_CACHE = 1_531
"""Keys of a cache: several units of any size, for several thread blocks."""


def check_problems(problem: TuningProblem, config: KernelConfig) -> tuple[TuningProblem, ...]:
    """Small problems that show whether a config's kernel is right, by the variant that is timed: one that fits no block
    size, and one whose last blocks are as incomplete as those of the problem."""
    kv_length = _same_remainder(problem.kv_length, config.B_c)
    if problem.reads_cache:
        small = replace(problem, batch=2, heads=2 * problem.heads // problem.heads_of_kv, kv_heads=2)
        ragged, alike = replace(small, kv_length=_CHECKED_CACHE), replace(small, kv_length=kv_length)
    else:
        small = replace(problem, batch=2, heads=2)
        ragged = replace(small, q_length=193, kv_length=211)
        alike = replace(small, q_length=_same_remainder(problem.q_length, config.B_r), kv_length=kv_length)
    return tuple(dict.fromkeys((ragged, alike)))


def _same_remainder(length: int, block: int) -> int:
    """A length of a few blocks, the last as incomplete as that of the given one."""
    return min(length, max(1, _CHECKED_LENGTH // block) * block + length % block)
