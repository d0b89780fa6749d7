"""Tuning on a GPU: kernels are really checked and timed, and `attention()` uses what was found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from flashwright.attention import attention
from flashwright.choice.choose import best_family
from flashwright.choice.database import TuningDatabase
from flashwright.choice.problem import problem_of
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE
from flashwright.kernels.family import Occasion
from flashwright.kernels.forward.ampere.names import parse_kernel_name_into_config
from flashwright.kernels.registry import families
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import MEDIUM
from flashwright.runtime import forward
from flashwright.workbench.tuning.measure import GpuMeasurer, this_machine
from flashwright.workbench.tuning.reload import reload
from flashwright.workbench.tuning.tuner import tune

from .tools import config_for, some, this_gpu


@pytest.fixture
def database(tmp_path):
    return TuningDatabase(tmp_path / "tuning.sqlite3")


@pytest.mark.parametrize(
    ("d_head", "causal"),
    [
        (32, False), (96, True), (128, False), (256, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((32, True), (96, False), (128, True), (256, False))),
    ],
)  # fmt: skip
def test_a_search_finds_a_config_that_is_not_slower_than_the_default(database, d_head, causal):
    problem = problem_of(d_head=d_head, causal=causal, q_length=512)
    report = tune(problem, this_machine(), database, limit=6, progress=False)
    assert report.wrong == ()
    assert report.speedup >= 1
    assert report.result.tflops > 1
    assert database.results() == [report.result]


@pytest.mark.parametrize("family", families("backward"), ids=lambda family: family.name)
@pytest.mark.parametrize("causal", [False, True])
def test_a_search_of_the_backward_finds_a_config_that_is_not_slower_than_the_default(database, family, causal):
    if not family.runs_on(this_gpu().arch):
        pytest.skip(f"the {family.name} family does not run on {this_gpu().arch}")
    problem = problem_of(family=family.prefix, d_head=128, causal=causal, q_length=512)
    report = tune(problem, this_machine(), database, limit=4, progress=False)
    assert report.wrong == ()
    assert report.speedup >= 1
    assert database.results() == [report.result]


@pytest.mark.parametrize("rows", [1, 16])
def test_a_search_of_the_decode_finds_a_config_that_is_not_slower_than_the_default(database, rows):
    problem = problem_of(family="ampere decode", d_head=128, q_length=rows, batch=4)
    report = tune(problem, this_machine(), database, limit=6, progress=False)
    assert report.wrong == ()
    assert report.speedup >= 1
    assert database.results() == [report.result]


def test_attention_uses_the_winner(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path))
    reload()
    family = best_family(Occasion(DType.FP16, 64, False, MEDIUM, MEDIUM, this_gpu())).name
    problem = problem_of(family=family, d_head=64, dtype="FP16", q_length=300, batch=2, heads=2)
    q, k, v = some(torch.float16, (2, 2, 300, 64), (2, 2, 300, 64))
    before = attention(q, k, v)
    report = tune(problem, this_machine(), TuningDatabase(), limit=3, progress=False)
    assert config_for(q, k, {}, None) == report.result.config
    torch.testing.assert_close(attention(q, k, v), before, atol=2e-3, rtol=2e-3)
    monkeypatch.undo()
    reload()


def test_the_check_sees_a_kernel_for_another_scale_as_wrong(monkeypatch):
    problem = problem_of(d_head=64, q_length=512)
    config = parse_kernel_name_into_config("(BF16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax")
    measurer = GpuMeasurer(replace(problem, causal=True))
    assert measurer.error(config) < 8e-3
    monkeypatch.setattr(forward, "run_forward", partial(forward.run_forward, scale=0.2))
    assert measurer.error(config) > 8e-3


@pytest.mark.alone
def test_sweeps_repeat_within_a_few_percent():
    problem = problem_of(d_head=128, q_length=4096)
    texts = ("128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax", "64, 64, 4): async+load_0_0_0_tiles")
    fast, slow = (parse_kernel_name_into_config(f"(BF16, 128, {text}") for text in texts)
    measurer = GpuMeasurer(problem)
    first, second = measurer.sweep([fast, slow]), measurer.sweep([fast, slow])
    assert first[fast] < first[slow]
    assert second[fast] == pytest.approx(first[fast], rel=0.05)
