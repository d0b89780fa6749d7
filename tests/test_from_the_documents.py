"""docs/from_the_documents.md: every name of the documents is on it, and what it names here exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flashwright

PAGE = Path(__file__).parents[1] / "docs" / "from_the_documents.md"
DOCUMENTED_NAMES = """
    src/include/forward_kernel.cuh src/include/gemm.cuh src/include/load_store.cuh src/include/ptx_functions.cuh
    src/include/static_kernel_configuration.cuh src/include/flash_kernels.cuh src/include/common.h
    swizzling.cuh layout.cuh py/flash_helpers/kernel_configs.py flash_helpers previous_kernels src_1-7 src_8 src_9
    src_8-9

    FlashForwardKernelConfig DType dtype d_head B_r B_c n_warps async_copy eager_load_blocks swizzled Q_mma_load_K_tiles
    K_mma_load_K_tiles V_mma_load_K_tiles mma_double_buffer_loads optimized_softmax short_form to_cpp_struct kernel_name
    parse_kernel_name_into_config should_autotune_config get_autotuning_kernel_configs get_kernel_progression_configs
    load_2_2_2_tiles buffer cfg

    ForwardKernelTileShapes CFG d_head_fragments QO_rows_per_warp QO_fragments_per_warp KV_calc_fragments
    KV_ldst_fragments_per_warp QK_rmem_tile_fragments PV_rmem_tile_fragments load_K_fragments max_fragments
    rmem_tile_buffer_size load_entire_block_into_rf RmemConfig

    GEMM GEMM::matmul matmul Tiles DoubleBufferA DoubleBufferB DoubleBuffer B_t load_tile A_stage_toggle A_stage
    MMA_K mma

    GM2SM GM2SM_async SM2GM SM2RF copy_GM2SM cp_async cp.async BYTES_PER_VEC4_ACCESS uint4 cp_async_commit
    cp.async.commit_group cp_async_wait cp.async.wait_group ldmatrix CuteSwizzle apply offset row_shifted

    flash_forward_kernel args.n_KV_blocks j __syncthreads CTA GMEM SMEM GM SM RF
"""
"""The identifiers and files of the five documents."""
EXPORTED = [
    "DType",
    "FlashForwardKernelConfig",
    "ForwardKernelTileShapes",
    "GemmShape",
    "get_autotuning_kernel_configs",
    "get_kernel_progression_configs",
    "parse_kernel_name_into_config",
    "should_autotune_config",
]

NAMES = r"`[^`]+`(?:, `[^`]+`| and `[^`]+`)*"
NAMES_IN_A_FILE = re.compile(rf"({NAMES})(?:, | in | from )+\[`[^`]+`\]\(([^)]+)\)")
LINK = re.compile(r"\[[^\]]*\]\([^)]+\)")


def rows() -> list[tuple[str, str, str]]:
    """The cells of the tables, less the last one, which is about the documents themselves."""
    text = PAGE.read_text().partition("## Where the documents disagree")[0]
    found = [tuple(line.strip("| ").split(" | ")) for line in text.splitlines() if line.startswith("| `")]
    return [(name, here, why) for name, here, why in found]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_name_of_the_documents_is_on_the_page_once():
    named = [name for cell, _, _ in rows() for name in quoted(cell)]
    assert [name for name in DOCUMENTED_NAMES.split() if name not in named] == []
    assert len(set(named)) == len(named)


@pytest.mark.parametrize(("name", "here", "why"), rows(), ids=[name for name, _, _ in rows()])
def test_what_a_row_names_here_is_in_the_file_that_it_links(name, here, why):
    claims = NAMES_IN_A_FILE.findall(f"{here} | {why}")
    for names, link in claims:
        text = (PAGE.parent / link).read_text()
        for each in quoted(names):
            assert re.search(rf"(?<!\w){re.escape(each)}(?!\w)", text), f"{link} has no {each}"
    claimed = {each for names, _ in claims for each in quoted(names)}
    assert set(quoted(LINK.sub("", here))) <= claimed, "a name without a file"
    assert LINK.search(here), "a row that leads nowhere"


@pytest.mark.parametrize("name", EXPORTED)
def test_the_documents_python_names_are_exported(name):
    assert name in flashwright.__all__
    assert name in PAGE.read_text()
