"""Benchmarks of gradients: the backward alone and training steps, their FLOPs, their errors and how they are kept."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from bench_fakes import a_cell, a_result, found

from flashwright import DType, attention
from flashwright.kernels.registry import parse_config
from flashwright.problem.flops import OPERATIONS, operation_flops
from flashwright.runtime import backward as runtime
from flashwright.workbench.bench.accuracy import gradient_error
from flashwright.workbench.bench.gpu_machine import GPUMachine, prepare_ours
from flashwright.workbench.bench.grid import Cell, cell_of, grid
from flashwright.workbench.bench.grid_plot import grid_figure
from flashwright.workbench.bench.peers import Inputs, Prepared, external_peer
from flashwright.workbench.bench.results import BenchResult, combined, read_result, write_result
from flashwright.workbench.bench.training import prepare_operation, with_gradients

# --- Cells and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operation", "times"), [("forward", 1), ("backward", 2.5), ("train", 3.5)])
def test_five_products_of_a_backward_count_two_and_a_half_forwards(operation, times):
    cell = cell_of(DType.BF16, 128, True, 2048)
    assert replace(cell, operation=operation).flops == times * cell.flops
    assert operation_flops(operation, 2, 3, 5, 7, 64) == times * 4 * 2 * 3 * 5 * 7 * 64


def test_a_grid_is_of_one_operation_and_of_the_forward_unless_told():
    assert {cell.operation for cell in grid()} == {"forward"}
    assert {cell.operation for cell in grid(operation="train")} == {"train"}
    assert len(grid(operation="backward")) == 36


def test_an_unknown_operation_is_refused_with_those_allowed():
    with pytest.raises(ValueError, match=r"operation: 'backwards' is not known; allowed: forward, backward, train"):
        grid(operation="backwards")
    with pytest.raises(ValueError, match="operation: 'decoding' is not known"):
        Cell.from_dict(a_cell().to_dict() | {"operation": "decoding"})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_result_names_its_operation_and_is_read_back(operation, tmp_path):
    cells = [replace(each, cell=replace(each.cell, operation=operation)) for each in a_result().cells]
    result = replace(a_result(), cells=tuple(cells))
    path = tmp_path / "result.json"
    write_result(path, result)
    assert read_result(path) == result
    assert result.to_dict()["operation"] == read_result(path).operation == operation


def test_a_cell_from_before_there_were_operations_is_of_the_forward():
    values = a_cell().to_dict()
    del values["operation"]
    assert Cell.from_dict(values) == a_cell()


def test_results_of_different_operations_do_not_make_one():
    parts = [BenchResult({}, {}, (found(a_cell(operation=name), ours=1.0),)) for name in ("backward", "train")]
    with pytest.raises(ValueError, match="results of different operations do not make one: backward, train"):
        combined(parts)


def test_a_picture_says_what_was_timed():
    cells = tuple(replace(each, cell=replace(each.cell, operation="train")) for each in a_result().cells)
    assert "Attention forward and backward, BF16" in grid_figure(replace(a_result(), cells=cells)).get_suptitle()


# --- What is timed, with PyTorch on the CPU ------------------------------------------------------------------------


def cpu_inputs(operation: str, *, causal: bool = False, heads: int = 4, kv_heads: int = 4, rows: int = 40) -> Inputs:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, rows, n, 16).transpose(1, 2) for n in (heads, kv_heads, kv_heads))
    return with_gradients(Inputs(q, k, v, causal), operation)


def eager(inputs: Inputs) -> Prepared:
    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, is_causal=inputs.causal, enable_gqa=inputs.grouped
        )

    return Prepared(attend, kernel="eager")


def expected_gradients(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(eager(inputs).call(), (inputs.q, inputs.k, inputs.v), inputs.do)


def test_tensors_for_gradients_keep_their_layout():
    inputs = cpu_inputs("backward")
    assert inputs.q.requires_grad
    assert inputs.q.is_leaf
    assert inputs.do.stride() == inputs.q.stride()
    assert inputs.operation == "backward"


def test_the_backward_alone_differentiates_one_forward_over_and_over():
    inputs = cpu_inputs("backward", causal=True)
    calls = []

    def counted(given: Inputs) -> Prepared:
        prepared = eager(given)
        return replace(prepared, call=lambda: (calls.append(1), prepared.call())[1])

    prepared = prepare_operation(counted, inputs)
    for _ in range(3):
        for mine, theirs in zip(prepared.call(), expected_gradients(inputs), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert len(calls) == 1
    assert prepared.kernel == "eager"


def test_a_training_step_is_both_passes_in_every_call():
    inputs = cpu_inputs("train")
    prepared = prepare_operation(eager, inputs)
    for _ in range(2):
        out, *gradients = prepared.call()
        torch.testing.assert_close(out, eager(inputs).call())
        for mine, theirs in zip(gradients, expected_gradients(inputs), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("operation", ["backward", "train"])
def test_a_peer_that_takes_rows_first_and_returns_more_is_differentiated_through(operation):
    inputs = cpu_inputs(operation)

    def rows_first(given: Inputs) -> Prepared:
        return Prepared(lambda: (eager(given).call().transpose(1, 2), "log-sum-exp"), rows_first=True)

    *_, dq, dk, dv = prepare_operation(rows_first, inputs).call()
    for mine, theirs in zip((dq, dk, dv), expected_gradients(inputs), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_forward_is_timed_as_it_is_prepared():
    inputs = Inputs(1, 2, 3, False)
    prepared = Prepared(lambda: "out")
    assert prepare_operation(lambda given: prepared, inputs) is prepared


def test_a_function_of_the_users_own_is_a_peer_in_training(monkeypatch, tmp_path):
    (tmp_path / "my_trained_peer.py").write_text(
        "import torch\n\n\ndef attend(q, k, v, causal):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    machine = GPUMachine("cpu")
    inputs = machine.inputs(a_cell(48, batch=1, heads=1, kv_heads=1, causal=True, operation="train"))
    prepared = prepare_operation(external_peer("my_trained_peer:attend").prepare, inputs)
    assert machine.relative_error(prepared, inputs) < 2e-2


@pytest.mark.parametrize("operation", ["backward", "train"])
def test_ours_is_attention_with_gradients_and_names_its_kernels(operation):
    machine = GPUMachine("cpu")
    inputs = machine.inputs(a_cell(64, batch=1, heads=2, kv_heads=1, causal=True, operation=operation))
    prepared = prepare_ours(inputs)
    assert machine.relative_error(prepared, inputs) < 8e-3
    kernels = [parse_config(text) for text in prepared.kernel.split("; ")]
    assert type(kernels[-1]).__name__ == "AmpereBackwardKernelConfig"
    assert len(kernels) == (2 if operation == "train" else 1)


def test_the_backward_alone_of_a_config_is_that_of_its_kernels(monkeypatch):
    monkeypatch.setattr(runtime, "run_backward", partial(runtime.run_backward, device="simulator"))
    machine = GPUMachine("cpu")
    inputs = machine.inputs(a_cell(64, batch=1, heads=1, kv_heads=1, causal=True, operation="backward"))
    config = parse_config("ampere backward (BF16, 64, 64, 64, 4): stages_2_1+swizzled")
    prepared = prepare_ours(inputs, config=config)
    assert prepared.kernel == str(config)
    assert 0 < machine.relative_error(prepared, inputs) < 8e-3


def test_the_backward_alone_of_a_family_is_attentions_through_autograd_as_every_peers():
    machine = GPUMachine("cpu")
    inputs = machine.inputs(a_cell(64, batch=1, heads=1, kv_heads=1, causal=True, operation="backward"))
    prepared = prepare_ours(inputs, family="hopper")
    assert prepared.kernel.startswith("hopper backward (")
    assert prepared.call.prepared.call.func is attention
    assert prepared.call.prepared.call.keywords["family"] == "hopper"


# --- Errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_error_of_right_gradients_is_that_of_rounding(causal, kv_heads):
    inputs = cpu_inputs("backward", causal=causal, kv_heads=kv_heads)
    gradients = expected_gradients(inputs)
    assert gradient_error(gradients, inputs) < 1e-5
    rounded = tuple(gradient.bfloat16() for gradient in gradients)
    assert 1e-4 < gradient_error(rounded, inputs) < 4e-3


@pytest.mark.parametrize("wrong", range(3))
def test_a_wrong_gradient_is_seen_whichever_it_is(wrong):
    inputs = cpu_inputs("backward", kv_heads=2)
    gradients = list(expected_gradients(inputs))
    gradients[wrong] = 1.2 * gradients[wrong]
    assert gradient_error(tuple(gradients), inputs) == pytest.approx(0.2, rel=0.5)
    gradients[wrong] = gradients[wrong] * math.nan
    assert math.isnan(gradient_error(tuple(gradients), inputs))


def test_a_gradient_that_is_a_difference_of_equal_terms_is_measured_by_the_terms():
    """Rows that attend to one key have gradients of 0, and kernels round the terms."""
    inputs = cpu_inputs("backward", rows=16)
    k = torch.eye(16).expand(2, 4, 16, 16)
    inputs = with_gradients(replace(inputs, q=1e4 * k, k=k), "backward")
    dq, dk, dv = expected_gradients(inputs)
    assert dq.norm() < 1e-5
    noise = 1e-3 * torch.randn_like(dq)
    assert 1e-4 < gradient_error((dq + noise, dk, dv), inputs) < 1e-2


def test_a_gradient_of_zero_is_right_if_it_is_zero():
    inputs = cpu_inputs("backward")
    inputs = with_gradients(replace(inputs, q=0 * inputs.q), "backward")
    dq, dk, dv = expected_gradients(inputs)
    assert dk.norm() == 0
    assert gradient_error((dq, dk, dv), inputs) < 1e-5
    assert gradient_error((dq, dk + 1e-6, dv), inputs) == math.inf


def test_gradients_of_another_shape_are_refused():
    inputs = cpu_inputs("backward")
    dq, dk, dv = expected_gradients(inputs)
    with pytest.raises(ValueError, match="dk has the shape"):
        gradient_error((dq, dk[:, :, 1:], dv), inputs)


def test_errors_of_gradients_are_not_relative_to_sums_that_vanish_by_chance():
    """Equal queries attend alike, and each has a neighbour with the opposite gradient: dk is 0, its terms are not."""
    q, k, v = torch.ones(1, 1, 64, 32), torch.randn(1, 1, 48, 32), torch.randn(1, 1, 48, 32)
    do = torch.randn(1, 1, 32, 32).repeat_interleave(2, dim=2)
    do[:, :, 1::2] *= -1
    inputs = Inputs(q, k, v, False, "backward", do)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = torch.softmax(leaves[0] @ leaves[1].mT / math.sqrt(32), dim=-1) @ leaves[2]
    dq, dk, dv = torch.autograd.grad(out, leaves, do.double())
    noise = torch.randn_like(dk) * 1e-3 * dq.norm() / math.sqrt(dk.numel())
    assert 0 < gradient_error((dq, dk + noise, dv), inputs) < 0.1
