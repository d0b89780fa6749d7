"""A row's results depend on its own query, the keys and values it attends to, and the options: on nothing else, bit by
bit. Data makes references follow their rows in every way there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from samples import every_other

from flashwright import Window, parse_config
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.runtime.simulated import simulate_forward

AMPERE = parse_config("(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+reversed+mma_sum+lazy")
CONFIGS = {
    "ampere": AMPERE,
    "ampere, first key first": replace(AMPERE, reversed_kv=False, mma_row_sum=False),
    "hopper, lazy": parse_config("hopper (FP16, 64, 128, 32): stages_2+overlap+ping_pong+persistent+lazy"),
    "hopper": parse_config("hopper (FP16, 64, 128, 32): stages_2+overlap+ping_pong+persistent+lazy+guess"),
    "hopper, first block first": parse_config(
        "hopper (BF16, 64, 128, 32): stages_2+overlap+ping_pong+persistent+lazy+guess+first"
    ),
}
CAUSAL = Window(None, 0)
ROWS = 200


@pytest.fixture(params=CONFIGS.values(), ids=list(CONFIGS))
def config(request) -> Any:
    return request.param


def inputs(config: Any, rows: int = ROWS) -> tuple[np.ndarray, ...]:
    """Rows of every spread, and keys with slopes and peaks: some exponentials overflow, some are lifted."""
    generator = np.random.default_rng(1)
    q, k, v = (generator.standard_normal((1, 1, rows, 64)) for _ in range(3))
    q *= np.array([0.3, 1, 3, 10])[generator.integers(0, 4, rows)][:, None]
    q[:, :, ::7, 0], k[..., 0] = 30, np.linspace(8, 0, rows)
    q[:, :, 5::11, 1], k[..., 1] = 40, 0
    k[:, :, ::50, 1] = generator.uniform(2, 8, (rows + 49) // 50)
    return tuple(x.astype(NUMPY_DTYPES[config.dtype]) for x in (q, k, v))


def results(config: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    found = simulate_forward(config, q, k, v, return_lse=True, **options)
    return found.output.view(np.uint16), found.lse.view(np.uint32)


def assert_same(found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> None:
    for name, some, other in zip(("output", "log-sum-exp"), found, expected, strict=True):
        assert np.array_equal(some, other), f"{name}: {np.count_nonzero(some != other)} of {some.size} differ"


@pytest.mark.parametrize("window", [Window(), CAUSAL], ids=["full", "causal"])
def test_other_queries_do_not_matter(config, window):
    q, k, v = inputs(config)
    others = np.arange(ROWS) % 3 != 0
    changed = q.copy()
    changed[:, :, others] = q[:, :, others][:, :, ::-1] * q.dtype.type(2)
    before, after = (results(config, each, k, v, window=window) for each in (q, changed))
    assert_same(tuple(x[:, :, ~others] for x in after), tuple(x[:, :, ~others] for x in before))


@pytest.mark.parametrize("chunks", every_other([(1, 99, 100), (64, 136), (130, 7, 63)]))
def test_a_prefill_in_chunks_is_the_whole_one(config, chunks):
    q, k, v = inputs(config)
    whole = results(config, q, k, v, window=CAUSAL)
    end = 0
    for rows in chunks:
        begin, end = end, end + rows
        part = results(config, q[:, :, begin:end], k[:, :, :end], v[:, :, :end], window=CAUSAL)
        assert_same(part, tuple(x[:, :, begin:end] for x in whole))


def test_a_batch_of_one_is_one_of_many(config):
    alone = inputs(config)
    generator = np.random.default_rng(2)
    many = [np.concatenate([x, generator.standard_normal(x.shape).astype(x.dtype), x]) for x in alone]
    found, expected = results(config, *many, window=CAUSAL), results(config, *alone, window=CAUSAL)
    for place in (0, 2):
        assert_same(tuple(x[place : place + 1] for x in found), expected)


def test_packed_sequences_are_dense_ones(config):
    lengths = (70, 1, 129)
    q, k, v = inputs(config)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    longest = (max(lengths), max(lengths))
    packed = results(config, q, k, v, window=CAUSAL, starts=(starts, starts), max_lengths=longest)
    for begin, end in pairwise(starts):
        dense = results(config, *(x[:, :, begin:end] for x in (q, k, v)), window=CAUSAL)
        assert_same(tuple(x[:, :, begin:end] for x in packed), dense)
