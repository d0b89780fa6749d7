"""Decoding on a GPU: the drop-in against the reference on the CPU, with everything that a cache may have, mixed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cache_cases import CallsOfAKind, int32, some

from flashwright import flash_attn_with_kvcache
from flashwright.kernels.registry import family_of, parse_config
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.decode_plans import CacheTensors, DecodeKind

from .tools import assert_same_bits

pytestmark = pytest.mark.gpu

KINDS = (
    CallsOfAKind(64, group=4, rows=4),
    CallsOfAKind(64, group=16, rows=4, dtype=torch.float16, causal=True),
    CallsOfAKind(128, group=4, rows=4, causal=True),
    CallsOfAKind(128, group=1, rows=16, dtype=torch.float16, window=(100, 3)),
    CallsOfAKind(128, group=64, rows=2, causal=True),
    CallsOfAKind(128, group=8, rows=2, softcap=20.0),
    CallsOfAKind(256, group=2, rows=5, causal=True, softcap=20.0),
    CallsOfAKind(256, group=12, rows=4, window=(40, 0)),
    CallsOfAKind(40, group=3, rows=3, dtype=torch.float16, causal=True),
    CallsOfAKind(96, group=5, rows=3, window=(-1, 2)),
    CallsOfAKind(192, group=16, rows=1, value_head_dim=128, causal=True),
    CallsOfAKind(59, group=2, rows=2, causal=True),
    CallsOfAKind(576, group=16, rows=1, value_head_dim=512, causal=True),
    CallsOfAKind(576, group=16, rows=1, value_head_dim=512, values_in_keys=True, causal=True),
    CallsOfAKind(576, group=40, rows=3, value_head_dim=512, values_in_keys=True, dtype=torch.float16, causal=True),
    CallsOfAKind(320, group=8, rows=2, value_head_dim=256, values_in_keys=True, window=(100, 3), softcap=20.0),
)
"""Few enough for their kernels to be compiled in a moment."""
CASES_OF_A_KIND = 25
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""At most so much of a number is lost."""


def on_gpu(x: Any) -> Any:
    return x.cuda() if isinstance(x, torch.Tensor) else x


def in_float64(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_random_problems_of_a_kind_are_computed_as_float64_does(number):
    kind = KINDS[number]
    unit = ROUNDING[kind.dtype]
    for seed in range(number * CASES_OF_A_KIND, (number + 1) * CASES_OF_A_KIND):
        (q, *caches), arguments = kind.problem(seed)
        gpu_caches = kind.copies(caches, lambda x: x.cuda())
        gpu_arguments = {name: on_gpu(value) for name, value in arguments.items()}
        out, lse = flash_attn_with_kvcache(q.cuda(), *gpu_caches, **gpu_arguments, return_softmax_lse=True)
        if "out" in arguments:
            assert out.data_ptr() == gpu_arguments["out"].data_ptr()
        exact = {name: in_float64(value) for name, value in arguments.items()}
        exact_caches = kind.copies(caches, lambda x: x.double())
        expected, expected_lse = flash_attn_with_kvcache(q.double(), *exact_caches, **exact, return_softmax_lse=True)
        for written, wanted in zip(gpu_caches, exact_caches, strict=True):
            assert ((written.cpu() - wanted).abs() <= 1.01 * unit * wanted.abs() + 1e-6).all(), (seed, arguments)
        # The output and weights are rounded; where they are rotated, queries and keys are too.
        roundings = 2 if "rotary_cos" not in arguments else 4
        if "cu_seqlens_q" in arguments and "out" in arguments:  # rows of no sequence are not written
            rows = int(arguments["cu_seqlens_q"][-1])
            out, expected = out[:rows], expected[:rows]
        error, size = (out.cpu() - expected).norm(dim=-1), expected.norm(dim=-1)
        assert (error <= roundings * unit * size + 1e-9).all(), (seed, arguments)
        torch.testing.assert_close(lse.cpu().double(), expected_lse.double(), rtol=0, atol=roundings * unit)


def a_cache(head_dim: int = 128, value_head_dim: int = 128) -> tuple[Any, Any, Any]:
    shapes = ((4, 1, 8, head_dim), (4, 5000, 2, head_dim), (4, 5000, 2, value_head_dim))
    q, k, v = (some(*shape, seed=i, dtype=torch.bfloat16) for i, shape in enumerate(shapes))
    return q.cuda(), k.cuda(), v.cuda()


@pytest.mark.parametrize("head_dims", ((128, 128), (192, 128), (576, 512)))
def test_a_captured_graph_stays_right_as_caches_grow(head_dims):
    q, k, v = a_cache(*head_dims)
    lengths = int32(100, 2000, 1, 4999).cuda()
    out = torch.empty((4, 1, 8, head_dims[1]), dtype=q.dtype, device="cuda")
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
    first, *others = (flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths) for _ in range(101))
    assert_same_bits([first], ([other] for other in others))


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
    assert_same_bits([expected], ([result] for result in results))


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
        assert_same_bits([expected], ([out] for out in outputs))


@pytest.mark.parametrize(
    "config",
    (
        "ampere decode (BF16, 128, 16, 16, 8): rows_1+stages_3+blocks_1+swizzled",
        "hopper decode (BF16, 128, 64, 64): stages_6",
        "hopper decode (BF16, 128, 128, 64): stages_6",
    ),
)
def test_lengths_and_keys_that_were_just_written_are_attended_to(config, arch):
    """Kernels that start early follow, without a wait between them, others that change lengths and keys."""
    known = parse_config(config)
    if not family_of(known).runs_on(arch):
        pytest.skip(f"{known} does not run on {arch}")
    kind = DecodeKind(AttentionOptions(), lambda *_: known, returns_lse=False, device_index=0)
    q, k, v = (x.transpose(1, 2) for x in a_cache())
    steps = 40
    lengths = torch.randint(0, 5001, (steps, 4), generator=torch.Generator().manual_seed(0), dtype=torch.int32).cuda()
    keys = [k, some(*k.shape, seed=9, dtype=torch.bfloat16).cuda()]
    cache, current = torch.empty_like(k), torch.empty_like(lengths[0])
    outputs = []
    for step in range(steps):
        cache.copy_(keys[step % 2])
        current.copy_(lengths[step])
        out, _ = kind.run(q, cache, v, torch.empty_like(q), CacheTensors(kv_lengths=current))
        outputs.append(out)
    for step, out in enumerate(outputs):
        tensors = (x.transpose(1, 2) for x in (q, keys[step % 2], v))
        expected = flash_attn_with_kvcache(*tensors, cache_seqlens=lengths[step])
        torch.testing.assert_close(out.transpose(1, 2), expected, atol=2e-2, rtol=0, msg=f"step {step}")
