"""Parts of a shared sequence by kernels on a GPU, which CPU tensors and the simulator stand in for."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from attention_cases import relative_error
from simulating_gpu import SimulatingGPU

from flashwright.distributed.layouts import holdings
from flashwright.distributed.parts import Kernels
from flashwright.distributed.rounds import RING, rounds_of
from flashwright.distributed.sequence import SharedSequence
from flashwright.distributed.visibility import Mask, Span, Tile
from flashwright.kernels.registry import parse_config
from flashwright.operators import backward as backward_operator
from flashwright.operators import forward as forward_operator
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import FULL, Window
from flashwright.runtime.backward_plans import BackwardKind
from flashwright.runtime.call_kinds import CallKind
from flashwright.runtime.reference import attention_gradients, attention_reference

FORWARD = parse_config("(BF16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax")
BACKWARD = parse_config("ampere backward (BF16, 64, 32, 32, 2): stages_2_1+swizzled")
HEADS, LENGTH, HEAD_DIM = (2, 1), 90, 64
DOCUMENTS = (0, 13, 50, 90)


class OtherRanks:
    """In the place of a transport: what arrives is read from the whole sequence; what returns is dropped."""

    rank, size = 1, 3

    def __init__(self, packed_by_rank):
        self._packed = packed_by_rank
        self.returned = []

    def start(self, sends, receives):
        if any(tensor.dtype == torch.float32 for _, tensor in (*sends, *receives)):
            self.returned += sends
            for _, tensor in receives:
                tensor.zero_()
            return self
        for rank, tensor in receives:
            tensor.copy_(self._packed[rank][: tensor.shape[0]])
        return self

    def wait(self):
        pass


@pytest.fixture
def gpu(monkeypatch):
    """Kernels for any length are one config's."""
    monkeypatch.setattr(
        forward_operator, "call_kind",
        lambda options, dtype, index, lse, *_, **__: CallKind(
            options, lambda *sizes: FORWARD, returns_lse=lse, device_index=0
        ),
    )  # fmt: skip
    monkeypatch.setattr(
        backward_operator, "backward_kind",
        lambda options, *_, accumulates=False: BackwardKind(
            options, lambda *sizes: BACKWARD, device_index=0, accumulates=accumulates
        ),
    )  # fmt: skip
    return SimulatingGPU(monkeypatch)


@pytest.mark.parametrize("starts", [(0, LENGTH), DOCUMENTS], ids=["one sequence", "packed"])
def test_a_rank_computes_its_rows_of_the_whole(gpu, starts):
    """Rank 1 of 3, contiguous shards, causal: rank 0's keys arrive whole, and none of rank 2's are needed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(1, heads, LENGTH, HEAD_DIM, generator=generator).bfloat16()
        for heads in (*HEADS, HEADS[1], HEADS[0])
    )
    by_rank = holdings("contiguous", LENGTH, 3)
    rows = slice(30, 60)
    mask = Mask(Window(None, 0), starts, starts)
    rounds = rounds_of(RING, 1, by_rank, by_rank, mask, HEADS[1])
    needed = rounds[1].receives[0].rows
    arriving = torch.stack((k, v))[:, :, :, needed.slice].permute(3, 0, 1, 2, 4).contiguous()
    others = OtherRanks({0: arriving})
    sequence = SharedSequence(others, rounds, Kernels(AttentionOptions(), "gpu"))
    mine = [x[:, :, rows] for x in (q, k, v, do)]
    out, lse = sequence.forward(*mine[:3])
    assert out.dtype == torch.float32

    expected_out, expected_lse, expected = _whole(q, k, v, do, starts, rows)
    assert relative_error(out, expected_out) < 2e-3
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-5, rtol=0)

    dq, dk, dv = sequence.backward(mine[3], None, *mine[:3], out.bfloat16(), lse)
    assert relative_error(dq, expected[0]) < 5e-3
    for actual, wanted in ((dk, expected[1]), (dv, expected[2])):
        assert relative_error(actual, wanted[:, :, rows]) < 5e-3
    ((_, returned),) = others.returned
    for index in (0, 1):
        assert relative_error(returned[:, index].permute(1, 2, 0, 3), expected[1 + index][:, :, needed.slice]) < 5e-3


def _whole(q, k, v, do, starts, rows):
    """Of rank 1's rows: output, log-sum-exp, and the gradients that come of them."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:3], dtype=torch.float64)
    gradients = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    of_rows = torch.zeros_like(do)
    of_rows[:, :, rows] = do[:, :, rows]
    options = AttentionOptions(Window(None, 0))
    for start, stop in pairwise(starts):
        at = (slice(None), slice(None), slice(start, stop))
        exact = [x[at].double() for x in (q, k, v)]
        out[at], lse[at] = attention_reference(*exact, options=options)
        parts = attention_gradients(of_rows[at].double(), None, *exact, options=options)
        for total, part in zip(gradients, parts, strict=True):
            total[at] = part
    gradients[0] = gradients[0][:, :, rows]
    return out[:, :, rows], lse[:, :, rows], gradients


def test_gradients_on_a_gpu_are_those_of_the_family_that_a_call_names(monkeypatch):
    asked = []

    def kind(options, dtype, index, family, deterministic, *, accumulates):
        asked.append((family, deterministic, accumulates))
        return SimpleNamespace(run=lambda *tensors: None)

    monkeypatch.setattr(backward_operator, "backward_kind", kind)
    q = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)
    sums = tuple(torch.zeros(q.shape) for _ in "qkv")
    kernels = Kernels(AttentionOptions(), "gpu", family="ampere", deterministic=True)
    (launch,) = kernels.launches([Tile(Span(0, 16), Span(0, 16), FULL)], batch=1)
    kernels.backward(q, None, q, q, q, q, torch.zeros(1, 2, 16), launch, sums)
    assert asked == [("ampere", True, True)]


def test_a_batch_of_none_launches_nothing():
    tiles = [Tile(Span(0, 16), Span(0, 16), FULL)]
    assert Kernels(AttentionOptions(), "gpu").launches(tiles, batch=0) == []
