"""What becomes of hazards: stopping at the first, going on and listing all, or not looking, by kind."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flashwright.simulator import SimulatedGPU, SimulationError
from flashwright.simulator.findings import HAZARD_KINDS
from flashwright.simulator.run import Run

from .test_hazards import TWINS, fault, launched
from .test_hopper_hazards import MUTATIONS
from .test_hopper_pipeline import GEMM, run_gemm
from .tools import compile_cuda

# Line 4: a race; line 5: another one, in a loop; line 6: rows that nobody wrote.
TWO_RACES = """extern "C" __global__ void k(int *out) {
    __shared__ int s[128];
    int t = threadIdx.x, sum = 0;
    s[t] = t; sum += s[t ^ 32];
    _Pragma("unroll 1") for (int i = 0; i < 3; ++i) { __syncthreads(); s[t] = i; sum += s[t ^ 32]; __syncthreads(); }
    sum += s[64 + t];
    out[t] = sum; }"""


def launch(source: str, out: np.ndarray | None = None, **options: object) -> Run:
    gpu = SimulatedGPU()
    address = gpu.to_device(np.zeros(64, np.int32))
    run = gpu.load(compile_cuda(source)).launch("k", 1, 64, 0, [address], **options)
    if out is not None:
        out[...] = gpu.to_host(address)
    return run


def test_collecting_goes_on_to_the_end_and_lists_each_place_once_with_a_count() -> None:
    out = np.zeros(64, np.int32)
    run = launch(TWO_RACES, out, check_hazards="collect")
    assert out.any()  # the kernel ran to its end
    found = {(finding.kind, finding.error.source_line): finding.count for finding in run.findings}
    assert found[("race", 4)] == 64
    assert found[("race", 5)] == 3 * 64
    assert found[("uninitialised-shared", 6)] == 64
    assert len(run.findings) == len(found) == 3


def test_findings_name_both_parties_and_are_part_of_the_report_and_of_json() -> None:
    run = launch(TWO_RACES, check_hazards="collect")
    race = run.findings[0].error
    assert race.other is not None and race.other.source_line == 4 and "st.shared" in race.other.instruction
    assert race.source_file == race.other.source_file and race.source_file.endswith("test.cu")
    assert "3 hazards:" in run.report() and "occurred: 192 times" in run.report()
    document = json.loads(json.dumps(run.to_dict()))
    assert [finding["count"] for finding in document["findings"]] == [64, 192, 64]
    assert document["findings"][0]["other"]["source_line"] == 4


@pytest.mark.parametrize("checks", [True, "stop", {}, {"uninitialised-shared": "collect"}])
def test_kinds_that_are_not_named_stop_the_run(checks: object) -> None:
    with pytest.raises(SimulationError) as caught:
        launch(TWO_RACES, check_hazards=checks)
    assert caught.value.kind == "race" and caught.value.source_line == 4


def test_a_fault_carries_what_was_collected_before_it() -> None:
    with pytest.raises(SimulationError) as caught:
        launch(TWO_RACES, check_hazards={"race": "collect"})
    assert caught.value.kind == "uninitialised-shared"
    assert [finding.kind for finding in caught.value.findings] == ["race", "race"]


@pytest.mark.parametrize("checks", [False, "ignore"])
def test_ignoring_finds_nothing(checks: object) -> None:
    assert launch(TWO_RACES, check_hazards=checks).findings == []


def test_ignoring_one_kind_leaves_the_others() -> None:
    run = launch(TWO_RACES, check_hazards=dict.fromkeys(HAZARD_KINDS, "collect") | {"race": "ignore"})
    assert [finding.kind for finding in run.findings] == ["uninitialised-shared"]


@pytest.mark.parametrize(
    ("checks", "message"),
    [
        ("sometimes", "'sometimes' is not allowed; allowed: True, False, 'stop', 'collect', 'ignore'"),
        ({"races": "stop"}, "'races' is no kind of hazard; allowed: uninitialised-shared"),
        ({"race": "often"}, "'often' for race is not allowed"),
        (None, "None is not allowed"),
    ],
)
def test_unknown_reactions_and_kinds_are_refused(checks: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(TWO_RACES, check_hazards=checks)


def test_stores_of_different_values_in_one_instruction_count_the_values_that_are_lost() -> None:
    run = launch(
        """extern "C" __global__ void k(int *out) {
        __shared__ int s[4]; int t = threadIdx.x;
        s[t % 4] = t / 8;
        __syncthreads(); out[t] = s[t % 4]; }""",
        check_hazards="collect",
    )
    assert [(finding.kind, finding.count) for finding in run.findings] == [("race", 64 - 2 * 4)]


@pytest.mark.parametrize("faulty", [case[1] for case in TWINS if case[3] in HAZARD_KINDS])
def test_collecting_begins_with_what_stopping_reports(faulty: str) -> None:
    block = 128 if "^ 64" in faulty or "128" in faulty else 64
    _, run = launched(faulty, block, check_hazards="collect")
    assert str(run.findings[0].error) == str(fault(faulty, block))


@pytest.mark.parametrize("name", ["no fence before the products", "no proxy fence before the bulk store"])
def test_a_pipeline_with_a_missing_fence_runs_to_its_end(name: str) -> None:
    before, after, kinds = MUTATIONS[name]
    result, expected, run = run_gemm(GEMM.replace(before, after), check_hazards="collect")
    np.testing.assert_allclose(result, expected, rtol=2e-2, atol=1e-2)
    assert {finding.kind for finding in run.findings} == kinds
