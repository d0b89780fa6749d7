"""The Ampere family's decode kernel on the simulated GPU, hazards checked, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("blocks", (1, 2, 3, 4, 40))
def test_items_that_are_known_to_be_equal_are_dealt_whole_and_what_is_left_is_shared(blocks):
    decoded(
        SMALL,
        multiprocessors=blocks,
        heads=(6, 3),
        capacity=190,
        lengths=(190,) * 3,
        lengths_on_device=False,
        launches=2,
    )


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


@pytest.mark.parametrize("page", (16, 48, 64))
def test_pages_are_read_wherever_they_lie(page):
    """More units than a warp looks up at a time, of a sequence that ends within a page."""
    config = parse_config("ampere decode (FP16, 32, 16, 32, 2): rows_1+stages_2+blocks_1+swizzled")
    draw = np.random.default_rng(0)
    count = -(-1200 // page)
    q = draw.standard_normal((1, 4, 1, 32)).astype(np.float16)
    pages = [draw.standard_normal((count + 3, 2, page, 32)).astype(np.float16) for _ in range(2)]
    table = draw.permutation(count + 3)[:count].astype(np.int32)[None]
    contiguous = [x[table[0]].transpose(1, 0, 2, 3).reshape(1, 2, count * page, 32) for x in pages]
    for x in pages:
        x[np.setdiff1d(np.arange(count + 3), table)] = np.inf  # another sequence's
    lengths = np.array([1190])
    whole = simulate_decode(config, q, *contiguous, kv_lengths=lengths, multiprocessors=2)
    paged = simulate_decode(config, q, *pages, kv_lengths=lengths, page_table=table, multiprocessors=2)
    assert np.array_equal(whole.output.view(np.int16), paged.output.view(np.int16))


@st.composite
def paged_caches(draw: Any) -> dict[str, Any]:
    page = draw(st.sampled_from((16, 48, 64, 256)))
    sequences, keys = draw(st.integers(1, 12)), draw(st.integers(1, 500))
    each = -(-keys // page)
    known = draw(st.booleans())
    lengths = [each * page] * sequences if known else [draw(st.integers(0, each * page)) for _ in range(sequences)]
    return {
        "page": page, "each": each, "lengths": lengths, "known": known, "in_order": draw(st.booleans()),
        "multiprocessors": draw(st.integers(1, 20)), "launches": draw(st.integers(1, 2)),
        "split_units": draw(st.sampled_from((0, 0, 2))), "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


@settings(max_examples=12, deadline=None, derandomize=True)
@given(paged_caches())
def test_a_paged_cache_gives_the_bits_of_one_in_one_piece(case):
    """In order or not, of several sequences; what is no key of theirs is never read, and no page behind their ends."""
    config = parse_config("ampere decode (BF16, 32, 16, 16, 2): rows_1+stages_3+blocks_1+swizzled")
    draw, dtype = np.random.default_rng(case["seed"]), NUMPY_DTYPES[config.dtype]
    page, each, lengths = case["page"], case["each"], case["lengths"]
    count = len(lengths) * each
    table = (np.arange(count) if case["in_order"] else draw.permutation(count + 3)[:count]).reshape(-1, each)
    q = draw.standard_normal((len(lengths), 4, 1, 32)).astype(dtype)
    pools = [np.full((count + 3, page, 2, 32), np.inf).astype(dtype) for _ in range(2)]
    known_pages = np.full_like(table, -1)
    for b, length in enumerate(lengths):
        for i in range(-(-length // page)):
            exist = min(page, length - i * page)
            known_pages[b, i] = table[b, i]
            for x in pools:
                x[table[b, i], :exist] = draw.standard_normal((exist, 2, 32)).astype(dtype)
    options: dict[str, Any] = {name: case[name] for name in ("multiprocessors", "launches", "split_units")}
    options["kv_lengths"] = None if case["known"] else np.array(lengths)

    def decoded_of(caches: list[Any], **table: Any) -> Any:
        return simulate_decode(config, q, *(x.transpose(0, 2, 1, 3) for x in caches), **table, **options).output

    whole = decoded_of([x[table].reshape(len(lengths), each * page, 2, 32) for x in pools])
    paged = decoded_of(pools, page_table=known_pages)
    assert np.isfinite(whole.astype(float)).all()
    assert np.array_equal(whole.view(np.int16), paged.view(np.int16))


@pytest.mark.parametrize(("page", "waits"), ((0, []), (64, ["div.u32", "ld.global.u32", "rem.u32"])))
def test_the_first_copies_wait_for_no_more_than_one_number_of_a_page(page, waits):
    """A cache in one piece: for no load, and for no division."""
    config = parse_config(SMALL)
    q = np.ones((1, 2, 1, 64), NUMPY_DTYPES[config.dtype])
    k = np.ones((3, 2, 64, 64) if page else (1, 2, 192, 64), q.dtype)
    table = np.array([[2, 0, 1]]) if page else None
    run = simulate_decode(config, q, k, k, page_table=table, arch="sm_90", trace_warp=(0, 0)).run
    opcodes = [entry.opcode for entry in run.trace]
    begin = opcodes.index("griddepcontrol.wait")
    copies = [i for i, opcode in enumerate(opcodes) if opcode.startswith("cp.async.c")]
    until_first_keys = opcodes[begin : copies[q.shape[3] * config.B_r // (8 * 32 * config.n_warps)]]
    assert [x for x in until_first_keys if x.startswith(("ld.global", "div.u32", "rem.u32"))] == waits


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
