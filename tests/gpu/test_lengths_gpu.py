"""Lengths are arguments: calls of new lengths compile nothing, load nothing, and are right."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from flashwright.attention import attention

from .tools import assert_close_lse, assert_right, assert_same_bits, some, truth

LONGEST = 640


def call(rows: int, keys: int, tensors: Any, family: str | None, options: dict[str, Any]) -> tuple[Any, ...]:
    """The first rows and keys of longer tensors, as a growing cache is used."""
    q, k, v = tensors
    part = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
    return (*part, attention(*part, **options, family=family))


def check_no_kernel_is_made(kernel_counts, calls: list[tuple[int, int]], family: str | None, options: Any) -> None:
    """Of all calls but the first; the results of some are compared."""
    tensors = some(None, (2, 4, LONGEST, 64), (2, 2, LONGEST, 64))
    call(*calls[0], tensors, family, options)
    assert kernel_counts.loaded == 1
    kernel_counts.reset()
    compared = set(calls[:: max(1, len(calls) // 12)]) | {calls[-1]}
    for rows, keys in calls:
        *part, out = call(rows, keys, tensors, family, options)
        if (rows, keys) in compared:
            assert_right(out, truth(*part, options)[0])
    assert (kernel_counts.compiled, kernel_counts.loaded) == (0, 0)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (300, -1)}], ids=str)
def test_decoding_with_growing_keys_makes_one_kernel(kernel_counts, family, options):
    check_no_kernel_is_made(kernel_counts, [(1, keys) for keys in range(201, 601)], family, options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (300, -1)}], ids=str)
def test_prefills_of_any_length_make_one_kernel(kernel_counts, family, options):
    calls = [(rows, rows) for rows in range(130, 201)] + [(rows, LONGEST - rows) for rows in range(130, 201)]
    check_no_kernel_is_made(kernel_counts, calls, family, options)


def test_the_kernel_that_is_chosen_for_decoding_is_made_once(kernel_counts):
    check_no_kernel_is_made(kernel_counts, [(1, keys) for keys in range(201, 601)], None, {"causal": True})


# --- Right in any order ----------------------------------------------------------------------------------------------


def contiguous(x: Any) -> Any:
    return x.contiguous()


def rows_before_heads(x: Any) -> Any:
    """As a view of a (batch, rows, heads, head_dim) tensor."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def part_of_a_cache(x: Any) -> Any:
    """As the first rows of a longer tensor whose others are NaN."""
    cache = torch.full((*x.shape[:2], x.shape[2] + 300, x.shape[3]), math.nan, dtype=x.dtype, device=x.device)
    cache[:, :, : x.shape[2]] = x
    return cache[:, :, : x.shape[2]]


def part_of_a_cache_of_rows(x: Any) -> Any:
    """The same, of a (batch, rows, heads, head_dim) cache."""
    return (
        part_of_a_cache(x.transpose(1, 2).flatten(2).unsqueeze(1))[:, 0].unflatten(2, (x.shape[1], -1)).transpose(1, 2)
    )


LAYOUTS = {
    "contiguous": (contiguous,) * 3,
    "rows before heads": (rows_before_heads,) * 3,
    "part of a cache": (part_of_a_cache,) * 3,
    "part of a cache of rows": (part_of_a_cache_of_rows,) * 3,
    "one for each tensor": (contiguous, rows_before_heads, part_of_a_cache),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72])
def test_new_lengths_are_right_in_any_order_and_every_time(family, layout, options, head_dim):
    """The first call of some lengths, the second, which may improve the schedule of tiles, and later ones."""
    draw = random.Random(f"{layout}{options}{head_dim}")
    lengths = [(draw.randint(65, 1000), draw.randint(65, 1000)) for _ in range(6)]
    lengths += [(n, n) for n in (128, 129, 1000)]
    q, k, v = some(torch.float16, (3, 8, 1000, head_dim), (3, 4, 1000, head_dim), seed=5)
    problems = []
    for rows, keys in lengths:
        parts = (q[:, :, :rows], k[:, :, :keys], v[:, :, :keys])
        problems.append([lay_out(x) for lay_out, x in zip(LAYOUTS[layout], parts, strict=True)])
    expected = [truth(*problem, options) for problem in problems]
    order = [number for number in range(len(problems)) for _ in range(4)]
    draw.shuffle(order)
    results: dict[int, list[Any]] = {number: [] for number in order}
    for number in order:
        results[number].append(attention(*problems[number], **options, return_lse=True, family=family))
    for number, (first, *others) in results.items():
        assert_right(first[0], expected[number][0])
        assert_close_lse(first[1], expected[number][1])
        assert_same_bits(first, others)
