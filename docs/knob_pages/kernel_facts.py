"""What the compiler and the simulator report of every kernel on the pages.

They are kept in a file, so that filling the pages takes no time. Counts are of PTX, and so of one compiler version,
which the file names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flashwright.compiler.kernel import Kernel
from flashwright.compiler.nvrtc import nvrtc_version
from flashwright.compiler.occupancy import occupancy
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.runtime.compiling import compile_many
from flashwright.runtime.progress import progress_bar
from flashwright.workbench.bench.result_files import read_document, write_document
from flashwright.workbench.explain.code_orders import code_orders
from flashwright.workbench.explain.disassembly import NOT_FOUND, find_disassembler
from flashwright.workbench.explain.execution import STEADY_ITERATION, execute, step_counts
from flashwright.workbench.explain.explanations import counted_warp, shared_map_of
from flashwright.workbench.explain.instruction_kinds import kind_of_ptx
from flashwright.workbench.explain.order import distances_text, runs_text

from .broken_kernels import BrokenKernel, broken_kernels
from .machine_code import digest, machine_code

ARCH = "sm_90"
ORDER_ARCHITECTURES = ("sm_80", "sm_90")
MOST_PARTS_SHOWN = 6
"""Of an order in a table: machine code may have a hundred runs."""
KEYS = 512
"""Rows of K and V in the simulated launch of one thread block."""


@dataclass(frozen=True)
class KernelFacts:
    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    limited_by: str
    code_bytes: int
    """Of machine code."""
    code_digest: str
    """Equal if and, as far as anyone will live to see, only if the machine code is."""
    scores: int
    """Computed by one warp in one KV step."""
    instructions: int
    """Executed by one warp in one KV step in the middle of the loop; so are the next four."""
    by_kind: Mapping[str, int]
    barriers: int
    shared_wavefronts: int
    bank_conflicts: int
    launch_instructions: int
    """Executed by one warp from the kernel's start to its end; of all keys."""
    bytes_read: int
    """From global memory, by the whole block in the whole launch."""
    bytes_written: int

    @property
    def instructions_per_thousand_scores(self) -> int:
        return round(1000 * self.instructions / self.scores)

    @property
    def wavefronts_per_thousand_scores(self) -> int:
        return round(1000 * self.shared_wavefronts / self.scores)

    def count_of(self, *kinds: str) -> int:
        return sum(self.by_kind.get(kind, 0) for kind in kinds)


@dataclass(frozen=True)
class OrderFacts:
    """How loads and products of a KV step follow one another in one form of a kernel's code."""

    code: str
    runs: int
    is_that_of_ptx: bool
    text: str
    distances: str
    """From a load to its first use."""


@dataclass(frozen=True)
class FactsFile:
    nvrtc: str
    kernels: Mapping[str, KernelFacts]
    """By short form."""
    orders: Mapping[str, tuple[OrderFacts, ...]]
    """By short form, of the kernels that differ in a knob about the order."""
    broken: tuple[BrokenKernel, ...] = ()
    arch: str = ARCH
    keys: int = KEYS

    def of(self, config: KernelConfig) -> KernelFacts:
        name = config.short_form()
        if name not in self.kernels:
            raise ValueError(f"the file of kernel facts does not know {name}; run `make docs`")
        return self.kernels[name]

    def orders_of(self, config: FlashForwardKernelConfig) -> tuple[OrderFacts, ...]:
        name = config.short_form()
        if name not in self.orders:
            raise ValueError(f"the file of kernel facts has no order of {name}; run `make docs`")
        return self.orders[name]


def installed_nvrtc() -> str:
    return ".".join(map(str, nvrtc_version()))


def gather_facts(configs: Sequence[KernelConfig], arch: str, keys: int, *, progress: bool = True) -> FactsFile:
    """Compiles and simulates every config."""
    kernels = compile_many(configs, arch, progress=progress)
    facts = {}
    with progress_bar("simulating", len(kernels), enabled=progress) as advance:
        for kernel in kernels:
            facts[kernel.config.short_form()] = facts_of(kernel, keys)
            advance()
    return FactsFile(installed_nvrtc(), facts, {}, (), arch, keys)


def gather(
    configs: Sequence[FlashForwardKernelConfig],
    ordered: Collection[FlashForwardKernelConfig],
    *,
    progress: bool = True,
) -> FactsFile:
    """Compiles and simulates every config, and disassembles those whose order of loads and products is shown."""
    found = gather_facts(configs, ARCH, KEYS, progress=progress)
    kernels = compile_many(list(ordered), ARCH, progress=progress)
    orders = {kernel.config.short_form(): orders_of(kernel) for kernel in kernels}
    return replace(found, orders=orders, broken=broken_kernels(ARCH))


def orders_of(kernel: Kernel[FlashForwardKernelConfig]) -> tuple[OrderFacts, ...]:
    if find_disassembler() is None:
        raise ValueError(NOT_FOUND)
    in_ptx, *in_machine_code = code_orders(kernel, ORDER_ARCHITECTURES)
    return tuple(
        OrderFacts(
            code=found.code,
            runs=len(found.order.runs),
            is_that_of_ptx=found.order.runs == in_ptx.order.runs,
            text=runs_text(found, MOST_PARTS_SHOWN),
            distances=distances_text(found),
        )
        for found in (in_ptx, *in_machine_code)
    )


def facts_of(kernel: Kernel[Any], keys: int = KEYS) -> KernelFacts:
    config, resident = kernel.config, occupancy(kernel, kernel.arch)
    execution = execute(kernel, keys // config.B_c - counted_warp(config).steps_before_loop)
    step = step_counts(config, execution, shared_map_of(config))
    first, end = execution.iterations[STEADY_ITERATION]
    kinds = Counter(kind_of_ptx(entry.opcode).value for entry in execution.trace[first:end])
    totals = execution.run.counters
    code = machine_code(kernel.cubin)
    return KernelFacts(
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        shared_bytes=kernel.shared_bytes,
        blocks_per_sm=resident.blocks_per_sm,
        limited_by=resident.limited_by,
        code_bytes=len(code),
        code_digest=digest(code),
        scores=step.scores,
        instructions=step.instructions,
        by_kind=dict(sorted(kinds.items())),
        barriers=step.barriers,
        shared_wavefronts=step.wavefronts,
        bank_conflicts=step.bank_conflicts,
        launch_instructions=len(execution.trace),
        bytes_read=totals.bytes_global_to_shared + totals.bytes_global_to_registers,
        bytes_written=totals.bytes_registers_to_global,
    )


def write_facts(path: Path, facts: FactsFile) -> None:
    kernels = [{"config": name, **asdict(each)} for name, each in facts.kernels.items()]
    broken = [asdict(each) for each in facts.broken]
    orders = {name: [asdict(each) for each in found] for name, found in facts.orders.items()}
    write_document(
        path,
        {
            "nvrtc": facts.nvrtc,
            "arch": facts.arch,
            "keys": facts.keys,
            "kernels": kernels,
            "orders": orders,
            "broken": broken,
        },
    )


def read_facts(path: Path) -> FactsFile:
    document = read_document(path, holding="kernels", made_by="make docs")
    kernels: dict[str, KernelFacts] = {}
    for values in document["kernels"]:
        facts: dict[str, Any] = dict(values)
        name = facts.pop("config")
        kernels[name] = KernelFacts(**facts)
    orders = {name: tuple(OrderFacts(**each) for each in found) for name, found in document["orders"].items()}
    broken = tuple(BrokenKernel(**values) for values in document["broken"])
    return FactsFile(document["nvrtc"], kernels, orders, broken, document["arch"], document["keys"])
