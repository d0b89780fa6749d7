"""Who holds what, and which parts of chunks attend to each other."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright.distributed.cost import Sizes, Strategy, cost_of
from flashwright.distributed.layouts import Documents, holdings, local_rows
from flashwright.distributed.links import LINKS
from flashwright.distributed.rounds import ALL_GATHER, RING, rounds_of
from flashwright.distributed.strategies import USUAL_MACHINE
from flashwright.distributed.visibility import Mask, needed, packed_launches, pieces, tiles
from flashwright.problem.reference import seen_keys
from flashwright.problem.window import FULL, Window

SIDES = st.one_of(st.none(), st.integers(0, 12))


@st.composite
def starts(draw, length, count):
    inner = sorted(draw(st.integers(0, length)) for _ in range(count - 1))
    return (0, *inner, length)


@st.composite
def problems(draw):
    """Ranks, a mask and the layout of queries and of keys."""
    q_length, kv_length = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    if draw(st.booleans()):
        kv_length = q_length
    sequences = draw(st.integers(1, 4))
    q_starts, kv_starts = draw(starts(q_length, sequences)), draw(starts(kv_length, sequences))
    window = Window(draw(SIDES), draw(SIDES), draw(st.booleans()))
    name = draw(st.sampled_from(["zigzag", "contiguous", "documents"]))
    layouts = (Documents(q_starts), Documents(kv_starts)) if name == "documents" else (name, name)
    ranks = draw(st.integers(1, 5))
    by_rank = tuple(
        holdings(layout, length, ranks) for layout, length in zip(layouts, (q_length, kv_length), strict=True)
    )
    return ranks, Mask(window, q_starts, kv_starts), *by_rank


def attended(mask):
    """[query, key] of the whole: how often a pair is attended to."""
    count = np.zeros((mask.q_starts[-1], mask.kv_starts[-1]), int)
    for (a, b), (c, d) in zip(pairwise(mask.q_starts), pairwise(mask.kv_starts), strict=True):
        count[a:b, c:d] = seen_keys(b - a, d - c, mask.window)
    return count


def positions_of(chunks):
    return np.array([position for chunk in chunks for position in range(*chunk)], int)


@given(problems())
def test_tiles_cover_what_is_attended_once(problem):
    ranks, mask, q_holdings, kv_holdings = problem
    covered = np.zeros_like(attended(mask))
    for rank in range(ranks):
        queries = pieces(q_holdings[rank], mask.q_starts)
        for other in range(ranks):
            keys = needed(queries, pieces(kv_holdings[other], mask.kv_starts), mask)
            sent = [row for piece in keys for row in range(*piece.rows)]
            takes_part = attended(mask)[np.ix_(positions_of(q_holdings[rank]), positions_of(kv_holdings[other]))]
            assert sorted(sent) == np.flatnonzero(takes_part.any(axis=0)).tolist(), "a key that no query needs"
            for tile in tiles(queries, keys, mask):
                seen = seen_keys(tile.rows.length, tile.keys.length, tile.window)
                rows = positions_of(q_holdings[rank])[tile.rows.slice]
                covered[np.ix_(rows, positions_of(kv_holdings[other])[tile.keys.slice])] += seen
                assert seen.sum() == tile.scores
                assert min(tile.window.left or 0, tile.window.right or 0) >= 0
                assert seen.any(axis=1).all() and seen.any(axis=0).all(), "a row or key that takes no part"
    np.testing.assert_array_equal(covered, attended(mask))


@given(problems())
def test_packed_launches_compute_what_their_tiles_do(problem):
    ranks, mask, q_holdings, kv_holdings = problem
    for rank in range(ranks):
        queries = pieces(q_holdings[rank], mask.q_starts)
        keys = needed(queries, pieces(kv_holdings[rank], mask.kv_starts), mask)
        parts = tiles(queries, keys, mask)
        shape = (len(positions_of(q_holdings[rank])), len(positions_of(kv_holdings[rank])))
        expected, packed = np.zeros(shape, int), np.zeros(shape, int)
        for tile in parts:
            expected[tile.rows.slice, tile.keys.slice] += seen_keys(tile.rows.length, tile.keys.length, tile.window)
        launches = packed_launches(parts)
        for launch in launches:
            here = packed[launch.rows.slice, launch.keys.slice]
            q_starts = launch.q_starts or (0, launch.rows.length)
            kv_starts = launch.kv_starts or (0, launch.keys.length)
            assert (q_starts[-1], kv_starts[-1]) == (launch.rows.length, launch.keys.length)
            for (a, b), (c, d) in zip(pairwise(q_starts), pairwise(kv_starts), strict=True):
                here[a:b, c:d] += seen_keys(b - a, d - c, launch.window)
        np.testing.assert_array_equal(packed, expected)
        assert len(launches) <= len(parts)


def test_packed_sequences_of_one_rank_share_a_launch():
    starts = tuple(range(0, 3201, 100))
    by_rank = holdings("contiguous", 3200, 4)
    mask = Mask(Window(None, 0), starts, starts)
    (local, *_) = rounds_of(RING, 1, by_rank, by_rank, mask, 1)
    assert len(local.tiles) == 8
    assert len(packed_launches(local.tiles)) == 1


@given(problems(), st.sampled_from([RING, ALL_GATHER]))
def test_what_a_rank_sends_is_what_others_expect(problem, strategy):
    ranks, mask, q_holdings, kv_holdings = problem
    all_rounds = [rounds_of(strategy, rank, q_holdings, kv_holdings, mask, 4, 2) for rank in range(ranks)]
    for a in range(ranks):
        for b in range(ranks):
            sent = [(t.rows, each.heads) for each in all_rounds[a] for t in each.sends if t.rank == b]
            expected = [(t.rows, each.heads) for each in all_rounds[b] for t in each.receives if t.rank == a]
            assert sent == expected


@given(st.integers(0, 60), st.integers(1, 9), st.sampled_from(["zigzag", "contiguous"]))
def test_shares_differ_by_few_rows(length, ranks, layout):
    rows = [local_rows(chunks) for chunks in holdings(layout, length, ranks)]
    assert sum(rows) == length
    assert max(rows) - min(rows) <= 2


def test_zigzag_shares_the_work_of_a_causal_mask_equally():
    mask = Mask(Window(None, 0), (0, 64_000), (0, 64_000))
    for layout, least, most in (("zigzag", 0.99, 1.01), ("contiguous", 0.1, 1.9)):
        by_rank = holdings(layout, 64_000, 8)
        work = [sum(each.scores for each in rounds_of(RING, rank, by_rank, by_rank, mask, 1)) for rank in range(8)]
        assert least < min(work) / (sum(work) / 8) < most
        assert layout == "zigzag" or max(work) > 1.8 * sum(work) / 8


def test_documents_share_the_work_of_every_document_equally():
    starts = (0, 1000, 9000, 9100, 16_000)
    by_rank = holdings(Documents(starts), 16_000, 4)
    mask = Mask(Window(None, 0), starts, starts)
    work = [sum(each.scores for each in rounds_of(RING, rank, by_rank, by_rank, mask, 1)) for rank in range(4)]
    assert max(work) < 1.02 * min(work)


def test_a_round_of_zigzag_is_one_launch():
    by_rank = holdings("zigzag", 4096, 4)
    mask = Mask(Window(None, 0), (0, 4096), (0, 4096))
    for rank in range(4):
        first, *others = rounds_of(RING, rank, by_rank, by_rank, mask, 1)
        (own,) = first.tiles  # an early chunk and a late one are a causal sequence of their own
        assert (own.rows, own.keys, own.window) == ((0, 1024), (0, 1024), Window(None, 0, bottom_right=False))
        assert [len(each.tiles) for each in others] == [1] * 3
        assert all(tile.window == FULL for each in others for tile in each.tiles)


def test_an_all_gather_of_contiguous_shards_is_one_launch_of_each_step():
    by_rank = holdings("contiguous", 4096, 4)
    mask = Mask(Window(None, 0), (0, 4096), (0, 4096))
    for rank in range(4):
        rounds = rounds_of(ALL_GATHER, rank, by_rank, by_rank, mask, 8, 4)
        assert [len(each.tiles) for each in rounds] == [1] * 4


def test_keys_that_a_window_hides_are_not_sent():
    by_rank = holdings("contiguous", 8000, 8)
    mask = Mask(Window(99, 0), (0, 8000), (0, 8000))
    for rank in range(8):
        rounds = rounds_of(RING, rank, by_rank, by_rank, mask, 1)
        assert sum(each.received_rows for each in rounds) == (99 if rank else 0)
        assert sum(bool(each.receives) for each in rounds) == (1 if rank else 0)


def test_packed_sequences_of_one_rank_need_no_messages():
    starts = tuple(range(0, 801, 100))
    by_rank = holdings("contiguous", 800, 8)
    mask = Mask(FULL, starts, starts)
    rounds = [each for rank in range(8) for each in rounds_of(RING, rank, by_rank, by_rank, mask, 1)]
    assert not any(each.receives or each.sends for each in rounds)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("striped", "'striped' is not known"),
        ([[(0, 4)], [(4, 9)]], "the chunks end at 9; the sequence has 10"),
        ([[(0, 5)], [(4, 10)]], r"\(4, 10\) does not begin where the one before it ends, 5"),
        ([[(0, 10)]], "chunks of 1 ranks were given; there are 2"),
        (Documents((0, 4, 9)), "from 0 to the whole length, 10"),
    ],
)
def test_a_layout_assigns_every_position_once(layout, message):
    with pytest.raises(ValueError, match=message):
        holdings(layout, 10, 2)


def test_a_ring_hides_messages_that_take_less_than_the_computation():
    mask = Mask(FULL, (0, 2**17), (0, 2**17))
    by_rank = holdings("contiguous", 2**17, 8)
    sizes = Sizes(1, 32, 8, 128)
    ring = cost_of(Strategy(RING, 8, 1), by_rank, by_rank, mask, sizes, USUAL_MACHINE, LINKS["nvlink"])
    assert ring.forward.time_s == pytest.approx(ring.forward.compute_s, rel=1e-6)
    assert 0 < ring.forward.communication_s < ring.forward.compute_s
    slow = cost_of(Strategy(RING, 8, 1), by_rank, by_rank, mask, sizes, USUAL_MACHINE, LINKS["gloo"])
    assert slow.forward.time_s > slow.forward.communication_s > slow.forward.compute_s
