"""What the compiler makes of the backward kernels: registers, spills, products that do not wait for one another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashwright import AttentionVariant, compile_kernel
from flashwright.kernels.backward.hopper import HOPPER_BACKWARD
from flashwright.kernels.backward.launch import DQ, ROWS
from flashwright.kernels.family import Occasion
from flashwright.kernels.registry import families
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import LONG, LONGEST, MEDIUM
from flashwright.problem.variant import PLAIN
from flashwright.runtime.compiling import compile_companion
from flashwright.workbench.explain.gather import SERIALISED

BEARABLE_SPILL_BYTES = 64
"""Of a few addresses and counters."""
BEARABLE_OF_PAIRS = 128
"""Where dK and dV take 128 of a thread's registers, S and dP and dQ 64 more, in each of two warpgroups."""
BEARABLE_BETWEEN_TILES = HOPPER_BACKWARD.space.bearable_spill_bytes
"""Of what a persistent thread block keeps from tile to tile, outside of the loop over queries."""
LARGEST = AttentionVariant(
    masks_left=True, masks_right=True, softcaps=True, grouped_heads=True, variable_lengths=True, head_dim=56
)
VARIANTS = {
    "full": PLAIN,
    "causal": AttentionVariant(masks_right=True),
    "left": AttentionVariant(masks_left=True),
    "window": AttentionVariant(masks_left=True, masks_right=True),
    "capped": AttentionVariant(masks_right=True, softcaps=True),
    "grouped": AttentionVariant(grouped_heads=True),
    "packed": AttentionVariant(masks_left=True, masks_right=True, variable_lengths=True),
    "padded": AttentionVariant(head_dim=56),
    "all at once": LARGEST,
}


def default_of(family: str, d_head: int, *, causal: bool = False, length: str = LONG, ordered: bool = False) -> Any:
    (found,) = (each for each in families("backward") if each.name == family)
    occasion = Occasion(DType.BF16, d_head, causal, length, length, None, ordered=ordered)
    config: Any = found.default_config(occasion)
    return replace(config, ordered=True) if ordered else config


def bearable(config: Any) -> int:
    if getattr(config, "persistent", False):
        return BEARABLE_BETWEEN_TILES
    return BEARABLE_OF_PAIRS if getattr(config, "paired", False) else BEARABLE_SPILL_BYTES


def check_kernel(config: Any, arch: str, variant: AttentionVariant) -> None:
    kernel = compile_kernel(config, arch, variant)
    assert kernel.spill_bytes <= bearable(config)
    assert SERIALISED not in kernel.program.log and "C75" not in kernel.program.log


def targets(family: str) -> tuple[str, ...]:
    return ("sm_90a",) if family == "hopper" else ("sm_80", "sm_90")


def test_steps_of_grouped_heads_take_no_division():
    config = default_of("ampere", 64)
    grouped, alone = (compile_kernel(config, "sm_90", VARIANTS[name]).ptx for name in ("grouped", "full"))
    assert all(grouped.count(f"{division}.") == alone.count(f"{division}.") for division in ("div", "rem"))


DEFAULTS = [(family.name, d_head) for family in families("backward") for d_head in family.d_heads]


@pytest.mark.parametrize(
    ("family", "d_head", "variant"),
    [
        ("ampere", 64, PLAIN),
        ("ampere", 128, PLAIN),
        ("hopper", 64, LARGEST),
        ("hopper", 128, PLAIN),
        ("hopper", 128, VARIANTS["causal"]),
        ("hopper", 256, PLAIN),
    ],
)
def test_defaults_spill_next_to_nothing_and_products_do_not_wait_for_one_another(family, d_head, variant):
    for arch in targets(family):
        check_kernel(default_of(family, d_head, causal=variant.masks_right), arch, variant)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "d_head"), DEFAULTS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ordered"])
@pytest.mark.parametrize("length", [MEDIUM, LONG, LONGEST])
def test_every_variant_of_every_default_spills_next_to_nothing(family, d_head, variant, ordered, length):
    config = default_of(family, d_head, causal=variant.masks_right, length=length, ordered=ordered)
    for arch in targets(family):
        check_kernel(config, arch, variant)


def test_the_kernels_before_and_after_keep_many_threads_busy():
    """They move data; few registers let many of their blocks share a multiprocessor."""
    for name in (ROWS, DQ):
        kernel = compile_companion(default_of("hopper", 128), name)
        assert (kernel.threads, kernel.shared_bytes, kernel.spill_bytes) == (128, 0, 0)
        assert kernel.registers <= 64


def test_registers_are_given_to_the_consumers():
    shapes = HOPPER_BACKWARD.shapes(config := default_of("hopper", 128))
    ptx = compile_kernel(config).ptx
    assert f"setmaxnreg.dec.sync.aligned.u32 {shapes.producer_registers};" in ptx
    assert f"setmaxnreg.inc.sync.aligned.u32 {shapes.consumer_registers};" in ptx
