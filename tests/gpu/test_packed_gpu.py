"""Sequences of different lengths, packed one after the other, on a GPU: each gets its own rows and keys."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attention_cases import relative_error

from flashwright.attention import attention
from flashwright.integrations.flash_attn import flash_attn_varlen_func
from flashwright.runtime.forward import run_forward

from .tools import (
    ERROR,
    assert_close_lse,
    assert_right,
    config_for,
    packed_truth,
    poison,
    some,
    starts_of,
    truth,
    window_of,
)

MASKS = [{}, {"causal": True}, {"window": (40, 9)}]
MANY = 70_000
"""More batches than a grid has room for in its second and third dimension."""


def heads_first(x: Any) -> Any:
    """(rows, heads, head_dim) as (1, heads, rows, head_dim)."""
    return x.transpose(0, 1).unsqueeze(0)


def by_run_forward(
    family: str | None, q: Any, k: Any, v: Any, starts: tuple[Any, Any], longest: tuple[int, int], options: Any
) -> tuple[Any, Any]:
    """Output (1, heads, rows, head_dim) and log-sum-exp (1, heads, rows)."""
    config = config_for(q, k, options, family, longest)
    return run_forward(
        config, q, k, v, window=window_of(options), return_lse=True, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
        max_seqlen_q=longest[0], max_seqlen_k=longest[1],
    )  # fmt: skip


def by_drop_in(
    q: Any, k: Any, v: Any, starts: tuple[Any, Any], longest: tuple[int, int], options: Any
) -> tuple[Any, Any]:
    """The same from the drop-in for `flash_attn`, whose kernel is the one that is chosen for the problem."""
    out, lse, _ = flash_attn_varlen_func(
        *(x[0].transpose(0, 1) for x in (q, k, v)), *starts, *longest, causal=options.get("causal", False),
        window_size=options.get("window") or (-1, -1), return_attn_probs=True,
    )  # fmt: skip
    return heads_first(out), lse.unsqueeze(0)


def every_other(starts: Any) -> Any:
    """The same starts as every other element of a tensor."""
    wide = torch.full((2 * len(starts),), 12345, dtype=starts.dtype, device=starts.device)
    wide[::2] = starts
    return wide[::2]


# --- cu_seqlens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_starts_need_not_be_contiguous(family, options):
    q_starts, kv_starts = starts_of([100, 1, 0, 199]), starts_of([130, 70, 5, 199])
    q, k, v = some(torch.float16, (1, 4, 300, 64), (1, 2, 404, 64))
    expected, expected_lse = packed_truth(q, k, v, q_starts, kv_starts, options)
    strided = every_other(q_starts), every_other(kv_starts)
    assert not strided[0].is_contiguous()
    for out, lse in (
        by_run_forward(family, q, k, v, strided, (199, 199), options),
        by_drop_in(q, k, v, strided, (199, 199), options),
    ):
        assert_right(out, expected)
        assert_close_lse(lse, expected_lse)


def test_gradients_are_right_with_starts_that_are_not_contiguous_and_0_outside_of_all_sequences():
    starts = starts_of([100, 1, 99], first=30)
    q, k, v = some(torch.float16, (300, 4, 64), (300, 2, 64), grad=True)
    for each in (starts, every_other(starts)):
        poison(q)
        out = flash_attn_varlen_func(q, k, v, each, each, 100, 100, causal=True)
        actual = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        doubles = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
        parts = [
            truth(*(heads_first(x[first:last]) for x in doubles), {"causal": True})[0]
            for first, last in ((30, 130), (130, 131), (131, 230))
        ]
        expected = torch.autograd.grad(torch.cat(parts, dim=2).square().sum(), doubles)
        for a, x in zip(actual, expected, strict=True):
            assert relative_error(a, x) <= 3e-3
            assert (a[:30] == 0).all().item() and (a[230:] == 0).all().item()


# --- Rows of no sequence ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(("first", "lengths"), [(0, [70, 0, 30]), (77, [70, 0, 30]), (77, [300]), (0, [0, 0])], ids=str)
def test_rows_of_no_sequence_are_0_and_their_log_sum_exp_is_minus_infinity(family, options, first, lengths):
    """In memory that held NaN, whether the output is given or not; on a CPU as on a GPU."""
    starts = starts_of(lengths, first)
    q, k, v = some(torch.float16, (1, 4, 900, 64), (1, 2, 900, 64))
    expected, expected_lse = packed_truth(q, k, v, starts, starts, options)
    longest = max(lengths)
    poison(q)
    out, lse = by_run_forward(family, q, k, v, (starts, starts), (longest, longest), options)
    poison(q)
    results = [(out, lse), by_drop_in(q, k, v, (starts, starts), (longest, longest), options)]
    on_cpu = by_drop_in(*(x.cpu() for x in (q, k, v)), (starts.cpu(), starts.cpu()), (longest, longest), options)
    results.append((on_cpu[0].to("cuda"), on_cpu[1].to("cuda")))
    given = torch.full_like(q, math.nan)
    run_forward(
        config_for(q, k, options, family, (longest, longest)), q, k, v, out=given, window=window_of(options),
        cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest,
    )  # fmt: skip
    results.append((given, lse))
    inside = slice(first, first + sum(lengths))
    for out, lse in results:
        assert relative_error(out, expected) <= ERROR[out.dtype]
        assert_close_lse(lse, expected_lse)
        outside, outside_lse = out.clone(), lse.clone()
        outside[:, :, inside], outside_lse[:, :, inside] = 0, -math.inf
        assert (outside == 0).all().item() and (outside_lse == -math.inf).all().item()


def test_a_packed_call_of_more_than_one_batch_is_refused_after_a_good_one(family):
    starts = starts_of([30, 70])
    q, k, v = some(torch.float16, (1, 4, 100, 64), (1, 2, 100, 64))
    by_run_forward(family, q, k, v, (starts, starts), (70, 70), {})
    with pytest.raises(ValueError, match="packed sequences need tensors of batch 1; got 2"):
        by_run_forward(family, *(x.repeat(2, 1, 1, 1) for x in (q, k, v)), (starts, starts), (70, 70), {})


# --- Many sequences --------------------------------------------------------------------------------------------------


def some_numbers(count: int) -> list[int]:
    """Of sequences: around where 16 bits end, the first, the last, and others."""
    return sorted({0, 1, 65_534, 65_535, 65_536, 65_537, count - 1, *random.Random(1).sample(range(count), 60)})


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_batches_may_be_more_than_65535(family, options):
    q, k, v = some(torch.float16, (MANY, 2, 16, 64), (MANY, 2, 16, 64))
    poison(q, 1)
    out, lse = attention(q, k, v, **options, return_lse=True, family=family)
    assert out.isfinite().all().item() and lse.isfinite().all().item()
    chosen = some_numbers(MANY)
    expected, expected_lse = truth(*(x[chosen] for x in (q, k, v)), options)
    assert_right(out[chosen], expected)
    assert_close_lse(lse[chosen], expected_lse)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_packed_sequences_may_be_more_than_65535(family, options):
    draw = random.Random(0)
    lengths = [draw.randint(0, 16) for _ in range(MANY)]
    starts = starts_of(lengths)
    rows = sum(lengths)
    q, k, v = some(torch.float16, (1, 2, rows, 64), (1, 2, rows, 64))
    poison(q, 1)
    out, lse = by_run_forward(family, q, k, v, (starts, starts), (16, 16), options)
    assert out.isfinite().all().item() and lse.isfinite().all().item()
    begins = starts.tolist()
    for number in some_numbers(MANY):
        row = slice(begins[number], begins[number + 1])
        if row.start < row.stop:
            expected, expected_lse = truth(*(x[:, :, row] for x in (q, k, v)), options)
            assert_right(out[:, :, row], expected)
            assert_close_lse(lse[:, :, row], expected_lse)
