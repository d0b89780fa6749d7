"""Which config is chosen: by the GPU's compute capability and shared memory, the problem, and what was requested."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tuning_fakes import untuned

from flashwright import DType, Window
from flashwright.choice import lookup
from flashwright.choice.choose import (
    backward_config,
    best_family,
    chosen_config,
    decode_choice,
    default_config,
    has_decode,
)
from flashwright.choice.problem import problem_of
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE
from flashwright.hardware.architectures import KIB, GPUModel
from flashwright.kernels.family import Occasion
from flashwright.kernels.registry import families, family_names, family_of, tile_shapes
from flashwright.problem.lengths import LENGTH_BUCKETS, LONG, SHORT
from flashwright.problem.window import FULL
from flashwright.workbench.tuning.reload import reload

UNKNOWN_HOPPER = GPUModel("NVIDIA Imaginary 9000", (9, 0), 228 * KIB)
HOPPER = "hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy+guess"
AMPERE = "(BF16, 128, 64, 64, 4): async+swizzled+load_0_2_2_tiles"


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(lookup, "shipped_results", lambda: iter(()))
    reload()
    yield
    reload()


def default(gpu: GPUModel | None, q_length: int = 2048, head_dim: int = 128, family: str | None = None):
    return default_config(DType.BF16, head_dim, causal=False, q_length=q_length, kv_length=2048, gpu=gpu, family=family)


# --- By the GPU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "capability", "shared_kib", "family", "two_stages"),
    [
        ("NVIDIA H200", (9, 0), 228, "hopper", None),
        ("NVIDIA GH200 480GB", (9, 0), 228, "hopper", None),
        ("a name that nobody has heard of", (9, 0), 228, "hopper", None),
        ("NVIDIA B200", (10, 0), 228, "ampere", True),
        ("NVIDIA B300", (10, 3), 228, "ampere", True),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 164, "ampere", False),
        ("NVIDIA GeForce RTX 4090", (8, 9), 100, "ampere", False),
        ("NVIDIA H200 in name only", (8, 6), 100, "ampere", False),
    ],
)
def test_a_gpu_is_known_by_its_capability_and_shared_memory_whatever_its_name(
    name, capability, shared_kib, family, two_stages
):
    config = default(GPUModel(name, capability, shared_kib * KIB))
    assert family_of(config).name == family
    assert two_stages is None or config.two_kv_stages is two_stages


def test_without_a_gpu_the_first_family_serves():
    assert family_of(default(None)).name == "ampere"
    assert not default(None).two_kv_stages


def test_a_few_rows_on_a_few_keys_are_computed_by_the_ampere_family_on_a_hopper_gpu():
    def family(q_bucket: str, kv_bucket: str) -> str:
        return best_family(Occasion(DType.BF16, 128, False, q_bucket, kv_bucket, UNKNOWN_HOPPER)).name

    assert (family(SHORT, SHORT), family(SHORT, LONG), family(LONG, LONG)) == ("ampere", "hopper", "hopper")
    boundaries = (
        (1, 1024, "ampere"),
        (64, 1024, "ampere"),
        (1, 1025, "hopper"),
        (64, 1025, "hopper"),
        (65, 1024, "hopper"),
    )
    for q_length, kv_length, name in boundaries:
        lengths = {"q_length": q_length, "kv_length": kv_length}
        assert family_of(default_config(DType.BF16, 128, causal=False, gpu=UNKNOWN_HOPPER, **lengths)).name == name


def test_a_head_dimension_is_padded_to_the_next_of_the_chosen_family():
    assert default(UNKNOWN_HOPPER, head_dim=32).d_head == 64
    assert default(UNKNOWN_HOPPER, head_dim=32, family="ampere").d_head == 32
    assert default(None, head_dim=136).d_head == 160


def test_what_nobody_measured_is_chosen_by_experience():
    assert default(UNKNOWN_HOPPER) == untuned(problem_of(family="hopper", q_length=2048), UNKNOWN_HOPPER)
    assert default(None) == untuned(problem_of(q_length=2048), None)


# --- By request --------------------------------------------------------------------------------------------------


def chosen(config, *, dtype=DType.BF16, head_dim=128, family=None, window=FULL):
    return chosen_config(dtype, head_dim, window, 2048, 2048, gpu=UNKNOWN_HOPPER, config=config, family=family)


@pytest.mark.parametrize("text", [AMPERE, HOPPER])
def test_a_requested_config_is_used_as_it_is(text):
    config = chosen(text)
    assert str(config) == text
    assert chosen(config) == config
    assert chosen(config, head_dim=40) == config
    assert chosen(config, window=Window(right=0), family=family_of(config).name) == config


@pytest.mark.parametrize("nothing", [None, ""])
def test_without_a_request_the_default_is_used(nothing):
    assert chosen(nothing) == default(UNKNOWN_HOPPER)
    assert chosen(nothing, family="ampere") == default(UNKNOWN_HOPPER, family="ampere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": HOPPER, "family": "ampere"}, "is not of the ampere family, which was requested too"),
        ({"config": AMPERE, "dtype": DType.FP16}, "computes BF16, but q is FP16"),
        ({"config": AMPERE, "head_dim": 136}, "computes head dimensions up to 128, but q has 136"),
        ({"config": None, "family": "nope"}, "family: 'nope' is not known; allowed: ampere, hopper"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_with_both_sides(options, message):
    with pytest.raises(ValueError, match=message):
        chosen(**options)


def test_a_config_of_another_operation_is_refused():
    with pytest.raises(ValueError, match="is of the operation backward, not forward"):
        chosen("ampere backward (BF16, 128, 64, 128, 8): stages_2_1+swizzled")


def test_what_is_no_config_is_a_type_error():
    with pytest.raises(TypeError, match="int is not a config of any kernel family; known: FlashForwardKernelConfig"):
        chosen(7)


# --- Of the backward ---------------------------------------------------------------------------------------------


def occasion(head_dim: int = 128, gpu: GPUModel | None = UNKNOWN_HOPPER) -> Occasion:
    return Occasion(DType.BF16, head_dim, True, LONG, LONG, gpu)


@pytest.mark.parametrize("gpu", [None, UNKNOWN_HOPPER, GPUModel("NVIDIA A10", (8, 6), 100 * KIB)], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 136, 256])
@pytest.mark.parametrize("family", [None, *family_names("forward"), "of a user's own"])
def test_every_problem_has_a_backward_that_holds_its_head_dimension(gpu, head_dim, family):
    config = backward_config(occasion(head_dim, gpu), family=family)
    chosen = family_of(config)
    assert chosen.operation.name == "backward"
    assert chosen.native_d_head(head_dim) == config.d_head
    assert gpu is None or chosen.runs_on(gpu.arch)


@pytest.mark.parametrize("family", families("backward"), ids=lambda family: family.name)
def test_the_family_that_is_named_computes_the_gradients_too(family):
    assert family_of(backward_config(occasion(), family=family.name)) is family


@pytest.mark.parametrize("family", families("backward"), ids=lambda family: family.name)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", LENGTH_BUCKETS)
def test_deterministic_gradients_are_added_in_order_by_a_kernel_that_can_be_built(family, causal, length):
    for d_head in family.d_heads:
        kind = replace(occasion(d_head), causal=causal, q_bucket=length, kv_bucket=length)
        ordered = backward_config(kind, family=family.name, deterministic=True)
        assert ordered.ordered
        assert tile_shapes(ordered).shared_bytes


# --- Decoding with wide heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dims", "values_in_keys", "capability", "has_one"),
    (
        ((576, 512), True, (9, 0), True),
        ((320, 256), True, (9, 0), True),
        ((576, 512), False, (9, 0), False),
        ((576, 512), True, (8, 0), False),
        ((576, 576), True, (9, 0), False),
        ((640, 512), True, (9, 0), False),
        ((572, 512), True, (9, 0), False),
        ((128, 128), False, (8, 0), True),
    ),
)
def test_wide_heads_have_a_kernel_where_values_are_columns_of_the_keys(head_dims, values_in_keys, capability, has_one):
    gpu = GPUModel("a GPU", capability, 228 * KIB)
    assert has_decode(*head_dims, values_in_keys=values_in_keys, gpu=gpu) is has_one


def test_wide_heads_are_decoded_by_their_own_family_and_others_by_those_before():
    families_of = [
        decode_choice(DType.BF16, head_dim, FULL, 128, gpu=UNKNOWN_HOPPER).family.name for head_dim in (128, 256, 576)
    ]
    assert families_of == ["hopper", "hopper", "latent"]


def test_keys_that_hold_their_values_are_counted_once_in_what_is_tuned():
    problem = problem_of(family="latent decode", d_head=576, batch=8, heads=128, kv_heads=1, kv_length=8192)
    assert problem.speed(0.03) == f"{8 * 8192 * 576 * 2 / 0.03 / 1e9:.2f}"
    assert problem.variant(decode_choice(DType.BF16, 576, FULL, 128, gpu=UNKNOWN_HOPPER).config).value_head_dim == 512
