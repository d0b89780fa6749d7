"""What each thread block computes of a decode: every unit of keys of every item, once, however items are shared."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flashwright.compiler.nvrtc import compile_source
from flashwright.kernels.decode.ampere.source import ampere_decode_source
from flashwright.kernels.decode.launch import LEAST_ROUNDS, CacheView, Dealing, decode_launch, decode_scratch
from flashwright.kernels.registry import family_of, parse_config
from flashwright.kernels.source import KernelSource
from flashwright.kernels.tensors import DeviceTensor
from flashwright.problem.dtypes import DType
from flashwright.problem.variant import AttentionVariant
from flashwright.simulator.gpu import SimulatedGPU

CONFIG: Any = parse_config("ampere decode (BF16, 32, 16, 16, 4): rows_1+stages_2+blocks_1+swizzled")
UNIT = 64
MOST_SEGMENTS = 200
"""Of a thread block."""

KERNEL = """
// Of each segment: its item, its units, whether it is whole; if it is not, its slot, how many segments the item has,
// and how far the slots of the first two are apart.
extern "C" __global__ void kernel(const __grid_constant__ DecodeArguments args, int *out) {
    out += blockIdx.x * MOST_SEGMENTS * 9;
    for (Share share(args, find_start<shape::threads>(args)); share.is_some(); share.next(args), out += 9) {
        if (threadIdx.x > 0)
            continue;
        const Destination to(args, share);
        const bool is_whole = share.is_whole_item();
        out[0] = share.item.pair;
        out[1] = share.item.head;
        out[2] = share.first;
        out[3] = share.last;
        out[4] = share.item.units;
        out[5] = is_whole;
        out[6] = is_whole ? -1 : to.slot;
        out[7] = is_whole ? 1 : to.segments.count;
        out[8] = is_whole ? 0 : to.segments.slot(1) - to.segments.slot(0);
    }
}
"""


class Segment(NamedTuple):
    pair: int
    head: int
    first: int
    last: int
    units: int
    is_whole: int
    slot: int
    count: int
    """Segments of the item, as the one that is combined last knows them."""
    distance: int
    """From the slot of the first segment to that of the second."""
    block: int


class Problem(NamedTuple):
    sequences: int
    kv_heads: int
    rows: int
    keys: int
    lengths: tuple[int, ...] | None
    """On the device."""
    blocks: int
    split_units: int

    @property
    def row_tiles(self) -> int:
        return -(-2 * self.rows // CONFIG.B_r)

    @property
    def units(self) -> list[int]:
        """Of each pair of a sequence and a tile of rows."""
        lengths = (self.keys,) * self.sequences if self.lengths is None else self.lengths
        return [max(1, -(-length // UNIT)) for length in lengths for _ in range(self.row_tiles)]


@cache
def compiled() -> str:
    source = ampere_decode_source(CONFIG, AttentionVariant(grouped_heads=True))
    text = source.text + KERNEL.replace("MOST_SEGMENTS", str(MOST_SEGMENTS))
    return compile_source(KernelSource(text, source.headers, "kernel", "kernel.cu"), "sm_80").ptx


def segments_of(problem: Problem) -> list[Segment]:
    """Those of each thread block in its order, block by block."""
    gpu = SimulatedGPU("sm_80")
    sequences, heads = problem.sequences, problem.kv_heads

    def tensor(name: str, count: int, rows: int) -> DeviceTensor:
        return DeviceTensor(name, 256, DType.BF16, (sequences, count, rows, 32), (count * rows * 32, rows * 32, 32, 1))

    lengths = 0 if problem.lengths is None else gpu.to_device(np.array(problem.lengths, np.int32))
    q, k = tensor("q", 2 * heads, problem.rows), tensor("k", heads, problem.keys)
    cache = CacheView(sequences, lengths)
    sharing: dict[str, Any] = {"multiprocessors": problem.blocks, "split_units": problem.split_units}
    launch = decode_launch(
        family_of(CONFIG).launch_rules,
        CONFIG,
        q,
        k,
        k,
        q,
        cache=cache,
        partials_address=256,
        zeros_address=256,
        **sharing,
    )
    out = gpu.to_device(np.full((problem.blocks, MOST_SEGMENTS, 9), -1, np.int32))
    threads = CONFIG.n_warps * 32
    gpu.load(compiled()).launch("kernel", launch.grid, threads, 0, [bytes(launch.arguments), out])
    scratch = decode_scratch(CONFIG, q, k, cache, **sharing)
    found = gpu.to_host(out).reshape(problem.blocks, MOST_SEGMENTS, 9)
    segments = [Segment(*map(int, x), block) for block, own in enumerate(found) for x in own if x[0] >= 0]
    slots = scratch.partial_terms // (4 * CONFIG.B_r * CONFIG.d_head)
    assert all(segment.is_whole or 0 <= segment.slot < slots for segment in segments)
    return segments


@st.composite
def problems(draw: Any) -> Problem:
    sequences, kv_heads = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    keys = draw(st.integers(1, 700))
    lengths = draw(st.none() | st.tuples(*[st.integers(0, keys)] * sequences))
    rows = draw(st.sampled_from((1, 1, 1, 8, 9, 20)))
    return Problem(
        sequences, kv_heads, rows, keys, lengths, draw(st.integers(1, 24)), draw(st.sampled_from((0, 0, 0, 1, 3)))
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(problems())
def test_every_unit_of_every_item_is_in_one_segment_of_one_thread_block(problem):
    of_items = defaultdict(list)
    for segment in segments_of(problem):
        of_items[segment.pair, segment.head].append(segment)
    assert set(of_items) == {(pair, head) for pair in range(len(problem.units)) for head in range(problem.kv_heads)}
    slots = []
    for (pair, _), segments in of_items.items():
        segments.sort(key=lambda segment: segment.first)
        assert [segment.first for segment in segments] == [0, *(segment.last for segment in segments[:-1])]
        assert segments[-1].last == problem.units[pair] == segments[0].units
        assert [segment.is_whole for segment in segments] == [len(segments) == 1] * len(segments)
        assert [segment.count for segment in segments] == [len(segments)] * len(segments)
        if len(segments) > 1:
            slots += [segment.slot for segment in segments]
            assert segments[1].slot - segments[0].slot == segments[0].distance
    assert len(slots) == len(set(slots))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems())
def test_thread_blocks_that_run_side_by_side_have_neighbouring_items_in_every_round(problem):
    items, of_blocks = problem.sequences * problem.kv_heads, defaultdict(list)
    blocks = min(problem.blocks, max(1, items // LEAST_ROUNDS))
    problem = problem._replace(lengths=None, rows=1, split_units=0, blocks=blocks)
    for segment in segments_of(problem):
        of_blocks[segment.block].append(segment)
    dealing = Dealing.of(items, problem.blocks, problem.blocks, deals=True)
    rounds, left = divmod(items, dealing.round_blocks) if items >= LEAST_ROUNDS else (0, items)
    assert rounds == dealing.whole_items // dealing.round_blocks
    assert left == 0 or dealing.round_blocks == problem.blocks
    for block, own in of_blocks.items():
        dealt = [segment.pair * problem.kv_heads + segment.head for segment in own[:rounds]]
        assert dealt == [block + turn * dealing.round_blocks for turn in range(rounds)]
        assert all(segment.is_whole for segment in own[:rounds])
        assert sum(segment.last - segment.first for segment in own[rounds:]) <= -(
            -left * own[0].units // problem.blocks
        )
