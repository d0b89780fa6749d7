"""The documents' rules about registers beside the facts: the estimate before compiling, and the compiler's count."""

from __future__ import annotations

import re

import pytest

from flashwright import occupancy, parse_kernel_name_into_config, rejection_reason
from flashwright.kernels.forward.ampere.registers import estimate

ARCH = "sm_80"
ESTIMATE_TOLERANCE = 24
"""Registers that a kernel may be away from its estimate."""
HELD_64_32 = "(BF16, 128, 64, 32, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
HELD_64_64 = "(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_4_4_tiles+opt_softmax"
STREAMED_64_64 = "(BF16, 128, 64, 64, 4): async+eager+swizzled+load_4_4_4_tiles+opt_softmax"
HELD_BY_8_WARPS = "(BF16, 128, 128, 64, 8): async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
HELD_BY_4_WARPS = "(BF16, 128, 128, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax"


@pytest.mark.parametrize(
    ("short_form", "reason", "facts"),
    [
        (HELD_64_32, "rule 4: .*the documents exclude it: over the threshold of registers", "160 registers, 3 blocks"),
        (STREAMED_64_64, "rule 5: .*the documents exclude it: a check of register use", "168 registers, 3 blocks"),
        (HELD_BY_8_WARPS, "rule 6: .*the documents exclude it: a check of register use", "168 registers, 1 block"),
        (HELD_BY_4_WARPS, "rule 6: ", r"255 registers \(45 more are wanted: it may spill\), 2 blocks"),
    ],
)
def test_a_rule_about_registers_gives_the_documents_reason_and_an_estimate_of_this_config(short_form, reason, facts):
    said = rejection_reason(short_form)
    assert re.fullmatch(f"{reason}.*Estimated before compiling: {facts} per SM on {ARCH}", said)


@pytest.mark.parametrize("short_form", [HELD_64_32, HELD_64_64, STREAMED_64_64, HELD_BY_8_WARPS])
def test_the_estimate_is_near_what_the_compiler_uses(short_form, compiled):
    kernel, estimated = compiled(short_form), estimate(parse_kernel_name_into_config(short_form), ARCH)
    assert abs(estimated.registers - kernel.registers) <= ESTIMATE_TOLERANCE
    assert estimated.blocks_per_sm == occupancy(kernel, ARCH).blocks_per_sm


def test_the_compiler_contradicts_what_the_rules_presume_of_these_configs(compiled):
    """So the reasons are given as the documents', and never as a fact about a config."""
    blocks = {config: occupancy(compiled(config), ARCH).blocks_per_sm for config in (HELD_64_32, HELD_64_64)}
    assert blocks[HELD_64_32] == 3  # rule 4: too many registers for three blocks
    assert blocks[HELD_64_64] < occupancy(compiled(STREAMED_64_64), ARCH).blocks_per_sm  # rule 5 keeps the held
    assert compiled(HELD_BY_8_WARPS).spill_bytes == 0  # rule 6: Q does not fit


def test_an_estimate_counts_what_does_not_fit():
    estimated = estimate(parse_kernel_name_into_config(HELD_BY_4_WARPS), ARCH)
    assert (estimated.operands, estimated.registers, estimated.excess) == (280, 255, 45)


def test_no_estimate_is_made_of_a_config_that_no_kernel_can_be_built_from():
    unbuildable = HELD_64_32.replace("load_0_2_2_tiles", "load_0_2_16_tiles")
    assert rejection_reason(unbuildable).startswith("rule 4: ")
    assert "Estimated" not in rejection_reason(unbuildable)
    with pytest.raises(ValueError, match="V_mma_load_K_tiles: 16"):
        estimate(parse_kernel_name_into_config(unbuildable), ARCH)
