"""The Hopper kernel with one synchronisation broken: the simulated GPU names what is wrong with it.

A mutation is told by the line of CUDA that it breaks. What the compiler made of that line is found in the PTX, by the
locations that the compiler leaves there, and changed there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from flashwright import AttentionVariant, HopperForwardKernelConfig, Kernel, compile_kernel, parse_hopper_config
from flashwright.hopper.source import hopper_kernel_source
from flashwright.numpy_dtypes import NUMPY_DTYPES
from flashwright.simulation import ForwardSimulation, reference_forward, relative_error, simulate_forward
from flashwright.simulator import SimulationError
from flashwright.simulator.ptx.parser import parse
from flashwright.simulator.ptx.syntax import Instruction, SourceLocation

CONFIG = parse_hopper_config("hopper (FP16, 64, 128, 32): stages_2+overlap+ping_pong+persistent+lazy")


# --- The kernel, as it is and broken -----------------------------------------------------------------------------


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(NUMPY_DTYPES[CONFIG.dtype])


def run_several_tiles() -> ForwardSimulation:
    """More tiles than thread blocks, more steps than stages: every barrier goes through several phases."""
    q, k, v = random(1, 3, 256, 64), random(1, 3, 96, 64), random(1, 3, 96, 64)
    done = simulate_forward(CONFIG, q, k, v)
    assert relative_error(done.output, reference_forward(q, k, v)[0]) < 5e-4
    return done


def run_packed() -> ForwardSimulation:
    """A sequence that ends within a block; in the next one there is infinity."""
    q, k, v = random(1, 1, 80, 64), random(1, 1, 80, 64), random(1, 1, 80, 64)
    v[:, :, 40:] = np.inf
    starts = np.array([0, 40, 80], np.int32)
    done = simulate_forward(CONFIG, q, k, v, starts=(starts, starts), max_lengths=(40, 40))
    first = (x[:, :, :40] for x in (q, k, v))
    assert relative_error(done.output[:, :, :40], reference_forward(*first)[0]) < 5e-4
    return done


RUNS: dict[str, Callable[[], ForwardSimulation]] = {"several tiles": run_several_tiles, "packed": run_packed}


@pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))
def test_the_kernel_is_sound_before_it_is_mutated(run):
    run()


@cache
def source_lines(file: str) -> list[str]:
    headers = dict(hopper_kernel_source(CONFIG).headers)
    return headers[file].splitlines() if file in headers else []


def lines_of(place: SourceLocation | None) -> Iterator[str]:
    """The source line of a place, and those that it was inlined at, outwards."""
    while place is not None:
        lines = source_lines(place.file)
        if 0 < place.line <= len(lines):
            yield lines[place.line - 1].strip()
        place = place.inlined_at


@dataclass(frozen=True)
class Mutation:
    """A change of every instruction of an opcode that comes from a source line, by way of another if that is given."""

    line: str
    opcode: str
    kinds: set[str]
    """What it may be reported as."""
    by_way_of: str = ""
    change: Callable[[str], str] = lambda instruction: ""
    run: Callable[[], ForwardSimulation] = run_several_tiles

    def concerns(self, item: Any) -> bool:
        if not isinstance(item, Instruction) or not re.match(self.opcode, item.opcode):
            return False
        lines = list(lines_of(item.source))
        return all(any(text in line for line in lines) for text in (self.line, self.by_way_of))

    def apply(self, ptx: str) -> str:
        (function,) = (function for function in parse(ptx).functions.values() if function.is_entry)
        lines = ptx.splitlines()
        places = [item.ptx_line - 1 for item in function.body if self.concerns(item)]
        assert places, f"no {self.opcode} comes from `{self.line}`; has the kernel changed?"
        for place in places:
            lines[place] = self.change(lines[place])
        return "\n".join(lines)


def without_looking(instruction: str) -> str:
    """A wait that returns at once: what it waits for counts as there."""
    predicate = re.search(r"try_wait\S*\s+(\w+),", instruction)
    assert predicate is not None
    return f"setp.eq.u32 {predicate[1]}, 0, 0;"


def announcing(bytes_: int) -> Callable[[str], str]:
    return lambda instruction: re.sub(r"%r\d+;", f"{bytes_};", instruction)


def no_wait(line: str, *kinds: str) -> Mutation:
    return Mutation(line, r"mbarrier\.try_wait", set(kinds), change=without_looking)


def no_release(line: str) -> Mutation:
    return Mutation(line, r"mbarrier\.arrive", {"deadlock"})


SYNC, ARRIVE = r"(bar|barrier)(\.cta)?\.sync", r"(bar|barrier)(\.cta)?\.arrive"
ANNOUNCEMENT = "mbarrier_arrive_expecting(slot.full, shape::panels * rows * 128);"
ISSUE_SCORES, ISSUE_OUTPUT = "issue_scores(S[0]", "issue_output(O[0]"
CLEARED = "named_barrier_sync(1 + cfg::n_consumers, consumer_threads);"
# What shows first depends on who comes first: the next copy, the products that read, or the second announcement.
OVERWRITTEN = ("race", "async-copy", "mbarrier")
# Registers of products in flight are touched, or the tiles that they read overwritten.
UNFINISHED = {"wgmma", "race"}
MUTATIONS = {
    "K is read before it has arrived": no_wait("K.wait_until_full(K_place.lap);", "async-copy"),
    "V is read before it has arrived": no_wait("V.wait_until_full(V_place.lap);", "async-copy"),
    "Q is read before it has arrived": no_wait("Q().wait_until_full(Q_lap);", "async-copy"),
    "K is overwritten while it is read": no_wait("slot.wait_until_empty(K_place.lap);", *OVERWRITTEN),
    "V is overwritten while it is read": no_wait("slot.wait_until_empty(V_place.lap);", *OVERWRITTEN),
    "Q is overwritten while it is read": no_wait("slot.wait_until_empty(Q_lap);", *OVERWRITTEN),
    "K is never released": no_release("shared.K(K_place.stage).release();"),
    "V is never released": no_release("shared.V(V_place.stage).release();"),
    "Q is never released": no_release("Q().release();"),
    "scores are used before they are there": Mutation("wgmma_wait_group<1>();", r"wgmma\.wait_group", UNFINISHED),
    "O is used before it is there": Mutation(
        "wgmma_wait_group<0>();", r"wgmma\.wait_group", UNFINISHED, "finish_output();"
    ),
    "the products of the scores are no group": Mutation(
        "wgmma_commit_group();", r"wgmma\.commit_group", UNFINISHED, ISSUE_SCORES
    ),
    "the products with P are no group": Mutation(
        "wgmma_commit_group();", r"wgmma\.commit_group", UNFINISHED, ISSUE_OUTPUT
    ),
    "no fence before the scores": Mutation("wgmma_fence();", r"wgmma\.fence", {"wgmma"}, ISSUE_SCORES),
    "no fence before the product with P": Mutation("wgmma_fence();", r"wgmma\.fence", {"wgmma"}, ISSUE_OUTPUT),
    "more bytes are announced than come": Mutation(
        ANNOUNCEMENT, r"mbarrier\.arrive\.expect_tx", {"deadlock"}, change=announcing(2**19)
    ),
    "fewer bytes are announced than come": Mutation(
        ANNOUNCEMENT, r"mbarrier\.arrive\.expect_tx", {"deadlock"}, change=announcing(16)
    ),
    "a turn is never passed on": Mutation("turns.pass();", ARRIVE, {"deadlock"}),
    "the producer keeps its registers": Mutation(
        "give_registers_back<shape::producer_registers>();", r"setmaxnreg", {"deadlock"}
    ),
    "barriers are used before they are there": Mutation("__syncthreads();", SYNC, {"mbarrier", "race"}),
    "barriers are not announced to the copy engine": Mutation(
        "mbarrier_init_fence();", r"fence\.mbarrier_init", {"proxy-fence"}
    ),
    "no proxy fence after rows of V are cleared": Mutation(
        "fence_async_proxy();", r"fence\.proxy", {"proxy-fence"}, run=run_packed
    ),
    "nobody waits until rows of V are cleared": Mutation(CLEARED, SYNC, {"race"}, run=run_packed),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=list(MUTATIONS))
def test_a_broken_synchronisation_is_named(mutation, monkeypatch):
    def compile_broken(config: HopperForwardKernelConfig, arch: str, variant: AttentionVariant) -> Kernel:
        kernel = compile_kernel(config, arch, variant)
        return replace(kernel, program=replace(kernel.program, ptx=mutation.apply(kernel.ptx)))

    monkeypatch.setattr("flashwright.simulation.compile_kernel", compile_broken)
    with pytest.raises(SimulationError) as caught:
        mutation.run()
    assert caught.value.kind in mutation.kinds, str(caught.value)
    assert caught.value.kind == "deadlock" or caught.value.source_line is not None
