"""`flashwright bench`: the command, its tables and its plots."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_fakes import THREE, FakeMachine, a_result, found
from command_line import flashwright
from rich.console import Console

import flashwright.cli.bench as command
from flashwright import DType
from flashwright.kernels.registry import parse_config
from flashwright.workbench.bench.figures import save_figure
from flashwright.workbench.bench.grid import Cell, grid, length_text
from flashwright.workbench.bench.grid_plot import grid_figure
from flashwright.workbench.bench.peers import PEERS
from flashwright.workbench.bench.results import OURS, BenchResult, ours_of, read_result, write_result
from flashwright.workbench.bench.scores import KINDS

CONFIG = "(BF16, 64, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax"
WIDE_CONFIG = CONFIG.replace("64", "128", 1)
BACKWARD_CONFIG = "ampere backward (BF16, 64, 64, 128, 8): stages_2_2+swizzled"


@pytest.fixture
def result() -> BenchResult:
    return a_result()


# --- The command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_gpu(monkeypatch):
    """A machine with a GPU whose every time is written down."""
    machine = FakeMachine()
    monkeypatch.setattr(command, "gpu_available", lambda: True)
    monkeypatch.setattr(command, "GPUMachine", lambda **_: machine)
    monkeypatch.setattr(command, "_implementations", lambda config, families, peers: THREE)
    return machine


def test_several_configs_are_timed_beside_what_attention_chooses():
    """One takes its place."""
    configs = [parse_config(text) for text in (CONFIG, f"{CONFIG}+mma_sum")]
    assert list(command._implementations(configs[:1], [], [])) == [OURS]
    assert list(command._implementations(configs, [], [])) == [OURS, *(ours_of(str(config)) for config in configs)]


def test_without_a_gpu_bench_says_what_it_needs_and_what_works(monkeypatch):
    monkeypatch.setattr(command, "gpu_available", lambda: False)
    code, out, error = flashwright("bench")
    assert (code, out) == (1, "")
    assert "GPU" in error
    assert "PyTorch" in error
    assert "flashwright ladder" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--peers", "sdpa-fa3"), "did you mean 'sdpa-fa2'?"),
        (("--peers", "flex,unheard-of"), "'unheard-of' is not known"),
        (("--seqlen", "0"), "seqlen: 0"),
        (("--dtype", "fp8"), "FP16, BF16"),
        (("--d-head", "100"), "d_head: 100"),
        (("--heads", "-1"), "heads: -1"),
        (("--config", "(BF16, 64, 64, 64, 4): nonsense"), "nonsense"),
        (("--config", "(BF16, 64, 64, 64, 4): load_3_3_3_tiles"), "power of two"),
        (("--config", CONFIG, "--d-head", "128"), "up to 64"),
        (("--config", CONFIG, "--dtype", "fp16"), "computes BF16, not FP16"),
        (("--config", WIDE_CONFIG, "--config", CONFIG), "computes head dimensions up to 64, not 128"),
        (("--output", "/nowhere/at/all/result.json"), "does not exist"),
        (("--plot", "picture.gif"), ".png or .svg"),
        (("--scores", "sinks"), "scores: 'sinks' is not known; did you mean 'sink'?"),
        (("--family", "volta"), "family: 'volta' is not known; allowed: ampere, hopper"),
        (("--family", "ampere", "--config", CONFIG), "--family does not go with it"),
        (("--peer", "nowhere:attention"), "'nowhere' cannot be imported"),
        (("--peer", "nowhere"), "allowed: module:function"),
        (("--operation", "dec"), "operation: 'dec' is not known; allowed: forward, backward, train, decode"),
        (("--keys", "8192"), "--keys: allowed with --operation decode alone"),
        (("--operation", "decode", "--tokens", "8192"), "--tokens: allowed with other operations alone"),
        (("--operation", "decode", "--pages", "24"), "pages: 24 is not allowed; allowed: multiples of 16"),
        (("--operation", "decode", "--pages", "64", "--keys", "100"), "keys: 100 are no whole pages of 64"),
        (("--operation", "decode", "--rows", "9", "--keys", "8"), "rows: 9 are more than the 8 keys"),
        (("--operation", "decode", "--heads", "6", "--kv-heads", "4"), "kv_heads: 4 does not divide the 6 heads"),
        (("--operation", "decode", "--config", CONFIG), "is of the operation forward; --operation decode does not"),
        (("--operation", "decode", "--family", "volta"), "family: 'volta' is not known"),
        (("--config", CONFIG, "--operation", "backward"), "is of the operation forward; --operation backward does not"),
        (("--config", BACKWARD_CONFIG), "is of the operation backward; --operation forward does not go with it"),
        (("--config", BACKWARD_CONFIG, "--operation", "train"), "is of the operation backward"),
        (("--operation", "backward", "--family", "volta"), "family: 'volta' is not known; allowed: ampere, hopper"),
        (("--from", "missing.json"), "missing.json"),
        (("--from", "missing.json", "--seqlen", "512"), "--seqlen do not go with it"),
    ],
)
def test_bad_arguments_are_one_message_before_anything_is_measured(arguments, message, fake_gpu):
    code, out, error = flashwright("bench", *arguments)
    assert (code, out) == (1, "")
    assert message in error
    assert "Traceback" not in error
    assert fake_gpu.cells == []


def test_flags_choose_the_cells(fake_gpu):
    flags = "--d-head 64 --d-head 96 --seqlen 2048 --seqlen 100 --causal --dtype fp16 --batch 2 --heads 8 --kv-heads 2"
    code, _, error = flashwright("bench", *flags.split(), "--json")
    assert code == 0, error
    assert fake_gpu.cells == [
        Cell(DType.FP16, d_head, True, length, 2, 8, 2) for d_head in (64, 96) for length in (100, 2048)
    ]


@pytest.mark.parametrize(
    ("arguments", "operation", "times_forward"),
    [
        ((), "forward", 1),
        (("--operation", "backward"), "backward", 2.5),
        (("--operation", "backward", "--config", BACKWARD_CONFIG), "backward", 2.5),
        (("--operation", "train", "--config", CONFIG), "train", 3.5),
    ],
)
def test_the_operation_is_that_of_every_cell_and_named_in_the_result(arguments, operation, times_forward, fake_gpu):
    size = ("--d-head", "64", "--seqlen", "512", "--full", "--json")
    code, out, error = flashwright("bench", *arguments, *size)
    assert code == 0, error
    assert [cell.operation for cell in fake_gpu.cells] == [operation]
    document = json.loads(out)
    assert document["operation"] == document["cells"][0]["operation"] == operation
    forward_tflops = 4 * 32 * 32 * 512 * 512 * 64 / 2.0 / 1e9
    measured = document["cells"][0]["implementations"][OURS]["tflops"]
    assert measured == pytest.approx(times_forward * forward_tflops)


def test_decodes_are_steps_of_generation_and_chunks_unless_sizes_are_given(fake_gpu):
    code, out, error = flashwright("bench", "--operation", "decode")
    assert code == 0, error
    assert [str(cell) for cell in fake_gpu.cells] == [
        "b1 32/8 s1k d128", "b1 32/8 s8k d128", "b1 32/8 s128k d128", "b16 32/8 s8k d128", "b64 32/8 s8k d128",
        "b32 64/8 s4k d64", "b16 128/1 s8k d128", "b8 16/16 s8k d128",
        *(f"b4 32/8 s32k d128, {rows} rows" for rows in (4, 16, 128, 512)),
    ]  # fmt: skip
    assert [cell.causal for cell in fake_gpu.cells] == [False] * 8 + [True] * 4
    assert "Decode, BF16: µs and TB/s of keys and values read once" in out
    assert "b: sequences, heads of q / of k and v, s: keys of each, d: head dimension" in out
    # 2 ms of ours for 16 sequences of 8k keys: 8 heads of 128 columns, keys and values of 2 bytes
    assert f"{2 * 2 * 16 * 8192 * 8 * 128 / 2.0 / 1e9:.2f}" in out


def test_sizes_of_caches_choose_the_cells_of_a_decode_and_are_stored(fake_gpu, tmp_path):
    flags = "--keys 4096 --pages 16 --pages 256 --rows 1 --rows 3 --batch 2 --heads 8 --kv-heads 2 --d-head 64"
    path = tmp_path / "result.json"
    code, out, error = flashwright(
        "bench", "--operation", "decode", *flags.split(), "--json", "--output", str(path), "--plot", str(tmp_path)
    )
    assert code == 0, error
    expected = [
        Cell(DType.BF16, 64, rows > 1, 4096, 2, 8, 2, operation="decode", rows=rows, page=page)
        for rows in (1, 3)
        for page in (16, 256)
    ]
    assert fake_gpu.cells == expected
    assert [found.cell for found in read_result(path).cells] == expected
    assert (tmp_path / "bench.png").exists()
    cell = json.loads(out)["cells"][0]
    assert (cell["rows"], cell["page"]) == (1, 16)
    assert cell["implementations"][OURS]["tbps"] == pytest.approx(2 * 2 * 2 * 4096 * 2 * 64 / 2.0 / 1e9)


def test_uneven_sequences_have_from_one_to_all_keys(fake_gpu):
    code, _, error = flashwright("bench", "--operation", "decode", "--uneven", "--batch", "64", "--keys", "65536")
    assert code == 0, error
    (cell,) = fake_gpu.cells
    assert (cell.page, len(cell.lengths)) == (64, 64)
    assert 1 <= cell.lengths[0] < 10
    assert 10_000 < cell.lengths[-1] <= 65_536
    assert cell.speed(1.0) == pytest.approx(2 * 2 * sum(cell.lengths) * 8 * 128 / 1e9)


def test_the_tables_of_a_backward_say_so(fake_gpu):
    code, out, error = flashwright("bench", "--operation", "backward", "--d-head", "64", "--seqlen", "512", "--full")
    assert code == 0, error
    assert "Backward, BF16, d_head 64, full: TFLOP/s" in out


def test_kinds_of_scores_are_a_dimension_of_the_grid(fake_gpu):
    code, out, error = flashwright("bench", "--d-head", "64", "--seqlen", "512", "--scores", "sink,normal", "--json")
    assert code == 0, error
    assert [(cell.causal, cell.scores) for cell in fake_gpu.cells] == [
        (causal, kind) for causal in (False, True) for kind in ("sink", "normal")
    ]
    assert [each["scores"] for each in json.loads(out)["summary"]] == ["normal", "sink"]


def test_all_kinds_are_every_kind(fake_gpu):
    code, _, error = flashwright("bench", "--d-head", "64", "--seqlen", "512", "--full", "--scores", "all", "--json")
    assert code == 0, error
    assert [cell.scores for cell in fake_gpu.cells] == list(KINDS)


def test_what_is_timed_is_attention_as_it_chooses_or_of_every_family_named():
    assert command._implementations([], [], []).keys() == {OURS}
    chosen = command._implementations([], ["ampere", "hopper"], [PEERS["sdpa-fa2"]])
    assert list(chosen) == ["flashwright (ampere)", "flashwright (hopper)", "sdpa-fa2"]
    assert chosen["flashwright (hopper)"].keywords == {"family": "hopper"}


def test_a_function_in_this_directory_is_timed_beside_the_others(monkeypatch, tmp_path):
    (tmp_path / "my_peers.py").write_text("def attention(q, k, v, causal):\n    return 'my_peers:attention'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_peers", raising=False)
    machine = FakeMachine()
    machine.times_ms = {OURS: 2.0, "my_peers:attention": 3.0}
    monkeypatch.setattr(command, "gpu_available", lambda: True)
    monkeypatch.setattr(command, "GPUMachine", lambda **_: machine)
    monkeypatch.setattr(command, "prepare_ours", lambda inputs, config=None: THREE[OURS](inputs))
    monkeypatch.setattr(command, "installed", lambda peers: ([], {}))
    code, out, error = flashwright(
        "bench", "--d-head", "64", "--seqlen", "512", "--peer", "my_peers:attention", "--json"
    )
    assert code == 0, error
    assert json.loads(out)["summary"][0]["means"] == {"my_peers:attention": pytest.approx(1.5)}


def test_a_given_config_decides_dtype_and_head_dimension(fake_gpu):
    code, _, error = flashwright("bench", "--config", CONFIG, "--full", "--json")
    assert code == 0, error
    assert {(cell.dtype, cell.d_head, cell.causal) for cell in fake_gpu.cells} == {(DType.BF16, 64, False)}


def test_bench_writes_its_result_with_the_environment_and_prints_the_same_json(fake_gpu, tmp_path):
    path = tmp_path / "result.json"
    code, out, error = flashwright("bench", "--d-head", "64", "--peers", "sdpa-fa2", "--json", "--output", str(path))
    assert code == 0, error
    document = json.loads(out)
    assert document.pop("schema").startswith("bench/")  # of the printed document; files have their format
    assert document == json.loads(path.read_text())
    assert document.keys() == {
        "format", "complete", "operation", "environment", "arguments", "summary", "missing", "cells",
    }  # fmt: skip
    assert document["environment"].keys() >= {"gpu", "driver", "torch", "cuda", "nvrtc", "flashwright", "date"}
    assert document["arguments"] == {"d_head": [64], "peers": ["sdpa-fa2"]}
    assert len(document["cells"]) == 12
    measured = document["cells"][0]["implementations"][OURS]
    assert measured.keys() == {"gpu_ms", "host_us", "relative_error", "kernel", "tflops"}
    assert document["summary"][0]["means"] == {"sdpa-fa2": pytest.approx(1.5), "sdpa-cudnn": pytest.approx(0.5)}


def test_ctrl_c_writes_the_cells_measured_so_far_and_marks_them_incomplete(fake_gpu, tmp_path):
    fake_gpu.interrupted_at = 3
    path = tmp_path / "result.json"
    code, out, error = flashwright("bench", "--output", str(path), "--plot", str(tmp_path))
    assert code == 130
    assert "3 cells were measured" in error
    stored = read_result(path)
    assert len(stored.cells) == 3
    assert not stored.complete
    assert "incomplete" in out
    assert (tmp_path / "bench.svg").exists()
    code, out, _ = flashwright("bench", "--from", str(path))
    assert code == 0
    assert "incomplete" in out


def test_ctrl_c_before_the_first_cell_leaves_a_result_without_cells(fake_gpu, tmp_path):
    fake_gpu.interrupted_at = 0
    path = tmp_path / "result.json"
    code, _, _ = flashwright("bench", "--output", str(path), "--plot", str(tmp_path / "bench.png"))
    assert code == 130
    assert read_result(path).cells == ()


def test_parts_of_a_grid_that_were_measured_apart_make_one_result(result, tmp_path):
    paths = [tmp_path / f"{d_head}.json" for d_head in (64, 128)]
    for path, d_head in zip(paths, (64, 128), strict=True):
        cells = tuple(found for found in result.cells if found.cell.d_head == d_head)
        write_result(path, replace(result, cells=cells, arguments={"d_head": [d_head], "dtype": "BF16"}))
    both = ("bench", "--from", str(paths[0]), "--from", str(paths[1]))
    code, out, error = flashwright(*both, "--output", str(tmp_path / "whole.json"))
    assert code == 0, error
    assert "d_head 128, causal" in out
    assert read_result(tmp_path / "whole.json") == result
    code, _, error = flashwright("bench", "--from", str(paths[0]), "--from", str(paths[0]))
    assert code == 1
    assert "BF16, d_head 64, full, 512 rows, normal is in 2 results" in error
    write_result(paths[1], replace(read_result(paths[1]), environment={"gpu": "NVIDIA Other"}))
    code, _, error = flashwright(*both)
    assert code == 1
    assert "gpu is NVIDIA Imaginary, NVIDIA Other" in error


def test_a_run_in_which_ours_never_worked_fails(fake_gpu):
    fake_gpu.errors = {OURS: 1.0}
    code, out, error = flashwright("bench", "--d-head", "64")
    assert code == 1
    assert "wrong output" in error
    assert "FlashAttention-2" in out  # what the others did is shown all the same


# --- Tables --------------------------------------------------------------------------------------------------------


def test_a_stored_result_is_shown_anywhere(result, tmp_path):
    path = tmp_path / "result.json"
    write_result(path, result)
    code, out, error = flashwright("bench", "--from", str(path))
    assert code == 0, error
    for title in ("d_head 64, full", "d_head 64, causal", "d_head 128, full", "d_head 128, causal"):
        assert title in out
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if "│" in line]
    assert ["", "flashwright", "400", "400", "400", "", ""] in rows
    assert ["", "÷ FlashAttention-2 (SDPA)", "1.25", "1.25", "1.25", "1.250", ""] in rows
    assert ["", "÷ cuDNN (SDPA)", "0.50", "0.50", "–", "0.500", ""] in rows
    assert ["", "cuDNN (SDPA)", "8", "0.500", "800", "1.0e-03", "20", ""] in rows
    assert "not measured: FlashAttention-3: No module named 'fa3'" in out
    assert "not measured in 4 of 12 cells: cuDNN (SDPA): RuntimeError: no [such] kernel" in out
    assert "NVIDIA Imaginary" in out
    assert "2026-01-02" in out


def test_the_tables_of_the_default_grid_fit_80_columns(result):
    cells = tuple(found(cell, ours=1.0, fa2=1.0, cudnn=1.0) for cell in grid(scores=("normal", "falling-fast")))
    console = Console(width=80, record=True, file=io.StringIO())
    command._print_result(console, replace(result, cells=cells, missing={}))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_kinds_are_summed_up_in_a_table_and_drawn_one_by_one(fake_gpu, tmp_path):
    fake_gpu.slower = {"sink": 1.25}
    path, flags = tmp_path / "result.json", ("--d-head", "64", "--seqlen", "512", "--full")
    code, out, error = flashwright("bench", *flags, "--scores", "normal,sink", "--output", str(path))
    assert code == 0, error
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if "│" in line]
    assert ["", "normal", "0.500", "0.50", "64 full 512", "1.00", "64 full 512", ""] in rows
    assert ["", "sink", "0.400", "0.40", "64 full 512", "0.80", "64 full 512", ""] in rows
    assert "d_head 64, full, sink: TFLOP/s" in out
    code, _, error = flashwright("bench", "--from", str(path), "--plot", str(tmp_path / "bench.svg"))
    assert code == 0, error
    assert sorted(file.name for file in tmp_path.glob("*.svg")) == ["bench-normal.svg", "bench-sink.svg"]
    assert "scores: sink" in texts_of(tmp_path / "bench-sink.svg")


# --- Plots ---------------------------------------------------------------------------------------------------------


def texts_of(svg: Path) -> str:
    return "\n".join("".join(element.itertext()) for element in ElementTree.parse(svg).iter() if "text" in element.tag)


def test_plots_are_png_and_svg_with_the_implementations_and_units_named(result, tmp_path):
    path = tmp_path / "result.json"
    write_result(path, result)
    code, _, error = flashwright("bench", "--from", str(path), "--plot", str(tmp_path))
    assert code == 0, error
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    texts = texts_of(tmp_path / "bench.svg")
    for text in ("flashwright", "FlashAttention-2 (SDPA)", "cuDNN (SDPA)", "TFLOP/s", "sequence length", "16k"):
        assert text in texts
    for text in ("d_head 64, full", "d_head 128, causal", "NVIDIA Imaginary", "BF16"):
        assert text in texts


def test_the_same_result_gives_the_same_picture(result, tmp_path):
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        save_figure(grid_figure(result), [tmp_path / name])
    for suffix in ("svg", "png"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_a_grid_with_holes_and_one_length_is_drawn(result, tmp_path):
    cells = tuple(c for c in result.cells if c.cell.length == 512 and (c.cell.d_head, c.cell.causal) != (64, True))
    save_figure(grid_figure(replace(result, cells=cells, complete=False)), [tmp_path / "x.svg"])
    assert "incomplete" in texts_of(tmp_path / "x.svg")


@pytest.mark.parametrize(("length", "text"), [(512, "512"), (1024, "1k"), (16_384, "16k"), (1000, "1000")])
def test_lengths_are_written_short(length, text):
    assert length_text(length) == text


def test_every_line_fits_its_panel(result):
    figure = grid_figure(result)
    for axis in figure.axes:
        for line in axis.lines:
            assert max(y for y in line.get_ydata() if y == y) < axis.get_ylim()[1]
