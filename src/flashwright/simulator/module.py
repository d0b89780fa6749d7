"""A loaded PTX module: its kernels, bound and ready, and how they are launched."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from .architecture import MAX_BLOCK_DIM, MAX_GRID_DIM, MAX_THREADS_PER_BLOCK, WARP_SIZE
from .arguments import Argument, pack_arguments
from .binding import SymbolAddress
from .clusters import MAX_CLUSTER_SIZE
from .counters import Counters
from .errors import SimulationError
from .findings import HazardChecks, HazardPolicy
from .garbage import without_garbage_collection
from .global_hazards import MAX_WARPS, GlobalShadow
from .grid import run_blocks
from .memory.thread_memory import ConstantMemory
from .memory.windows import FUNCTION_BASE, FUNCTION_STEP, WINDOW_BASE
from .parsed_modules import parsed
from .parties import Parties
from .program import Program, ProgramBuilder, align_up
from .ptx.syntax import ModuleSyntax
from .run import Run
from .wave import Dim3, Launch

if TYPE_CHECKING:
    from .gpu import SimulatedGPU

# Threads executed together: enough to amortise the interpreter, few enough for registers to stay in cache.
_THREADS_PER_WAVE = 4096
# Shared memory of a wave together with its hazard records, which take 8 bytes per granule and warp.
_SHARED_BYTES_PER_WAVE = 256 << 20
# Jumps back that a wave may make before it is taken to be in an endless loop.
_STEP_LIMIT = 2_000_000


class Module:
    """What `SimulatedGPU.load` returns."""

    def __init__(self, gpu: SimulatedGPU, ptx_text: str) -> None:
        self._gpu = gpu
        with without_garbage_collection():
            self._syntax = parsed(ptx_text)
            symbols, constant_bytes = _place_variables(gpu, self._syntax)
            self._symbols = symbols
            self._constants = ConstantMemory("const", constant_bytes)
            self._programs: dict[str, Program] = {}
            self.refused: dict[str, SimulationError] = {}
            """Kernels that cannot be executed, and why: the error that `launch` raises for them."""
            for kernel in self.kernels:
                try:
                    self._programs[kernel] = ProgramBuilder(
                        self._syntax, self._syntax.functions[kernel], symbols
                    ).build()
                except SimulationError as error:
                    self.refused[kernel] = error
        if self.refused and not self._programs:
            raise next(iter(self.refused.values()))

    @property
    def kernels(self) -> list[str]:
        """Names of the entry points."""
        return [function.name for function in self._syntax.functions.values() if function.is_entry]

    def program(self, kernel: str) -> Program:
        """The bound program of a kernel (static shared bytes, instructions with their lines)."""
        if kernel in self.refused:
            raise self.refused[kernel]
        if kernel not in self._programs:
            raise ValueError(f"no kernel {kernel!r} in this module; it has: {', '.join(self.kernels) or 'none'}")
        return self._programs[kernel]

    @property
    def variables(self) -> dict[str, int]:
        """Names and sizes in bytes of the module's `__device__` and `__constant__` variables."""
        return {item.name: item.size for item in self._syntax.variables if item.name in self._symbols}

    def address_of(self, variable: str) -> int:
        """The device address of a `.global` variable."""
        symbol = self._symbols.get(variable)
        if symbol is None or symbol.space != "global":
            raise ValueError(f"no global variable {variable!r} in this module")
        return symbol.offset

    def write(self, variable: str, value: np.ndarray | np.generic | bytes, offset: int = 0) -> None:
        """Set a `__constant__` or `__device__` variable, from byte ``offset`` on, as `cudaMemcpyToSymbol` does."""
        data = np.frombuffer(value if isinstance(value, bytes) else np.asarray(value).tobytes(), np.uint8)
        symbol = self._variable(variable, offset, data.size)
        if symbol.space == "const":
            self._constants.store.bytes[symbol.offset + offset :][: data.size] = data
        else:
            self._gpu.memory.write(symbol.offset + offset, data)

    def read(self, variable: str, dtype: Any = np.uint8) -> np.ndarray:
        """The content of a `__constant__` or `__device__` variable."""
        symbol, size = self._variable(variable), self.variables[variable]
        if symbol.space == "const":
            data = self._constants.store.bytes[symbol.offset : symbol.offset + size].tobytes()
        else:
            data = self._gpu.memory.read(symbol.offset, size)
        return np.frombuffer(data, np.uint8).copy().view(dtype)

    def _variable(self, name: str, offset: int = 0, size: int = 0) -> SymbolAddress:
        """Where a variable lies; ValueError if there is none, or it has no room for ``size`` bytes at ``offset``."""
        if name not in self.variables:
            known = ", ".join(self.variables) or "none"
            raise ValueError(f"no global or constant variable {name!r} in this module; it has: {known}")
        if offset < 0 or offset + size > self.variables[name]:
            raise ValueError(
                f"{size} bytes at offset {offset} do not fit variable {name!r} of {self.variables[name]} bytes"
            )
        return self._symbols[name]

    def launch(
        self,
        kernel: str,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        shared_bytes: int = 0,
        args: Sequence[Argument] = (),
        *,
        check_hazards: HazardChecks = True,
        trace_warp: tuple[int, int] | None = None,
        step_limit: int = _STEP_LIMIT,
        registers: int | None = None,
        spurious_waits: bool = False,
        stdout: TextIO | None = None,
        cluster: Sequence[int] | int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Run:
        """Execute a kernel to its end; returns its counters.

        ``shared_bytes`` is dynamic shared memory. ``trace_warp=(block, warp)`` records the instructions of
        one warp of one block (by linear index). ``check_hazards`` says what happens on a hazard (a race, a read of
        uninitialised memory, a missing wait or fence): ``"stop"`` raises `SimulationError`, ``"collect"`` goes on and
        lists it in ``run.findings``, ``"ignore"`` (or False) does not look for any; True stops, except for
        mbarrier-fence, which it collects; a mapping says it by kind, with what True means for kinds it does not name;
        unordered-sum is looked for only if it is named. Bounds and alignment are always checked. After
        ``step_limit`` backward jumps of a wave the kernel is taken to be in an endless loop. ``registers`` is what
        the kernel was compiled for, per thread: what ``setmaxnreg`` has to distribute (default: its ``.maxnreg``, or
        unlimited). With ``spurious_waits`` every other ``mbarrier.try_wait`` or ``test_wait`` of a thread says "not
        complete" whatever the phase, as hardware may: code that takes the answer for granted is found. What the kernel
        prints goes to ``stdout`` (default: the process's).
        ``cluster`` is the number of thread blocks in a cluster (default: what the kernel was compiled for, or 1).
        ``progress`` is called, wave after wave, with the thread blocks that were started before and those of the grid.
        """
        program = self.program(kernel)
        grid3, block3 = _dim3("grid", grid), _dim3("block", block)
        self._check_limits(program, grid3, block3, shared_bytes)
        cluster3 = _cluster(program, grid3, cluster)
        cluster_size = cluster3[0] * cluster3[1] * cluster3[2]
        blocks = grid3[0] * grid3[1] * grid3[2]
        threads = align_up(block3[0] * block3[1] * block3[2], WARP_SIZE)
        policy = HazardPolicy(check_hazards)
        per_wave = _blocks_per_wave(program, threads, shared_bytes, policy.is_checking)
        per_wave = max(cluster_size, per_wave // cluster_size * cluster_size)
        if trace_warp is not None and not (0 <= trace_warp[0] < blocks and 0 <= trace_warp[1] * WARP_SIZE < threads):
            raise ValueError(f"trace_warp={trace_warp}: the launch has {blocks} blocks of {threads // WARP_SIZE} warps")
        launch = Launch(
            program=program,
            grid=grid3,
            block=block3,
            cluster=cluster3,
            dynamic_shared_bytes=shared_bytes,
            global_memory=self._gpu.memory,
            constants=self._constants,
            parameters=ConstantMemory("param", pack_arguments(program, args, self._gpu.tensor_maps)),
            counters=Counters(program),
            hazard_policy=policy,
            step_limit=step_limit,
            tensor_maps=self._gpu.tensor_maps,
            print=(stdout or sys.stdout).write,
            registers=registers or program.limits.get("maxnreg", (None,))[0],
            spurious_waits=spurious_waits,
            global_shadow=self._global_shadow(program, policy, blocks * threads // WARP_SIZE, cluster_size),
        )
        if trace_warp is not None:
            trace_warp = _number_of_block(trace_warp[0], grid3, cluster3), trace_warp[1]
        started = time.perf_counter()
        try:
            with np.errstate(all="ignore"):
                trace = run_blocks(launch, blocks, per_wave, trace_warp, progress)
        except SimulationError as error:
            error.findings = policy.findings
            raise
        finally:
            self._gpu.memory.settle()
        elapsed_s = time.perf_counter() - started
        return Run(program, grid3, block3, shared_bytes, launch.counters, trace, policy.findings, elapsed_s)

    def _global_shadow(
        self, program: Program, policy: HazardPolicy, warps: int, cluster_size: int
    ) -> GlobalShadow | None:
        """None: races on global memory are not looked for."""
        is_wanted = policy.looks_for("global-race") or policy.looks_for("unordered-sum")
        # The order that barriers and mbarriers make between the blocks of a cluster is not tracked.
        if not is_wanted or not program.has_global_flags or cluster_size > 1 or warps > MAX_WARPS:
            return None
        return GlobalShadow(self._gpu.memory.bytes.size, program.global_granule, warps)

    def _check_limits(self, program: Program, grid: Dim3, block: Dim3, shared_bytes: int) -> None:
        threads = block[0] * block[1] * block[2]
        if threads > MAX_THREADS_PER_BLOCK or any(b > limit for b, limit in zip(block, MAX_BLOCK_DIM, strict=True)):
            raise ValueError(f"a block of {block} threads exceeds {MAX_THREADS_PER_BLOCK} or {MAX_BLOCK_DIM}")
        if any(size > limit for size, limit in zip(grid, MAX_GRID_DIM, strict=True)):
            raise ValueError(f"a grid of {grid} blocks exceeds {MAX_GRID_DIM}")
        for limit in ("maxntid", "reqntid"):
            declared = program.limits.get(limit)
            if declared is None:
                continue
            allowed = int(np.prod(declared))
            if threads > allowed or (limit == "reqntid" and threads != allowed):
                raise ValueError(f"kernel {program.name} was compiled for .{limit} {declared}, launched with {block}")
        available = self._gpu.architecture.shared_bytes_per_block
        if shared_bytes < 0 or program.shared_bytes(shared_bytes) > available:
            raise SimulationError(
                "shared-size",
                f"{program.static_shared_bytes} static + {shared_bytes} dynamic bytes of shared memory; "
                f"{self._gpu.architecture.name} allows {available} per block",
                kernel=program.name,
            )


def _blocks_per_wave(program: Program, threads: int, shared_bytes: int, is_checking: bool) -> int:
    shared = program.shared_bytes(shared_bytes)
    if is_checking:
        parties = Parties(threads // WARP_SIZE, program.has_asynchronous_parties)
        shared += shared // program.shared_granule * 8 * (1 + parties.readers)
    return max(1, min(_THREADS_PER_WAVE // threads, _SHARED_BYTES_PER_WAVE // max(shared, 1)))


def _cluster(program: Program, grid: Dim3, requested: Sequence[int] | int | None) -> Dim3:
    """The shape of a cluster, checked against the kernel and the grid."""
    declared = program.limits.get("reqnctapercluster")
    cluster = _dim3("cluster", requested if requested is not None else declared or 1)
    if declared is not None and cluster != _dim3("cluster", declared):
        raise ValueError(f"kernel {program.name} was compiled for clusters of {declared}, launched with {cluster}")
    if cluster[0] * cluster[1] * cluster[2] > MAX_CLUSTER_SIZE:
        raise ValueError(f"a cluster of {cluster} thread blocks; allowed: up to {MAX_CLUSTER_SIZE}")
    if any(blocks % size for blocks, size in zip(grid, cluster, strict=True)):
        raise ValueError(f"a grid of {grid} thread blocks is no multiple of clusters of {cluster}")
    return cluster


def _number_of_block(linear: int, grid: Dim3, cluster: Dim3) -> int:
    """The place of a block of the grid in the order of execution, in which blocks of a cluster are neighbours."""
    index = (linear % grid[0], linear // grid[0] % grid[1], linear // (grid[0] * grid[1]))
    (x, i), (y, j), (z, k) = (divmod(at, size) for at, size in zip(index, cluster, strict=True))
    columns, rows = grid[0] // cluster[0], grid[1] // cluster[1]
    number = x + columns * (y + rows * z)
    return number * cluster[0] * cluster[1] * cluster[2] + i + cluster[0] * (j + cluster[1] * k)


def _dim3(name: str, value: Sequence[int] | int) -> Dim3:
    try:
        sizes = [operator.index(size) for size in ([value] if isinstance(value, (int, np.integer)) else value)]
    except TypeError:  # no integers
        sizes = []
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"{name} must be one to three positive integers, not {value!r}")
    sizes += [1] * (3 - len(sizes))
    return sizes[0], sizes[1], sizes[2]


def _place_variables(gpu: SimulatedGPU, syntax: ModuleSyntax) -> tuple[dict[str, SymbolAddress], bytes]:
    """Addresses of the module's variables and functions, and the content of the constant bank."""
    symbols: dict[str, SymbolAddress] = {}
    constants = bytearray()
    for variable in syntax.variables:
        if variable.space == "const":
            constants = constants.ljust(align_up(len(constants), variable.align), b"\0")
            symbols[variable.name] = SymbolAddress("const", len(constants))
            constants += variable.initial or bytes(variable.size)
        elif variable.space == "global":
            address = gpu.allocate(variable.size)
            gpu.memory.write(address, np.frombuffer(variable.initial or bytes(variable.size), np.uint8))
            symbols[variable.name] = SymbolAddress("global", address)
    for number, function in enumerate(syntax.functions):
        symbols.setdefault(function, SymbolAddress("code", FUNCTION_BASE + FUNCTION_STEP * number))
    for variable in syntax.variables:
        for offset, target, addend, generic in variable.pointers:
            if target not in symbols:
                raise SimulationError("unsupported", f"initialiser of {variable.name} points at {target}")
            pointed = symbols[target]
            value = pointed.offset + addend + (WINDOW_BASE.get(pointed.space, 0) if generic else 0)
            place = symbols[variable.name].offset + offset
            data = value.to_bytes(8, "little")
            if variable.space == "const":
                constants[place : place + 8] = data
            else:
                gpu.memory.write(place, np.frombuffer(data, np.uint8))
    return symbols, bytes(constants)
