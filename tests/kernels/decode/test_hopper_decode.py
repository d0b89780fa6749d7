"""The Hopper family's decode kernel on the simulated GPU, hazards checked, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from decode_cases import decoded

from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.decode.hopper import HOPPER_DECODE
from flashwright.kernels.family import Occasion
from flashwright.kernels.registry import parse_config, tile_shapes
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.runtime.compiling import compile_kernel
from flashwright.runtime.simulated import simulate_decode

SMALL = "hopper decode (BF16, 64, 64, 32): stages_2"
OTHERS = (
    "hopper decode (FP16, 64, 128, 64): stages_3",
    "hopper decode (BF16, 128, 64, 48): stages_2",
    "hopper decode (FP16, 256, 64, 32): stages_2",
)


def first_fast(first: object, *others: object) -> tuple[object, ...]:
    return first, *(pytest.param(each, marks=pytest.mark.slow) for each in others)


@pytest.mark.parametrize("blocks", first_fast(3, 1, 7))
def test_any_number_of_thread_blocks_shares_the_keys(blocks):
    decoded(SMALL, heads=(40, 1), multiprocessors=blocks, lengths=(200, 1, 64), launches=2)


@pytest.mark.parametrize("config", first_fast(*OTHERS))
def test_configs_compute_attention(config):
    decoded(config, rows=3, heads=(36, 1), causal=True, capacity=150, lengths=(150, 33))


@pytest.mark.parametrize(
    "options",
    (
        {"window": (10, 4), "rows": 70},
        *first_fast(
            {"head_dim": 40, "value_head_dim": 64, "causal": True},
            {"value_head_dim": 32},
            {"window": (30, 0), "rows": 3},
            {"softcap": 4.0},
            {"head_dim": 40},
            {"heads": (3, 3), "rows": 7},
            {"lengths": (0, 5, 0), "heads": (80, 2)},
        ),
    ),
    ids=str,
)
def test_masks_caps_padding_and_groups(options):
    decoded(SMALL, **{"heads": (20, 1), **options})


def test_pages_are_read_wherever_they_lie():
    config = parse_config(SMALL)
    draw = np.random.default_rng(0)
    q = draw.standard_normal((1, 40, 1, 64)).astype(NUMPY_DTYPES[config.dtype])
    k, v = (draw.standard_normal((1, 1, 96, 64)).astype(NUMPY_DTYPES[config.dtype]) for _ in range(2))
    table = draw.permutation(6).astype(np.int32)[None]
    pages = []
    for x in (k, v):
        paged = np.empty((6, 1, 16, 64), x.dtype)
        paged[table[0]] = x[0].reshape(1, 6, 16, 64).transpose(1, 0, 2, 3)
        pages.append(paged)
    lengths = np.array([90])
    contiguous = simulate_decode(config, q, k, v, kv_lengths=lengths)
    paged_run = simulate_decode(config, q, *pages, kv_lengths=lengths, page_table=table)
    assert np.array_equal(contiguous.output.view(np.int16), paged_run.output.view(np.int16))


def test_with_fixed_splits_a_sequence_has_the_same_bits_whatever_else_is_computed():
    alone, among = (
        decoded(SMALL, heads=(40, 1), lengths=(200,), multiprocessors=blocks, split_units=2) for blocks in (2, 9)
    )
    assert np.array_equal(alone.output.view(np.int16), among.output.view(np.int16))
    assert np.array_equal(alone.lse, among.lse)


# --- Configs --------------------------------------------------------------------------------------------------------


def test_names_round_trip():
    for text in (SMALL, *OTHERS):
        config = parse_config(text)
        assert str(config) == text
        assert parse_config(config.kernel_name()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"stages": 1}, "stages: 1 is not allowed; allowed: 2 to 16"),
        ({"B_r": 96}, "B_r: 96 is not allowed; allowed: 64, 128"),
        ({"B_c": 40}, "B_c: 40 is not allowed"),
        ({"d_head": 96}, "d_head: 96 is not allowed"),
    ),
)
def test_values_that_are_no_configs_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(parse_config(SMALL), **changes)


@pytest.mark.parametrize(
    ("changes", "rule"), (({"stages": 16, "B_c": 128}, "shared memory"), ({"d_head": 256, "B_c": 96}, "registers"))
)
def test_configs_without_a_kernel_break_a_rule(changes, rule):
    with pytest.raises(ValueError, match=f"^{rule}: "):
        tile_shapes(replace(parse_config(SMALL), **changes))


@pytest.mark.parametrize("d_head", first_fast(128, 64, 192, 256))
@pytest.mark.parametrize("rows", first_fast(128, 33))
def test_defaults_fit_and_do_not_spill(d_head, rows):
    gpu = GPUModel.of_architecture("a GPU", "sm_90")
    config = HOPPER_DECODE.default_config(Occasion(DType.BF16, d_head, False, "", "", gpu, rows))
    assert config.B_r >= rows
    assert compile_kernel(config, "sm_90").spill_bytes == 0
