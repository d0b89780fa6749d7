"""Tuning on a GPU: kernels are really checked and timed, and `attention()` uses what was found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashwright import tuning
from flashwright.attention import attention, chosen_config
from flashwright.defaults import best_family, length_bucket
from flashwright.kernel_configs import parse_kernel_name_into_config
from flashwright.program_cache import CACHE_DIRECTORY_VARIABLE
from flashwright.tuning.database import TuningDatabase
from flashwright.tuning.measure import GpuMeasurer, this_machine
from flashwright.tuning.problem import problem_of
from flashwright.tuning.tuner import tune
from flashwright.variant import FULL

pytestmark = pytest.mark.gpu


@pytest.fixture
def database(tmp_path):
    return TuningDatabase(tmp_path / "tuning.sqlite3")


@pytest.mark.parametrize("d_head", [32, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_a_search_finds_a_config_that_is_not_slower_than_the_default(database, d_head, causal):
    problem = problem_of(d_head=d_head, causal=causal, q_length=512)
    report = tune(problem, this_machine(), database, limit=6, progress=False)
    assert report.wrong == ()
    assert report.speedup >= 1
    assert report.result.tflops > 1
    assert database.results() == [report.result]


def test_attention_uses_the_winner(tmp_path, monkeypatch):
    import torch

    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path))
    family = best_family(torch.cuda.get_device_name(), length_bucket(300))
    problem = problem_of(family=family, d_head=64, dtype="FP16", q_length=300, batch=2, heads=2)
    q, k, v = (torch.randn(2, 2, 300, 64, dtype=torch.float16, device="cuda") for _ in range(3))
    before = attention(q, k, v)
    report = tune(problem, this_machine(), TuningDatabase(), limit=3, progress=False)
    assert chosen_config(q, k, FULL, None) == report.result.config
    torch.testing.assert_close(attention(q, k, v), before, atol=2e-3, rtol=2e-3)
    monkeypatch.undo()
    tuning.reload()


def test_the_check_sees_a_kernel_for_another_scale_as_wrong(monkeypatch):
    from functools import partial

    from flashwright import runtime

    problem = problem_of(d_head=64, q_length=512)
    config = parse_kernel_name_into_config("(BF16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax")
    measurer = GpuMeasurer(replace(problem, causal=True))
    assert measurer.error(config) < 8e-3
    monkeypatch.setattr(runtime, "run_forward", partial(runtime.run_forward, scale=0.2))
    assert measurer.error(config) > 8e-3


def test_sweeps_repeat_within_a_few_percent():
    problem = problem_of(d_head=128, q_length=4096)
    texts = ("128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax", "64, 64, 4): async+load_0_0_0_tiles")
    fast, slow = (parse_kernel_name_into_config(f"(BF16, 128, {text}") for text in texts)
    measurer = GpuMeasurer(problem)
    first, second = measurer.sweep([fast, slow]), measurer.sweep([fast, slow])
    assert first[fast] < first[slow]
    assert second[fast] == pytest.approx(first[fast], rel=0.05)
