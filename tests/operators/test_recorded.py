"""Training on a GPU beside the dispatcher: CPU tensors stand in for a GPU's, the simulator executes the launches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attention_cases import relative_error
from simulating_gpu import SimulatingGPU
from torch.utils._python_dispatch import TorchDispatchMode

from flashwright.attention import attention, forget_kinds
from flashwright.hardware.architectures import GPUModel
from flashwright.integrations.flash_attn import flash_attn_func
from flashwright.kernels.backward.launch import DQ, ROWS
from flashwright.operators import backward, forward, torch_ops
from flashwright.operators.plain_calls import RECORDED
from flashwright.operators.recorded import RecordedKind, record, record_output
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.reference import attention_reference

GPU = GPUModel.of_architecture("NVIDIA A100-SXM4-80GB", "sm_80")
ERROR = 8e-3
BACKWARD = [("ampere backward", ROWS), ("ampere backward", None), ("ampere backward", DQ)]


@pytest.fixture(params=[True])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatingGPU]:
    forget_kinds()
    for module in (forward, backward):
        monkeypatch.setattr(module, "gpu_model", lambda index: GPU)
    monkeypatch.setattr(sys.modules["flashwright.attention"], "way_of_call", lambda q, k, v: RECORDED)
    yield SimulatingGPU(monkeypatch, executes=request.param)
    forget_kinds()


launches_only = pytest.mark.parametrize("gpu", [False], indirect=True, ids=[""])


def some(requires_grad: bool = True) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 40, 32), (1, 1, 50, 32), (1, 1, 50, 32))
    return [
        torch.randn(shape, generator=generator).to(torch.bfloat16).requires_grad_(requires_grad) for shape in shapes
    ]


def loss_of(out: Any, lse: Any) -> Any:
    return out.double().square().sum() + lse.double().sin().sum()


def test_gradients_flow_from_the_output_and_the_log_sum_exp_as_often_as_they_are_wanted(gpu):
    q, k, v = some()
    loss = loss_of(*attention(q, k, v, causal=True, softcap=5.0, return_lse=True))
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    second = torch.autograd.grad(loss, (q, k, v))
    assert gpu.launches == [("ampere", None), *BACKWARD, *BACKWARD]
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    options = AttentionOptions.of(True, softcap=5.0)
    truth = torch.autograd.grad(loss_of(*attention_reference(*doubles, options=options)), doubles)
    for name, a, b, expected in zip("qkv", first, second, truth, strict=True):
        assert relative_error(a, expected) <= ERROR, name
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["ampere", pytest.param("hopper", marks=pytest.mark.slow)])
def test_the_simulator_computes_gradients_by_the_kernels_of_the_family(family):
    q, k, v = some()
    loss = loss_of(*attention(q, k, v, causal=True, softcap=5.0, return_lse=True, family=family))
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    options = AttentionOptions.of(True, softcap=5.0)
    truth = torch.autograd.grad(loss_of(*attention_reference(*doubles, options=options)), doubles)
    for name, gradient, expected in zip("qkv", torch.autograd.grad(loss, (q, k, v)), truth, strict=True):
        assert relative_error(gradient, expected) <= ERROR, name


def test_the_simulator_has_gradients_of_nothing():
    q, k, v = (torch.zeros(1, 2, n, 32, dtype=torch.bfloat16).requires_grad_() for n in (3, 0, 0))
    attention(q, k, v, backend="simulator").sum().backward()
    assert not q.grad.any() and k.grad.shape == k.shape


@launches_only
def test_a_loss_may_be_of_the_log_sum_exp_alone(gpu):
    tensors = some()
    attention(*tensors, return_lse=True)[1].sum().backward()
    assert gpu.launches == [("ampere", None), *BACKWARD]
    assert [x.grad.shape for x in tensors] == [x.shape for x in tensors]


def test_packed_sequences_are_recorded_with_their_starts():
    q, k, v = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((11, 4, 16), *2 * ((13, 2, 16),)))
    starts = [torch.tensor(each, dtype=torch.int32) for each in ((0, 4, 4, 10), (0, 6, 8, 13))]
    request = torch_ops.Request(AttentionOptions.of(True), with_lse=True)
    call = torch_ops.PackedCall((6, 6), request)
    recorded, _ = record(call, q, k, v, *starts)
    alone = record_output(call, q, k, v, *starts)
    dispatched, _ = torch.ops.flashwright.attention_varlen_forward(q, k, v, *starts, 6, 6, *request.flat())
    gradients = [torch.autograd.grad(out[:10].square().sum(), (q, k, v)) for out in (dispatched, recorded, alone)]
    for expected, *found in zip(*gradients, strict=True):
        assert all(torch.equal(gradient, expected) for gradient in found)


class SeesOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@launches_only
def test_no_operator_of_ours_is_dispatched(gpu):
    tensors = some()
    with SeesOperators() as mode:
        attention(*tensors).sum().backward()
    assert mode.seen and not any("flashwright" in name for name in mode.seen)
    assert all(x.grad is not None for x in tensors)


@launches_only
def test_gradients_of_gradients_are_refused(gpu):
    q, k, v = some()
    (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no gradients of gradients; backend='reference' computes them"):
        dq.sum().backward()


@launches_only
def test_a_tensor_that_changed_since_the_forward_is_refused(gpu):
    q, k, v = some()
    doubled = k * 2
    out = attention(q, doubled, v)
    doubled += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def chosen_configs(monkeypatch: pytest.MonkeyPatch, call: Any) -> list[Any]:
    """Those of the backward that a call and its gradients use."""
    found: list[Any] = []

    def choose(*arguments: Any, **options: Any) -> Any:
        found.append(backward_config(*arguments, **options))
        return found[-1]

    backward_config = backward.backward_config
    monkeypatch.setattr(backward, "backward_config", choose)
    call()
    return found


@launches_only
@pytest.mark.parametrize("by", ["argument", "drop-in", "PyTorch's switch"])
def test_deterministic_gradients_are_added_in_order(gpu, monkeypatch, by):
    def call() -> None:
        if by == "argument":
            out = attention(*some(), deterministic=True)
        elif by == "drop-in":
            out = flash_attn_func(*(x.transpose(1, 2) for x in some()), deterministic=True)
        else:
            out = attention(*some())
            monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        out.sum().backward()

    (config,) = chosen_configs(monkeypatch, call)
    assert config.ordered


@launches_only
def test_the_family_of_a_requested_config_computes_the_gradients(gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(backward, "backward_config", lambda occasion, family, deterministic: asked.append(family))
    for request in (
        {"config": "hopper (BF16, 64, 128, 64): stages_2+overlap+ping_pong+persistent+lazy+guess"},
        {"family": "hopper"},
        {},
    ):
        kind = RecordedKind(AttentionOptions(), DType.BF16, 0, **request)
        kind._usual._choose(64, 100, 100)
    assert asked == ["hopper", "hopper", None]
