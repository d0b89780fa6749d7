"""Benchmarks of decoding: inputs, errors and implementations, on the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from simulating_gpu import SimulatingGPU

from flashwright import DType
from flashwright.kernels.registry import parse_config
from flashwright.problem.flops import DECODE
from flashwright.workbench.bench.cache_cells import cache_cell
from flashwright.workbench.bench.gpu_machine import GPUMachine, prepare_ours
from flashwright.workbench.bench.peers import PEERS, Inputs
from flashwright.workbench.bench.training import prepare_operation
from flashwright.workbench.kernel_calls import kernel_calls

SIZES = {"batch": 3, "heads": 4, "kv_heads": 2, "d_head": 32}


def inputs_of(rows: int = 1, **changes: object) -> Inputs:
    return GPUMachine("cpu").inputs(cache_cell(DType.FP16, rows, 128, **(SIZES | changes)))


def of_sequence(inputs: Inputs, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in pages, one after the other."""
    cache = inputs.cache
    pages, length = cache.table[sequence].long(), int(cache.lengths[sequence])
    k, v = (x[pages].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (cache.k, cache.v))
    return k, v


def test_a_contiguous_cache_has_few_rows_of_queries():
    inputs = inputs_of(rows=3)
    assert inputs.operation == DECODE
    assert (inputs.causal, inputs.cache) == (True, None)
    assert (tuple(inputs.q.shape), tuple(inputs.k.shape)) == ((3, 4, 3, 32), (3, 2, 128, 32))


def test_pages_hold_the_same_keys_in_another_order():
    inputs = inputs_of(page=16)
    assert tuple(inputs.cache.k.shape) == (3 * 8, 2, 16, 32)
    assert sorted(inputs.cache.table.flatten().tolist()) == list(range(24))
    for sequence in range(3):
        k, v = of_sequence(inputs, sequence)
        assert torch.equal(k[0], inputs.k[sequence])
        assert torch.equal(v[0], inputs.v[sequence])


def test_uneven_sequences_have_pages_of_their_own_and_the_last_is_the_longest():
    inputs = inputs_of(uneven=True, page=16)
    lengths = inputs.cache.lengths.tolist()
    assert lengths == sorted(lengths)
    k, v = of_sequence(inputs, 2)
    assert torch.equal(k, inputs.k)
    assert torch.equal(v, inputs.v)
    owned = [page for row, n in zip(inputs.cache.table.tolist(), lengths, strict=True) for page in row[: -(-n // 16)]]
    assert len(set(owned)) == len(owned) == len(inputs.cache.k)


@pytest.mark.parametrize(
    "changes", [{}, {"rows": 3}, {"page": 16}, {"page": 16, "rows": 3}, {"uneven": True, "page": 16}]
)
def test_ours_is_right_on_contiguous_and_paged_caches(changes, monkeypatch):
    monkeypatch.setattr("flashwright.workbench.bench.gpu_machine.choice", lambda *q, **options: Choice())
    inputs = inputs_of(**changes)
    prepared = prepare_ours(inputs)
    assert GPUMachine("cpu").relative_error(prepared, inputs) < 1e-3
    if inputs.cache is not None:
        assert prepared.kernel.startswith("ampere decode (FP16, 32, 16, ")


class Choice:
    config = "what attention() chooses on a GPU"


@pytest.mark.parametrize("rows", [1, 3])
def test_peers_of_pytorch_align_the_last_row_with_the_last_key(rows):
    inputs = inputs_of(rows=rows)
    prepared = prepare_operation(PEERS["sdpa-efficient"].prepare, inputs)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        assert GPUMachine("cpu").relative_error(type(prepared)(prepared.call), inputs) < 1e-3


def test_peers_take_no_pages():
    with pytest.raises(ValueError, match="it takes no paged cache"):
        prepare_operation(PEERS["sdpa-fa2"].prepare, inputs_of(page=16))


def test_operations_without_kernels_have_no_calls():
    with pytest.raises(ValueError, match=r"operation: 'train' has no kernels of its own; allowed: .*decode"):
        kernel_calls("train", None, None, None)


def test_a_config_whose_values_are_in_the_keys_takes_them_from_there(monkeypatch):
    gpu = SimulatingGPU(monkeypatch, executes=False)
    q, k, v = (torch.zeros(2, heads, rows, 576, dtype=torch.bfloat16) for heads, rows in ((16, 1), (1, 32), (1, 32)))
    run = kernel_calls("decode", q, k, v)(parse_config("latent decode (BF16, 576, 64, 32): stages_2"))
    assert run().shape == (2, 16, 1, 512)
    assert gpu.launches == [("latent decode", None)]
