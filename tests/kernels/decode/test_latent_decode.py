"""The decode kernel of multi-head latent attention on the simulated GPU, hazards checked, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from decode_cases import decoded

from flashwright.kernels.decode.latent import LATENT_DECODE
from flashwright.kernels.registry import parse_config, tile_shapes
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.runtime.simulated import simulate_decode

SMALL = "latent decode (BF16, 576, 64, 32): stages_2"
USUAL = "latent decode (BF16, 576, 64, 64): stages_2"
OTHERS = ("latent decode (FP16, 576, 64, 64): stages_2", "latent decode (BF16, 576, 64, 32): stages_4")


@pytest.mark.parametrize(
    "problem",
    (
        {"lengths": (150, 1), "multiprocessors": 3, "launches": 2},
        *(
            pytest.param(problem, marks=pytest.mark.slow)
            for problem in (
                {"lengths": (200, 1, 64), "multiprocessors": 1},
                {"lengths": (200, 1, 64), "multiprocessors": 7, "launches": 2},
                {"config": USUAL, "heads": (70, 1), "rows": 2, "causal": True, "lengths": (150, 0)},
                *({"config": config, "heads": (128, 1), "lengths": (150, 33)} for config in OTHERS),
                {"window": (30, 0), "rows": 3},
                {"softcap": 4.0},
                {"heads": (6, 2), "rows": 4, "causal": True},
                {"head_dim": 320, "value_head_dim": 256},
                {"value_head_dim": 440},
            )
        ),
    ),
    ids=str,
)
def test_values_are_columns_of_the_keys(problem):
    decoded(**{"config": SMALL, "heads": (20, 1), **problem})


@pytest.mark.slow
def test_pages_are_read_wherever_they_lie():
    config = parse_config(SMALL)
    draw = np.random.default_rng(0)
    q = draw.standard_normal((1, 16, 1, 576)).astype(NUMPY_DTYPES[config.dtype])
    k = draw.standard_normal((1, 1, 96, 576)).astype(NUMPY_DTYPES[config.dtype])
    table = draw.permutation(6).astype(np.int32)[None]
    paged = np.empty((6, 1, 16, 576), k.dtype)
    paged[table[0]] = k[0].reshape(1, 6, 16, 576).transpose(1, 0, 2, 3)
    lengths = np.array([90])
    contiguous = simulate_decode(config, q, k, k[..., :512].copy(), kv_lengths=lengths)
    in_pages = simulate_decode(config, q, paged, paged[..., :512].copy(), kv_lengths=lengths, page_table=table)
    assert np.array_equal(contiguous.output.view(np.int16), in_pages.output.view(np.int16))


@pytest.mark.slow
def test_with_fixed_splits_a_sequence_has_the_same_bits_whatever_else_is_computed():
    alone, among = (decoded(SMALL, heads=(20, 1), lengths=(200,), multiprocessors=n, split_units=2) for n in (2, 9))
    assert np.array_equal(alone.output.view(np.int16), among.output.view(np.int16))


def test_values_of_their_own_are_refused():
    x = np.ones((1, 1, 32, 576), NUMPY_DTYPES[parse_config(SMALL).dtype])
    with pytest.raises(ValueError, match="takes the first columns of k for values, which these are not"):
        simulate_decode(SMALL, x, x, 2 * x[..., :512])
    with pytest.raises(ValueError, match=r"v: head_dim is 576; allowed: up to 512, which are the first columns of k"):
        simulate_decode(SMALL, x, x, x)


# --- Configs --------------------------------------------------------------------------------------------------------


def test_names_round_trip():
    for text in (SMALL, USUAL, *OTHERS):
        config = parse_config(text)
        assert str(config) == text
        assert parse_config(config.kernel_name()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"stages": 1}, "stages: 1 is not allowed; allowed: 2 to 8"),
        ({"B_r": 128}, "B_r: 128 is not allowed; allowed: 64"),
        ({"B_c": 48}, "B_c: 48 is not allowed; allowed: 32, 64"),
        ({"d_head": 512}, "d_head: 512 is not allowed; allowed: 576"),
    ),
)
def test_values_that_are_no_configs_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(parse_config(SMALL), **changes)


def test_a_config_that_needs_too_much_shared_memory_is_rejected():
    config = replace(parse_config(USUAL), stages=3)
    with pytest.raises(ValueError, match=r"^shared memory: .* needs 304784 bytes; a thread block has at most 231424"):
        tile_shapes(config)
    assert LATENT_DECODE.rejection_reason(config) is not None
    assert LATENT_DECODE.rejection_reason(parse_config(USUAL)) is None
