"""A wave: thread blocks that execute together, every register an array over all their threads.

Thread ``t`` of a wave is lane ``t % 32`` of warp ``t // 32``; warps of one block are consecutive. A block
whose size is not a multiple of 32 is padded with lanes that never live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from .architecture import WARP_SIZE
from .async_hazards import AsyncHazards
from .clusters import Clusters
from .errors import ErrorKind, OtherParty, SimulationError
from .findings import HazardPolicy
from .global_hazards import GlobalHazards, GlobalShadow
from .hazards import HazardTracker
from .memory.shared_memory import ClusterSharedMemory, SharedMemory
from .memory.space import MemorySpace
from .memory.thread_memory import ConstantMemory, LocalMemory
from .memory.windows import CLUSTER_SHARED
from .memory_order import Ordering
from .ptx.types import RAW_DTYPES
from .register_hazards import RegisterHazards
from .scheduler import FAR, Scheduler
from .special_registers import SPECIAL_REGISTERS
from .sync.async_copies import AsyncCopies
from .sync.blocker import Blocker
from .sync.bulk_copies import BulkCopies
from .sync.cluster_barriers import ClusterBarriers
from .sync.convergence import Convergence
from .sync.mbarriers import Mbarriers
from .sync.meetings import Meetings
from .sync.named_barriers import NamedBarriers
from .sync.register_pool import RegisterPool
from .sync.remote_accesses import RemoteAccesses
from .sync.spinning import Activity, Spinning, Verdict
from .sync.warpgroups import Warpgroups
from .sync.wgmma_groups import WgmmaGroups
from .trace import WarpTrace

if TYPE_CHECKING:
    from .counters import Counters
    from .memory.global_memory import GlobalMemory
    from .program import Program
    from .tensor_maps import TensorMaps

Dim3 = tuple[int, int, int]

# After so many jumps back, in one turn or in several, the next group is one that did not come first: those that do may
# be spinning on memory that one of the others will write.
_FAIRNESS_QUANTUM = 2_000


@dataclass(frozen=True)
class Launch:
    """What all waves of one launch share."""

    program: Program
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_shared_bytes: int
    global_memory: GlobalMemory
    constants: ConstantMemory
    parameters: ConstantMemory
    counters: Counters
    hazard_policy: HazardPolicy
    step_limit: int
    tensor_maps: TensorMaps
    print: Callable[[str], object]
    registers: int | None = None
    spurious_waits: bool = False
    global_shadow: GlobalShadow | None = None
    activity: Activity = field(default_factory=Activity)

    @property
    def warps_per_block(self) -> int:
        return -(-self.block[0] * self.block[1] * self.block[2] // WARP_SIZE)


class Wave:
    """State and execution of the blocks ``first_block … first_block + blocks - 1`` of a launch."""

    def __init__(self, launch: Launch, first_block: int, blocks: int, traced_warp: int | None = None) -> None:
        program = launch.program
        self.program = program
        self.counters = launch.counters
        self.print = launch.print
        self.blocks = blocks
        self.dynamic_shared_bytes = launch.dynamic_shared_bytes
        self.warps_per_block = launch.warps_per_block
        self._set_geometry(launch.grid, launch.block, launch.cluster, first_block, blocks)
        # State spaces
        self.global_memory = launch.global_memory
        self.shared = SharedMemory(blocks, program.shared_bytes(launch.dynamic_shared_bytes), self.block_of_thread)
        self.local = LocalMemory(self.threads, program.local_bytes)
        self.spaces: dict[str, MemorySpace] = {
            "global": launch.global_memory,
            "shared": self.shared,
            CLUSTER_SHARED: ClusterSharedMemory(self.shared),
            "local": self.local,
            "const": launch.constants,
            "param": launch.parameters,
        }
        # Synchronisation objects
        self.scheduler = Scheduler(program.flow.order)
        self.meetings = Meetings(self)
        self.spinning = Spinning(self, launch.activity, launch.step_limit)
        self._activity = launch.activity
        self.convergence = Convergence(self)
        self.barriers = NamedBarriers(self)
        self.cluster_barriers = ClusterBarriers(self)
        self.async_copies = AsyncCopies(self)
        self.mbarriers = Mbarriers(self, launch.spurious_waits)
        self.bulk_copies = BulkCopies(self)
        self.warpgroups = Warpgroups(self)
        self.wgmma = WgmmaGroups(self)
        self.register_pool = RegisterPool(self, launch.registers)
        self.tensor_maps = launch.tensor_maps
        # In a deadlock the first that somebody waits in is named first: the likely cause before its consequences.
        self.blockers: tuple[Blocker, ...] = (
            self.mbarriers,
            self.register_pool,
            self.convergence,
            self.warpgroups,
            self.barriers,
            self.cluster_barriers,
            self.meetings,
            self.spinning,
        )
        # Hazards
        self.hazard_policy = launch.hazard_policy
        is_checking = launch.hazard_policy.is_checking
        self.hazards = HazardTracker(self, program.shared_granule) if is_checking else None
        self.async_hazards = None if self.hazards is None else AsyncHazards(self, self.hazards)
        self.global_hazards = (
            None
            if self.hazards is None or launch.global_shadow is None
            else GlobalHazards(self, self.hazards.clocks, launch.global_shadow, first_block * self.warps_per_block)
        )
        self.remote_accesses = RemoteAccesses(self) if is_checking and self.clusters.size > 1 else None
        self.register_hazards = (
            RegisterHazards(self, program.wgmma_registers) if is_checking and program.wgmma_registers else None
        )
        # Execution
        self.pc = 0
        self.mask: np.ndarray | None = None
        self.merge: np.ndarray | None = None
        self._lanes: np.ndarray | None = None
        self._stops_at_meeting_points = False
        self._jumps_to_rest = _FAIRNESS_QUANTUM
        self.ordering: Ordering | None = None  # of the strong access that is being executed
        zeros = {bits: np.zeros(self.threads, raw) for bits, raw in RAW_DTYPES.items()}
        false = np.zeros(self.threads, bool)
        # Arrays of registers are replaced, never modified, so that all may start as the same one.
        self.registers = [false if slot.type.kind == "pred" else zeros[slot.type.bits] for slot in program.slots]
        for name, index in program.special_slots.items():
            special = SPECIAL_REGISTERS[name]
            self.registers[index] = np.broadcast_to(
                np.asarray(special.value(self)).astype(special.type.dtype), (self.threads,)
            ).copy()
        self.trace = None if traced_warp is None else WarpTrace(traced_warp)
        self.scheduler.add(0, self.alive.copy())

    def _set_geometry(self, grid: Dim3, block: Dim3, cluster: Dim3, first_block: int, blocks: int) -> None:
        live = block[0] * block[1] * block[2]
        padded = self.warps_per_block * WARP_SIZE
        self.threads = blocks * padded
        self.warps = blocks * self.warps_per_block
        self.grid_shape, self.block_shape = grid, block
        thread = np.arange(self.threads)
        in_block = thread % padded
        self.block_of_thread = thread // padded
        self.thread_index = (
            in_block % block[0],
            in_block // block[0] % block[1],
            in_block // (block[0] * block[1]),
        )
        self.clusters = Clusters(cluster, self.block_of_thread)
        self.cluster_shape = cluster
        number, rank = divmod(first_block + self.block_of_thread, self.clusters.size)
        shape = self.cluster_grid_shape = (grid[0] // cluster[0], grid[1] // cluster[1], grid[2] // cluster[2])
        self.cluster_index = (number % shape[0], number // shape[0] % shape[1], number // (shape[0] * shape[1]))
        self.index_in_cluster = (
            rank % cluster[0],
            rank // cluster[0] % cluster[1],
            rank // (cluster[0] * cluster[1]),
        )
        x, y, z = (
            index * size + within
            for index, size, within in zip(self.cluster_index, cluster, self.index_in_cluster, strict=True)
        )
        self.block_index = (x, y, z)
        self.lane = thread % WARP_SIZE
        self.warp_in_block = in_block // WARP_SIZE
        self.alive = in_block < live
        self.alive_count = int(np.count_nonzero(self.alive))

    # Active threads ----------------------------------------------------------------------------------

    @property
    def lanes(self) -> np.ndarray | None:
        """Indices of the active threads; None when every thread of the wave is active."""
        if self.mask is None:
            return None
        if self._lanes is None:
            self._lanes = np.flatnonzero(self.mask)
        return self._lanes

    @property
    def active(self) -> np.ndarray | slice:
        """What picks the active threads from an array over all threads."""
        lanes = self.lanes
        return slice(None) if lanes is None else lanes

    @property
    def active_mask(self) -> np.ndarray:
        return np.ones(self.threads, bool) if self.mask is None else self.mask

    def activate(self, mask: np.ndarray) -> None:
        """Make ``mask`` the running group.

        ``self.mask`` says who executes (None: everybody); ``self.merge`` says whose registers may change
        (None: no living thread outside the group, so whole registers may be replaced).
        """
        count = int(np.count_nonzero(mask))
        self._group_mask = mask
        self._group_count = count
        self.mask = None if count == self.threads else mask
        self.merge = None if count == self.alive_count else mask
        self._lanes = None
        self.group_warps = _count_warps(mask)

    def restrict(self, mask: np.ndarray) -> None:
        """Execute for part of the running group only, until `unrestrict`."""
        self.mask = self.merge = mask
        self._lanes = None

    def unrestrict(self) -> None:
        mask, count = self._group_mask, self._group_count
        self.mask = None if count == self.threads else mask
        self.merge = None if count == self.alive_count else mask
        self._lanes = None

    @contextmanager
    def only(self, positions: np.ndarray) -> Iterator[None]:
        """Within the block, only these of the active threads (by position among them) are active."""
        saved = (self.mask, self.merge, self._lanes)
        threads = positions if self.lanes is None else self.lanes[positions]
        mask = np.zeros(self.threads, bool)
        mask[threads] = True
        self.restrict(mask)
        try:
            yield
        finally:
            self.mask, self.merge, self._lanes = saved

    # Execution ---------------------------------------------------------------------------------------

    def run(self, gives_way: bool = True) -> bool:
        """Run until every thread has exited; False: those that live wait for other thread blocks, or seem to.

        Threads that spin wait; threads that run without getting anywhere seem to, and go on unless ``gives_way``.
        """
        try:
            return self._run(gives_way)
        except (SimulationError, MemoryError):
            raise
        except Exception as error:
            # An operation met operands that it was not written for.
            detail = "operands, modifiers or values of a form that the simulator does not know"
            raise self._error("unsupported", detail, self.thread_at(0), None, None, None) from error

    def _run(self, gives_way: bool) -> bool:
        is_spinning = False
        last_turn = 0
        while self.alive_count:
            if is_spinning:
                self.bulk_copies.deliver()
            chosen = self.scheduler.take_after(last_turn) if is_spinning else self.scheduler.take_first()
            if chosen is None:
                if self._release_somebody():
                    continue
                if self.spinning.has_parked:
                    return False
                self.report_deadlock()
            self.convergence.refuse_passing(*chosen)
            if is_spinning:
                last_turn = chosen[0]
                self.meetings.run_ahead(chosen[1])
                self._run_group(*chosen, yields_to_earlier=False)
                is_spinning = False
                if gives_way and self.spinning.gives_way():
                    return False
            else:
                ready = self.meetings.ready(*chosen)
                if ready is not None:
                    is_spinning = self._run_group(chosen[0], ready)
        self.spinning.end()
        self.async_copies.deliver_all()
        self.bulk_copies.finish()
        return True

    def _release_somebody(self) -> bool:
        """Nobody can run: what is on its way arrives, those that spin look again, lanes that wait where ways join go on
        alone, or those that wait for a phase give up for a moment. False: none of that helps."""
        if self.bulk_copies.deliver():
            self._activity.count += 1
            return True
        return self.spinning.wake() or self.meetings.give_up() or self.mbarriers.time_out()

    def _run_group(self, pc: int, mask: np.ndarray, yields_to_earlier: bool = True) -> bool:
        """Run one group until it blocks, exits, or comes to a place in the program's order that a group stands at.

        It also stops where it has passed a group, unless this is a turn out of order (``yields_to_earlier`` is False).
        Returns whether it was stopped for running too long: it may be spinning.
        """
        self.activate(mask)
        steps, executed, scheduler = self.program.steps, self.counters.executed, self.scheduler
        spinning = self.spinning
        spinning.begin_turn(pc, mask)
        groups, gathering, meeting = scheduler.groups, self.convergence.aligned, self.meetings.waiting
        self._stops_at_meeting_points = self.mask is not None and self.meetings.stops_at_meeting_points(mask)
        limit = self._next_stop(pc, yields_to_earlier, arrives=False)
        while True:
            execute, guard, negated, is_control, skip_to, place = steps[pc]
            if place >= limit:
                break
            self.pc = pc
            executed[pc] += self.group_warps
            if self.trace is not None:
                self.trace.step(pc, self._group_mask)
            if guard >= 0:
                predicate = ~self.registers[guard] if negated else self.registers[guard]
                if self.mask is not None:
                    predicate = predicate & self.mask
                taken = int(np.count_nonzero(predicate))
                if taken == 0:
                    pc = skip_to
                    continue
                if taken != self._group_count:
                    if not is_control:
                        self.restrict(predicate)
                        execute(self)
                        self.unrestrict()
                        pc += 1
                        continue
                    # Threads may go different ways here: those whose guard is false form a group of their own.
                    scheduler.add(skip_to, self._group_mask & ~predicate)
                    self.activate(predicate)
            if not is_control:
                execute(self)
                pc += 1
                continue
            pc = execute(self)
            if pc < 0:
                spinning.acted()
                return False
            limit = FAR
            if groups or gathering or meeting or self._stops_at_meeting_points:
                limit = self._next_stop(pc, yields_to_earlier)
            if pc <= self.pc:
                verdict = Verdict.GO_ON
                self._jumps_to_rest -= 1
                spinning.jumps_to_look -= 1
                if spinning.jumps_to_look == 0:
                    verdict = spinning.look(pc, self._group_mask)
                if verdict is Verdict.PARK:
                    spinning.park(pc, self._group_mask)
                    return False
                if self._jumps_to_rest == 0 or verdict is Verdict.YIELD:
                    self._jumps_to_rest = _FAIRNESS_QUANTUM
                    scheduler.add(pc, self._group_mask)
                    spinning.acted()
                    return True
        scheduler.add(pc, self._group_mask)
        spinning.acted()
        return False

    def _next_stop(self, pc: int, yields_to_earlier: bool, arrives: bool = True) -> int:
        """The place in the program's order at which a group that stands at ``pc`` has to stop.

        If it ``arrives`` there, that may be the place; if its turn begins there, it may go on.
        """
        flow = self.program.flow
        place = flow.order[pc]
        first = place if arrives else place + 1
        stop = self.scheduler.first_place(0 if yields_to_earlier else place)
        if self.convergence.aligned:
            stop = min(stop, self.convergence.next_place(first))
        if self.meetings.waiting:
            stop = min(stop, self.meetings.next_place(first))
        if self._stops_at_meeting_points:
            point = pc if arrives and flow.is_meeting_point(pc) else flow.next_meeting_point(pc)
            stop = stop if point is None else min(stop, flow.order[point])
        return stop

    def postpone(self, mask: np.ndarray) -> None:
        """These of the active threads execute the current instruction later: it does not count as executed yet."""
        self.counters.executed[self.pc] -= _count_warps(mask)
        if self.trace is not None:
            self.trace.postpone(self.pc, mask)

    def catch_up(self, pc: int, mask: np.ndarray) -> None:
        """These threads, whose instruction was postponed, execute it now, together with the running group."""
        self.counters.executed[pc] += _count_warps(mask)
        if self.trace is not None:
            self.trace.step(pc, mask)

    def exit_group(self) -> None:
        """The running group ends; barriers stop expecting its threads."""
        self.bulk_copies.on_exit(self._group_mask)
        self.alive = self.alive & ~self._group_mask
        self.alive_count = int(np.count_nonzero(self.alive))
        if self.remote_accesses is not None:
            for block in np.unique(self.block_of_thread[self._group_mask]):
                if not self.alive[self.block_of_thread == block].any():
                    self.remote_accesses.end(int(block))
        for blocker in self.blockers:
            blocker.on_exit()

    # Faults ------------------------------------------------------------------------------------------

    def fault(
        self,
        kind: ErrorKind,
        detail: str,
        position: int,
        address: int | None = None,
        other: OtherParty | None = None,
    ) -> NoReturn:
        """Raise for the ``position``-th active thread, at the current instruction."""
        self.fault_thread(kind, detail, self.thread_at(position), address, other)

    def fault_thread(
        self,
        kind: ErrorKind,
        detail: str,
        thread: int,
        address: int | None = None,
        other: OtherParty | None = None,
        pc: int | None = None,
    ) -> NoReturn:
        raise self._error(kind, detail, thread, address, other, pc)

    def hazard(
        self,
        kind: ErrorKind,
        detail: str,
        thread: int,
        address: int | None = None,
        other: OtherParty | None = None,
        pc: int | None = None,
        count: int = 1,
    ) -> None:
        """A hazard of a thread, met by ``count`` accesses: stop, or note it and go on, as the launch wants it."""
        reaction = self.hazard_policy.reaction_to(kind)
        if reaction == "ignore":
            return
        error = self._error(kind, detail, thread, address, other, pc)
        if reaction == "stop":
            raise error
        self.hazard_policy.collect(error, count)

    def thread_at(self, position: int) -> int:
        """The ``position``-th active thread."""
        return position if self.lanes is None else int(self.lanes[position])

    def _error(
        self,
        kind: ErrorKind,
        detail: str,
        thread: int,
        address: int | None,
        other: OtherParty | None,
        pc: int | None,
    ) -> SimulationError:
        item = self.program.code[self.pc if pc is None else pc]
        return SimulationError(
            kind,
            detail,
            kernel=self.program.name,
            thread_block=self.block_index_of(thread),
            warp=int(self.warp_in_block[thread]),
            lane=int(self.lane[thread]),
            address=address,
            ptx_line=item.ptx_line,
            source_line=item.source.line if item.source else None,
            source_file=item.source.file if item.source else None,
            source_location=str(item.source) if item.source else None,
            instruction=item.text,
            other=other,
        )

    def block_index_of(self, thread: int) -> Dim3:
        x, y, z = (int(axis[thread]) for axis in self.block_index)
        return x, y, z

    def report_deadlock(self) -> NoReturn:
        """Who waits for what, in the first cluster that is stuck; others are usually stuck in the same way."""
        waiting = [(blocker.deadlock_kind, *entry) for blocker in self.blockers for entry in blocker.waiting_threads()]
        assert waiting, "living threads are neither runnable nor waiting"
        stuck = np.any([mask for _, _, mask, _ in waiting], axis=0)
        nearby = self.clusters.of_thread == self.clusters.of_thread[int(np.flatnonzero(stuck)[0])]
        others = np.unique(self.block_of_thread[stuck & ~nearby]).size
        here = [(kind, pc, mask & nearby, why) for kind, pc, mask, why in waiting if (mask & nearby).any()]
        kind, pc, mask, _ = here[0]
        first = int(np.flatnonzero(mask)[0])
        lines = [self._describe_waiting(*entry) for _, *entry in here]
        if others:
            lines.append(f"and {'one other thread block' if others == 1 else f'{others} others'} of this wave")
        self.fault_thread(kind, "no thread can run: " + "; ".join(lines), first, pc=pc)

    def _describe_waiting(self, pc: int, mask: np.ndarray, reason: str) -> str:
        item = self.program.code[pc]
        threads = np.flatnonzero(mask)
        warps = ", ".join(map(str, np.unique(self.warp_in_block[threads])))
        return (
            f"{threads.size} threads (thread block {self.block_index_of(int(threads[0]))}: warps {warps}) wait at PTX "
            f"line {item.ptx_line} `{item.text}`: {reason}"
        )


def _count_warps(mask: np.ndarray) -> int:
    return int(np.count_nonzero(mask.reshape(-1, WARP_SIZE).any(axis=1)))
