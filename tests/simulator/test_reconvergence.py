"""Lanes that went different ways meet again where the ways join, wherever the compiler put the join."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright.simulator.control_flow import END, ControlFlow
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.run import Run

from .tools import HEADER, compile_cuda, launch

LANES = np.arange(32)


def kernel(body: str) -> str:
    """A kernel with the lane in %lane, its parity in %odd, and the address of its word of the output in %out."""
    return f"""{HEADER}
        .visible .entry k(.param .u64 p_out)
        {{
            .reg .b32 %lane, %r<8>; .reg .b64 %out, %rd<4>; .reg .pred %odd, %p<8>;
            .shared .align 8 .b64 barrier;
            mov.u32 %lane, %tid.x;
            ld.param.u64 %rd0, [p_out];
            mad.wide.u32 %out, %lane, 4, %rd0;
            and.b32 %r0, %lane, 1;
            setp.ne.u32 %odd, %r0, 0;
            {body}
        }}"""


def run(ptx: str, block: int = 32) -> tuple[np.ndarray, Run]:
    outputs = {"out": np.zeros(block, np.uint32)}
    done = launch(ptx, block, outputs, arch="sm_90")
    return outputs["out"], done


def executed(done: Run, opcode: str) -> int:
    return sum(item.counts.executed for item in done.per_instruction if item.opcode.startswith(opcode))


def test_lanes_that_return_before_a_barrier_are_not_waited_for() -> None:
    ptx = compile_cuda("""extern "C" __global__ void k(int *out, int n) {
        __shared__ int s[32];
        if (threadIdx.x >= n) return;
        s[threadIdx.x] = threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = s[n - 1 - threadIdx.x]; }""")
    outputs = {"out": np.full(32, -1, np.int32)}
    launch(ptx, 32, outputs, np.int32(20))
    assert (outputs["out"] == np.where(LANES < 20, 19 - LANES, -1)).all()


def test_lanes_that_do_something_before_they_return_are_not_waited_for() -> None:
    out, _ = run(kernel("@%odd bra OUT; bar.sync 0; st.global.u32 [%out], 1; ret; OUT: st.global.u32 [%out], 2; ret;"))
    assert (out == 1 + LANES % 2).all()


def test_one_side_of_a_branch_behind_the_join() -> None:
    out, done = run(
        kernel("""mov.u32 %r1, 5; @%odd bra OUT;
            JOIN: bar.sync 0; st.global.u32 [%out], %r1; ret;
            OUT: mov.u32 %r1, 7; bra JOIN;""")
    )
    assert (out == np.where(LANES % 2, 7, 5)).all()
    assert executed(done, "st.global") == executed(done, "bar.sync") == 1
    assert done.counters.global_requests == 1


def test_a_rare_case_behind_the_join_that_may_return() -> None:
    """Lanes that end early do not keep the others from meeting."""
    out, done = run(
        kernel("""mov.u32 %r1, 5; @%odd bra RARE;
            JOIN: st.global.u32 [%out], %r1; bar.sync 0; ret;
            RARE: setp.eq.u32 %p1, %lane, 3; @%p1 ret; mov.u32 %r1, 7; bra JOIN;""")
    )
    assert (out == np.where(LANES == 3, 0, np.where(LANES % 2, 7, 5))).all()
    assert executed(done, "st.global") == executed(done, "bar.sync") == 1


def test_a_loop_that_lanes_continue_from_several_places() -> None:
    out, done = run(
        kernel("""mov.u32 %r1, 0; mov.u32 %r2, 0;
            TOP: setp.eq.u32 %p1, %r1, 4; @%p1 bra DONE;
            add.u32 %r1, %r1, 1; st.global.u32 [%out], %r2;
            @%odd bra TOP;
            add.u32 %r2, %r2, 10; bra TOP;
            DONE: st.global.u32 [%out], %r2; ret;""")
    )
    assert (out == np.where(LANES % 2, 0, 40)).all()
    assert executed(done, "st.global") == 5


@pytest.mark.parametrize("other_side", ["bra JOIN;", "add.u32 %r1, %r1, 1; bra JOIN;"], ids=["empty", "not empty"])
def test_lanes_wait_at_the_join_for_one_that_waits_on_its_way(other_side: str) -> None:
    """Lane 0 of warp 0 waits for the other warp; its store is still one with that of the other lanes."""
    out, done = run(
        kernel(f"""setp.eq.u32 %p1, %lane, 0; mov.u32 %r1, 0;
            @%p1 mbarrier.init.shared.b64 [barrier], 1;
            bar.sync 0;
            setp.ge.u32 %p2, %lane, 32; @%p2 bra OTHER;
            @%p1 bra WAIT;
            {other_side}
            WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [barrier], 0; @!%p3 bra WAIT;
            JOIN: st.global.u32 [%out], 1; ret;
            OTHER: setp.eq.u32 %p1, %lane, 32; @!%p1 ret; mbarrier.arrive.shared.b64 _, [barrier]; ret;"""),
        block=64,
    )
    assert (out == np.repeat([1, 0], 32)).all()
    assert executed(done, "st.global") == 1


def test_lanes_wait_at_the_join_from_both_sides() -> None:
    """Even lanes wait first; odd lanes come to the join by a way of their own, without a pause."""
    out, done = run(
        kernel("""setp.eq.u32 %p1, %lane, 0;
            @%p1 mbarrier.init.shared.b64 [barrier], 1;
            bar.sync 0;
            setp.ge.u32 %p2, %lane, 32; @%p2 bra OTHER;
            @%odd bra ODD;
            WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [barrier], 0; @!%p3 bra WAIT;
            bra JOIN;
            ODD: add.u32 %r1, %r1, 1;
            JOIN: st.global.u32 [%out], 1; ret;
            OTHER: setp.eq.u32 %p1, %lane, 32; @!%p1 ret; mbarrier.arrive.shared.b64 _, [barrier]; ret;"""),
        block=64,
    )
    assert (out == np.repeat([1, 0], 32)).all()
    assert executed(done, "st.global") == 1


def test_lanes_at_the_join_go_on_alone_where_nobody_else_can_run() -> None:
    """Lane 0 waits for what lane 1 does behind the join: allowed, if unusual."""
    out, _ = run(
        kernel("""setp.eq.u32 %p1, %lane, 0; setp.eq.u32 %p2, %lane, 1;
            @%p1 mbarrier.init.shared.b64 [barrier], 1;
            bar.sync 0;
            @!%p1 bra JOIN;
            WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [barrier], 0; @!%p3 bra WAIT;
            JOIN: @%p2 mbarrier.arrive.shared.b64 _, [barrier];
            bar.sync 0;
            st.global.u32 [%out], 1; ret;""")
    )
    assert (out == 1).all()


@pytest.mark.parametrize(
    "body",
    [
        "@!%odd bra JOIN; bar.sync 0; JOIN: st.global.u32 [%out], 1; ret;",
        "@%odd bra OUT; JOIN: st.global.u32 [%out], 1; ret; OUT: bar.sync 0; bra JOIN;",
        "@%odd bar.sync 0; st.global.u32 [%out], 1; ret;",
        # Lanes leave the loop after as many rounds as their number.
        "mov.u32 %r1, 0; TOP: bar.sync 0; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, %lane; @%p1 bra TOP;"
        "st.global.u32 [%out], 1; ret;",
        # Every round, and the lanes that go around the barrier come back to the top before it.
        "mov.u32 %r1, 0; TOP: setp.eq.u32 %p1, %r1, 4; @%p1 ret; add.u32 %r1, %r1, 1; @!%odd bra TOP;"
        "bar.sync 0; bra TOP;",
    ],
    ids=["skipped", "behind the join", "guard", "different trip counts", "in a loop"],
)
def test_a_barrier_for_part_of_a_warp_is_an_error(body: str) -> None:
    with pytest.raises(SimulationError, match="executed by part of the warp only: lane") as caught:
        run(kernel(body))
    assert caught.value.kind == "barrier"
    assert "bar.sync" in caught.value.instruction


def test_cuda_barrier_for_part_of_a_warp_is_an_error() -> None:
    ptx = compile_cuda("""extern "C" __global__ void k(int *out) {
        if (threadIdx.x & 1) __syncthreads();
        out[threadIdx.x] = 1; }""")
    with pytest.raises(SimulationError, match="executed by part of the warp only") as caught:
        launch(ptx, 32, {"out": np.zeros(32, np.int32)})
    assert caught.value.kind == "barrier"


# The order of instructions, against the definition of post-dominance ------------------------------------------


def reaches(successors: list[tuple[int, ...]], start: int, end: int, without: int | None = None) -> bool:
    seen, stack = {without, END}, [start]
    while stack:
        pc = stack.pop()
        if pc in seen:
            continue
        if pc == end:
            return True
        seen.add(pc)
        stack += successors[pc]
    return False


@st.composite
def flow_graphs(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Instructions that fall through or jump anywhere; the last one ends the threads."""
    count = draw(st.integers(1, 9))
    place = st.integers(0, count)
    branch = st.one_of(st.just(()), st.tuples(place), st.tuples(place, place))
    targets = [tuple(dict.fromkeys(draw(branch))) or (pc + 1,) for pc in range(count)]
    return [*targets, (END,)]


@given(flow_graphs())
def test_instructions_come_before_those_that_post_dominate_them(successors: list[tuple[int, ...]]) -> None:
    flow = ControlFlow(successors)
    assert sorted(flow.order) == list(range(len(successors)))
    end = len(successors) - 1
    for pc in range(len(successors)):
        if not reaches(successors, pc, end):
            continue
        for other in range(len(successors)):
            post_dominates = other != pc and not reaches(successors, pc, end, without=other)
            assert flow.is_past(other, pc) == post_dominates
            assert not post_dominates or flow.order[pc] < flow.order[other]
