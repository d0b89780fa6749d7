"""Searches on every GPU of a machine, with processes that are not there."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest

from flashwright.choice.problem import standard_problems
from flashwright.cli import tune as tune_commands
from flashwright.workbench.environment import GPU
from flashwright.workbench.tuning.several_gpus import (
    VISIBLE_VARIABLE,
    Device,
    search_arguments,
    search_on_all,
    visible_devices,
)

PROBLEMS = list(standard_problems(d_head=64, dtype="BF16", family="ampere"))
H200 = [Device(str(index), "NVIDIA H200") for index in range(3)]


def test_every_problem_is_searched_once_and_no_gpu_has_two_searches_at_a_time():
    busy: Counter[str] = Counter()
    both = threading.Barrier(3)
    lock = threading.Lock()
    commands = []

    def run(arguments, additions):
        gpu = additions[VISIBLE_VARIABLE]
        with lock:
            busy[gpu] += 1
            assert busy[gpu] == 1
            commands.append(tuple(arguments))
            first_of_all = len(commands) <= 3
        if first_of_all:
            both.wait(10)  # all GPUs are at work at the same time
        with lock:
            busy[gpu] -= 1
        return 0, json.dumps({"searches": [{"gpu": gpu}]}), ""

    outcomes = list(search_on_all(PROBLEMS, H200, ["--quick"], run))
    assert sorted(commands) == sorted(tuple(search_arguments(problem, ["--quick"])) for problem in PROBLEMS)
    assert Counter(map(str, (outcome.problem for outcome in outcomes))) == Counter(map(str, PROBLEMS))
    assert {outcome.device for outcome in outcomes} == set(H200)
    assert all(outcome.report == {"gpu": outcome.device.visible} for outcome in outcomes)


def test_each_model_of_gpu_has_searches_of_its_own():
    devices = [Device("0", "NVIDIA H200"), Device("1", "NVIDIA A100-SXM4-80GB")]
    outcomes = list(search_on_all(PROBLEMS, devices, [], lambda *_: (0, '{"searches": [{}]}', "")))
    assert Counter(outcome.device.name for outcome in outcomes) == dict.fromkeys(
        ("NVIDIA H200", "NVIDIA A100-SXM4-80GB"), len(PROBLEMS)
    )


@pytest.mark.parametrize(
    ("result", "message"),
    [((1, "", "warning\nno memory left\n"), "no memory left"), ((0, "not JSON", ""), "JSONDecodeError"),
     ((9, "", ""), "exit code 9")],
)  # fmt: skip
def test_a_search_that_fails_is_reported_and_the_others_go_on(result, message):
    calls = iter([result, *[(0, '{"searches": [{}]}', "")] * len(PROBLEMS)])
    outcomes = list(search_on_all(PROBLEMS, H200[:1], [], lambda *_: next(calls)))
    assert [outcome.report is None for outcome in outcomes] == [True] + [False] * (len(PROBLEMS) - 1)
    assert message in outcomes[0].error


def test_gpus_are_those_that_the_process_sees():
    two = [GPU("NVIDIA H200", (9, 0), 1), GPU("NVIDIA H200", (9, 0), 1)]
    assert [device.visible for device in visible_devices(two, {})] == ["0", "1"]
    assert [device.visible for device in visible_devices(two, {VISIBLE_VARIABLE: "5, GPU-8c"})] == ["5", "GPU-8c"]


def test_tune_all_uses_every_gpu(monkeypatch, capsys):
    monkeypatch.setattr(tune_commands, "visible_devices", lambda: H200)
    monkeypatch.setattr(tune_commands, "this_machine", lambda: pytest.fail)
    seen = {}

    def searched(problems, devices, options):
        seen["problems"], seen["options"] = problems, options
        report = {"result": {"config": "a config", "time_ms": 1.5, "tflops": 321.0}, "seconds": 12.0}
        for problem in problems:
            yield type("Outcome", (), {"problem": problem, "device": devices[0], "report": report, "error": ""})

    monkeypatch.setattr(tune_commands, "search_on_all", searched)
    tune_commands.app(
        ["--all", "--d-head", "64", "--family", "ampere", "--quick", "--resume", "--limit", "7"], standalone_mode=False
    )
    out, err = capsys.readouterr()
    assert len(seen["problems"]) == 12
    assert seen["options"][-4:] == ["--limit", "7", "--quick", "--resume"]
    assert "12 problems on 3 GPUs" in err
    assert out.count("1.5000 ms, 321 TFLOP/s") == 12


DECODING = list(standard_problems(d_head=64, dtype="BF16", family="ampere decode"))


@pytest.mark.parametrize("problem", [*PROBLEMS[::5], *DECODING[::5]], ids=str)
def test_the_command_of_a_search_is_about_its_problem(problem, monkeypatch):
    found = []

    def tune(problem, *_, **options):
        found.append((problem, options["quick"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(tune_commands, "tune", tune)
    tune_commands.app([*search_arguments(problem, ["--quick"])[1:], "--dry-run"], standalone_mode=False)
    assert found == [(problem, True)]
