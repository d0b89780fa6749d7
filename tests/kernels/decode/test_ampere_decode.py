"""The Ampere family's decode kernel on the simulated GPU, hazards checked, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from decode_cases import decoded

from flashwright.hardware.architectures import ARCHITECTURES, GPUModel
from flashwright.kernels.decode.ampere import AMPERE_DECODE
from flashwright.kernels.decode.launch import DecodeScratch
from flashwright.kernels.family import Occasion
from flashwright.kernels.registry import parse_config, tile_shapes
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.runtime.compiling import compile_kernel
from flashwright.runtime.simulated import simulate_decode

SMALL = "ampere decode (BF16, 64, 16, 16, 4): rows_1+stages_2+blocks_1+swizzled"
OTHERS = (
    "ampere decode (FP16, 64, 32, 16, 4): rows_2+stages_3+blocks_1+swizzled",
    "ampere decode (BF16, 128, 16, 16, 4): rows_1+stages_2+blocks_1+swizzled",
    "ampere decode (BF16, 32, 64, 32, 8): rows_4+stages_2+blocks_1+swizzled",
    "ampere decode (FP16, 256, 16, 16, 4): rows_1+stages_2+blocks_1",
)


@pytest.mark.parametrize("blocks", (1, 3, 7, 40))
def test_any_number_of_thread_blocks_shares_the_keys(blocks):
    decoded(SMALL, multiprocessors=blocks, lengths=(200, 1, 64), launches=2)


@pytest.mark.parametrize("config", OTHERS)
def test_configs_compute_attention(config):
    decoded(config, rows=2, heads=(6, 2), causal=True, capacity=150, lengths=(150, 33))


@pytest.mark.parametrize(
    "options",
    (
        {"causal": True, "rows": 5},
        {"window": (30, 0), "rows": 3},
        {"window": (10, 4), "rows": 9},
        {"softcap": 4.0},
        {"head_dim": 40},
        {"heads": (32, 1)},
        {"heads": (3, 3), "rows": 7},
    ),
    ids=str,
)
def test_masks_caps_padding_and_groups(options):
    decoded(SMALL, **options)


def test_a_sequence_without_keys_gives_zeros():
    simulated = decoded(SMALL, lengths=(0, 5, 0))
    assert (simulated.output[0] == 0).all()
    assert np.isneginf(simulated.lse[0]).all()


def test_lengths_that_lead_out_of_the_cache_are_clamped():
    config = parse_config(SMALL)
    zeros = np.zeros((1, 1, 40, 64), NUMPY_DTYPES[config.dtype])
    simulate_decode(config, zeros[:, :, :1], zeros, zeros, kv_lengths=np.array([1000]))  # the simulator checks bounds


def test_keys_on_pages_that_do_not_exist_are_zeros_and_nobody_elses():
    config = parse_config(SMALL)
    q = np.ones((1, 1, 1, 64), NUMPY_DTYPES[config.dtype])
    pages = np.full((3, 1, 16, 64), np.inf, NUMPY_DTYPES[config.dtype])  # another sequence's
    simulated = simulate_decode(config, q, pages, pages, kv_lengths=np.array([48]), page_table=np.array([[99, -5, 3]]))
    assert (simulated.output == 0).all()


@pytest.mark.parametrize("split_units", (1, 2))
def test_with_fixed_splits_a_sequence_has_the_same_bits_whatever_else_is_computed(split_units):
    alone = decoded(SMALL, lengths=(200,), multiprocessors=3, split_units=split_units)
    among = decoded(SMALL, lengths=(200,), multiprocessors=16, split_units=split_units)
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
        ({"stages": 1}, "stages: 1 is not allowed; allowed: 2 to 8"),
        ({"B_r": 24}, "B_r: 24 is not allowed"),
        ({"keys_per_warp": 8}, "keys_per_warp: 8 is not allowed"),
    ),
)
def test_values_that_are_no_configs_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(parse_config(SMALL), **changes)


@pytest.mark.parametrize(
    ("changes", "rule"),
    (
        ({"row_warps": 3}, "warps"),
        ({"row_warps": 2}, "warps"),
        ({"stages": 8, "n_warps": 16, "keys_per_warp": 32}, "shared memory"),
        ({"B_r": 64, "d_head": 256, "n_warps": 1}, "registers"),
    ),
)
def test_configs_without_a_kernel_break_a_rule(changes, rule):
    with pytest.raises(ValueError, match=f"^{rule}: "):
        tile_shapes(replace(parse_config(SMALL), **changes))


@pytest.mark.parametrize("arch", ("sm_80", "sm_86", "sm_90"))
def test_defaults_fit_their_gpu(arch):
    gpu = GPUModel.of_architecture("a GPU", arch)
    for d_head in AMPERE_DECODE.d_heads:
        for rows in (1, 16, 17, 33, 500):
            config = AMPERE_DECODE.default_config(Occasion(DType.BF16, d_head, False, "", "", gpu, rows))
            static_bytes = 1024  # more than the kernel has
            assert tile_shapes(config).shared_bytes + static_bytes <= ARCHITECTURES[arch].shared_bytes_per_block
            assert config.B_r >= min(rows, 64 if d_head <= 128 else 32)


@pytest.mark.parametrize("d_head", (64, 128))
def test_the_usual_kernels_do_not_spill(d_head):
    gpu = GPUModel.of_architecture("a GPU", "sm_90")
    config = AMPERE_DECODE.default_config(Occasion(DType.BF16, d_head, False, "", "", gpu, 4))
    assert compile_kernel(config, "sm_90").spill_bytes == 0


def test_scratch_holds_two_segments_of_every_thread_block():
    config = parse_config(SMALL)
    scratch = DecodeScratch.of(config, items=6, slots=8)
    assert (scratch.zeros, scratch.partial_terms) == (12, 4 * 8 * 16 * 64)
    assert scratch.partial_bytes == scratch.partial_terms + 8 * 8 * 16
