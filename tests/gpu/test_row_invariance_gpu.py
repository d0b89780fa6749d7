"""`row_invariant=True` on a GPU: a row's bits follow from its query, the keys and values it attends to, and the
arguments."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from flashwright.attention import attention
from flashwright.integrations.flash_attn import flash_attn_varlen_func

ROWS = 1500


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def tensors(request) -> tuple[Any, Any, Any]:
    """Every head another kind of data, so that references follow their rows in every way there is."""
    generator = torch.Generator(device="cuda").manual_seed(5)
    q, k, v = (torch.randn(1, 6, ROWS, 128, device="cuda", generator=generator) for _ in range(3))
    spreads = torch.tensor([0.25, 1.0, 4.0, 10.0, 1.0, 1.0], device="cuda")
    q *= spreads[None, :, None, None]
    position = torch.arange(ROWS, device="cuda")
    q[:, 4:, :, 0], k[:, 4, :, 0], k[:, 5, :, 0] = 16, -position / 64, -position / 2
    return tuple(x.to(request.param) for x in (q, k, v))


def invariant(family: str, *tensors: Any) -> tuple[Any, Any]:
    out, lse = attention(*tensors, causal=True, family=family, row_invariant=True, return_lse=True)
    return out, lse


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert all(torch.equal(some, other) for some, other in zip(found, expected, strict=True))


def test_other_queries_do_not_matter(family, tensors):
    q, k, v = tensors
    others = torch.arange(ROWS, device="cuda") % 5 != 0
    changed = torch.where(others[:, None], q.flip(2) * 2, q)
    for window in (None, (300, 0)):
        before, after = (
            attention(x, k, v, window=window, family=family, row_invariant=True, return_lse=True) for x in (q, changed)
        )
        assert_same(tuple(x[:, :, ~others] for x in after), tuple(x[:, :, ~others] for x in before))


@pytest.mark.parametrize("chunks", [(64, 1436), (1, 1, 98, 900, 500), (1023, 477)], ids=str)
def test_a_prefill_in_chunks_is_the_whole_one(family, tensors, chunks):
    q, k, v = tensors
    whole, end = invariant(family, q, k, v), 0
    for rows in chunks:
        begin, end = end, end + rows
        part = invariant(family, q[:, :, begin:end], k[:, :, :end], v[:, :, :end])
        assert_same(part, tuple(x[:, :, begin:end] for x in whole))


def test_a_batch_of_one_is_one_of_many(family, tensors):
    alone = invariant(family, *tensors)
    others = [torch.randn_like(x).expand(7, -1, -1, -1) for x in tensors]
    many = invariant(family, *(torch.cat([y, x, y]) for x, y in zip(tensors, others, strict=True)))
    assert_same(tuple(x[7:8] for x in many), alone)


def test_packed_sequences_are_dense_ones(tensors):
    lengths = (1, 64, 65, 700, 670)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    rows_first = [x[0].transpose(0, 1).contiguous() for x in tensors]
    packed = flash_attn_varlen_func(*rows_first, starts, starts, 700, 700, causal=True, row_invariant=True)
    begin = 0
    for rows in lengths:
        dense = attention(*(x[:, :, begin : begin + rows] for x in tensors), causal=True, row_invariant=True)
        assert torch.equal(packed[begin : begin + rows].transpose(0, 1), dense[0])
        begin += rows
