"""`fw.choice()`: the kernel that `attention()` runs on a GPU, and where its config comes from."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
from command_line import flashwright
from ml_dtypes import bfloat16
from tuning_fakes import a_result

import flashwright as fw
from flashwright.choice import lookup
from flashwright.choice.database import TuningDatabase
from flashwright.choice.lookup import shipped_results
from flashwright.choice.problem import problem_of
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE
from flashwright.hardware.architectures import GPUModel
from flashwright.hardware.models import gpu_named, gpu_names
from flashwright.operators.warming import needed_kernels
from flashwright.workbench.tuning.reload import reload

H200 = gpu_named("h200")
MINE = "hopper (FP16, 128, 128, 128): stages_2+overlap+persistent"


@pytest.fixture(autouse=True)
def database(tmp_path, monkeypatch):
    """A database of the test's own; the shipped results stay."""
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path))
    reload()
    yield TuningDatabase()
    reload()


def tensor(rows: int, heads: int = 4, head_dim: int = 128) -> np.ndarray:
    return np.zeros((1, heads, rows, head_dim), np.float16)


def choice(rows: int = 2048, keys: int | None = None, **options) -> fw.KernelChoice:
    return fw.choice(tensor(rows), tensor(rows if keys is None else keys), **({"gpu": "h200"} | options))


def store_mine(database, **changes) -> None:
    problem = problem_of(family="hopper", dtype="FP16", q_length=2048)
    database.store([a_result(fw.parse_hopper_config(MINE), gpu=H200.name, problem=problem, **changes)])
    reload()


# --- Where a config comes from -----------------------------------------------------------------------------------


def test_a_shipped_result_of_the_ampere_family_is_chosen_where_that_family_is_requested():
    found = choice(family="ampere")
    assert (found.source, found.family, found.gpu) == ("shipped", "ampere", H200)


def test_a_shipped_result_is_chosen_and_shown():
    found = choice(causal=True)
    assert (found.source, found.family, found.gpu) == ("shipped", "hopper", H200)
    assert found.measured in list(shipped_results())
    assert found.config == found.measured.config
    assert "ships with flashwright" in found.reason and f"{found.measured.problem}" in found.reason


def test_what_the_user_tuned_comes_before_what_ships(database):
    store_mine(database)
    found = choice()
    assert (found.source, str(found.config)) == ("tuned", MINE)
    assert "your tuning, 2030-01-02" in found.reason


def test_what_nobody_measured_is_chosen_by_a_rule(monkeypatch):
    monkeypatch.setattr(lookup, "shipped_results", lambda: iter(()))
    reload()
    found = choice()
    assert (found.source, found.measured) == ("rule", None)
    assert "no result is measured on NVIDIA H200 for 1025-4096 × 1025-4096 rows × keys" in found.reason


def test_a_result_for_other_numbers_of_keys_is_said_to_be_one(database):
    store_mine(database)
    found = choice(keys=9000, family="hopper")
    assert "the nearest to 4097- keys measured" in found.reason


def test_a_requested_config_is_the_choice():
    found = choice(config=MINE)
    assert (found.source, str(found.config)) == ("requested", MINE)


@pytest.mark.parametrize("rows", [1, 200, 2048, 9000])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (64, 0), "softcap": 30.0}])
def test_the_choice_is_what_attention_compiles(rows, options):
    """`needed_kernels` is what `warm_up()` compiles, which GPU tests hold against calls."""
    found = choice(rows, **options)
    problem = found.problem
    assert (found.config, found.variant) in needed_kernels(128, problem.dtype, problem.options, H200)


def test_few_rows_on_many_keys_are_decoded():
    found = choice(1, 9000, causal=True)
    assert str(found.config).startswith("ampere decode (FP16, 128, ")
    assert "few rows on many keys are decoded" in found.reason and "p1-16 × 4097- rows × keys" in found.reason
    problem = found.problem
    assert (found.config, found.variant) in needed_kernels(128, problem.dtype, problem.options, H200)
    for options in ({"family": "ampere"}, {"config": MINE}, {"row_invariant": True}, {"causal": "top-left"}):
        assert "decode" not in str(choice(1, 9000, **options).config)


@pytest.mark.parametrize("rows", [1, 200, 2048, 9000])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "deterministic": True}, {"window": (64, 0), "family": "ampere"}]
)
def test_in_training_the_kernel_of_the_gradients_is_chosen_too(rows, options):
    found = choice(rows, 9000, training=True, **options)
    problem, family = found.problem, options.get("family")
    needed = needed_kernels(
        128, problem.dtype, problem.options, H200, training=True, deterministic=problem.deterministic, family=family
    )
    for each in (found, found.gradients):
        assert (each.config, each.variant) in needed
        assert "decode" not in str(each.config)  # calls whose gradients are computed are not decoded
    assert found.gradients.config.ordered or not problem.deterministic
    assert found.gradients.explain_command.startswith("flashwright explain ")
    assert f"gradients: {found.gradients.config}" in str(found)
    assert choice(rows, 9000, **options).gradients is None


def test_tensors_that_require_gradients_are_trained_on():
    torch = pytest.importorskip("torch")
    k = torch.zeros(1, 4, 9000, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    q = k[:, :, :1].detach()
    assert "backward" in str(fw.choice(q, k, gpu="h200").gradients.config)
    for choose in (
        lambda: fw.choice(q, k, gpu="h200", training=False),
        torch.no_grad()(lambda: fw.choice(q, k, gpu="h200")),
    ):
        assert choose().gradients is None
        assert "decode" in str(choose().config)


def test_a_row_invariant_call_uses_one_config_for_all_lengths():
    assert choice(100, row_invariant=True).config == choice(8192, row_invariant=True).config == choice(8192).config


def test_of_few_columns_a_row_invariant_causal_call_uses_the_config_for_short_sequences():
    """That for long ones is slow at few rows: of a short causal sequence, steps in the first blocks are nearly all."""

    def narrow(rows: int, dtype=bfloat16, **options) -> fw.KernelConfig:
        q = np.empty((1, 4, rows, 64), dtype)
        return fw.choice(q, q, gpu="h200", **options).config

    for rows in (100, 512, 2048, 16384):
        assert narrow(rows, causal=True, row_invariant=True) == narrow(512, causal=True)
        assert narrow(rows, row_invariant=True) == narrow(8192)
    assert narrow(512, causal=True) != narrow(8192, causal=True)
    for others in ({"dtype": np.float16}, {"family": "ampere"}):
        assert narrow(512, causal=True, row_invariant=True, **others) == narrow(8192, causal=True, **others)


# --- For which GPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h200", "H200", "nvidia h200", "NVIDIA H200"])
def test_a_gpu_is_named_in_short_or_as_the_driver_does(name):
    assert gpu_named(name) == GPUModel.of_architecture("NVIDIA H200", "sm_90")


def test_a_known_model_of_another_size_keeps_its_own_name_by_which_results_are_found():
    assert gpu_named("NVIDIA A100-PCIE-40GB") == GPUModel.of_architecture("NVIDIA A100-PCIE-40GB", "sm_80")
    assert gpu_named("RTX 4090") == gpu_named("rtx4090") == gpu_named("NVIDIA GeForce RTX 4090")


@pytest.mark.parametrize("name", [*gpu_names(), "sm_80", "sm_120"])
def test_every_named_gpu_has_a_kernel(name):
    found = choice(gpu=name)
    assert found.gpu == gpu_named(name)
    assert fw.tile_shapes(found.config).shared_bytes <= found.gpu.shared_bytes_per_sm


def test_an_unknown_gpu_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"gpu: 'tpu' is not known; allowed: a100, .* or an architecture: sm_80"):
        choice(gpu="tpu")


def test_without_a_gpu_one_has_to_be_named(monkeypatch):
    monkeypatch.setattr("flashwright.runtime.devices.gpu_available", lambda: False)
    with pytest.raises(fw.GPUError, match="no GPU here to choose a kernel for; name one"):
        fw.choice(tensor(64), tensor(64))


def test_a_family_that_the_gpu_does_not_run_is_refused():
    with pytest.raises(ValueError, match="the hopper family runs on sm_90a alone, not on sm_80"):
        choice(gpu="a100", family="hopper")


def test_tensors_of_any_kind_will_do():
    torch = pytest.importorskip("torch")
    q = torch.empty(1, 4, 2048, 128, dtype=torch.float16, device="meta")
    assert fw.choice(q, q, gpu="h200").config == choice().config


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (tensor(0), tensor(0), "leave nothing for a kernel to compute"),
        (tensor(8).astype(np.float32), tensor(8).astype(np.float32), "float32.* allowed: FP16, BF16"),
        (tensor(8, heads=3), tensor(8, heads=2), "heads"),
    ],
)
def test_tensors_that_no_kernel_computes_are_refused(q, k, message):
    with pytest.raises(ValueError, match=message):
        fw.choice(q, k, gpu="h200")


# --- The way to explain ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, []),
        ({"causal": True}, ["--causal"]),
        ({"window": (64, None), "softcap": 30.0}, ["--window", "64,-1", "--softcap", "30"]),
        ({"window": (1024, 0), "causal": True}, ["--window", "1024,0"]),
    ],
)
def test_the_explain_command_names_the_same_kernel(options, flags):
    found = choice(**options)
    words = shlex.split(found.explain_command)
    assert words == ["flashwright", "explain", str(found.config), "--arch", "sm_90", *flags]
    code, _, error = flashwright(*words[1:], "--help")
    assert code == 0, error


def test_grouped_heads_are_part_of_the_explain_command():
    found = fw.choice(tensor(64, heads=4), tensor(64, heads=2), gpu="h200")
    assert found.variant.grouped_heads
    assert found.explain_command.endswith("--kv-heads 1")
