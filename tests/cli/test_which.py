"""`flashwright which`: the kernel for a problem on a GPU, as text and as JSON."""

from __future__ import annotations

import json

import pytest
from command_line import flashwright

import flashwright as fw
from flashwright.workbench.tuning.reload import reload


@pytest.fixture(autouse=True)
def choose_anew():
    reload()


def test_which_prints_the_config_its_source_and_the_command_that_explains_it():
    code, out, error = flashwright("which", "--gpu", "h200", "--d-head", "128", "--rows", "4096", "--causal")
    assert code == 0, error
    problem, config, source, command = out.splitlines()
    assert problem == "BF16, head_dim 128, causal, 4096 × 4096 rows × keys on NVIDIA H200 (sm_90)"
    assert fw.parse_config(config.removesuffix("  hopper family"))
    assert source.startswith("shipped: a result that ships with flashwright")
    assert command.startswith("flashwright explain 'hopper (BF16, 128, ") and command.endswith("--arch sm_90 --causal")


def test_which_prints_the_same_as_json():
    code, out, error = flashwright("which", "--gpu", "h200", "--kv-heads", "4", "--window", "-1,64", "--json")
    assert code == 0, error
    document = json.loads(out)
    assert document["schema"] == "which/1"
    assert document["gpu"] == {"name": "NVIDIA H200", "arch": "sm_90"}
    assert document["problem"]["window"] == [None, 64]
    assert document["variant"]["grouped_heads"] and document["variant"]["masks_right"]
    assert document["measured"]["config"] == document["config"]


def test_in_training_which_prints_the_kernel_of_the_gradients_too():
    arguments = (
        "which",
        "--gpu",
        "h200",
        "--d-head",
        "128",
        "--rows",
        "4096",
        "--causal",
        "--training",
        "--deterministic",
    )
    code, out, error = flashwright(*arguments)
    assert code == 0, error
    *forward, heading, config, source, command = out.splitlines()
    assert (len(forward), heading) == (4, "Gradients:")
    assert "ordered" in config and config.startswith("hopper backward (BF16, 128, ")
    assert source.startswith(("rule: ", "shipped: "))
    assert command.startswith("flashwright explain 'hopper backward (BF16, 128, ")
    document = json.loads(flashwright(*arguments, "--json")[1])
    assert config.startswith(document["gradients"]["config"])
    assert document["gradients"].keys() == document.keys() - {"schema", "gpu", "problem", "gradients"}
    assert document["problem"]["training"] and document["problem"]["deterministic"]
    assert json.loads(flashwright("which", "--gpu", "h200", "--json")[1])["gradients"] is None


def test_a_gpu_of_an_architecture_is_served_by_a_rule():
    _, out, _ = flashwright("which", "--gpu", "sm_89")
    assert "on any sm_89" in out
    assert "rule: no result is measured on such a GPU" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "h300"), "gpu: 'h300' is not known; allowed: a100"),
        (("--gpu", "h200", "--window", "5"), "--window: '5' is not a window; expected LEFT,RIGHT"),
        (("--gpu", "h200", "--d-head", "260"), "head_dim 260 is not allowed"),
        (("--gpu", "h200", "--kv-heads", "3"), "16"),
        (("--gpu", "h200", "--family", "volta"), "family: 'volta' is not known; allowed: ampere, hopper"),
        (("--gpu", "a100", "--family", "hopper"), "runs on sm_90a alone"),
        (("--gpu", "h200", "--deterministic"), "--deterministic is about gradients: it needs --training"),
    ],
)
def test_what_is_not_allowed_is_refused_with_what_is(arguments, message):
    code, _, error = flashwright("which", *arguments)
    assert code == 1
    assert message in error
