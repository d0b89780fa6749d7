"""`flash_attn_with_kvcache`: the reference against plain loops, plans and kernels against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cache_cases import CallsOfAKind, int32, random_problem, some
from simulating_gpu import SimulatingGPU

from flashwright import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flashwright.integrations import kv_cache
from flashwright.kernels.registry import parse_config
from flashwright.operators.ragged_append import append_ragged
from flashwright.operators.wide_heads import decode_wide
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.decode_plans import CacheTensors, DecodeKind, NewRows

CONFIG = "ampere decode (BF16, 64, 16, 16, 4): rows_1+stages_2+blocks_1+swizzled"


def naive(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """Of one sequence: (rows, heads, head_dim) and (keys, kv_heads, head_dim)."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        for row in range(q.shape[0]):
            last = k.shape[0] - q.shape[0] + row + 1 if causal else k.shape[0]
            if last <= 0:
                continue
            scores = k[:last, head // group] @ q[row, head] / math.sqrt(q.shape[2])
            out[row, head] = torch.softmax(scores, 0) @ v[:last, head // group]
    return out


def turned(x: Any, position: int, cosines: Any, sines: Any, interleaved: bool) -> Any:
    """One row of one head, pair by pair."""
    y, half = x.clone(), cosines.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cosine, sine = cosines[position, i], sines[position, i]
        y[a], y[b] = x[a] * cosine - x[b] * sine, x[b] * cosine + x[a] * sine
    return y


# --- The reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", (False, True))
def test_a_cache_is_read_up_to_each_sequences_length(causal):
    q, k, v = some(3, 2, 4, 16, seed=1), some(3, 9, 2, 16, seed=2), some(3, 9, 2, 16, seed=3)
    lengths = (9, 1, 4)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(*lengths), causal=causal, return_softmax_lse=True)
    for b, n in enumerate(lengths):
        torch.testing.assert_close(out[b], naive(q[b], k[b, :n], v[b, :n], causal=causal))
    assert lse.shape == (3, 4, 2)
    assert (lse[1, :, 0] == -math.inf).all() == causal, "of two rows on one key, the first is before it"


@pytest.mark.parametrize("name", ("block_table", "page_table"))
def test_pages_are_found_by_either_name_of_their_table(name):
    k, v, q = some(6, 16, 1, 8, seed=1), some(6, 16, 1, 8, seed=2), some(2, 1, 2, 8, seed=3)
    table = int32(5, 0, 3, 2).view(2, 2)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(20, 32), **{name: table})
    for b, n in enumerate((20, 32)):
        keys, values = (torch.cat([x[int(page)] for page in table[b]])[:n] for x in (k, v))
        torch.testing.assert_close(out[b], naive(q[b], keys, values))


def test_a_tables_rows_may_be_named_by_cache_batch_idx():
    k, v, q = some(6, 16, 1, 8, seed=1), some(6, 16, 1, 8, seed=2), some(2, 1, 2, 8, seed=3)
    table, index = int32(5, 0, 3, 2, 1, 4).view(3, 2), int32(2, 0)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(20, 32), block_table=table, cache_batch_idx=index)
    expected = flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(20, 32), block_table=table[index])
    assert torch.equal(out, expected)


def test_pages_that_hold_keys_are_checked_and_others_are_not():
    k, q = some(2, 16, 1, 8), some(1, 1, 2, 8)
    table = int32(1, 9).view(1, 2)
    assert flash_attn_with_kvcache(q, k, k, cache_seqlens=16, block_table=table).isfinite().all()
    with pytest.raises(ValueError, match=r"block_table: from 1 to 9; allowed: 0 to 1"):
        flash_attn_with_kvcache(q, k, k, cache_seqlens=17, block_table=table)
    with pytest.raises(ValueError, match=r"block_table: from 1 to 9; allowed: 0 to 1"):
        flash_attn_with_kvcache(q, k, k, q[:, :, :1], q[:, :, :1], cache_seqlens=16, block_table=table)


@pytest.mark.parametrize("integers", (torch.int64, torch.int32))
def test_numbers_may_be_of_either_integer_type(integers):
    q, k = some(4, 2, 8), some(3, 20, 1, 8, seed=1)
    starts, lengths, index = (int32(*x).to(integers) for x in ((0, 1, 4), (9, 20), (2, 0)))
    out = flash_attn_with_kvcache(
        q, k, k, cache_seqlens=lengths, cache_batch_idx=index, cu_seqlens_q=starts, max_seqlen_q=3, causal=True
    )
    torch.testing.assert_close(out[:1], naive(q[:1], k[2, :9], k[2, :9], causal=True))
    torch.testing.assert_close(out[1:], naive(q[1:], k[0], k[0], causal=True))


def test_arguments_of_the_third_generation_that_say_nothing_change_nothing():
    q, k = some(2, 1, 2, 8), some(2, 20, 1, 8, seed=1)
    expected = flash_attn_with_kvcache(q, k, k, cache_seqlens=7)
    out = flash_attn_with_kvcache(
        q, k, k, cache_seqlens=7, rotary_seqlens=int32(7, 7), num_splits=3, pack_gqa=True, sm_margin=8,
        scheduler_metadata=int32(1), attention_chunk=0,
    )  # fmt: skip
    assert torch.equal(out, expected)


def test_new_keys_are_written_behind_those_that_are_there_and_nothing_else_is():
    k, v, q = some(2, 8, 1, 8, seed=1), some(2, 8, 1, 8, seed=2), some(2, 3, 1, 8, seed=3)
    new_k, new_v = some(2, 3, 1, 8, seed=4), some(2, 3, 1, 8, seed=5)
    expected = k.clone()
    expected[0, 2:5], expected[1, 5:8] = new_k[0], new_k[1]
    out = flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=int32(2, 5), causal=True)
    assert torch.equal(k, expected)
    for b, n in enumerate((5, 8)):
        torch.testing.assert_close(out[b], naive(q[b], k[b, :n], v[b, :n], causal=True))


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("causal", (False, True))
def test_rotary_embeddings_turn_new_keys_and_queries(interleaved, causal):
    q, k, v = some(1, 2, 1, 24, seed=1), some(1, 8, 1, 24, seed=2), some(1, 8, 1, 24, seed=3)
    new_k, new_v = some(1, 2, 1, 24, seed=4), some(1, 2, 1, 24, seed=5)
    angles = some(10, 8, seed=6)
    cosines, sines = angles.cos(), angles.sin()
    out = flash_attn_with_kvcache(
        q, k, v, new_k, new_v, cosines, sines, cache_seqlens=3, causal=causal, rotary_interleaved=interleaved
    )
    for i in range(2):
        expected = turned(new_k[0, i, 0], 3 + i, cosines, sines, interleaved)
        torch.testing.assert_close(k[0, 3 + i, 0], expected)
    queries = torch.stack([turned(q[0, i, 0], 3 + (i if causal else 0), cosines, sines, interleaved) for i in (0, 1)])
    torch.testing.assert_close(out[0], naive(queries[:, None], k[0, :5], v[0, :5], causal=causal))


def test_left_padding_indices_and_ragged_queries():
    k, v, q = some(4, 8, 1, 8, seed=1), some(4, 8, 1, 8, seed=2), some(5, 2, 8, seed=3)
    out = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=int32(6, 8, 3), cache_leftpad=int32(2, 0, 1), cache_batch_idx=int32(3, 0, 2),
        cu_seqlens_q=int32(0, 2, 2, 5), max_seqlen_q=3,
    )  # fmt: skip
    torch.testing.assert_close(out[:2], naive(q[:2], k[3, 2:6], v[3, 2:6]))
    torch.testing.assert_close(out[2:], naive(q[2:], k[2, 1:3], v[2, 1:3]))


def test_packed_queries_attend_to_pages():
    k, v, q = some(5, 16, 1, 8, seed=1), some(5, 16, 1, 8, seed=2), some(5, 2, 8, seed=3)
    table = int32(4, 0, 1, 2).view(2, 2)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, int32(0, 2, 5), int32(0, 20, 52), 3, 32, causal=True, block_table=table, return_attn_probs=True
    )
    for rows, pages, n in ((slice(0, 2), (4, 0), 20), (slice(2, 5), (1, 2), 32)):
        keys, values = (torch.cat([x[page] for page in pages])[:n] for x in (k, v))
        torch.testing.assert_close(out[rows], naive(q[rows], keys, values, causal=True))
    assert lse.shape == (2, 5)


def test_packed_sequences_of_packed_tensors():
    qkv, starts = some(9, 3, 2, 8), int32(0, 4, 9)
    expected = flash_attn_varlen_func(*qkv.unbind(1), starts, starts, 5, 5, causal=True)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, starts, 5, causal=True), expected)
    q, kv = qkv[:, 0], qkv[:, 1:]
    assert torch.equal(flash_attn_varlen_kvpacked_func(q, kv, starts, starts, 5, 5, causal=True), expected)
    for call in (
        lambda: flash_attn_varlen_qkvpacked_func(kv, starts, 5),
        lambda: flash_attn_varlen_kvpacked_func(q, qkv, starts, starts, 5, 5),
    ):
        with pytest.raises(ValueError, match=r"kv: shape \(9, \d, 2, 8\) is not allowed; allowed: "):
            call()


def rotary_tables(positions: int) -> dict[str, Any]:
    angles = some(positions, 8, seed=6)
    return {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}


@pytest.mark.parametrize("paged", (False, True))
@pytest.mark.parametrize("rotary", (False, True))
@pytest.mark.parametrize("causal", (False, True))
def test_new_keys_may_be_of_different_numbers(causal, rotary, paged):
    """Each sequence as it is alone."""
    lengths = (5, 9, 29)
    caches = (
        [some(7, 16, 2, 24, seed=seed) for seed in (1, 2)] if paged else [some(3, 32, 2, 24, seed=s) for s in (1, 2)]
    )
    alone = [x.clone() for x in caches]
    q, k, v = some(4, 4, 24, seed=3), some(5, 2, 24, seed=4), some(5, 2, 24, seed=5)
    table = int32(6, 2, 0, 4, 3, 5).view(3, 2)
    options: dict[str, Any] = {"causal": causal, **(rotary_tables(40) if rotary else {})}
    out = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=int32(*lengths), cu_seqlens_k_new=int32(0, 2, 2, 5),
        cu_seqlens_q=int32(0, 2, 3, 4), max_seqlen_q=2, block_table=table if paged else None, **options,
    )  # fmt: skip
    for b, (rows, new) in enumerate(((slice(0, 2), slice(0, 2)), (slice(2, 3), None), (slice(3, 4), slice(2, 5)))):
        given = {} if new is None else {"k": k[new][None], "v": v[new][None], **options}
        index = {"block_table": table[b : b + 1]} if paged else {"cache_batch_idx": int32(b)}
        queries = q[rows][None]
        if new is None and rotary:
            tables = options["rotary_cos"], options["rotary_sin"]
            queries = torch.stack([turned(head, lengths[b], *tables, True) for head in queries[0, 0]])[None, None]
        expected = flash_attn_with_kvcache(
            queries, *alone, cache_seqlens=int32(lengths[b]), causal=causal, **index,
            **{name: value for name, value in given.items() if name != "causal"},
        )  # fmt: skip
        torch.testing.assert_close(out[rows], expected[0])
    for written, wanted in zip(caches, alone, strict=True):
        torch.testing.assert_close(written, wanted)


def test_rotations_may_be_counted_from_elsewhere():
    q, k, v = some(2, 1, 2, 24, seed=1), some(2, 8, 2, 24, seed=2), some(2, 8, 2, 24, seed=3)
    new_k, new_v = some(2, 1, 2, 24, seed=4), some(2, 1, 2, 24, seed=5)
    tables = rotary_tables(30)
    flash_attn_with_kvcache(
        q, k, v, new_k, new_v, **tables, cache_seqlens=int32(3, 7), rotary_seqlens=int32(20, 11), causal=True
    )
    for b, (place, position) in enumerate(((3, 20), (7, 11))):
        expected = turned(new_k[b, 0, 1], position, tables["rotary_cos"], tables["rotary_sin"], True)
        torch.testing.assert_close(k[b, place, 1], expected)
        torch.testing.assert_close(v[b, place], new_v[b, 0])


@pytest.mark.parametrize("lengths", ((5, 100), (100, 100), (-4, 2)))
def test_ragged_keys_that_do_not_fit_are_not_written(lengths):
    """As on a GPU, where the host does not know lengths."""
    k_cache, v_cache = (some(2, 2, 8, 24, seed=seed) for seed in (1, 2))
    before = [k_cache.clone(), v_cache.clone()]
    new = NewRows(some(1, 2, 4, 24, seed=3), some(1, 2, 4, 24, seed=4))
    cache = CacheTensors(int32(*lengths))
    append_ragged(some(2, 2, 1, 24), k_cache, v_cache, cache, new, int32(0, 2, 3), None)
    for written, old, rows in zip((k_cache, v_cache), before, (new.k, new.v), strict=True):
        for b, row, place in ((0, 0, lengths[0]), (0, 1, lengths[0] + 1), (1, 2, lengths[1])):
            if 0 <= place < 8:
                old[b, :, place] = rows[0, :, row]
        assert torch.equal(written, old)


def test_ragged_queries_may_be_rotated_with_dense_new_keys():
    q, k, new = some(3, 2, 16, seed=1), some(2, 9, 1, 16, seed=2), some(2, 1, 1, 16, seed=3)
    angles = some(9, 8, seed=4)
    tables, lengths = (angles.cos(), angles.sin()), int32(4, 6)
    caches = [k.clone(), k.clone()]
    arguments = {"cache_seqlens": lengths, "causal": True, "cu_seqlens_q": int32(0, 1, 3), "max_seqlen_q": 2}
    out = flash_attn_with_kvcache(q, *caches, new, new, *tables, **arguments)
    for b, rows in enumerate((slice(0, 1), slice(1, 3))):
        own = [k[b : b + 1].clone() for _ in range(2)]
        new_rows = new[b : b + 1]
        expected = flash_attn_with_kvcache(
            q[None, rows], *own, new_rows, new_rows, *tables, cache_seqlens=lengths[b : b + 1], causal=True
        )
        torch.testing.assert_close(out[rows], expected[0])
        for written, wanted in zip(caches, own, strict=True):
            torch.testing.assert_close(written[b], wanted[0])


def test_the_output_may_be_given():
    q, k = some(1, 1, 2, 8), some(1, 4, 2, 8)
    out = torch.full_like(q, math.nan)
    assert flash_attn_with_kvcache(q, k, k, out=out).data_ptr() == out.data_ptr()
    assert out.isfinite().all()


@pytest.mark.parametrize(("head_dim", "value_head_dim"), ((59, 59), (24, 16), (16, 24), (13, 7), (300, 200), (8, 264)))
def test_any_head_dimensions_of_keys_and_values(head_dim, value_head_dim):
    q, k, v = some(2, 2, 4, head_dim), some(2, 9, 2, head_dim, seed=1), some(2, 9, 2, value_head_dim, seed=2)
    new_k, new_v = some(2, 1, 2, head_dim, seed=3), some(2, 1, 2, value_head_dim, seed=4)
    expected = [x.clone() for x in (k, v)]
    for cache, rows in zip(expected, (new_k, new_v), strict=True):
        cache[0, 3], cache[1, 8] = rows[:, 0]
    given = torch.full((2, 2, 4, value_head_dim), math.nan, dtype=torch.float64)
    out = flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=int32(3, 8), causal=True, out=given)
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])
    assert out.data_ptr() == given.data_ptr()
    for b, n in enumerate((4, 9)):
        for head in range(4):
            scores = q[b, :, head] @ k[b, :n, head // 2].T / math.sqrt(head_dim)
            scores[0, n - 1] = -math.inf
            torch.testing.assert_close(out[b, :, head], torch.softmax(scores, -1) @ v[b, :n, head // 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"cache_seqlens": 9}, r"cache_seqlens: 9 is not allowed; allowed: 0 to 8"),
        ({"cache_seqlens": int32(9)}, r"cache_seqlens: from 9 to 9; allowed: 0 to 8"),
        ({"cache_seqlens": [1]}, r"cache_seqlens: expected an int32 tensor, got list"),
        ({"cache_seqlens": int32(1, 2)}, r"cache_seqlens: shape \(2,\) is not allowed"),
        ({"k": some(1, 1, 1, 8)}, r"k and v: give both of them"),
        ({"k": some(1, 1, 1, 8), "v": some(1, 1, 1, 8)}, r"cache_seqlens: needed with k and v"),
        ({"k": some(1, 1, 2, 8), "v": some(1, 1, 2, 8), "cache_seqlens": 1}, r"k: \(1, 1, 2, 8\) .* is not allowed"),
        ({"rotary_cos": some(4, 4)}, r"rotary_cos and rotary_sin: give both"),
        ({"block_table": int32(0).view(1, 1)}, r"pages of 8 rows are not allowed; allowed: multiples of 16"),
        ({"alibi_slopes": some(2)}, r"alibi_slopes: not supported"),
        ({"qv": some(2), "attention_chunk": 3}, r"qv, attention_chunk: not supported"),
        ({"cu_seqlens_k_new": int32(0, 1)}, r"cu_seqlens_k_new: says something of k and v, which are not given"),
        ({"cache_batch_idx": int32(1)}, r"cache_batch_idx: from 1 to 1; allowed: 0 to 0"),
        ({"cu_seqlens_q": int32(0, 1)}, r"q: shape \(1, 1, 2, 8\) is not allowed; allowed: \(rows, heads, head_dim\)"),
        ({"out": some(1, 1, 1, 8)}, r"out: .* is not allowed; allowed: \(1, 1, 2, 8\)"),
    ),
)
def test_what_is_wrong_is_said(arguments, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        flash_attn_with_kvcache(some(1, 1, 2, 8), some(1, 8, 1, 8), some(1, 8, 1, 8), **arguments)


def test_calls_of_a_form_are_checked_once(monkeypatch):
    """As on a GPU, where values are not looked at."""
    checked: list[Any] = []
    check = kv_cache._check_call
    monkeypatch.setattr(kv_cache, "_checked_forms", set())
    monkeypatch.setattr(kv_cache, "way_of_call", lambda *tensors: kv_cache.LAUNCHED)
    monkeypatch.setattr(kv_cache, "_check_call", lambda given: (checked.append(given), check(given)))
    q, k = some(1, 1, 2, 8), some(1, 9, 1, 8)
    for cache in (k, k, k[:, :7], k[:, :5].contiguous()):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=int32(5))
    assert len(checked) == 1
    for other in ({"causal": True}, {"cache_seqlens": int32(5).long()}, {"softcap": 2.0}, {"out": torch.empty_like(q)}):
        flash_attn_with_kvcache(q, k, k, **{"cache_seqlens": int32(5), **other})
    assert len(checked) == 5
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cache_seqlens: shape \(2,\) is not allowed"):
            flash_attn_with_kvcache(q, k, k, cache_seqlens=int32(5, 5))
        with pytest.raises(ValueError, match=r"cache_seqlens: 10 is not allowed"):
            flash_attn_with_kvcache(q, k, k, cache_seqlens=10)
        with pytest.raises(ValueError, match=r"window: \{1: 2\} is not allowed"):
            flash_attn_with_kvcache(q, k, k, window_size={1: 2})


# --- Head dimensions that no kernel has ------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", (False, True))
def test_latent_attention_has_keys_of_576_and_values_of_512_columns(paged):
    q, cache = some(2, 1, 16, 576, seed=1), some(8, 16, 1, 576, seed=2)
    lengths, table = (40, 17), int32(3, 0, 5, 1, 7, 2).view(2, 3)
    pages = {"block_table": table} if paged else {}
    if not paged:
        cache = cache[table.long()].flatten(1, 2)
    out = flash_attn_with_kvcache(
        q, cache, cache[..., :512], cache_seqlens=int32(*lengths), causal=True, softmax_scale=192**-0.5, **pages
    )
    for b, n in enumerate(lengths):
        keys = (cache[table[b].long()].flatten(0, 1) if paged else cache[b])[:n, 0]
        weights = torch.softmax(q[b, 0] @ keys.T * 192**-0.5, -1)
        torch.testing.assert_close(out[b, 0], weights @ keys[:, :512])


@pytest.mark.parametrize("seed", range(20))
def test_products_of_pytorch_compute_what_the_reference_does(monkeypatch, seed):
    kind = CallsOfAKind(
        288, group=1 + seed % 3, rows=3, value_head_dim=264, dtype=torch.float64, causal=seed % 2 == 0,
        window=((-1, -1), (40, 3))[seed % 3 == 0], softcap=(0.0, 5.0)[seed % 5 == 0],
    )  # fmt: skip
    (q, k, v), arguments = kind.problem(seed)
    if seed % 2:
        v = k[..., :264]
    if seed % 4 == 0:
        arguments["cache_seqlens"] = None
    new = ("k", "v", "out", "cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_seqlens")
    arguments = {name: x for name, x in arguments.items() if name not in new}
    expected, expected_lse = flash_attn_with_kvcache(q, k, v, **arguments, return_softmax_lse=True)
    monkeypatch.setattr("flashwright.operators.decode.decode", lambda *tensors, **_: decode_wide(*tensors[:5]))
    out, lse = flash_attn_with_kvcache(q, k, v, **arguments, return_softmax_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse.float(), expected_lse)


# --- Plans and kernels ----------------------------------------------------------------------------------------------


def run_kernels(
    monkeypatch: pytest.MonkeyPatch, config: str, *arguments: Any, options: Any, split_units: int = 0
) -> Any:
    gpu = SimulatingGPU(monkeypatch)
    kind = DecodeKind(
        options, lambda *sizes: parse_config(config), returns_lse=True, device_index=0, split_units=split_units
    )
    results = [kind.run(*arguments) for _ in range(2)]
    assert torch.equal(results[0][0], results[1][0]), "a second call finds counters at zero"
    return results[0], gpu.launches


@pytest.mark.parametrize("seed", (*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 40))))
def test_plans_and_kernels_compute_what_the_reference_does(monkeypatch, seed):
    (q, k, v), arguments = random_problem(100 * seed)
    reference_caches = [k.clone(), v.clone()]
    expected, expected_lse = flash_attn_with_kvcache(q, *reference_caches, **arguments, return_softmax_lse=True)
    new = NewRows()
    if "k" in arguments:
        windowed = arguments["causal"] or arguments["window_size"] != (-1, -1)
        new = NewRows(
            arguments["k"].transpose(1, 2), arguments["v"].transpose(1, 2), arguments.get("rotary_cos"),
            arguments.get("rotary_sin"), arguments.get("rotary_interleaved", True), windowed,
        )  # fmt: skip
    cache = CacheTensors(
        arguments["cache_seqlens"], arguments.get("cache_leftpad"), arguments.get("cache_batch_idx"),
        arguments.get("block_table"),
    )  # fmt: skip
    options = AttentionOptions.of(arguments["causal"], arguments["window_size"], None, arguments["softcap"])
    tensors = [x.transpose(1, 2) for x in (q, k, v, torch.full_like(q, math.nan))]
    (out, lse), launches = run_kernels(monkeypatch, CONFIG, *tensors, cache, new, options=options, split_units=seed % 2)
    for written, wanted in zip((k, v), reference_caches, strict=True):
        torch.testing.assert_close(written, wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-2, atol=1e-2)
    assert launches[0] == ("ampere decode", "append" if "k" in arguments else None)


@pytest.mark.parametrize(("head_dim", "value_head_dim"), ((64, 40), (24, 64)))
def test_values_have_columns_of_their_own(monkeypatch, head_dim, value_head_dim):
    q = some(2, 2, 4, head_dim, seed=1, dtype=torch.bfloat16)
    k, new_k = (some(2, rows, 2, head_dim, seed=rows, dtype=torch.bfloat16) for rows in (70, 3))
    v, new_v = (some(2, rows, 2, value_head_dim, seed=rows + 1, dtype=torch.bfloat16) for rows in (70, 3))
    angles = some(70, 8, seed=2)
    cosines, sines, lengths = angles.cos().bfloat16(), angles.sin().bfloat16(), int32(67, 10)
    wanted = [k.clone(), v.clone()]
    expected, expected_lse = flash_attn_with_kvcache(
        q, *wanted, new_k, new_v, cosines, sines, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    tensors = [x.transpose(1, 2) for x in (q, k, v, torch.full((2, 2, 4, value_head_dim), math.nan).bfloat16())]
    new = NewRows(new_k.transpose(1, 2), new_v.transpose(1, 2), cosines, sines)
    options = AttentionOptions.of(causal=True)
    (out, lse), _ = run_kernels(monkeypatch, CONFIG, *tensors, CacheTensors(lengths), new, options=options)
    torch.testing.assert_close(k, wanted[0], rtol=1e-2, atol=1e-2)
    assert torch.equal(v, wanted[1])
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-2, atol=1e-2)


LATENT = "latent decode (BF16, 576, 64, 32): stages_2"


def test_values_in_keys_are_read_with_them(monkeypatch):
    q, cache = some(2, 1, 16, 576, seed=1, dtype=torch.bfloat16), some(8, 16, 1, 576, seed=2, dtype=torch.bfloat16)
    pages = CacheTensors(int32(40, 17), page_table=int32(3, 0, 5, 1, 7, 2).view(2, 3))
    expected, expected_lse = flash_attn_with_kvcache(
        q, cache, cache[..., :512], cache_seqlens=pages[0], block_table=pages[3], return_softmax_lse=True
    )
    tensors = [x.transpose(1, 2) for x in (q, cache, cache[..., :512], torch.full_like(expected, math.nan))]
    (out, lse), launches = run_kernels(monkeypatch, LATENT, *tensors, pages, options=AttentionOptions())
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-2, atol=1e-2)
    assert launches[0] == ("latent decode", None)


def test_values_that_are_not_in_the_keys_are_refused(monkeypatch):
    SimulatingGPU(monkeypatch, executes=False)
    kind = DecodeKind(AttentionOptions(), lambda *sizes: parse_config(LATENT), returns_lse=False, device_index=0)
    q, k = (some(1, heads, 32, 576, dtype=torch.bfloat16) for heads in (16, 1))
    out = torch.empty_like(q[..., :512])
    kind.run(q, k, k[..., :512], out, CacheTensors())
    for v in (k[..., :512].clone(), k[..., 64:]):
        with pytest.raises(ValueError, match="v_cache: is no view of the first columns of k_cache"):
            kind.run(q, k, v, out, CacheTensors())


def test_a_cache_that_grows_is_arranged_once(monkeypatch):
    SimulatingGPU(monkeypatch)
    kind = DecodeKind(AttentionOptions(), lambda *sizes: parse_config(CONFIG), returns_lse=False, device_index=0)
    q, k, v = (some(2, heads, 40, 64, seed=seed, dtype=torch.bfloat16) for seed, heads in enumerate((4, 2, 2)))
    q = q[:, :, :1].contiguous()
    for keys, contiguous in ((5, False), (6, False), (39, True), (40, True)):
        part = [x[:, :, :keys].contiguous() if contiguous else x[:, :, :keys] for x in (k, v)]
        out, _ = kind.run(q, *part, torch.full_like(q, math.nan), CacheTensors())
        expected = flash_attn_with_kvcache(*(x.transpose(1, 2) for x in (q, *part)))
        torch.testing.assert_close(out.transpose(1, 2), expected, rtol=2e-2, atol=2e-2)
    assert len(kind.arrangements) == 1


def test_keys_are_not_appended_to_pages_that_do_not_exist(monkeypatch):
    SimulatingGPU(monkeypatch)
    kind = DecodeKind(AttentionOptions(), lambda *sizes: parse_config(CONFIG), returns_lse=False, device_index=0)
    k, v = (some(3, 2, 16, 64, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    before = [k.clone(), v.clone()]
    q = some(1, 2, 1, 64, seed=3, dtype=torch.bfloat16)
    cache = CacheTensors(int32(5), page_table=int32(7).view(1, 1))
    out, _ = kind.run(q, k, v, torch.full_like(q, math.nan), cache, NewRows(q, q))
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    assert (out == 0).all()


@pytest.mark.parametrize("index", (-1, 2, 2**31 - 1))
def test_a_sequence_that_the_cache_does_not_have_reads_and_writes_no_other(monkeypatch, index):
    SimulatingGPU(monkeypatch)
    kind = DecodeKind(AttentionOptions(), lambda *sizes: parse_config(CONFIG), returns_lse=False, device_index=0)
    k, v = (some(2, 2, 40, 64, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    q, new = (some(2, 2, 1, 64, seed=seed, dtype=torch.bfloat16) for seed in (3, 4))
    before = [k.clone(), v.clone()]
    cache = CacheTensors(int32(30, 39), cache_index=int32(index, 0))
    out, _ = kind.run(q, k, v, torch.full_like(q, math.nan), cache, NewRows(new, new))
    for written, old in zip((k, v), before, strict=True):
        old[0, :, 39] = new[1, :, 0]
        assert torch.equal(written, old)
    assert (out[0] == 0).all() and out[1].isfinite().all() and (out[1] != 0).any()
