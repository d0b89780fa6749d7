"""Block ranges of the device code against their definition: who attends to whom, as a matrix of rows × keys."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from device_code import compile_device_code
from hypothesis import given, settings
from hypothesis import strategies as st

from flashwright.simulator.gpu import SimulatedGPU

BLOCKS = (16, 48, 64, 128)
"""Rows or keys of a block, of which the kernels have one copy each."""
NO_LIMIT = 2**30

KEY_BLOCKS = """
template <int block_keys, bool reversed> __device__ void compute(int *out, const int *in, const Window &window) {
    const KeyBlocks<block_keys, reversed> blocks(window, in[5], in[6]);
    const Steps steps = blocks.steps_of(window, in[7], in[8]);
    out[0] = blocks.count;
    out[1] = blocks.count > 0 ? blocks.first_key(0) : 0;
    out[2] = steps.begin;
    out[3] = steps.plain_begin;
    out[4] = steps.plain_end;
}
extern "C" __global__ void kernel(int *outs, const int *ins) {
    int *out = outs + 5 * threadIdx.x;
    const int *in = ins + 11 * threadIdx.x;
    const Window window(in[0], in[1], in[2], in[3], in[4]);
    switch (2 * in[9] + in[10]) {
        CASES
    }
}
"""
QUERY_BLOCKS = """
template <int block_queries> __device__ void compute(int *out, const int *in, const Window &window) {
    const QueryBlocks<block_queries> blocks(window, in[3], in[5], in[6]);
    out[0] = blocks.count;
    out[1] = blocks.first_query(0);
    out[2] = blocks.plain_begin;
    out[3] = blocks.plain_end;
}
extern "C" __global__ void kernel(int *outs, const int *ins) {
    int *out = outs + 5 * threadIdx.x;
    const int *in = ins + 11 * threadIdx.x;
    const Window window(in[0], in[1], in[2], in[3], in[4]);
    switch (in[7]) {
        CASES
    }
}
"""


class Mask(NamedTuple):
    """A window's edges, or None without one; the lengths it is applied to."""

    left: int | None
    right: int | None
    bottom_right: bool
    q_length: int
    kv_length: int

    @property
    def seen(self) -> np.ndarray:
        """Rows × keys: who attends to whom."""
        rows, keys = np.arange(self.q_length)[:, None], np.arange(self.kv_length)
        position = rows + (self.kv_length - self.q_length if self.bottom_right else 0)
        seen = np.ones((self.q_length, self.kv_length), bool)
        if self.left is not None:
            seen &= keys >= position - self.left
        if self.right is not None:
            seen &= keys <= position + self.right
        return seen

    @property
    def arguments(self) -> tuple[int, ...]:
        return -(self.left or 0), self.right or 0, int(self.bottom_right), self.q_length, self.kv_length


@cache
def compiled(body: str, masks_left: bool, masks_right: bool) -> str:
    if "KeyBlocks" in body:
        cases = [
            f"case {2 * i + reverse}: compute<{block}, {str(bool(reverse)).lower()}>(out, in, window); break;"
            for i, block in enumerate(BLOCKS)
            for reverse in (0, 1)
        ]
    else:
        cases = [f"case {i}: compute<{block}>(out, in, window); break;" for i, block in enumerate(BLOCKS)]
    return compile_device_code(
        "attention/ranges.cuh",
        body.replace("CASES", "\n        ".join(cases)),
        masks_left=masks_left,
        masks_right=masks_right,
    )


def results(body: str, mask: Mask, cases: list[tuple[int, ...]]) -> np.ndarray:
    """What the kernel finds for one case a thread."""
    gpu = SimulatedGPU("sm_80")
    rows = [mask.arguments + case + (0,) * (6 - len(case)) for case in cases]
    out = gpu.to_device(np.full((len(cases), 5), -1, np.int32))
    module = gpu.load(compiled(body, mask.left is not None, mask.right is not None))
    module.launch("kernel", (1,), (len(cases),), 0, [out, gpu.to_device(np.array(rows, np.int32))])
    return gpu.to_host(out).reshape(len(cases), 5)


edges = st.none() | st.integers(-40, 300)
masks = st.builds(Mask, edges, edges, st.booleans(), st.integers(1, 300), st.integers(1, 300))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(masks, st.data())
def test_key_blocks_are_those_that_hold_a_key_and_plain_where_all_rows_attend_to_all_keys(mask, data):
    """For a tile of rows, in both orders; and for some of its rows, as a warpgroup has them, perhaps none."""
    tile = data.draw(st.sampled_from(BLOCKS))
    first = data.draw(st.integers(0, (mask.q_length - 1) // tile)) * tile
    last = min(first + tile, mask.q_length) - 1
    part_first = data.draw(st.integers(first, first + tile - 1))
    part_last = data.draw(st.integers(part_first, first + tile - 1))
    parts = [(first, last), (part_first, min(part_last, last))]
    cases = [(first, last, *part, i, reverse) for part in parts for i in range(len(BLOCKS)) for reverse in (0, 1)]
    seen = mask.seen
    for case, found in zip(cases, results(KEY_BLOCKS, mask, cases), strict=True):
        check_key_blocks(seen, case, *map(int, found))


def check_key_blocks(seen, case, count, first_key, begin, plain_begin, plain_end) -> None:
    first, last, part_first, part_last, index, reverse = case
    size = BLOCKS[index]
    needed = [b for b in range(-(-seen.shape[1] // size)) if seen[first : last + 1, b * size : (b + 1) * size].any()]
    # Rows of a window move to the right together: what lies between two blocks that are needed is visited too.
    visited = list(range(needed[0], needed[-1] + 1)) if needed else []
    if not visited:
        return  # blocks without a key may be visited, under a mask that hides all of them
    order = visited[::-1] if reverse else visited
    assert set(visited) <= set(range(first_key // size - (count - 1) * reverse, first_key // size + count))
    assert count >= len(visited)
    if count == len(visited):
        assert first_key == order[0] * size
    step_of = {(first_key // size + (-s if reverse else s)): s for s in range(count)}
    part = seen[part_first : part_last + 1]
    for block, step in step_of.items():
        keys = part[:, block * size : (block + 1) * size]
        if step < begin:
            assert not keys.any()
        is_plain = keys.shape[1] == size and bool(keys.all()) and len(part) > 0
        assert (plain_begin <= step < plain_end) == is_plain or len(part) == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(masks, st.data())
def test_query_blocks_are_those_that_attend_to_a_key_and_plain_where_all_rows_attend_to_all_keys(mask, data):
    block_keys = data.draw(st.sampled_from((16, 64, 128)))
    first_key = data.draw(st.integers(0, (mask.kv_length - 1) // block_keys)) * block_keys
    cases = [(first_key, block_keys, i) for i in range(len(BLOCKS))]
    columns = mask.seen[:, first_key : first_key + block_keys]
    for (*_, index), found in zip(cases, results(QUERY_BLOCKS, mask, cases), strict=True):
        count, first_query, plain_begin, plain_end, _ = map(int, found)
        size = BLOCKS[index]
        blocks = [columns[r : r + size] for r in range(0, mask.q_length, size)]
        needed = [b for b, part in enumerate(blocks) if part.any()]
        visited = list(range(first_query // size, first_query // size + count))
        assert visited == (list(range(needed[0], needed[-1] + 1)) if needed else [])
        plain = [b for b in visited if blocks[b].shape == (size, block_keys) and blocks[b].all()]
        assert visited[plain_begin:plain_end] == plain


@pytest.mark.parametrize("bottom_right", [True, False])
def test_windows_without_a_practical_limit_do_not_overflow(bottom_right):
    mask = Mask(NO_LIMIT, NO_LIMIT, bottom_right, 7, 300)
    (found,) = results(QUERY_BLOCKS, mask, [(64, 64, 0)])
    assert list(found[:2]) == [1, 0]
    (found,) = results(KEY_BLOCKS, mask, [(0, 6, 0, 6, 2, 0)])
    assert list(found) == [5, 0, 0, 0, 4]


@pytest.mark.parametrize("kv_length", [1, 16, 17, 100])
def test_where_the_first_block_leads_the_others_follow_from_the_last(kv_length):
    """Of rows that attend to all keys: their steps behind the first block are all plain but that of the last block."""
    body = """
extern "C" __global__ void kernel(int *out, int kv_length) {
    const Window window(0, 0, false, 1, kv_length);
    const KeyBlocks<16, true, true> blocks(window, 0, 0);
    const Steps steps = blocks.steps_of(window, 0, 0);
    out[0] = steps.begin;
    out[1] = steps.plain_begin;
    for (int step = 0; step < blocks.count; ++step)
        out[2 + step] = blocks.first_key(step);
}
"""
    gpu = SimulatedGPU("sm_80")
    out = gpu.to_device(np.full(20, -1, np.int32))
    code = compile_device_code("attention/ranges.cuh", body, masks_left=False, masks_right=False)
    gpu.load(code).launch("kernel", (1,), (1,), 0, [out, np.int32(kv_length)])
    begin, plain_begin, *keys = gpu.to_host(out)
    blocks = -(-kv_length // 16)
    assert [key for key in keys if key >= 0] == [0, *(16 * block for block in range(blocks - 1, 0, -1))]
    assert begin == 1
    assert plain_begin == min(blocks, 1 + (kv_length % 16 > 0))
