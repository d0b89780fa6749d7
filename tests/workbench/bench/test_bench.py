"""Benchmarks: the grid, the measuring, what follows from the numbers, and how they are kept."""

from __future__ import annotations

import json
import math
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from bench_fakes import THREE, FakeMachine, a_cell, a_result, found, raising
from command_line import flashwright

from flashwright import DType, parse_kernel_name_into_config
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import FULL, Window
from flashwright.runtime.reference import attention_reference
from flashwright.workbench.bench import gpu_machine, timing
from flashwright.workbench.bench import peers as peers_module
from flashwright.workbench.bench.accuracy import SAMPLED_ROWS, sampled_relative_error
from flashwright.workbench.bench.gpu_machine import GPUMachine, prepare_ours
from flashwright.workbench.bench.grid import Cell, cell_of, grid
from flashwright.workbench.bench.measure import LONGEST_REASON, Timed, measure, measure_cell, measure_kinds, reason
from flashwright.workbench.bench.peers import PEERS, Inputs, Prepared, chosen_peers, external_peer, installed
from flashwright.workbench.bench.result_files import check_destination, write_atomically
from flashwright.workbench.bench.results import (
    OURS,
    BenchResult,
    CellResult,
    Measurement,
    geometric_mean,
    mean_ratio,
    ours_of,
    read_result,
    write_result,
)
from flashwright.workbench.bench.timing import gpu_times_ms, launches_for

CONFIG = "(BF16, 64, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax"


# --- The grid ------------------------------------------------------------------------------------------------------


def test_the_default_grid_keeps_tokens_and_hidden_size_over_all_lengths():
    cells = grid()
    assert len(cells) == 36
    assert {cell.batch * cell.length for cell in cells} == {16_384}
    assert {cell.heads * cell.d_head for cell in cells} == {2_048}
    assert {(cell.d_head, cell.causal) for cell in cells} == {(d, c) for d in (64, 128, 256) for c in (False, True)}
    assert sorted({cell.length for cell in cells}) == [512, 1024, 2048, 4096, 8192, 16_384]


def test_a_cell_counts_both_matrix_products_and_half_of_them_under_a_causal_mask():
    cell = cell_of(DType.BF16, 64, False, 1024, batch=2, heads=4)
    assert cell.flops == 2_147_483_648 == 4 * 2 * 4 * 1024 * 1024 * 64
    assert replace(cell, causal=True).flops == cell.flops / 2
    assert cell.tflops(time_ms=2.147483648) == pytest.approx(1.0)


def test_batch_and_heads_are_given_or_as_many_as_there_is_room_for():
    assert cell_of(DType.FP16, 96, False, 1000) == Cell(DType.FP16, 96, False, 1000, 16, 21, 21)
    assert cell_of(DType.FP16, 64, True, 32_768, batch=1, heads=32, kv_heads=8) == Cell(
        DType.FP16, 64, True, 32_768, 1, 32, 8
    )


@pytest.mark.parametrize(
    ("arguments", "sizes", "message"),
    [
        ((64, False, 0), {}, "seqlen: 0 is not allowed"),
        ((100, False, 512), {}, "d_head: 100 is not allowed; allowed: multiples of 8 from 8 to 256"),
        ((64, False, 512), {"batch": 0}, "batch: 0"),
        ((64, False, 32_768), {}, "seqlen: 32768 is more than the 16384 tokens"),
        ((64, False, 512), {"kv_heads": 3}, "kv_heads: 3 does not divide the 32 heads"),
    ],
)
def test_a_cell_that_cannot_be_is_refused_with_the_value(arguments, sizes, message):
    with pytest.raises(ValueError, match=message):
        cell_of(DType.BF16, *arguments, **sizes)


# --- What follows from the measurements ----------------------------------------------------------------------------


def test_a_ratio_above_one_means_that_ours_takes_less_time():
    result = found(a_cell(), ours=2.0, fa2=3.0)
    assert result.ratio("sdpa-fa2") == 1.5
    assert result.ratio("sdpa-cudnn") is None


def test_the_geometric_mean_is_over_the_cells_where_both_were_measured():
    cells = [
        found(a_cell(512), ours=2.0, fa2=3.0),
        found(a_cell(1024), ours=1.0, fa2=6.0),
        found(a_cell(2048), ours=1.0),
    ]
    assert mean_ratio(cells, "sdpa-fa2") == pytest.approx(3.0)  # √(1.5 · 6)
    assert mean_ratio(cells, "sdpa-cudnn") is None
    assert geometric_mean([2, 4, 8]) == pytest.approx(4.0)


@pytest.fixture
def result() -> BenchResult:
    return a_result()


def test_a_result_says_all_that_follows_from_its_times(result):
    document = result.to_dict()
    first = document["cells"][0]
    assert first["implementations"][OURS]["tflops"] == pytest.approx(400.0)
    assert first["scores"] == "normal"
    assert first["ratios"] == {OURS: {"sdpa-fa2": pytest.approx(1.25), "sdpa-cudnn": pytest.approx(0.5)}}
    (summary,) = document["summary"]
    assert (summary["scores"], summary["implementation"]) == ("normal", OURS)
    assert summary["means"] == {"sdpa-fa2": pytest.approx(1.25), "sdpa-cudnn": pytest.approx(0.5)}
    assert summary["worst_to_best_peer"]["ratio"] == pytest.approx(0.5)
    assert document["cells"][-1]["failures"] == {"sdpa-cudnn": "RuntimeError: no [such] kernel"}
    assert document["complete"] is True


def kinds_result() -> BenchResult:
    """Two families on two kinds of scores and two lengths; ours takes longer on one of the kinds."""
    cells = []
    for cell in grid(DType.BF16, (64,), (False,), (512, 1024), ("sink", "normal")):
        slower = {("sink", 512): 1.25, ("sink", 1024): 2.0}.get((cell.scores, cell.length), 1.0)
        times = {ours_of("ampere"): 4 * slower, ours_of("hopper"): 2 * slower, "sdpa-fa2": 5.0, "sdpa-cudnn": 3.0}
        cells.append(CellResult(cell, {name: Measurement(ms, 20.0, 1e-3) for name, ms in times.items()}))
    return BenchResult({}, {}, tuple(cells))


def test_kinds_are_summed_up_for_each_family_beside_the_best_peer_and_beside_normal_scores():
    result = kinds_result()
    assert result.kinds() == ["normal", "sink"]
    assert result.ours() == ["flashwright (ampere)", "flashwright (hopper)"]
    assert result.peers() == ["sdpa-fa2", "sdpa-cudnn"]
    found = {(each.name, each.scores): each for each in result.summaries()}
    hopper = found[ours_of("hopper"), "sink"]
    assert hopper.mean_to_best == pytest.approx(math.sqrt(1.5 / 1.25 * 1.5 / 2))
    assert (hopper.worst_to_best.ratio, hopper.worst_to_best.cell.length) == (0.75, 1024)
    assert (hopper.worst_to_normal.ratio, hopper.worst_to_normal.cell.length) == (0.5, 1024)
    assert found[ours_of("ampere"), "normal"].mean_to_best == pytest.approx(0.75)
    assert found[ours_of("ampere"), "normal"].means["sdpa-fa2"] == pytest.approx(1.25)
    of_fa2 = found[ours_of("ampere"), "sink"].worsts["sdpa-fa2"]
    assert (of_fa2.ratio, of_fa2.cell.length) == (pytest.approx(0.625), 1024)
    assert found[ours_of("hopper"), "normal"].worst_to_normal.ratio == 1


def test_without_peers_or_normal_scores_there_is_nothing_to_compare_with():
    cell = a_cell(scores="sink")
    (summary,) = BenchResult({}, {}, (found(cell, ours=1.0),)).summaries()
    assert (summary.mean_to_best, summary.worst_to_best, summary.worst_to_normal) == (None, None, None)


# --- Result files --------------------------------------------------------------------------------------------------


def test_a_result_is_read_back_as_it_was_written(result, tmp_path):
    path = tmp_path / "result.json"
    write_result(path, result)
    assert read_result(path) == result


def test_kinds_and_families_are_read_back(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, kinds_result())
    assert read_result(path) == kinds_result()
    assert {cell["scores"] for cell in json.loads(path.read_text())["cells"]} == {"normal", "sink"}


def test_a_result_of_the_first_format_is_read_as_one_of_normal_scores():
    stored = read_result(Path(__file__).parents[3] / "benchmarks/results/bench_h200_bf16.json")
    assert stored.kinds() == ["normal"]
    assert stored.ours() == [OURS]
    assert len(stored.cells) == 36


def without(document: dict, *keys: object) -> dict:
    *path, last = keys
    inner = document
    for key in path:
        inner = inner[key]
    del inner[last]
    return document


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged or incomplete"),
        (lambda text: "", "is damaged or incomplete"),
        (lambda text: "[1, 2]", "is not a result of `flashwright bench`"),
        (lambda text: '{"rungs": []}', "is not a result of `flashwright bench`"),
        (lambda text: text.replace('"format": 2', '"format": 99'), "format 99 is not known"),
        (lambda text: text.replace('"gpu_ms"', '"gpu_s"', 1), "entry 1 of 'cells' lacks 'gpu_ms'"),
        (lambda text: text.replace('"length": 1024', '"length": -1', 1), "entry 2 of 'cells' is damaged: length: -1"),
        (lambda text: json.dumps(without(json.loads(text), "cells", 2, "dtype")), "entry 3 of 'cells' lacks 'dtype'"),
    ],
)
def test_a_damaged_result_file_is_refused_with_the_place(damage, message, result, tmp_path):
    path = tmp_path / "result.json"
    write_result(path, result)
    path.write_text(damage(path.read_text()))
    code, out, error = flashwright("bench", "--from", str(path))
    assert (code, out) == (1, "")
    assert message in error
    assert str(path) in error


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("result.json", "old")]


def test_a_device_a_pipe_and_a_link_are_written_into_and_stay_what_they_are(tmp_path):
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    (tmp_path / "result.json").write_text("old")
    link.symlink_to("result.json")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    full = tmp_path / "full"
    full.symlink_to("/dev/full")  # not the device itself: what replaces a file would replace it
    for path in (link, pipe, full):
        check_destination(path)
    write_atomically(link, b"new")
    write_atomically(pipe, b"new")
    with pytest.raises(OSError, match=r"full cannot be written: No space left on device"):
        write_atomically(full, b"new")
    assert link.is_symlink() and (tmp_path / "result.json").read_text() == "new"
    assert pipe.is_fifo() and os.read(reader, 9) == b"new"
    os.close(reader)
    assert full.is_symlink() and sorted(path.name for path in tmp_path.iterdir()) == [
        "full", "link.json", "pipe", "result.json",
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["/proc/page.html", "/nowhere/page.html"])
def test_a_place_that_cannot_be_written_is_named_before_any_work(where):
    """Whoever writes: the permissions of a directory say nothing to root."""
    with pytest.raises(ValueError, match=f"^{where} cannot be written: "):
        check_destination(Path(where))


# --- Measuring -----------------------------------------------------------------------------------------------------


def test_all_implementations_of_a_cell_are_timed_together_on_the_same_inputs():
    machine = FakeMachine()
    result = measure_cell(machine, a_cell(), THREE)
    assert machine.timed_together == [[Timed("normal", name) for name in THREE]]
    assert len(machine.cells) == 1
    assert result.measurements[OURS] == Measurement(2.0, 20.0, 1e-3, f"the kernel of {OURS}")
    assert result.ratio("sdpa-cudnn") == 0.5


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (raising(RuntimeError("unsupported\nsecond line")), "RuntimeError: unsupported"),
        (raising(ImportError()), "ImportError: no message"),
        (lambda inputs: Prepared(lambda: 1 / 0), "ZeroDivisionError: division by zero"),
    ],
)
def test_a_peer_that_fails_is_listed_with_its_reason_and_the_others_are_measured(prepare, message):
    result = measure_cell(FakeMachine(), a_cell(), THREE | {"sdpa-fa2": prepare})
    assert result.failures == {"sdpa-fa2": message}
    assert result.measurements.keys() == {OURS, "sdpa-cudnn"}


@pytest.mark.parametrize("error", [math.nan, math.inf, 0.9])
def test_a_wrong_output_is_never_timed(error):
    machine = FakeMachine()
    machine.errors = {"sdpa-fa2": error}
    result = measure_cell(machine, a_cell(), THREE)
    assert machine.timed_together == [[Timed("normal", OURS), Timed("normal", "sdpa-cudnn")]]
    assert "wrong output" in result.failures["sdpa-fa2"]


def test_an_implementation_that_cannot_be_captured_does_not_take_the_others_along():
    machine = FakeMachine()
    machine.uncapturable = ("sdpa-cudnn",)
    result = measure_cell(machine, a_cell(), THREE)
    assert result.failures == {"sdpa-cudnn": "cannot be captured"}
    assert result.measurements.keys() == {OURS, "sdpa-fa2"}


def test_a_gpu_that_breaks_while_timing_leaves_no_time_of_that_cell(monkeypatch):
    machine = FakeMachine()
    monkeypatch.setattr(machine, "gpu_times_ms", raising(RuntimeError("an illegal memory access")))
    result = measure_cell(machine, a_cell(), THREE)
    assert result.measurements == {}
    assert result.failures == dict.fromkeys(THREE, "RuntimeError: an illegal memory access")


def test_all_kinds_of_a_problem_are_timed_together_and_host_time_once():
    machine = FakeMachine()
    machine.slower = {"sink": 2.0}
    cells = [a_cell(scores="normal"), a_cell(scores="sink")]
    normal, sink = measure_kinds(machine, cells, THREE)
    assert machine.timed_together == [[Timed(kind, name) for kind in ("normal", "sink") for name in THREE]]
    assert machine.host_timed == list(THREE)
    assert [found.cell for found in (normal, sink)] == cells
    assert (normal.measurements[OURS].gpu_ms, sink.measurements[OURS].gpu_ms) == (2.0, 4.0)
    assert sink.measurements[OURS].host_us == normal.measurements[OURS].host_us == 20.0


def test_a_kind_whose_inputs_cannot_be_made_does_not_take_the_others_along(monkeypatch):
    machine = FakeMachine()
    plain = machine.inputs

    def inputs(cell: Cell) -> Inputs:
        if cell.scores == "sink":
            raise MemoryError("too large")
        return plain(cell)

    monkeypatch.setattr(machine, "inputs", inputs)
    normal, sink = measure_kinds(machine, [a_cell(), a_cell(scores="sink")], THREE)
    assert normal.measurements.keys() == THREE.keys()
    assert (sink.measurements, sink.failures) == ({}, dict.fromkeys(THREE, "MemoryError: too large"))


def test_an_interruption_keeps_the_problems_before_it():
    cells = grid(scores=("normal", "sink"))
    results, complete = measure(FakeMachine(interrupted_at=5), cells, THREE)
    assert [found.cell for found in results] == cells[:4]
    assert not complete


def test_a_reason_is_one_short_line_with_what_pytorch_warned_of():
    said = [
        "Flash attention needs 16 bits. (Triggered internally at sdp_utils.cpp:1.)",
        "Flash attention needs 16 bits.",
    ]
    text = reason(RuntimeError("No available kernel. Aborting execution.\nmore"), said)
    assert text == "RuntimeError: No available kernel. Aborting execution.; Flash attention needs 16 bits."
    assert len(reason(RuntimeError("x" * 10_000))) == LONGEST_REASON


class FakeCuda:
    """A GPU whose clock moves only when work is replayed on it: each candidate's launch takes what it says, and the
    clock slows down by a tenth with every replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms, self.replays, self.capturing = 0.0, [], None
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                self.at_ms = cuda.now_ms

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return end.at_ms - self.at_ms

        class Graph:
            def __init__(self) -> None:
                self.launches: list[tuple[str, float]] = []

            def replay(self) -> None:
                cuda.replays.append((self.launches[0][0], len(self.launches)))
                cuda.now_ms += sum(ms for _, ms in self.launches) * (1 + 0.1 * len(cuda.replays))

        @contextmanager
        def graph(into: Graph, stream: object) -> Iterator[None]:
            cuda.capturing = into
            yield
            cuda.capturing = None

        class Stream:
            def __init__(self, device: str = "cuda") -> None:
                pass

            def wait_stream(self, other: Stream) -> None:
                pass

        fakes = {"Event": Event, "CUDAGraph": Graph, "graph": graph, "Stream": Stream, "current_stream": Stream}
        fakes |= {"stream": lambda stream: nullcontext(), "synchronize": lambda: None}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def launch(self, name: str, ms: float) -> None:
        if self.capturing is None:
            self.now_ms += ms
        else:
            self.capturing.launches.append((name, ms))


def test_candidates_are_replayed_in_turns_so_that_a_drifting_clock_drifts_for_all(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(timing.random, "shuffle", list.reverse)
    candidates = {name: partial(cuda.launch, name, ms) for name, ms in (("fast", 0.5), ("slow", 1.0), ("long", 9.0))}
    times = gpu_times_ms(candidates, launches=None, rounds=5)
    order = [("fast", 10), ("slow", 5), ("long", 1)]
    assert cuda.replays == [*order[::-1], *order] * 3  # the first round warms up
    # Replays 4 to 18 are timed; timed one after the other, the clock would have favoured the first.
    assert times == {
        "fast": pytest.approx(0.5 * 2.0),
        "slow": pytest.approx(1.0 * 2.1),
        "long": pytest.approx(9.0 * 2.2),
    }


def test_the_order_of_turns_is_another_in_each_round(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    gpu_times_ms({name: partial(cuda.launch, name, 1.0) for name in "abcdefgh"}, launches=1, rounds=7)
    rounds = [tuple(name for name, _ in cuda.replays[first : first + 8]) for first in range(0, 64, 8)]
    assert all(sorted(names) == list("abcdefgh") for names in rounds)
    assert len(set(rounds)) > 4


def test_the_gpu_machine_reports_what_cannot_be_captured_and_times_the_rest(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    prepared = {
        "fine": Prepared(partial(cuda.launch, "fine", 1.0)),
        "broken": Prepared(partial(raising(RuntimeError("operation not permitted when stream is capturing")), None)),
    }
    times, failures = GPUMachine().gpu_times_ms(prepared)
    assert times.keys() == {"fine"}
    assert failures == {"broken": "RuntimeError: operation not permitted when stream is capturing"}


@pytest.mark.parametrize("rounds", [1, 4])
def test_every_implementation_has_as_many_turns_as_there_are_rounds_and_one_to_warm_up(rounds, monkeypatch):
    cuda = FakeCuda(monkeypatch)
    GPUMachine(rounds=rounds).gpu_times_ms({"one": Prepared(partial(cuda.launch, "one", 1.0))})
    assert cuda.replays == [("one", gpu_machine.LAUNCHES)] * (rounds + 1)


def test_a_turn_has_as_many_launches_as_fill_the_time_that_is_given(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    GPUMachine(rounds=1, replay_ms=4).gpu_times_ms({"one": Prepared(partial(cuda.launch, "one", 0.5))})
    assert cuda.replays == [("one", 8)] * 2


@pytest.mark.parametrize("replay_ms", [0, -1, math.inf, math.nan])
def test_a_turn_of_no_time_or_of_no_end_is_refused(replay_ms):
    with pytest.raises(ValueError, match=f"replay_ms: {replay_ms} is not allowed"):
        GPUMachine(replay_ms=replay_ms)


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds: 0 is not allowed"):
        GPUMachine(rounds=0)


def test_host_time_is_measured_inside_the_context_but_not_with_it(monkeypatch):
    FakeCuda(monkeypatch)
    entered, calls = [], []

    @contextmanager
    def context() -> Iterator[None]:
        entered.append(True)
        yield

    prepared = Prepared(lambda: calls.append(True), context=context)
    assert 0 < GPUMachine().host_us(prepared, gpu_ms=5.0) < 1e5
    assert (len(entered), len(calls)) == (1, 8 * (1 + 5))  # long calls are made few times


def test_inputs_are_the_same_every_time_and_stored_rows_before_heads():
    cell = Cell(DType.BF16, 64, True, 32, batch=2, heads=4, kv_heads=2)
    first, second = (GPUMachine("cpu").inputs(cell) for _ in range(2))
    assert first.q.shape == (2, 4, 32, 64)
    assert first.k.shape == first.v.shape == (2, 2, 32, 64)
    assert all(x.is_contiguous() for x in first.rows_first())
    assert all(torch.equal(a, b) for a, b in zip(first.rows_first(), second.rows_first(), strict=True))
    assert first.grouped


def test_inputs_have_the_scores_of_their_cell():
    cell = Cell(DType.BF16, 64, False, 32, batch=1, heads=2, kv_heads=2, scores="equal")
    assert not GPUMachine("cpu").inputs(cell).q.any()


def test_ours_with_a_family_is_attention_of_that_family():
    machine = GPUMachine("cpu")
    inputs = machine.inputs(a_cell(64, batch=1, heads=1, kv_heads=1))
    prepared = prepare_ours(inputs, family="hopper")
    assert prepared.kernel.startswith("hopper (")
    assert prepared.call.keywords["family"] == "hopper"


@pytest.mark.parametrize("config", [None, parse_kernel_name_into_config(CONFIG)])
def test_ours_is_attention_and_names_its_kernel(config):
    machine = GPUMachine("cpu")
    inputs = machine.inputs(a_cell(64, batch=1, heads=2, kv_heads=1, causal=True))
    prepared = prepare_ours(inputs, config=config)
    assert machine.relative_error(prepared, inputs) < 5e-3
    kernel = parse_kernel_name_into_config(prepared.kernel)
    assert kernel == config if config else kernel.d_head == 64


@pytest.mark.parametrize(("call_ms", "launches"), [(0.1, 50), (0.5, 10), (2.0, 2), (15.0, 1), (0.0, 50)])
def test_a_replay_holds_as_many_launches_as_fill_a_few_milliseconds(call_ms, launches):
    assert launches_for(call_ms) == launches


# --- Accuracy, with PyTorch on the CPU -----------------------------------------------------------------------------


def cpu_inputs(length: int, *, causal: bool, heads: int = 4, kv_heads: int = 4) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, n, 32, generator=generator).transpose(1, 2) for n in (heads, kv_heads, kv_heads))
    return Inputs(q, k, v, causal)


@pytest.mark.parametrize("length", [17, SAMPLED_ROWS + 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_sampled_error_of_attention_is_rounding_and_of_another_mask_is_not(length, causal, kv_heads):
    inputs = cpu_inputs(length, causal=causal, kv_heads=kv_heads)
    right, wrong = (Window(right=0), FULL) if causal else (FULL, Window(right=0))
    outputs = [
        attention_reference(inputs.q, inputs.k, inputs.v, options=AttentionOptions(window))[0]
        for window in (right, wrong)
    ]
    assert sampled_relative_error(outputs[0], inputs) < 1e-6
    assert sampled_relative_error(outputs[1], inputs) > 0.05


# --- Peers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_the_peers_of_pytorch_compute_attention(causal):
    inputs = cpu_inputs(64, causal=causal)
    prepared = PEERS["sdpa-fa2"].prepare(inputs)
    assert sampled_relative_error(prepared.output(), inputs) < 1e-6


def test_a_backend_that_cannot_compute_a_cell_says_why():
    class CPU(FakeMachine):
        def inputs(self, cell: Cell) -> Inputs:
            return cpu_inputs(64, causal=False)

        def relative_error(self, prepared: Prepared, inputs: Inputs) -> float:
            return sampled_relative_error(prepared.output(), inputs)

    prepares = {name: PEERS[name].prepare for name in ("sdpa-fa2", "sdpa-cudnn")}
    result = measure_cell(CPU(), a_cell(), prepares)
    assert result.measurements.keys() == {"sdpa-fa2"}
    assert "scaled_dot_product_attention" in result.failures["sdpa-cudnn"]


@contextmanager
def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> Iterator[None]:
    fake = types.ModuleType(name)
    vars(fake).update(members)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, name, fake)
        yield


@pytest.mark.parametrize("returns_lse", [False, True])
def test_flash_attns_layout_is_rows_before_heads_with_or_without_a_log_sum_exp(returns_lse, monkeypatch):
    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> object:
        assert q.is_contiguous()  # no copy is needed, so none is timed
        options = AttentionOptions(Window(right=0) if causal else FULL)
        out, lse = attention_reference(*(x.transpose(1, 2) for x in (q, k, v)), options=options)
        return (out.transpose(1, 2), lse) if returns_lse else out.transpose(1, 2)

    inputs = cpu_inputs(64, causal=True)
    with module(monkeypatch, "flash_attn_interface", flash_attn_func=flash_attn_func):
        assert installed([PEERS["fa3"]]) == ([PEERS["fa3"]], {})
        assert sampled_relative_error(PEERS["fa3"].prepare(inputs).output(), inputs) < 1e-6


def test_a_peer_that_is_not_installed_is_reported_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    found_peers, missing = installed([PEERS["sdpa-fa2"], PEERS["fa3"]])
    assert found_peers == [PEERS["sdpa-fa2"]]
    assert "flash_attn_interface" in missing["fa3"]


def test_peers_are_chosen_by_name_each_once():
    assert [peer.name for peer in chosen_peers(["flex", "fa3", "flex"])] == ["flex", "fa3"]
    assert [peer.name for peer in chosen_peers(None)] == list(PEERS)
    with pytest.raises(ValueError, match="did you mean 'sdpa-cudnn'"):
        chosen_peers(["cudnn"])


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return attention_reference(q, k, v, options=AttentionOptions(Window(right=0) if causal else FULL))[0]


@pytest.mark.parametrize("causal", [False, True])
def test_a_function_of_the_users_own_is_a_peer(causal, monkeypatch):
    inputs = cpu_inputs(64, causal=causal)
    library = types.SimpleNamespace(forward=plain_attention)
    with module(monkeypatch, "my_library", attention=plain_attention, ops=library):
        for text in ("my_library:attention", "my_library:ops.forward"):
            peer = external_peer(text)
            assert peer.name == peer.label == text
            assert sampled_relative_error(peer.prepare(inputs).output(), inputs) < 1e-6


def test_an_output_in_another_layout_is_not_timed(monkeypatch):
    class CPU(FakeMachine):
        inputs = staticmethod(lambda cell: cpu_inputs(64, causal=False))
        relative_error = staticmethod(lambda prepared, inputs: sampled_relative_error(prepared.output(), inputs))

    with module(monkeypatch, "my_library", attention=lambda q, k, v, causal: plain_attention(q, k, v, causal).mT):
        result = measure_cell(CPU(), a_cell(), {"my_library:attention": external_peer("my_library:attention").prepare})
    assert (
        "the output has the shape (2, 4, 32, 64), but q has (2, 4, 64, 32)" in result.failures["my_library:attention"]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my_library", "peer: 'my_library' is not allowed; allowed: module:function"),
        (":attention", "allowed: module:function"),
        ("my_library:", "allowed: module:function"),
        ("not_installed:attention", "'not_installed' cannot be imported: ModuleNotFoundError"),
        ("my_library:missing", "has no attribute 'missing'"),
        ("my_library:number", "is a int; allowed: a function of"),
    ],
)
def test_a_function_that_cannot_be_found_is_refused_at_once(text, message, monkeypatch):
    with module(monkeypatch, "my_library", number=3), pytest.raises(ValueError, match=message):
        external_peer(text)


def test_importing_the_peers_imports_no_torch():
    # What a peer needs is imported when it is prepared: a machine without PyTorch can name and list them all.
    assert "torch" not in vars(peers_module)


def test_measuring_leaves_the_callers_warnings_alone():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        measure_cell(FakeMachine(), a_cell(), THREE)
    assert said == []
