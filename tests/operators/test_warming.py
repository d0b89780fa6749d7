"""Compiling ahead covers what calls need, whatever their lengths."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright import GPUError, compile_kernel, warm_up
from flashwright.choice.choose import backward_config, chosen_config, decode_choice
from flashwright.choice.few_rows import MOST_PACKED_ROWS
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.backward.launch import DQ, ROWS
from flashwright.kernels.family import Occasion
from flashwright.kernels.forward.launch import forward_variant
from flashwright.kernels.registry import family_of
from flashwright.operators.warming import needed_kernels
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import length_bucket
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.compiling import compile_one

GPUS = [
    GPUModel.of_architecture("NVIDIA A100-SXM4-80GB", "sm_80"),
    GPUModel.of_architecture("NVIDIA GeForce RTX 4090", "sm_89"),
    GPUModel.of_architecture("NVIDIA H200", "sm_90"),
]


lengths = st.one_of(st.integers(1, 70), st.integers(1, 9000))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@given(
    head_dim=st.integers(1, 32).map(lambda n: 8 * n),
    dtype=st.sampled_from(DType),
    causal=st.booleans(),
    grouped=st.booleans(),
    training=st.booleans(),
    packed=st.booleans(),
    deterministic=st.booleans(),
    q_length=lengths,
    kv_length=lengths,
)
def test_every_length_finds_its_kernel_among_those_compiled_ahead(
    gpu, head_dim, dtype, causal, grouped, training, packed, deterministic, q_length, kv_length
):
    options = AttentionOptions.of(causal)
    ready = needed_kernels(
        head_dim, dtype, options, gpu, grouped=grouped, training=training, packed=packed, deterministic=deterministic
    )
    assert len(ready) == len(set(ready)) <= 19
    config = chosen_config(dtype, head_dim, options.window, q_length, kv_length, gpu=gpu)
    for returns_lse in (False, True) if training else (False,):
        variant = forward_variant(
            config, options, head_dim=head_dim, grouped_heads=grouped, packed=packed, returns_lse=returns_lse
        )
        assert (config, variant) in ready
    if training:
        occasion = Occasion(dtype, head_dim, causal, length_bucket(q_length), length_bucket(kv_length), gpu)
        config = backward_config(occasion, deterministic=deterministic)
        variant = forward_variant(
            config, options, head_dim=head_dim, grouped_heads=grouped, packed=packed, returns_lse=False
        )
        assert (config, variant) in ready


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("packed_rows", (1, 17, 40, MOST_PACKED_ROWS))
def test_few_rows_find_their_decode_kernel_among_those_compiled_ahead(gpu, packed_rows):
    options = AttentionOptions.of(True)
    config = decode_choice(DType.BF16, 128, options.window, packed_rows, gpu=gpu).config
    variant = forward_variant(config, options, head_dim=128, grouped_heads=False, packed=False, returns_lse=False)
    assert (config, variant) in needed_kernels(128, DType.BF16, options, gpu)
    assert all(family_of(each).operation.name != "decode" for each, _ in needed_kernels(
        128, DType.BF16, options, gpu, family="ampere"
    ))  # fmt: skip


def test_kernels_compiled_ahead_are_found_in_the_cache():
    kernels = warm_up(64, "fp16", causal=True, training=True, arch="sm_80")
    assert {kernel.arch for kernel in kernels} == {"sm_80"}
    for kernel in kernels:
        assert compile_kernel(kernel.config, "sm_80", kernel.variant).program.from_cache
    (backward,) = {
        (each.config, each.variant) for each in kernels if family_of(each.config).operation.name == "backward"
    }
    for companion in (ROWS, DQ):
        assert compile_one(*backward, companion, arch="sm_80").program.from_cache


def test_without_a_gpu_an_architecture_must_be_named(monkeypatch):
    monkeypatch.setattr(sys.modules["flashwright.attention"], "gpu_available", lambda: False)
    with pytest.raises(GPUError, match="no GPU to warm up; name what to compile for"):
        warm_up(64)


@pytest.mark.parametrize(
    ("arguments", "what_is_said"),
    [
        ({"head_dim": 60}, "head_dim 60 is not allowed"),
        ({"head_dim": 64, "dtype": "float32"}, "'float32' is not a known element type"),
        ({"head_dim": 64, "family": "turing"}, "'turing' is not known; allowed: ampere, hopper"),
        ({"head_dim": 64, "causal": "diagonal"}, "causal: 'diagonal' is not allowed"),
    ],
)
def test_what_cannot_be_compiled_is_refused(arguments, what_is_said):
    with pytest.raises(ValueError, match=what_is_said):
        warm_up(**arguments, arch="sm_90")
