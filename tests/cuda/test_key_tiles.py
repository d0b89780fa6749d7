"""Which block of keys each thread block of a backward owns: every one once, none with many queries left to the end."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from device_code import compile_device_code

from flashwright.kernels.backward.launch import BackwardArguments
from flashwright.simulator.gpu import SimulatedGPU

BODY = """
extern "C" __global__ void kernel(int *out, const __grid_constant__ BackwardArguments args) {
    const KeyTile tile = key_tile_of_block<ORDERED, 64, TOGETHER>(args, threadIdx.x);
    out[3 * threadIdx.x] = tile.batch;
    out[3 * threadIdx.x + 1] = tile.kv_head;
    out[3 * threadIdx.x + 2] = tile.kv_block;
}
"""


@cache
def compiled(causal: bool, ordered: bool, together: int) -> str:
    body = BODY.replace("ORDERED", str(ordered).lower()).replace("TOGETHER", str(together))
    return compile_device_code("attention/key_tile.cuh", body, masks_right=causal)


def tiles(
    batches: int, kv_heads: int, kv_blocks: int, pairs_at_once: int, *, causal: bool, ordered: bool, together: int
) -> np.ndarray:
    """(batch, kv head, block of keys) of each thread block, in the order in which they begin."""
    arguments = BackwardArguments(kv_blocks=kv_blocks, pairs_at_once=pairs_at_once)
    arguments.forward.batches = batches
    arguments.forward.q_heads, arguments.forward.q_heads_per_kv_head = 2 * kv_heads, 2
    count = batches * kv_heads * kv_blocks
    gpu = SimulatedGPU("sm_80")
    out = gpu.to_device(np.full((count, 3), -1, np.int32))
    module = gpu.load(compiled(causal, ordered, together))
    module.launch("kernel", (1,), (count,), 0, [out, bytes(arguments)])
    return gpu.to_host(out).reshape(count, 3)


@pytest.mark.parametrize("together", [1, 2], ids=["alone", "in pairs"])
@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ordered"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_block_of_keys_has_one_thread_block(causal, ordered, together):
    found = tiles(3, 2, 8, 4, causal=causal, ordered=ordered, together=together)
    assert len({tuple(tile) for tile in found}) == 3 * 2 * 8
    assert np.array_equal(found.max(axis=0), [2, 1, 7])
    assert np.array_equal(found[:, 2] % together, np.arange(48) % together)  # neighbours, in order of their keys


def test_without_a_mask_a_head_follows_the_other():
    found = tiles(2, 2, 4, 3, causal=False, ordered=False, together=1)
    assert np.array_equal(found[:, 2], np.tile(np.arange(4), 4))
    assert np.array_equal(found[:, 1], np.repeat([0, 1, 0, 1], 4))


def test_with_a_causal_mask_the_first_keys_of_several_heads_begin_before_the_second():
    """Three heads take turns, then the one that is left."""
    found = tiles(2, 2, 4, 3, causal=True, ordered=False, together=1)
    assert np.array_equal(found[:12, 2], np.repeat(np.arange(4), 3))
    assert np.array_equal(found[:3], [[0, 0, 0], [0, 1, 0], [1, 0, 0]])
    assert np.array_equal(found[12:], [[1, 1, block] for block in range(4)])


def test_in_order_the_last_keys_begin_first():
    found = tiles(2, 2, 4, 3, causal=True, ordered=True, together=1)
    assert np.array_equal(found[:12, 2], np.repeat([3, 2, 1, 0], 3))
