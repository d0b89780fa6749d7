"""The search spaces of the backward: what is considered, what is tried, and the rule against each of the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from flashwright import DType
from flashwright.kernels.family import KernelFamily, Occasion
from flashwright.kernels.registry import (
    families,
    family_of,
    parse_config,
    rejection_reason,
    search_space_of,
    tile_shapes,
)
from flashwright.problem.lengths import LENGTH_BUCKETS

FAMILIES = families("backward")
CASES = [(family, d_head) for family in FAMILIES for d_head in family.d_heads]
IDS = [f"{family.name} {d_head}" for family, d_head in CASES]


def considered(family: KernelFamily, d_head: int) -> list[tuple[object, str | None]]:
    assert family.space is not None
    return list(family.space.configs(DType.BF16, d_head))


@pytest.mark.parametrize(("family", "d_head"), CASES, ids=IDS)
def test_every_config_is_considered_once_and_judged_as_rejection_reason_judges_it(family, d_head):
    configs = considered(family, d_head)
    assert len({config for config, _ in configs}) == len(configs)
    for config, reason in configs[:: max(1, len(configs) // 40)]:
        assert reason == rejection_reason(config)


@pytest.mark.parametrize(("family", "d_head"), CASES, ids=IDS)
def test_every_reason_begins_with_a_listed_rule(family, d_head):
    rules = Counter(reason.partition(": ")[0] for _, reason in considered(family, d_head) if reason is not None)
    assert set(rules) <= set(family.space.rules)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_rule_removes_something_at_some_head_dimension(family):
    reasons = {
        reason.partition(": ")[0] for d_head in family.d_heads for _, reason in considered(family, d_head) if reason
    }
    assert reasons == set(family.space.rules)


@pytest.mark.parametrize(("family", "d_head"), CASES, ids=IDS)
def test_what_is_kept_can_be_built_has_a_promising_part_and_the_default(family, d_head):
    kept = [config for config, reason in considered(family, d_head) if reason is None]
    for config in kept:
        tile_shapes(config)
    assert any(family.space.is_promising(config) for config in kept)
    for causal, length in product((False, True), LENGTH_BUCKETS):
        default = family.default_config(Occasion(DType.BF16, d_head, causal, length, length, None))
        assert default in kept
        assert family.space.is_promising(default)
        assert search_space_of(default) == "default"


def test_persistent_pairs_are_promising_whatever_the_mask():
    pairs = parse_config("hopper backward (BF16, 256, 64, 64, 2): stages_2_1+paired+persistent")
    assert family_of(pairs).space.is_promising(pairs)
    assert search_space_of(pairs) == "default"


def test_searches_try_an_order_where_it_saves_a_kernel_and_no_other():
    for family, d_head in CASES:
        for config, _ in considered(family, d_head):
            assert not config.ordered or config.finishes_dQ
    default = parse_config("ampere backward (BF16, 128, 64, 128, 8): stages_2_1+swizzled")
    assert search_space_of(replace(default, ordered=True)) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("ampere backward (BF16, 128, 64, 128, 8): stages_2_1", "swizzle: without it"),
        ("ampere backward (BF16, 64, 16, 64, 8): stages_1_1+swizzled", "warps: "),
        ("ampere backward (BF16, 256, 64, 64, 4): stages_1_1+swizzled", "registers: "),
        ("hopper backward (BF16, 128, 64, 64, 1): stages_2_2", "consumers: 1 warpgroup"),
        ("hopper backward (BF16, 64, 128, 128, 2): stages_4_4+register_P", "shared memory: "),
        ("hopper backward (BF16, 64, 128, 128, 2): stages_4_3+register_P", "ahead: Q and dO have 80 KiB on the way"),
    ],
)
def test_a_reason_gives_the_rule_and_its_numbers(config, reason):
    assert (rejection_reason(config) or "kept").startswith(reason)
