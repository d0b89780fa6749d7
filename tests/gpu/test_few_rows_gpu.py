"""Few rows on many keys by `attention()` on a GPU: decoded, and right, by every way that a call may take."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashwright import attention, scaled_dot_product_attention
from flashwright.choice.few_rows import decodes
from flashwright.problem.options import AttentionOptions
from flashwright.runtime import few_rows
from flashwright.runtime.reference import attention_reference

from .tools import assert_same_bits

pytestmark = pytest.mark.gpu

NO_OPTIONS = AttentionOptions()


@pytest.fixture
def decoded(monkeypatch) -> list[Any]:
    """One entry for each launch of a decode kernel."""
    launches: list[Any] = []
    run = few_rows.FewRowsArrangement.run

    def counting(self: Any, *arguments: Any, **options: Any) -> Any:
        launches.append(self)
        return run(self, *arguments, **options)

    monkeypatch.setattr(few_rows.FewRowsArrangement, "run", counting)
    return launches


def some(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def problem(
    rows: int = 1, keys: int = 3000, heads: tuple[int, int] = (8, 2), batch: int = 2, head_dim: int = 128
) -> Any:
    q = some(batch, rows, heads[0], head_dim).transpose(1, 2)
    k, v = (some(batch, heads[1], keys, head_dim) for _ in range(2))
    return q, k, v


def assert_right(out: Any, q: Any, k: Any, v: Any, options: AttentionOptions = NO_OPTIONS) -> None:
    expected, _ = attention_reference(q.float(), k.float(), v.float(), options=options)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("seed", range(40))
def test_random_problems(seed, decoded):
    draw = random.Random(seed)
    kv_heads, group, rows = draw.choice((1, 2, 5)), draw.choice((1, 4, 7)), draw.choice((1, 1, 2, 4))
    keys, batch, head_dim = draw.choice((5, 70, 2100, 5000)), draw.randint(1, 3), draw.choice((64, 128, 256, 40))
    q, k, v = problem(rows, keys, (kv_heads * group, kv_heads), batch, head_dim)
    causal = draw.choice((False, True, "top-left"))
    window = draw.choice((None, None, (100, 0), (-1, 2)))
    softcap = draw.choice((0.0, 20.0))
    options = AttentionOptions.of(causal, window, None, softcap)
    out, lse = attention(q, k, v, causal=causal, window=window, softcap=softcap, return_lse=True)
    assert_right(out, q, k, v, options)
    _, expected_lse = attention_reference(q.float(), k.float(), v.float(), options=options)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-2, atol=1e-2)
    assert len(decoded) == decodes(options.window, batch, kv_heads * group, kv_heads, rows, keys)


@pytest.mark.parametrize("head_dims", ((192, 128), (64, 256), (128, 40)))
def test_values_of_another_head_dimension_are_read_as_they_are(monkeypatch, head_dims):
    q, k, _ = problem(rows=2, head_dim=head_dims[0])
    v = some(2, 2, 3000, head_dims[1])

    def refuse(*of: Any) -> None:
        raise AssertionError("columns are padded")

    monkeypatch.setattr(sys.modules["flashwright.attention"], "with_columns", refuse)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    options = AttentionOptions.of(True)
    assert_right(out, q, k, v, options)
    assert out.shape == (*q.shape[:3], head_dims[1])
    _, expected_lse = attention_reference(q.float(), k.float(), v.float(), options=options)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-2, atol=1e-2)


def test_a_cache_that_grows(decoded):
    q, k, v = problem(keys=600)
    for keys in range(1, 600, 37):
        part = k[:, :, :keys], v[:, :, :keys].contiguous()
        assert_right(attention(q, *part), q, *part)
    assert len(decoded) == len(range(1, 600, 37))


def test_the_drop_in_of_pytorch_decodes_too(decoded):
    q, k, v = problem()
    assert_right(scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v)
    assert len(decoded) == 1


def test_a_captured_graph_replays(decoded):
    q, k, v = problem(keys=9000)
    attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention(q, k, v, return_lse=True)
        twice = attention(q, k, v)
    for _ in range(3):
        q.copy_(torch.randn_like(q))
        out.fill_(torch.nan)
        graph.replay()
        assert_right(out, q, k, v)
        assert torch.equal(out, twice)
        assert lse.isfinite().all()
    assert len(decoded) == 3


def test_a_compiled_function_has_no_graph_breaks(decoded):
    q, k, v = problem()
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(lambda *x: attention(*x, causal=True) * 2, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_right(out / 2, q, k, v, AttentionOptions.of(True))
    assert len(decoded) == 1


def test_gradients_row_invariance_and_named_kernels_are_the_forwards(decoded):
    q, k, v = problem()
    attention(q, k, v, family="ampere")
    attention(q.detach().requires_grad_(), k, v).sum().backward()
    alone = attention(q, k, v, causal=True, row_invariant=True)
    chunk = torch.cat((torch.randn_like(q).expand(-1, -1, 1, -1), q), 2)
    assert torch.equal(attention(chunk, k, v, causal=True, row_invariant=True)[:, :, 1:], alone)
    assert not decoded


def test_the_same_call_gives_the_same_bits_on_any_stream(decoded):
    q, k, v = problem(keys=20_000)
    expected = attention(q, k, v)
    torch.cuda.synchronize()
    results = []
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(attention(q, k, v))
    torch.cuda.synchronize()
    assert_same_bits([expected], ([result] for result in results))


def test_tensors_that_no_kernel_reads_are_copied(decoded):
    q, k, v = problem()
    shifted = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(q)
    assert_right(attention(shifted, k, v), q, k, v)
