"""`flashwright warm-up`."""

from __future__ import annotations

import json

from command_line import flashwright


def test_warm_up_compiles_with_and_without_a_mask_and_finds_it_again():
    command = ("warm-up", "--head-dim", "64", "--arch", "sm_80", "--json")
    _, out, _ = flashwright(*command)
    configs = json.loads(out)["kernels"]
    assert len(configs) >= 4 and {kernel["arch"] for kernel in configs} == {"sm_80"}
    _, out, _ = flashwright(*command)
    assert all(kernel["from_cache"] for kernel in json.loads(out)["kernels"])


def test_a_wrong_head_dimension_is_an_error():
    code, _, error = flashwright("warm-up", "--head-dim", "60", "--arch", "sm_80")
    assert code == 1 and "head_dim 60 is not allowed" in error
