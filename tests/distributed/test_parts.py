"""Parts of attention, merged: the error of many parts is about that of one."""

import pytest

torch = pytest.importorskip("torch")

from flashwright.distributed.parts import Kernels, no_keys_yet
from flashwright.distributed.visibility import Launch, Span
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import FULL
from flashwright.runtime.reference import attention_gradients, attention_reference

ROWS, KEYS = 64, 1024


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, rows, 64, generator=generator).bfloat16() for rows in (ROWS, KEYS, KEYS, ROWS)]


def in_parts(tensors, parts, rounded):
    """Parts mixed in fp32, or with sums that are `rounded` to bf16 after every part."""
    q, k, v, _ = tensors
    kernels = Kernels(AttentionOptions(), "reference")
    sums = no_keys_yet(q, all_come_first=True)
    for keys in (Span(i * KEYS // parts, (i + 1) * KEYS // parts) for i in range(parts)):
        kernels.forward(q, k[:, :, keys.slice], v[:, :, keys.slice], Launch(Span(0, ROWS), keys, FULL), sums)
        if rounded:
            sums[0].copy_(sums[0].bfloat16())
    return sums[0].bfloat16()


def error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


def test_the_error_does_not_grow_with_the_number_of_parts(tensors):
    expected, _ = attention_reference(*(x.double() for x in tensors[:3]))
    of_one = error(in_parts(tensors, 1, False), expected)
    of_many = {parts: error(in_parts(tensors, parts, False), expected) for parts in (2, 8, 32, 128)}
    assert max(of_many.values()) < 1.01 * of_one
    assert error(in_parts(tensors, 128, True), expected) > 2 * of_many[128], "merging in bf16 would show"


def test_gradients_of_parts_add_to_those_of_the_whole(tensors):
    q, k, v, do = (x.double() for x in tensors)
    kernels = Kernels(AttentionOptions(softcap=3.0), "reference")
    whole = Launch(Span(0, ROWS), Span(0, KEYS), FULL)
    out, lse = kernels.forward(q, k, v, whole)
    dlse = torch.linspace(-1, 1, 2 * ROWS, dtype=torch.float64).view(1, 2, ROWS)
    expected = attention_gradients(do, dlse, q, k, v, options=AttentionOptions(softcap=3.0))
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for keys in (slice(0, 100), slice(100, 1000), slice(1000, KEYS)):
        at = (slice(None), slice(None), keys)
        kernels.backward(do, dlse, q, k[at], v[at], out, lse, whole, (sums[0], sums[1][at], sums[2][at]))
    for actual, wanted in zip(sums, expected, strict=True):
        torch.testing.assert_close(actual, wanted)
