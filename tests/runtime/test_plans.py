"""Launch plans: what is decided once, and what every new length is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_gpu import FakeGPU

from flashwright.kernels.registry import family_of, parse_config
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window

torch = pytest.importorskip("torch")

AMPERE = parse_config("(BF16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+mma_sum+lazy")
HOPPER = parse_config("hopper (BF16, 64, 128, 64): stages_2+overlap+ping_pong+persistent+lazy+guess")


@pytest.fixture
def gpu(monkeypatch):
    return FakeGPU(monkeypatch)


def laid_out(layout: str, batch: int, heads: int, rows: int, head_dim: int = 64) -> Any:
    """(batch, heads, rows, head_dim) over memory in some order, or part of a longer cache."""
    if layout == "heads first":
        return torch.zeros(batch, heads, rows, head_dim, dtype=torch.bfloat16)
    if layout == "rows first":
        return torch.zeros(batch, rows, heads, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    return torch.zeros(batch, heads, rows + 24, head_dim, dtype=torch.bfloat16)[:, :, :rows]


@pytest.mark.parametrize("config", [AMPERE, HOPPER], ids=["ampere", "hopper"])
def test_growing_keys_load_one_kernel(gpu, config):
    kind = gpu.kind(AttentionOptions(Window(100, 0)), lambda *sizes: config)
    for keys in range(65, 600, 7):
        kind.run(laid_out("heads first", 1, 4, 1), *(laid_out("heads first", 1, 2, keys) for _ in range(2)))
    # Plans are made by ranges of lengths, within which one config serves; all of them are of one kernel.
    assert len({(kernel.config, kernel.variant) for kernel in gpu.kernels}) == 1


@pytest.mark.parametrize(("rows", "at_second_call"), [(300, 1), (256, 0)], ids=["6 tiles", "4 tiles"])
def test_a_schedule_is_dealt_when_lengths_come_again_unless_there_is_a_thread_block_for_each_tile(
    gpu, monkeypatch, rows, at_second_call
):
    dealt = []
    family = family_of(HOPPER)
    rules = replace(family.launch_rules, schedule=lambda *a: dealt.append(a) or family.launch_rules.schedule(*a))
    monkeypatch.setattr("flashwright.runtime.plans.family_of", lambda config: replace(family, launch_rules=rules))
    kind = gpu.kind(AttentionOptions(Window(None, 0)), lambda *sizes: HOPPER)
    tensors = [laid_out("heads first", 1, 2, rows) for _ in range(3)]
    kind.run(*tensors)
    dealt.clear()
    kind.run(*tensors)
    assert len(dealt) == at_second_call
    kind.run(*tensors)
    assert len(dealt) == at_second_call
    kind.run(*(laid_out("heads first", 1, 2, rows - 1) for _ in range(3)))  # as many tiles
    assert len(dealt) == at_second_call


@pytest.mark.parametrize("config", [AMPERE, HOPPER], ids=["ampere", "hopper"])
def test_lengths_near_others_are_left_to_the_whole_checks_where_they_are_empty_or_wrong(gpu, config):
    kind = gpu.kind(AttentionOptions(), lambda *sizes: config)
    cache = laid_out("heads first", 3, 2, 600)
    kind.run(*(cache[:, :, :500],) * 3)

    def arranged(q: Any, k: Any) -> Any:
        return kind.arrangement(q, k, k, q)

    assert arranged(cache[:, :, :501], cache[:, :, :501]) is not None
    for q, k in ((cache[:0], cache[:0]), (cache[:, :, :0], cache), (cache, cache[:, :, :0])):
        assert arranged(q, k) is None
    with pytest.raises(ValueError, match=r"q: shape .* is not allowed"):
        arranged(cache[0], cache[0])
    many = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(2**31, 2, 70, 64)
    with pytest.raises(ValueError, match=r"tiles of .* rows; allowed: up to 2147483647"):
        arranged(many, many)


def test_a_kernel_for_one_row_stride_refuses_others(gpu):
    kind = gpu.kind(AttentionOptions(), lambda *sizes: replace(AMPERE, static_row_stride=64))
    kind.run(*(laid_out("heads first", 1, 2, 8) for _ in range(3)))
    with pytest.raises(ValueError, match=r"128 elements, but .* was specialised for 64|static_row_stride = 64"):
        kind.run(*(laid_out("rows first", 1, 2, 9) for _ in range(3)))


@pytest.mark.parametrize("config", [AMPERE, HOPPER], ids=["ampere", "hopper"])
def test_launches_of_several_threads_at_once_have_parameters_of_their_own(gpu, config):
    kind = gpu.kind(AttentionOptions(Window(None, 0)), lambda *sizes: config)
    calls = [[laid_out("heads first", 1, 2, rows) for _ in range(3)] for rows in (300, 300, 200)]
    alone = []
    for tensors in calls * 3:  # until schedules are dealt
        out = torch.zeros_like(tensors[0])
        kind.run(*tensors, out)
        alone.append((out, gpu.kernels[-1].launches[-1]))
    kernel, record = gpu.kernels[-1], gpu.kernels[-1].launch

    def launch_amid_others(grid: Any, parameters_at: int, stream: int) -> None:
        """Before the driver has copied the parameters, the other calls are launched."""
        if waiting:
            tensors, out = waiting.pop()
            kind.run(*tensors, out)
        record(grid, parameters_at, stream)

    next(iter(kind.arrangements.values())).plan.launch = launch_amid_others
    waiting = [(tensors, out) for tensors, (out, _) in zip(calls, alone[-3:], strict=True)]
    tensors, out = waiting.pop()
    kernel.launches.clear()
    kind.run(*tensors, out)
    assert kernel.launches == [launch for _, launch in alone[-3:]]
