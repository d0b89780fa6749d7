"""Gradients beside our kernels: what PyTorch's backward does not compute, and which of the two is used."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from attention_cases import tensors

from flashwright.operators.backward import BACKWARD_VARIABLE, backward_kind
from flashwright.operators.pytorch_gradients import PyTorchGradients
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.backward_plans import BackwardKind
from flashwright.runtime.reference import attention_gradients, attention_reference

CAPPED = AttentionOptions.of(causal=True, softcap=3.0)


def test_dense_gradients_are_the_references():
    q, k, v = tensors((2, 4, 5, 8), (2, 2, 7, 8))
    do, (out, lse) = torch.ones_like(q), attention_reference(q, k, v, options=CAPPED)
    found = PyTorchGradients(CAPPED, deterministic=False).run(do, q, k, v, out, lse)
    for gradient, expected in zip(found, attention_gradients(do, None, q, k, v, options=CAPPED), strict=True):
        assert torch.equal(gradient, expected)


def test_packed_gradients_are_those_of_each_sequence_and_zero_elsewhere():
    q, k, v = tensors((1, 2, 9, 8), (1, 2, 9, 8))
    starts = torch.tensor([1, 4, 4, 8], dtype=torch.int32)
    do, dlse = torch.randn_like(q), torch.randn(2, 9, dtype=q.dtype)
    nothing = torch.full((2, 9), torch.nan)
    kind = PyTorchGradients(CAPPED, deterministic=True)
    found = kind.run(do, q, k, v, q, nothing, dlse, (starts, starts), (3, 4, 4))
    for begin, end in ((1, 4), (4, 8)):
        part = [x[:, :, begin:end] for x in (do, dlse[None], q, k, v)]
        for gradient, expected in zip(found, attention_gradients(*part, options=CAPPED), strict=True):
            torch.testing.assert_close(gradient[:, :, begin:end], expected)
    for gradient in found:
        assert (gradient[:, :, [0, 8]] == 0).all()


def test_a_variable_says_which_kernels_differentiate(monkeypatch):
    kind = (AttentionOptions(), DType.BF16, 0)
    monkeypatch.delenv(BACKWARD_VARIABLE, raising=False)
    assert isinstance(backward_kind(*kind), PyTorchGradients)
    monkeypatch.setenv(BACKWARD_VARIABLE, "kernels")
    assert isinstance(backward_kind(*kind), BackwardKind)
    monkeypatch.setenv(BACKWARD_VARIABLE, "cudnn")
    with pytest.raises(ValueError, match="FLASHWRIGHT_BACKWARD: 'cudnn' is not allowed; allowed: kernels, pytorch"):
        backward_kind(*kind)
