"""Kinds of scores: what float64 says of the scores of 16-bit inputs is what the kind's name promises."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from flashwright.workbench.bench.scores import (
    ALL,
    HEIGHT_COORDINATES,
    KINDS,
    NORMAL,
    chosen_scores,
    head_spreads,
    own_keys,
    score_inputs,
    score_kind,
)

D_HEADS = (32, 72, 256)
DTYPES = (torch.float16, torch.bfloat16)
LENGTH = 192


def inputs_of(kind: str, d_head: int = 64, dtype: object = torch.bfloat16, **changes: object):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": LENGTH} | changes
    return score_inputs(kind, d_head=d_head, dtype=dtype, **sizes)


def scores_of(q, k, coordinates: slice = slice(None)):
    """(batch, heads, rows, keys) in float64, of all coordinates or of some."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q[..., coordinates].double() @ k[..., coordinates].double().mT / math.sqrt(q.shape[-1])


def heights_of(q, k):
    """What keys have over each other in the scores of every row: (batch, heads, keys)."""
    scores = scores_of(q, k, slice(0, HEIGHT_COORDINATES))
    assert (scores == scores[:, :, :1]).all()
    return scores[:, :, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "d_head"), [(torch.float16, 32), (torch.bfloat16, 256)], ids=str)
def test_every_kind_is_finite_repeatable_and_stored_rows_first(kind, dtype, d_head):
    first, second = (inputs_of(kind, d_head, dtype, q_length=48) for _ in range(2))
    other = inputs_of(kind, d_head, dtype, q_length=48, seed=1)
    assert [tuple(x.shape) for x in first] == [(2, 4, 48, d_head), *[(2, 2, 48, d_head)] * 2]
    for x, again, changed in zip(first, second, other, strict=True):
        assert x.dtype == dtype
        assert x.isfinite().all()
        assert x.transpose(1, 2).is_contiguous()
        assert torch.equal(x, again)
        assert not torch.equal(x, changed) or not x.any()
    assert first[2].double().std() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", ["rising-fast", "falling-fast", "late-peak"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_steepest_kinds_are_finite_over_the_longest_sequences(kind, dtype):
    q, k, _ = inputs_of(kind, 256, dtype, q_length=1, kv_length=32_768, batch=1, heads=1, kv_heads=1)
    assert q.isfinite().all()
    assert k.isfinite().all()


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_any_number_of_heads_and_more_keys_than_rows_or_fewer(kind, heads):
    for rows, keys in ((7, 50), (50, 7), (1, 1)):
        q, k, v = inputs_of(kind, 32, batch=1, heads=heads, kv_heads=1, q_length=rows, kv_length=keys)
        assert (q.shape, k.shape, v.shape) == ((1, heads, rows, 32), (1, 1, keys, 32), (1, 1, keys, 32))


@pytest.mark.parametrize(
    ("kind", "spread"), [(NORMAL, 1), ("normal-x2", 2), ("normal-x4", 4), ("normal-x6", 6), ("normal-x10", 10)]
)
def test_scores_of_scaled_queries_have_that_spread(kind, spread):
    q, k, _ = inputs_of(kind)
    assert scores_of(q, k).std().item() == pytest.approx(spread, rel=0.03)


@pytest.mark.parametrize("d_head", D_HEADS)
@pytest.mark.parametrize(("kind", "height"), [("sink", 12), ("early-peak", 64)])
def test_the_first_key_stands_above_a_normal_rest(kind, height, d_head):
    q, k, _ = inputs_of(kind, d_head)
    heights = heights_of(q, k)
    assert heights[..., 0].sub(height).abs().max() < 1e-3
    assert (heights[..., 1:] == 0).all()
    assert scores_of(q, k)[..., 1:].std().item() == pytest.approx(1, rel=0.1)
    assert (scores_of(q, k).argmax(-1) == 0).double().mean() > 0.99


@pytest.mark.parametrize(
    ("dtype", "d_head"), [(torch.float16, 40), (torch.bfloat16, 64), (torch.bfloat16, 256)], ids=str
)
@pytest.mark.parametrize(
    ("kind", "slope"),
    [("rising-slow", 1 / 64), ("rising", 1 / 8), ("rising-fast", 1), ("falling-slow", -1 / 64), ("falling", -1 / 8),
     ("falling-fast", -1)],
)  # fmt: skip
def test_sloping_scores_change_by_the_same_amount_from_every_key_to_the_next(kind, slope, dtype, d_head):
    q, k, _ = inputs_of(kind, d_head, dtype, q_length=2, kv_length=16_384, batch=1, heads=1, kv_heads=1)
    steps = heights_of(q, k).diff(dim=-1)
    assert (steps.sign() == math.copysign(1, slope)).all()
    assert steps.sub(slope).abs().max() < 0.01 * abs(slope)
    assert scores_of(q, k, slice(HEIGHT_COORDINATES, None)).std().item() == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize(("kind", "sign"), [("rising-fast", 1), ("falling-fast", -1)])
def test_maxima_of_blocks_grow_at_every_step_of_one_order_of_visiting(kind, sign):
    q, k, _ = inputs_of(kind)
    maxima = scores_of(q, k).unflatten(-1, (-1, 64)).amax(-1)
    assert (maxima.diff(dim=-1) * sign > 32).all()


@pytest.mark.parametrize("d_head", D_HEADS)
def test_a_late_peak_is_the_largest_score_of_a_row_with_and_without_a_causal_mask(d_head):
    q, k, _ = inputs_of("late-peak", d_head)
    scores = scores_of(q, k)
    assert (scores.argmax(-1) == LENGTH - 1).all()
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    largest = scores.masked_fill(hidden, -math.inf).argmax(-1)
    assert (largest == own_keys(q, k)).all()


def test_waves_come_back_to_the_same_height():
    q, k, _ = inputs_of("waves", q_length=2, kv_length=4096)
    heights = heights_of(q, k)
    assert heights.amax().item() == pytest.approx(16, rel=1e-3)
    assert heights.amin().item() == pytest.approx(-16, rel=1e-3)
    assert (heights[..., 1024:] - heights[..., :-1024]).abs().max() < 1e-2


def test_outlier_keys_are_one_in_64_and_far_above_in_every_head():
    q, k, _ = inputs_of("outlier-keys", 32, kv_length=8192, q_length=2, kv_heads=4)
    heights = heights_of(q, k)
    raised = heights > 1
    assert raised.double().mean(-1).flatten().tolist() == pytest.approx([1 / 64] * 8, rel=0.4)
    assert ((heights[raised] > 7.9) & (heights[raised] < 24.1)).all()
    assert heights[~raised].abs().max() == 0
    assert not (raised == raised[:1, :1]).all()


def test_outlier_rows_are_one_in_64_with_ten_times_the_spread():
    q, k, _ = inputs_of("outlier-rows", 128, q_length=2048, kv_length=64)
    spreads = scores_of(q, k).std(-1)
    far = spreads > 4
    assert far.double().mean().item() == pytest.approx(1 / 64, rel=0.3)
    assert spreads[far].mean().item() == pytest.approx(10, rel=0.1)
    assert spreads[~far].mean().item() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_every_head_has_another_spread(heads):
    q, k, _ = inputs_of("mixed-heads", heads=heads, kv_heads=1)
    spreads = scores_of(q, k).std(dim=(0, 2, 3))
    assert spreads.tolist() == pytest.approx(head_spreads(heads).tolist(), rel=0.1)
    if heads > 1:
        assert (head_spreads(heads)[0].item(), head_spreads(heads)[-1].item()) == pytest.approx((0.25, 10))


def test_equal_scores_are_equal():
    q, k, _ = inputs_of("equal")
    assert (scores_of(q, k) == 0).all()


@pytest.mark.parametrize("d_head", D_HEADS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_of_one_hot_attends_nearly_to_one_key(causal, d_head):
    q, k, _ = inputs_of("one-hot", d_head)
    scores = scores_of(q, k)
    if causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -math.inf)
    weights = scores.softmax(-1).amax(-1)
    assert (weights > 0.9).double().mean() > 0.99
    assert scores.argmax(-1).flatten().unique().numel() > LENGTH / 4


def test_kinds_are_chosen_by_name_each_once():
    assert chosen_scores(["sink, normal", "sink"]) == ("sink", NORMAL)
    assert chosen_scores([ALL]) == tuple(KINDS)
    assert chosen_scores(["equal", ALL])[:2] == ("equal", NORMAL)
    with pytest.raises(ValueError, match="scores: 'sinks' is not known; did you mean 'sink'"):
        score_kind("sinks")


def test_every_kind_says_in_one_line_what_it_is():
    assert all(kind.meaning and "\n" not in kind.meaning and not kind.meaning.endswith(".") for kind in KINDS.values())
