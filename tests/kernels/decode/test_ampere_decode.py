"""The Ampere family's decode kernel on the simulated GPU, hazards checked, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashwright.hardware.architectures import ARCHITECTURES, GPUModel
from flashwright.kernels.decode.ampere import AMPERE_DECODE
from flashwright.kernels.decode.launch import DecodeScratch
from flashwright.kernels.family import Occasion
from flashwright.kernels.registry import parse_config, tile_shapes
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.compiling import compile_kernel
from flashwright.runtime.simulated import ForwardSimulation, simulate_decode

SMALL = "ampere decode (BF16, 64, 16, 16, 4): rows_1+stages_2+swizzled"
OTHERS = (
    "ampere decode (FP16, 64, 32, 16, 4): rows_2+stages_3+swizzled",
    "ampere decode (BF16, 128, 16, 16, 4): rows_1+stages_2+swizzled",
    "ampere decode (BF16, 32, 64, 32, 8): rows_4+stages_2+swizzled",
    "ampere decode (FP16, 256, 16, 16, 4): rows_1+stages_2",
)


def truth(q: Any, k: Any, v: Any, causal: bool, window: Any, softcap: float) -> tuple[Any, Any]:
    """Of one sequence: (heads, rows, head_dim), (kv_heads, keys, head_dim)."""
    k, v = (x.double().repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q.double() @ k.mT * q.shape[2] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = q.shape[1], k.shape[1]
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None]
    left, right = window or (None, None)
    right = 0 if causal else right
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
    return weights @ v, lse


def decoded(
    config: Any,
    *,
    heads: tuple[int, int] = (4, 2),
    rows: int = 1,
    capacity: int = 200,
    lengths: tuple[int, ...] = (200, 77),
    causal: bool = False,
    window: Any = None,
    softcap: float = 0.0,
    head_dim: int | None = None,
    seed: int = 0,
    **arguments: Any,
) -> ForwardSimulation:
    """A simulated decode, which is checked."""
    config = parse_config(config) if isinstance(config, str) else config
    dtype = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}[config.dtype]
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    head_dim = head_dim or config.d_head
    q = some(len(lengths), heads[0], rows, head_dim)
    k, v = (some(len(lengths), heads[1], capacity, head_dim) for _ in range(2))
    simulated = simulate_decode(
        config, *(x.view(torch.int16).numpy().view(NUMPY_DTYPES[config.dtype]) for x in (q, k, v)),
        kv_lengths=np.array(lengths), options=AttentionOptions.of(causal, window, None, softcap), return_lse=True,
        **arguments,
    )  # fmt: skip
    assert simulated.lse is not None
    tolerance = 1.5e-2 if config.dtype is DType.BF16 else 2e-3
    for b, n in enumerate(lengths):
        out, lse = truth(q[b], k[b, :, :n], v[b, :, :n], causal, window, softcap)
        np.testing.assert_allclose(simulated.output[b].astype(float), out, atol=tolerance)
        np.testing.assert_allclose(simulated.lse[b], lse, atol=1e-3)
    return simulated


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
    table = np.array([[99, -5, 3]])
    pages = np.zeros((3, 1, 16, 64), NUMPY_DTYPES[config.dtype])
    simulate_decode(config, zeros[:, :, :1], pages, pages, kv_lengths=np.array([48]), page_table=table)


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
        ({"B_r": 128, "d_head": 256, "n_warps": 1}, "registers"),
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
            assert config.B_r >= min(rows, 64)


@pytest.mark.parametrize("d_head", (64, 128))
def test_the_usual_kernels_do_not_spill(d_head):
    gpu = GPUModel.of_architecture("a GPU", "sm_90")
    config = AMPERE_DECODE.default_config(Occasion(DType.BF16, d_head, False, "", "", gpu, 4))
    assert compile_kernel(config, "sm_90").spill_bytes == 0


def test_scratch_holds_two_segments_of_every_thread_block():
    config = parse_config(SMALL)
    scratch = DecodeScratch.of(config, items=6, slots=8)
    assert (scratch.arrivals, scratch.partial_terms) == (6, 4 * 8 * 16 * 64)
    assert scratch.partial_bytes == scratch.partial_terms + 8 * 8 * 16
