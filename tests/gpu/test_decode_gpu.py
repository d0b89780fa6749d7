"""Decoding on a GPU: the drop-in against the reference on the CPU, with everything that a cache may have, mixed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cache_cases import int32, random_problem, some

from flashwright import flash_attn_with_kvcache

pytestmark = pytest.mark.gpu

SEEDS = (*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 300)))


def on_gpu(x: Any) -> Any:
    return x.cuda() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("seed", SEEDS)
def test_random_problems(seed):
    head_dim = (64, 128, 256, 40)[seed % 4]
    (q, k, v), arguments = random_problem(1000 * seed, capacity=(96, 480, 2400)[seed % 3], head_dim=head_dim)
    if "rotary_cos" in arguments and 2 * arguments["rotary_cos"].shape[1] > head_dim:
        del arguments["rotary_cos"], arguments["rotary_sin"], arguments["rotary_interleaved"]
    gpu_tensors = [on_gpu(x.clone()) for x in (q, k, v)]
    gpu_arguments = {name: on_gpu(value) for name, value in arguments.items()}
    out, lse = flash_attn_with_kvcache(*gpu_tensors, **gpu_arguments, return_softmax_lse=True)
    expected, expected_lse = flash_attn_with_kvcache(q, k, v, **arguments, return_softmax_lse=True)
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-2, atol=1e-2)
    for written, wanted in zip(gpu_tensors[1:], (k, v), strict=True):
        torch.testing.assert_close(written.cpu(), wanted, rtol=1e-2, atol=1e-2)


def a_cache() -> tuple[Any, Any, Any]:
    q, k, v = (
        some(*shape, seed=i, dtype=torch.bfloat16)
        for i, shape in enumerate(((4, 1, 8, 128), *2 * ((4, 5000, 2, 128),)))
    )
    return q.cuda(), k.cuda(), v.cuda()


def test_a_captured_graph_stays_right_as_caches_grow():
    q, k, v = a_cache()
    lengths = int32(100, 2000, 1, 4999).cuda()
    out = torch.empty_like(q)
    flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, out=out)
    for each in ((100, 2000, 1, 4999), (101, 2001, 2, 5000), (5000, 3, 4000, 0)):
        lengths.copy_(int32(*each))
        out.fill_(torch.nan)
        graph.replay()
        expected = flash_attn_with_kvcache(q.cpu(), k.cpu(), v.cpu(), cache_seqlens=int32(*each))
        torch.testing.assert_close(out.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_the_same_call_gives_the_same_bits():
    q, k, v = a_cache()
    lengths = int32(5000, 17, 999, 4096).cuda()
    first = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    for _ in range(100):
        assert torch.equal(first, flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths))


def test_a_row_invariant_sequence_has_the_same_bits_alone_and_among_others():
    q, k, v = a_cache()
    lengths = int32(5000, 17, 999, 4096).cuda()
    together = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, row_invariant=True)
    for b in range(4):
        alone = flash_attn_with_kvcache(
            q[b : b + 1], k[b : b + 1], v[b : b + 1], cache_seqlens=lengths[b : b + 1], row_invariant=True
        )
        assert torch.equal(alone[0], together[b])


def test_lengths_and_pages_out_of_range_read_nothing_else():
    q, k, v = a_cache()
    wrong = int32(10**6, -5, 2**31 - 1, 5000).cuda()
    assert flash_attn_with_kvcache(q, k, v, cache_seqlens=wrong).isfinite().all()
    pages = k.view(-1, 1000, 2, 128)[:, :16].contiguous()
    table = int32(*range(-2, 6)).view(4, 2).cuda() * 10**6
    full = int32(32, 32, 32, 32).cuda()
    assert flash_attn_with_kvcache(q, pages, pages, cache_seqlens=full, block_table=table).isfinite().all()


def test_streams_work_side_by_side():
    q, k, v = a_cache()
    expected = flash_attn_with_kvcache(q, k, v)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(flash_attn_with_kvcache(q, k, v))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize(
    ("heads", "rows", "head_dim"), [((128, 1), 1, 128), ((64, 1), 2, 64), ((16, 2), 16, 256), ((40, 1), 1, 192)]
)
@pytest.mark.parametrize("pages", (False, True))
def test_tiles_of_many_packed_rows(heads, rows, head_dim, pages):
    q = some(3, rows, heads[0], head_dim, seed=0, dtype=torch.bfloat16)
    k, v = (some(3, 1024, heads[1], head_dim, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    arguments: dict[str, Any] = {"cache_seqlens": int32(1000, 3, 517), "causal": True}
    if pages:
        order = torch.randperm(3 * 64, generator=torch.Generator().manual_seed(0)).int()
        k, v = (
            torch.empty_like(x.view(-1, 16, *x.shape[2:])).index_copy_(0, order.long(), x.view(-1, 16, *x.shape[2:]))
            for x in (k, v)
        )
        arguments["block_table"] = order.view(3, 64)
    expected, expected_lse = flash_attn_with_kvcache(q, k, v, **arguments, return_softmax_lse=True)
    on_gpu_arguments = {name: on_gpu(value) for name, value in arguments.items()}
    out, lse = flash_attn_with_kvcache(q.cuda(), k.cuda(), v.cuda(), **on_gpu_arguments, return_softmax_lse=True)
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-2, atol=1e-2)


def test_captured_graphs_are_replayed_side_by_side():
    q, k, v = a_cache()
    expected = flash_attn_with_kvcache(q, k, v)
    streams, graphs, outputs = [torch.cuda.Stream() for _ in range(3)], [], []
    for stream in streams:
        out, graph = torch.empty_like(q), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(5):
                flash_attn_with_kvcache(q, k, v, out=out)
        graphs.append(graph)
        outputs.append(out)
    for _ in range(20):
        for out in outputs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outputs)
