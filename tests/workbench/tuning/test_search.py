"""The search: halving finds the fastest kernel that is right, and an interrupted search goes on where it was."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pytest
import tuning_fakes
from hypothesis import given
from hypothesis import strategies as st
from tuning_fakes import (
    CONFIGS,
    GPU,
    PROBLEM,
    SPACE,
    WRONG,
    FakeMachine,
    FakeMeasurer,
    a_result,
    fake_compiler,
    untuned,
)

from flashwright import DType, ForwardKernelTileShapes, __version__, get_autotuning_kernel_configs
from flashwright.choice.currency import Currency, currency, kernel_digest
from flashwright.choice.database import TuningDatabase
from flashwright.choice.problem import problem_of, standard_problems
from flashwright.compiler.nvrtc import compiler_build
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.forward.ampere.space import search_space
from flashwright.kernels.registry import families, family_named, parse_config
from flashwright.kernels.source import device_headers
from flashwright.workbench.tuning import candidates as tuning_candidates
from flashwright.workbench.tuning import journal as journal_module
from flashwright.workbench.tuning.candidates import check_problems
from flashwright.workbench.tuning.journal import SearchJournal
from flashwright.workbench.tuning.measure import BackwardCheck, Check, KernelCrash
from flashwright.workbench.tuning.reload import reload
from flashwright.workbench.tuning.search import FINAL_SWEEPS, FINALISTS, halve, schedule
from flashwright.workbench.tuning.space import enumerate_space
from flashwright.workbench.tuning.tuner import tune

INCUMBENT = untuned()
AMPERE = family_named("ampere")
H200 = GPUModel.of_architecture("NVIDIA H200", "sm_90")


@pytest.fixture
def database(tmp_path, monkeypatch):
    """A database of the test's own, which `default_config` uses too; nothing is really compiled."""
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(tuning_candidates, "compile_all", fake_compiler())
    reload()
    yield TuningDatabase()
    reload()


def tuned(measurer, database, **options):
    return tune(PROBLEM, FakeMachine(fake=measurer), database, progress=False, **{**SPACE, **options})


# --- The space -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_head", AMPERE.d_heads)
def test_every_native_head_dimension_has_a_space_of_kernels_that_can_be_built(d_head):
    problem = problem_of(d_head=d_head)
    space = enumerate_space(problem)
    assert len(space.configs) == space.kept > 100
    assert space.kept + sum(removal.count for removal in space.removals) == space.enumerated
    assert len(set(space.configs)) == len(space.configs)
    for config in space.configs:
        assert (config.dtype, config.d_head, config.static_row_stride) == (problem.dtype, d_head, 0)
        ForwardKernelTileShapes(config)
    assert {removal.rule for removal in space.removals} >= {f"rule {number}" for number in range(1, 7)}
    assert all(removal.example for removal in space.removals if removal.count)


@pytest.mark.parametrize("d_head", [160, 192, 256])
def test_the_space_of_wide_heads_holds_their_untuned_default(d_head):
    problem = problem_of(dtype="FP16", d_head=d_head)
    assert untuned(problem, H200) in enumerate_space(problem).configs


def test_the_search_space_is_the_one_of_the_package():
    configs = [config for config, reason in search_space(DType.BF16, 64) if reason is None]
    assert configs == get_autotuning_kernel_configs("BF16", 64)
    assert sorted(enumerate_space(PROBLEM).configs) == sorted(configs)


def test_the_full_space_of_a_problem_holds_the_default_one_and_more_of_the_same_rules():
    default, full = enumerate_space(PROBLEM), enumerate_space(PROBLEM, name="full")
    assert (default.name, full.name) == ("default", "full")
    assert set(default.configs) < set(full.configs)
    assert sorted(full.configs) == sorted(get_autotuning_kernel_configs("BF16", 64, full=True))
    assert full.kept + sum(removal.count for removal in full.removals) == full.enumerated
    assert all(removal.count > 0 for removal in full.removals)
    assert enumerate_space(PROBLEM, name="full", limit=3).configs == default.configs[:3]  # the promising first


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("ampere", "whole", "space: 'whole' is not known; allowed: default, full"),
        ("hopper", "full", "space: the hopper family has no full space; those that have one: ampere"),
    ],
)
def test_a_space_that_a_family_does_not_have_is_refused(family, name, message):
    with pytest.raises(ValueError, match=message):
        enumerate_space(problem_of(family=family), name=name)


def test_every_family_that_can_be_tuned_has_a_space():
    assert [family.name for family in families() if family.space is None] == []


def test_quick_and_limited_spaces_are_the_promising_part_of_the_whole():
    whole, quick = enumerate_space(PROBLEM), enumerate_space(PROBLEM, quick=True)
    assert 20 < len(quick.configs) < len(whole.configs) / 2
    assert whole.configs[: len(quick.configs)] == quick.configs
    assert enumerate_space(PROBLEM, limit=5).configs == quick.configs[:5]
    with pytest.raises(ValueError, match="limit: 0 is not allowed"):
        enumerate_space(PROBLEM, limit=0)


def test_the_standard_problems_are_every_head_dimension_dtype_mask_and_length():
    problems = list(standard_problems())
    assert len({problem.kind for problem in problems}) == len(problems) == len(AMPERE.d_heads) * 2 * 2 * 3
    assert {problem.batch * problem.q_length for problem in problems} == {16_384}
    assert all(2048 - problem.d_head < problem.heads * problem.d_head <= 2048 for problem in problems)
    assert len(list(standard_problems(dtype="FP16", d_head=96, causal=True))) == 3


@given(st.integers(1, 9000), st.integers(1, 9000), st.booleans())
def test_a_small_check_problem_is_computed_by_the_variant_that_is_timed(q_length, kv_length, causal):
    problem = replace(PROBLEM, causal=causal, q_length=q_length, kv_length=kv_length)
    for config in (CONFIGS[0], CONFIGS[-1]):
        ragged, *_ = checks = check_problems(problem, config)
        assert all(check.q_length < 512 and check.kv_length < 512 for check in checks)
        assert ragged.q_length % config.B_r and ragged.kv_length % config.B_c
        assert {check.variant(config) for check in checks} == {problem.variant(config)}


# --- Halving ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 400))
def test_each_stage_has_half_the_candidates_and_more_sweeps_down_to_a_few(count):
    stages = schedule(count)
    assert stages[0][0] == count
    assert stages[-1] == (min(count, FINALISTS), FINAL_SWEEPS)
    for (candidates, sweeps), (left, more) in pairwise(stages):
        assert left >= candidates / 2
        assert left < candidates
        assert more > sweeps


@pytest.mark.parametrize("best", [0, 3, 12, len(CONFIGS) - 1])
def test_halving_finds_the_best_in_spite_of_noise(best, database):
    ranking = [CONFIGS[best], *CONFIGS[:best], *CONFIGS[best + 1 :]]
    report = tuned(FakeMeasurer(ranking, noise=0.002), database)
    assert report.result.config == CONFIGS[best]
    assert [result.config for result in database.results()] == [CONFIGS[best]]


def test_halving_measures_few_candidates_often_instead_of_all(database):
    measurer = FakeMeasurer()
    tuned(measurer, database)
    everything = len(CONFIGS) * len(measurer.swept)
    assert sum(len(configs) for configs in measurer.swept) < everything / 2
    assert len(measurer.swept[-1]) <= FINALISTS + 1


def test_what_is_in_use_is_measured_to_the_end_and_stays_if_it_is_fastest(database):
    slowest = [config for config in CONFIGS if config != INCUMBENT] + [INCUMBENT]
    measurer = FakeMeasurer(slowest)
    report = tuned(measurer, database)
    assert all(INCUMBENT in configs for configs in measurer.swept)
    assert report.speedup == pytest.approx(measurer.time_ms(INCUMBENT) / measurer.time_ms(slowest[0]))

    fastest = [INCUMBENT, *slowest[:-1]]
    second = tuned(FakeMeasurer(fastest), database)
    assert second.result.config == INCUMBENT
    assert second.incumbents == (slowest[0], INCUMBENT)  # the first search's winner is what was in use since
    assert second.result.was_compared_with(slowest[0])


def test_one_candidate_wins_alone(database):
    journal = SearchJournal.open(database, GPU, PROBLEM, "space", resume=False)
    (stage,) = halve(CONFIGS[:1], (), FakeMeasurer(), journal, progress=False)
    assert [timing.config for timing in stage.timings] == [CONFIGS[0]]


# --- What may not win ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [WRONG, math.inf, math.nan])
def test_a_wrong_kernel_is_reported_and_never_timed(error, database):
    measurer = FakeMeasurer(errors={CONFIGS[0]: error})
    report = tuned(measurer, database)
    assert [wrong.config for wrong in report.wrong] == [CONFIGS[0]]
    assert all(CONFIGS[0] not in configs for configs in measurer.swept)
    assert report.result.config == CONFIGS[1]
    json.dumps(report.to_dict(), allow_nan=False)


def test_even_the_config_in_use_is_not_timed_if_it_is_wrong(database):
    measurer = FakeMeasurer([INCUMBENT, *CONFIGS], errors={INCUMBENT: WRONG})
    report = tuned(measurer, database)
    assert all(INCUMBENT not in configs for configs in measurer.swept)
    assert report.result.config != INCUMBENT
    assert report.speedup is None


def test_nothing_is_stored_if_all_kernels_are_wrong(database):
    measurer = FakeMeasurer(errors=dict.fromkeys((*CONFIGS, INCUMBENT), WRONG))
    with pytest.raises(ValueError, match=r"none of .* kernels computes .*: the smallest error is .*, less than"):
        tuned(measurer, database)
    assert database.results() == []


def test_a_kernel_that_crashes_the_gpu_is_left_out_by_the_next_attempt(database):
    class Crashing(FakeMeasurer):
        def error(self, config):
            if config == CONFIGS[2]:
                raise KernelCrash("illegal memory access")
            return super().error(config)

    with pytest.raises(KernelCrash, match="--resume goes on without it"):
        tuned(Crashing(), database)
    measurer = Crashing()
    report = tuned(measurer, database, resume=True)
    assert [wrong.config for wrong in report.wrong] == [CONFIGS[2]]
    assert CONFIGS[1] not in measurer.checked  # it was, before the crash


def test_spilling_kernels_are_neither_checked_nor_timed_but_for_the_one_in_use(database, monkeypatch):
    spilling = {CONFIGS[0], CONFIGS[5], INCUMBENT}
    monkeypatch.setattr(tuning_candidates, "compile_all", fake_compiler(spilling))
    measurer = FakeMeasurer()
    report = tuned(measurer, database)
    assert {candidate.config for candidate in report.candidates.spilling} == spilling - {INCUMBENT}
    assert not (spilling - {INCUMBENT}) & {config for configs in measurer.swept for config in configs}
    assert not (spilling - {INCUMBENT}) & set(measurer.checked)
    assert INCUMBENT in measurer.swept[-1]


def test_kernels_that_need_more_shared_memory_than_the_gpu_has_are_not_compiled(database):
    machine = FakeMachine(shared_bytes_per_block=32 * 1024)
    report = tune(PROBLEM, machine, database, progress=False, **SPACE)
    assert report.candidates.too_large
    assert all(candidate.shared_bytes <= 32 * 1024 for candidate in report.candidates.survivors)


# --- Interruptions ---------------------------------------------------------------------------------------------


def interrupt_at(number):
    def before_sweep(current):
        if current == number:
            raise KeyboardInterrupt

    return before_sweep


@pytest.mark.parametrize("sweep", [0, 1, 4])
def test_an_interrupted_search_is_resumed_without_measuring_anything_twice(sweep, database):
    complete = FakeMeasurer()
    expected = tuned(complete, TuningDatabase(database.path.with_name("other.sqlite3")))

    interrupted = FakeMeasurer(before_sweep=interrupt_at(sweep))
    with pytest.raises(KeyboardInterrupt):
        tuned(interrupted, database)
    assert database.results() == []
    assert database.status().unfinished_searches == 1

    rest = FakeMeasurer()
    report = tuned(rest, database, resume=True)
    assert report.resumed
    assert rest.checked == []
    assert interrupted.swept + rest.swept == complete.swept
    assert report.final_timings == expected.final_timings
    assert database.status().unfinished_searches == 0


def test_a_search_that_is_not_resumed_starts_anew(database):
    with pytest.raises(KeyboardInterrupt):
        tuned(FakeMeasurer(before_sweep=interrupt_at(4)), database)
    again = FakeMeasurer()
    assert not tuned(again, database).resumed
    assert set(again.checked) == {*CONFIGS, INCUMBENT}
    assert len(again.swept[0]) == len({*CONFIGS, INCUMBENT})


@pytest.mark.parametrize("change", [{"limit": 20}, {"limit": 25}, {"scores": ("normal",)}])
def test_only_a_search_of_the_same_space_and_kinds_of_scores_is_resumed(change, database):
    with pytest.raises(KeyboardInterrupt):
        tuned(FakeMeasurer(before_sweep=interrupt_at(2)), database)
    assert not tuned(FakeMeasurer(), database, resume=True, **change).resumed
    assert tuned(FakeMeasurer(), database, resume=True).resumed  # and the other can still be


def other_device_header(monkeypatch):
    name, text = device_headers()[-1]
    headers = (*device_headers()[:-1], (name, text + "// changed"))
    monkeypatch.setattr(journal_module, "device_headers", lambda: headers)


def other_generated_source_of_the_last(monkeypatch):
    last = sorted(CONFIGS, key=str)[-1]

    def source(config, variant):
        made = AMPERE.source(config, variant)
        return replace(made, options=("--use_fast_math",)) if config == last else made

    monkeypatch.setattr(journal_module, "family_of", lambda config: replace(AMPERE, source=source))


def other_compiler(monkeypatch):
    monkeypatch.setattr(journal_module, "compiler_build", lambda: "CL-1 V13.0.1")


@pytest.mark.parametrize("change", [other_device_header, other_generated_source_of_the_last, other_compiler])
def test_times_of_two_sources_or_compilers_are_never_mixed(change, database, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        tuned(FakeMeasurer(before_sweep=interrupt_at(2)), database)
    with monkeypatch.context() as changed:
        change(changed)
        anew = FakeMeasurer()
        assert not tuned(anew, database, resume=True).resumed
        assert set(anew.checked) >= set(CONFIGS)
    assert tuned(FakeMeasurer(), database, resume=True).resumed  # what was measured with the first is kept for it


def test_a_result_carries_what_it_was_measured_with(database):
    result = tuned(FakeMeasurer(), database).result
    assert result.versions["flashwright"] == __version__
    assert result.versions["compiler"] == compiler_build()
    assert result.versions["kernels"] == kernel_digest(result.config)
    assert currency(result) is Currency.CURRENT


def test_a_search_replaces_the_result_of_an_older_package_even_if_that_was_faster(database):
    database.store([a_result(CONFIGS[-1], 1e-3, kernels="0123456789abcdef")])
    report = tuned(FakeMeasurer(), database)
    assert report.stored == report.result
    assert [result.config for result in database.results()] == [CONFIGS[0]]


def test_a_gpu_of_an_architecture_that_is_not_known_yet_can_be_tuned_for(database):
    unknown = GPUModel("NVIDIA Imaginary 9001", (13, 7), 300 * 1024)
    report = tune(PROBLEM, FakeMachine(unknown), database, progress=False, **SPACE)
    assert (report.gpu, report.arch) == ("NVIDIA Imaginary 9001", "sm_137")
    assert {candidate.blocks_per_sm for candidate in report.candidates.survivors} == {None}


def test_resuming_a_finished_search_measures_nothing_and_says_what_came_out(database):
    first = tuned(FakeMeasurer(), database)
    idle = FakeMeasurer()
    report = tuned(idle, database, resume=True)
    assert (idle.checked, idle.swept) == ([], [])
    assert report.result == first.result == report.stored


def test_a_search_that_was_killed_is_resumed_by_another_process(tmp_path, database):
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(tuning_fakes.__file__).parent)!r})
from tuning_fakes import *
from flashwright.choice.database import TuningDatabase
from flashwright.workbench.tuning import candidates
from flashwright.workbench.tuning.tuner import tune
candidates.compile_all = fake_compiler()
def report(number):
    print(number, flush=True)
    time.sleep(60 if number == 5 else 0)
tune(PROBLEM, FakeMachine(fake=FakeMeasurer(before_sweep=report)), TuningDatabase(), progress=False, **SPACE)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ)
    for number in range(6):
        assert process.stdout.readline() == f"{number}\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL
    process.stdout.close()

    complete, rest = FakeMeasurer(), FakeMeasurer()
    tuned(complete, TuningDatabase(tmp_path / "other.sqlite3"))
    report = tuned(rest, database, resume=True)
    assert report.resumed
    assert rest.checked == []
    assert rest.swept == complete.swept[5:]
    assert database.results()[0].config == CONFIGS[0]


# --- On a GPU, as far as that can be tested without ------------------------------------------------------------


@pytest.fixture(params=["normal", "falling-slow"])
def check(monkeypatch, request):
    """A check on CPU tensors with scores of some kind by the simulated GPU."""
    torch = pytest.importorskip("torch")
    from flashwright.runtime import forward as runtime

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(runtime, "run_forward", partial(runtime.run_forward, device="simulator"))
    ragged, _ = check_problems(replace(PROBLEM, causal=True), CONFIGS[0])
    return Check.of(replace(ragged, batch=1, heads=1), request.param, device="cpu")


def test_a_right_kernel_passes_the_check_with_nans_behind_its_inputs(check, small_config):
    assert check.inputs[0]._base.isnan().any()
    assert 0 < check.error(small_config) < 8e-3


@pytest.mark.parametrize(
    "fault",
    [
        lambda out: out[..., -1, :].fill_(math.nan),
        lambda out: out._base[:, -1].fill_(0),
        lambda out: out.mul_(1.1),
    ],
    ids=["a row not written", "a row behind the output written", "wrong values"],
)
def test_a_kernel_with_a_fault_fails_the_check(check, small_config, monkeypatch, fault):
    from flashwright.runtime import forward as runtime

    simulated = runtime.run_forward

    def faulty(*arguments, out, **options):
        simulated(*arguments, out=out, **options)
        fault(out)

    monkeypatch.setattr(runtime, "run_forward", faulty)
    assert check.error(small_config) > 8e-3


def test_each_kernel_is_captured_once_per_kind_of_scores_and_timed_beside_the_others(monkeypatch):
    torch = pytest.importorskip("torch")
    from flashwright.workbench.tuning import measure

    captured, replayed = [], []

    def capture(call, stream, launches):
        assert (stream, launches) == ("stream", None)
        captured.append(call)
        return call

    def replay_times_ms(calls, stream, *, rounds):
        replayed.append(list(calls))
        return {(config, kind): 1.0 if kind == "normal" else 4.0 for config, kind in calls}

    monkeypatch.setattr(torch.cuda, "Stream", lambda: "stream")
    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(measure, "replay_times_ms", replay_times_ms)
    problem = replace(PROBLEM, batch=1, heads=1, q_length=70, kv_length=90, causal=True)
    measurer = measure.GpuMeasurer(problem, ("normal", "equal"), device="cpu")
    assert measurer.sweep(CONFIGS[:3]) == dict.fromkeys(CONFIGS[:3], pytest.approx(2.0))  # √(1 · 4)
    measurer.sweep(CONFIGS[1:4])
    assert replayed == [list(product(configs, ("normal", "equal"))) for configs in (CONFIGS[:3], CONFIGS[1:4])]
    assert [call.args[0] for call in captured] == [config for config in CONFIGS[:4] for _ in range(2)]
    assert [bool(call.args[1].any()) for call in captured[:2]] == [True, False]
    _, q, k, v = captured[0].args
    assert (q.shape, k.shape, v.shape) == ((1, 1, 70, 64), (1, 1, 90, 64), (1, 1, 90, 64))
    assert captured[0].keywords["window"] == problem.window
    assert captured[0].keywords["out"].shape == q.shape


def test_a_failing_launch_is_a_crash_of_the_kernel(check, small_config, monkeypatch):
    from flashwright.runtime import forward as runtime

    def fail(*_arguments, **_options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runtime, "run_forward", fail)
    with pytest.raises(KernelCrash, match=r"load_2_2_2_tiles.*illegal memory access"):
        check.error(small_config)


# --- The backward ----------------------------------------------------------------------------------------------


BACKWARD_CONFIG = parse_config("ampere backward (FP16, 32, 32, 64, 4): stages_1_1+swizzled")


@pytest.fixture
def simulated_backward(monkeypatch):
    """`run_backward` on CPU tensors; a function put into it changes its gradients."""
    torch = pytest.importorskip("torch")
    from flashwright.runtime import backward as runtime

    simulated, faults = partial(runtime.run_backward, device="simulator"), []

    def run(*arguments, **options):
        gradients = simulated(*arguments, **options)
        for fault in faults:
            fault(*gradients)
        return gradients

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(runtime, "run_backward", run)
    return faults


def a_backward_check(scores: str = "normal-x4") -> BackwardCheck:
    problem = problem_of(family="ampere backward", dtype="FP16", d_head=32, causal=True, q_length=70, kv_length=90)
    return BackwardCheck.of(replace(problem, batch=1, heads=2), scores, device="cpu")


@pytest.mark.parametrize("scores", ["normal-x4", "equal"])
def test_a_right_backward_passes_the_check_with_nans_behind_its_inputs(simulated_backward, scores):
    check = a_backward_check(scores)
    assert check.inputs[0]._base.isnan().any()
    assert 0 < check.error(BACKWARD_CONFIG) < 1e-3


@pytest.mark.parametrize("wrong", range(3))
def test_a_backward_with_one_wrong_gradient_in_one_head_fails_the_check(simulated_backward, wrong):
    simulated_backward.append(lambda *gradients: gradients[wrong][0, 0].mul_(1.05))
    assert a_backward_check().error(BACKWARD_CONFIG) > 1e-3


def test_a_failing_launch_of_a_backward_is_a_crash(simulated_backward):
    def fail(*_gradients):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    simulated_backward.append(fail)
    with pytest.raises(KernelCrash, match=r"ampere backward.*illegal memory access"):
        a_backward_check().error(BACKWARD_CONFIG)


def test_sweeps_of_the_backward_run_its_kernels_on_one_forward_a_kind(monkeypatch):
    torch = pytest.importorskip("torch")
    from flashwright.workbench.tuning import measure

    captured = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "stream")
    monkeypatch.setattr(measure, "capture", lambda call, stream, launches: captured.append(call) or call)
    monkeypatch.setattr(measure, "replay_times_ms", lambda calls, stream, *, rounds: dict.fromkeys(calls, 2.0))
    problem = problem_of(family="ampere backward", dtype="FP16", d_head=32, causal=True, q_length=70, kv_length=90)
    configs = [BACKWARD_CONFIG, replace(BACKWARD_CONFIG, Q_stages=2)]
    measurer = measure.GpuMeasurer(replace(problem, batch=1, heads=1), ("normal", "equal"), device="cpu")
    assert measurer.sweep(configs) == dict.fromkeys(configs, pytest.approx(2.0))
    first, _, third, _ = captured  # both kinds of the first config, then of the second
    assert [call.args[0] for call in captured] == [config for config in configs for _ in range(2)]
    assert first.args[1:] == third.args[1:]  # the same tensors, output and log-sum-exp
    assert first.args[1].stride() == first.args[2].stride()
    assert first.keywords == {"window": problem.window}
