"""Parts of attention, merged: the error of many parts is about that of one."""

import pytest

torch = pytest.importorskip("torch")

from flashwright.distributed.parts import Kernels, Merged
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
    """Outputs of parts rounded to bf16, as kernels give them; merged in fp32, or `rounded` after every part."""
    q, k, v, _ = tensors
    kernels = Kernels(AttentionOptions(), "reference")
    merged = Merged(q)
    for keys in (Span(i * KEYS // parts, (i + 1) * KEYS // parts) for i in range(parts)):
        out, lse = kernels.forward(q, k[:, :, keys.slice], v[:, :, keys.slice], Launch(Span(0, ROWS), keys, FULL))
        merged.add(Span(0, 2), Span(0, ROWS), out.bfloat16(), lse)
        if rounded:
            merged.result()[0].copy_(merged.result()[0].bfloat16())
    return merged.result()[0].bfloat16()


def error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


def test_the_error_does_not_grow_with_the_number_of_parts(tensors):
    expected, _ = attention_reference(*(x.double() for x in tensors[:3]))
    of_one = error(in_parts(tensors, 1, False), expected)
    of_many = {parts: error(in_parts(tensors, parts, False), expected) for parts in (2, 8, 32, 128)}
    assert max(of_many.values()) < 1.6 * of_one
    assert of_many[128] < 1.1 * of_many[8]
    assert error(in_parts(tensors, 128, True), expected) > 2 * of_many[128], "merging in bf16 would show"


def test_gradients_of_parts_add_to_those_of_the_whole(tensors):
    q, k, v, do = (x.double() for x in tensors)
    kernels = Kernels(AttentionOptions(softcap=3.0), "reference")
    whole = Launch(Span(0, ROWS), Span(0, KEYS), FULL)
    out, lse = kernels.forward(q, k, v, whole)
    dlse = torch.linspace(-1, 1, 2 * ROWS, dtype=torch.float64).view(1, 2, ROWS)
    expected = attention_gradients(do, dlse, q, k, v, options=AttentionOptions(softcap=3.0))
    dq, dks, dvs = torch.zeros_like(q), [], []
    for keys in (slice(0, 100), slice(100, 1000), slice(1000, KEYS)):
        part = kernels.backward(do, dlse, q, k[:, :, keys], v[:, :, keys], out, lse, whole)
        dq += part[0]
        dks.append(part[1])
        dvs.append(part[2])
    for actual, wanted in zip((dq, torch.cat(dks, 2), torch.cat(dvs, 2)), expected, strict=True):
        torch.testing.assert_close(actual, wanted)
