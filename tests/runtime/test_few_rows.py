"""Few rows on many keys by decode kernels, beside the forward's arrangements: simulated launches of plans on CPU
tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from simulating_gpu import SimulatingGPU

from flashwright.kernels.decode.ampere.config import AmpereDecodeKernelConfig
from flashwright.kernels.registry import parse_config
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.call_kinds import CallKind
from flashwright.runtime.decode_plans import DecodeKind
from flashwright.runtime.few_rows import FewRows
from flashwright.runtime.reference import attention_reference

DECODE = AmpereDecodeKernelConfig(DType.BF16, 64, B_r=16, keys_per_warp=16, n_warps=4)
NO_OPTIONS = AttentionOptions()
FORWARD = parse_config("(BF16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax")


def some(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def call_kind(options: AttentionOptions = NO_OPTIONS, *, returns_lse: bool = False, most_rows: int = 9) -> Any:
    decoding = DecodeKind(options, lambda *sizes: DECODE, returns_lse=returns_lse, device_index=0)
    few_rows = FewRows(decoding, lambda batch, heads, kv_heads, rows, keys: rows <= most_rows, most_rows)
    return CallKind(options, lambda *sizes: FORWARD, returns_lse=returns_lse, device_index=0, few_rows=few_rows)


@pytest.mark.parametrize(
    "options",
    (
        AttentionOptions(),
        AttentionOptions.of(True, None, 0.3, 0.0),
        AttentionOptions.of("top-left", None, None, 5.0),
        AttentionOptions.of(False, (20, 3), None, 0.0),
    ),
    ids=str,
)
def test_few_rows_are_decoded(monkeypatch, options):
    gpu = SimulatingGPU(monkeypatch)
    kind = call_kind(options, returns_lse=True)
    q, k, v = some(2, 4, 3, 64), some(2, 150, 2, 64, seed=1).transpose(1, 2), some(2, 2, 150, 64, seed=2)
    out, lse = kind.run(q, k, v)
    expected, expected_lse = attention_reference(q, k, v, options=options)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-2, atol=1e-2)
    assert gpu.launches == [("ampere decode", None)]


def test_a_cache_that_grows_is_planned_once(monkeypatch):
    gpu = SimulatingGPU(monkeypatch)
    kind, loaded = call_kind(), []
    load = gpu._load
    monkeypatch.setattr("flashwright.runtime.decode_plans.loaded_kernel", lambda *of: loaded.append(of) or load(*of))
    q, k, v = some(1, 4, 1, 64), some(1, 2, 90, 64, seed=1), some(1, 2, 90, 64, seed=2)
    for keys in (1, 2, 63, 64, 65, 90, 65):
        part = k[:, :, :keys], v[:, :, :keys].contiguous()
        out, lse = kind.run(q, *part)
        torch.testing.assert_close(out, attention_reference(q, *part, options=kind.options)[0], rtol=2e-2, atol=2e-2)
        assert lse is None
    assert len(loaded) == 1 and len(gpu.launches) == 7


def test_keys_that_grow_in_a_cache_share_their_parameters(monkeypatch):
    """But for the number of keys. What is kept of a length is little: a generation has thousands."""
    SimulatingGPU(monkeypatch, executes=False)
    kind = call_kind()
    q, k = some(1, 4, 1, 64), some(1, 2, 90, 64, seed=1)
    first, second = (kind.arrangement(q, k[:, :, :keys], k[:, :, :keys], q) for keys in (70, 71))
    copied = kind.arrangement(q, *[k[:, :, :72].contiguous()] * 2, q)
    assert first.words is second.words is not copied.words
    assert [each.lengths for each in (first, second, copied)] == [1 | keys << 32 for keys in (70, 71, 72)]


def test_what_decoding_does_not_suit_or_read_goes_to_the_forward(monkeypatch):
    gpu = SimulatingGPU(monkeypatch, executes=False)
    kind = call_kind()
    q, k = some(1, 4, 1, 64), some(1, 2, 40, 64)
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    odd_rows = torch.zeros(1, 2, 40, 65, dtype=q.dtype)[..., :64]
    for tensors in ((some(1, 4, 10, 64), k, k), (shifted, k, k), (q, odd_rows, k), (q, k, odd_rows)):
        kind.run(*tensors)
    assert gpu.launches == [("ampere", None)] * 4
    with pytest.raises(ValueError, match="k: head_dim is 32, but q's is 64"):
        kind.run(q, k[..., :32], k[..., :32])
    with pytest.raises(ValueError, match="q has 4 heads, which is not a multiple of the 3 heads"):
        kind.run(q, some(1, 3, 40, 64), some(1, 3, 40, 64))


def test_an_output_that_is_given_is_the_forwards(monkeypatch):
    gpu = SimulatingGPU(monkeypatch, executes=False)
    q, k = some(1, 4, 1, 64), some(1, 2, 40, 64)
    call_kind().run(q, k, k, torch.full_like(q, math.nan))
    assert gpu.launches == [("ampere", None)]
