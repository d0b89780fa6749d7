"""Calls of lengths that no call had before: by the parameters of others, and as if those had never been."""

from __future__ import annotations

import ctypes
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_gpu import FakeGPU, scattered
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashwright.kernels.forward.launch import ForwardArguments
from flashwright.kernels.registry import parse_config
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window
from flashwright.runtime import arranging, frames, plans
from flashwright.runtime.call_kinds import CallKind
from flashwright.runtime.copies_first import CopiesFirst
from flashwright.runtime.plans import Arrangement
from flashwright.runtime.tensor_maps import MapTemplate

CONFIGS = {
    "ampere": parse_config("(BF16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+mma_sum+lazy"),
    "hopper": parse_config("hopper (BF16, 64, 128, 64): stages_2+overlap+ping_pong+persistent+lazy+guess"),
}
HEAD_DIM = 64
LONGEST = 5000
LAYOUTS = ("part of a cache", "rows first", "rows first, of a cache", "contiguous", "padded rows of a cache")


@pytest.fixture
def gpu(monkeypatch):
    return FakeGPU(monkeypatch)


@pytest.fixture(params=CONFIGS.values(), ids=list(CONFIGS))
def config(request):
    return request.param


def tensor(layout: str, batch: int, heads: int, rows: int, device: str = "meta") -> Any:
    """(batch, heads, rows, HEAD_DIM), in memory of its own or in that of a longest one."""
    like = {"dtype": torch.bfloat16, "device": device}
    match layout:
        case "part of a cache":
            return torch.empty(batch, heads, LONGEST, HEAD_DIM, **like)[:, :, :rows]
        case "rows first":
            return torch.empty(batch, rows, heads, HEAD_DIM, **like).transpose(1, 2)
        case "rows first, of a cache":
            return torch.empty(batch, LONGEST, 3 * heads, HEAD_DIM, **like)[:, :rows, :heads].transpose(1, 2)
        case "padded rows of a cache":  # not in whole vectors, which only a single row may be
            return torch.empty(batch, heads, LONGEST, HEAD_DIM + 4, **like)[:, :, :rows, :HEAD_DIM]
    return torch.empty(batch, heads, rows, HEAD_DIM, **like)


@dataclass(frozen=True)
class Call:
    layouts: tuple[str, str, str]
    batch: int
    kv_heads: int
    groups: int
    q_rows: int
    kv_rows: int

    def tensors(self, device: str = "meta") -> tuple[Any, Any, Any]:
        of_q, of_k, of_v = self.layouts
        q = tensor(of_q, self.batch, self.groups * self.kv_heads, self.q_rows, device)
        k, v = (tensor(each, self.batch, self.kv_heads, self.kv_rows, device) for each in (of_k, of_v))
        return q, k, v


def decided(kind: CallKind, call: Call) -> Any:
    """The arrangement of a call, without the addresses that are filled in."""
    q, k, v = call.tensors()
    found = kind.arrangement(q, k, v, torch.empty_like(q))
    if isinstance(found, CopiesFirst):
        return "copies first"
    assert isinstance(found, Arrangement)
    words = found.words[:]
    words[found.plan.lse] = 0
    return found.plan.kernel.config, found.grid, found.lse_layout, words


def calls_alike(draw: Any) -> st.SearchStrategy[Call]:
    """Most of them in one pair of buckets."""
    layouts = st.tuples(*[st.sampled_from(LAYOUTS)] * 3)
    bounds = st.sampled_from([(1, 4), (60, 70), (65, 1024), (1, LONGEST)])
    return st.builds(
        Call,
        layouts=mostly(draw(layouts), layouts),
        batch=mostly(draw(st.integers(1, 2)), st.integers(1, 3)),
        kv_heads=mostly(2, st.integers(1, 2)),
        groups=mostly(draw(st.sampled_from([1, 3])), st.just(2)),
        q_rows=st.integers(*draw(bounds)),
        kv_rows=st.integers(*draw(bounds)),
    )


def mostly(value: Any, others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from([True] * 9 + [False]).flatmap(lambda usual: st.just(value) if usual else others)


@st.composite
def sequences_of_calls(draw: Any) -> list[Call]:
    return draw(st.lists(calls_alike(draw), min_size=3, max_size=10))


def lengths(*both: tuple[int, int], layout: str = "part of a cache", batch: int = 1) -> list[Call]:
    return [Call((layout,) * 3, batch, 2, 1, q_rows, kv_rows) for q_rows, kv_rows in both]


@settings(max_examples=100, deadline=None)
@example(lengths((5, 5), (6, 6), (1, 7), (1, 8), (7, 1), (8, 1), (1, 1), (9, 9)), "hopper", False)
@example(lengths((1, 1), (1, 1), (1, 3), (3, 3), layout="padded rows of a cache"), "ampere", False)
@example(lengths((1, 1), (1, 1), (1, 3), (3, 3), layout="padded rows of a cache"), "hopper", False)
@example(lengths((70, 70), (80, 80), (90, 90), layout="rows first", batch=2), "ampere", False)
@example(lengths((70, 70), (80, 80), (90, 90), layout="rows first"), "hopper", True)
@given(calls=sequences_of_calls(), name=st.sampled_from(sorted(CONFIGS)), returns_lse=st.booleans())
def test_what_is_decided_for_a_length_does_not_depend_on_the_calls_before(calls, name, returns_lse):
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGPU(patch)

        def new_kind() -> CallKind:
            return gpu.kind(AttentionOptions(), lambda *sizes: CONFIGS[name], returns_lse=returns_lse)

        kind = new_kind()
        for call in calls:
            assert decided(kind, call) == decided(new_kind(), call)


@pytest.mark.parametrize("layout", ["part of a cache", "rows first", "contiguous"])
def test_a_new_length_neither_compiles_nor_calls_the_driver(gpu, config, layout, monkeypatch):
    encoded: list[Any] = []
    templates = cache(lambda kind: MapTemplate(kind, lambda each: encoded.append(each) or scattered(each)))
    monkeypatch.setattr(plans, "map_template", templates)
    chosen: list[Any] = []
    kind = gpu.kind(AttentionOptions(Window(None, 0)), lambda *sizes: chosen.append(sizes) or config)
    kind.run(*(tensor(layout, 1, 2, 65, "cpu") for _ in range(3)))
    loaded = len(gpu.kernels)
    chosen.clear()
    encoded.clear()
    for rows in range(66, 1025, 13):
        kind.run(*(tensor(layout, 1, 2, rows, "cpu") for _ in range(3)))
    assert (len(gpu.kernels), chosen, encoded) == (loaded, [], [])


def test_lengths_that_came_before_are_not_arranged_again(gpu, config, monkeypatch):
    """Of tensors that share a frame, and of others between them: of another bucket, contiguous, with other heads. One
    that others replace takes with it what it knows, so this is so from the third round on at the latest."""
    kind = gpu.kind(AttentionOptions(), lambda *sizes: config)
    calls = [Call(("part of a cache",) * 3, 1, 2, 1, rows, rows) for rows in (70, 71, 900, 1030, 1031, 4000)]
    calls += [Call((layout,) * 3, 1, 3, 1, rows, rows) for layout in ("rows first", "contiguous") for rows in (70, 900)]
    tensors = [call.tensors() for call in calls]

    def round_of_calls() -> None:
        for q, k, v in tensors:
            kind.arrangement(q, k, v, q)

    for _ in range(2):
        round_of_calls()
    made: list[Any] = []
    for module in (frames, arranging):
        monkeypatch.setattr(module, "Arrangement", lambda *arguments: made.append(arguments) or Arrangement(*arguments))
    round_of_calls()
    assert not made


def test_twenty_threads_at_once_give_every_launch_its_own_parameters(gpu, config, monkeypatch):
    """New lengths, lengths that come again, other strides, and what is known of all of them forgotten now and then."""
    monkeypatch.setattr(plans.Plan, "MOST_ARRANGEMENTS", 7)
    layouts = [("part of a cache",) * 3, ("contiguous",) * 3, ("rows first", "part of a cache", "part of a cache")]
    calls = [
        Call(layout, 1, 2, 1, rows, keys)
        for layout in layouts
        for rows, keys in ((1, 70), (1, 71), (65, 65), (66, 70), (300, 300), (301, 17), (1030, 1030))
    ]
    tensors = [call.tensors("cpu") for call in calls]

    def launches() -> Counter[Any]:
        found = [launch for kernel in gpu.kernels for launch in kernel.launches]
        return Counter((grid, *_without_output(parameters)) for grid, parameters in found)

    for each in tensors:
        gpu.kind(AttentionOptions(), lambda *sizes: config).run(*each)
    alone = launches()
    gpu.kernels.clear()
    kind = gpu.kind(AttentionOptions(), lambda *sizes: config)

    def several(seed: int) -> None:
        order = tensors * 3
        random.Random(seed).shuffle(order)
        for each in order:
            kind.run(*each)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(several, range(20)))
    finally:
        sys.setswitchinterval(interval)
    assert launches() == Counter({launch: 60 * count for launch, count in alone.items()})


def _without_output(parameters: list[bytes]) -> list[bytes]:
    size, at = ctypes.sizeof(ForwardArguments), ForwardArguments.O.offset
    return [each if len(each) != size else each[:at] + bytes(8) + each[at + 8 :] for each in parameters]
