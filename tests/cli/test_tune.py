"""`flashwright tune`: what it prints, stores and refuses, with a GPU that is not there and without one."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from tuning_fakes import CONFIGS, GPU, MODEL, WRONG, FakeMachine, FakeMeasurer, a_result, fake_compiler

from flashwright import DType, parse_kernel_name_into_config
from flashwright.choice.choose import backward_config, tuned_or_default
from flashwright.choice.currency import kernel_digest
from flashwright.choice.database import TuningDatabase
from flashwright.choice.lookup import shipped_results
from flashwright.choice.results import from_document, to_document
from flashwright.cli import app as cli
from flashwright.cli import tune as tune_commands
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import Occasion
from flashwright.kernels.registry import family_named
from flashwright.problem.lengths import length_bucket
from flashwright.workbench.tuning import candidates as tuning_candidates
from flashwright.workbench.tuning.measure import TUNING_SCORES
from flashwright.workbench.tuning.reload import reload

SEARCH = ("tune", "--d-head", "64", "--seqlen", "512", "--limit", "24")
REPORT_KEYS = {
    "problem", "scores", "gpu", "arch", "space", "candidates", "wrong", "stages", "incumbents", "result", "speedup",
    "stored", "resumed", "seconds",
}  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(argument, …)`: exit code, standard output and standard error of the command in this process."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flashwright", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
            raise SystemExit(0)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return exit.value.code or 0, out, err

    return run


@pytest.fixture
def database(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    reload()
    yield TuningDatabase()
    reload()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(tune_commands, "this_machine", lambda: None)


@pytest.fixture
def gpu(database, monkeypatch):
    """`gpu(…)`: puts an imaginary GPU into this machine, and returns what is asked of it."""
    monkeypatch.setattr(tuning_candidates, "compile_all", fake_compiler())

    def put(model: GPUModel = MODEL, **options) -> FakeMeasurer:
        measurer = FakeMeasurer(**options)
        monkeypatch.setattr(tune_commands, "this_machine", lambda: FakeMachine(model, fake=measurer))
        return measurer

    return put


# --- Without a GPU ---------------------------------------------------------------------------------------------


DRY_RUN = ("tune", "--dry-run", "--family", "ampere")


def test_a_dry_run_says_what_there_is_to_time_and_stores_nothing(run, database, no_gpu, program_cache_directory):
    code, out, err = run("tune", "--dry-run", "--d-head", "64", "--causal", "--limit", "2", "--arch", "sm_80", "--json")
    assert (code, err) == (0, "")
    (report,) = json.loads(out)["searches"]
    assert report.keys() == REPORT_KEYS
    assert report["problem"] == {
        "family": "ampere", "dtype": "BF16", "d_head": 64, "causal": True, "batch": 4, "heads": 32,
        "q_length": 4096, "kv_length": 4096,
    }  # fmt: skip
    assert (report["gpu"], report["arch"], report["result"], report["stored"]) == (None, "sm_80", None, None)
    space = report["space"]
    assert space["tried"] == 2
    assert space["kept"] == space["enumerated"] - sum(removed["count"] for removed in space["removed"])
    assert [removed["rule"] for removed in space["removed"][:6]] == [f"rule {number}" for number in range(1, 7)]
    survivors, spilling = report["candidates"]["survivors"], report["candidates"]["spilling"]
    assert len(survivors) + len(spilling) == 2
    for candidate in survivors:
        parse_kernel_name_into_config(candidate["config"])
        assert 32 < candidate["registers"] <= 255
        assert candidate["spill_bytes"] == 0
        assert candidate["blocks_per_sm"] >= 1
        assert candidate["limited_by"] in ("registers", "shared memory", "threads", "blocks")
    assert not database.path.exists()


@pytest.mark.parametrize("arguments", [(), ("--all",), ("--json",)])
def test_without_a_gpu_it_fails_at_once_and_says_so_once(run, database, no_gpu, arguments):
    code, out, error = run("tune", *arguments)
    assert (code, out) == (1, "")
    assert error.count("there is none here") == error.count("--dry-run") == 1


def test_a_dry_run_lists_the_space_and_what_there_is_to_time(run, database, no_gpu, monkeypatch):
    monkeypatch.setattr(tuning_candidates, "compile_all", fake_compiler())
    code, out, error = run(*SEARCH, "--dry-run", "--family", "ampere")
    assert (code, error) == (0, "")
    assert "rule 6" in out
    assert str(CONFIGS[0]) in out


@pytest.mark.parametrize(("arch", "family"), [("sm_80", "ampere"), ("sm_90", "hopper"), ("sm_120", "ampere")])
def test_a_dry_run_is_of_the_family_that_its_architecture_uses(run, database, no_gpu, monkeypatch, arch, family):
    monkeypatch.setattr(tuning_candidates, "compile_all", fake_compiler())
    _, out, _ = run("tune", "--dry-run", "--limit", "1", "--arch", arch, "--json")
    assert [search["problem"]["family"] for search in json.loads(out)["searches"]] == [family]


def test_a_dry_run_on_a_gpu_times_nothing(run, database, gpu):
    measurer = gpu()
    code, _, _ = run(*SEARCH, "--dry-run")
    assert (code, measurer.checked, measurer.swept) == (0, [], [])
    assert not database.path.exists()


def test_the_full_space_is_searched_where_it_is_asked_for(run, database, no_gpu, monkeypatch):
    monkeypatch.setattr(tuning_candidates, "compile_all", fake_compiler())
    searches = {}
    for name in ("default", "full"):
        code, out, _ = run(*DRY_RUN, "--d-head", "64", "--space", name, "--limit", "1", "--json")
        assert code == 0
        (searches[name],) = json.loads(out)["searches"]
    assert [searches[name]["space"]["name"] for name in searches] == ["default", "full"]
    assert searches["full"]["space"]["kept"] > 10 * searches["default"]["space"]["kept"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--space", "whole"), "space: 'whole' is not known; allowed: default, full"),
        (("--space", "full", "--family", "hopper"), "the hopper family has no full space; those that have one: ampere"),
        (("--space", "full", "--quick"), "--quick: not with --space full"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused_at_once(run, database, no_gpu, arguments, message):
    code, out, error = run("tune", *arguments)
    assert (code, out) == (1, "")
    assert message in error


def test_all_enumerates_every_head_dimension_of_what_is_asked_for(run, database, no_gpu, monkeypatch):
    monkeypatch.setattr(tuning_candidates, "compile_all", fake_compiler())
    code, out, _ = run(*DRY_RUN, "--all", "--dtype", "FP16", "--causal", "--limit", "1", "--json")
    assert code == 0
    problems = [search["problem"] for search in json.loads(out)["searches"]]
    assert [(problem["d_head"], problem["q_length"]) for problem in problems] == [
        (d_head, length) for d_head in family_named("ampere").d_heads for length in (512, 2048, 8192)
    ]
    assert {(problem["dtype"], problem["causal"]) for problem in problems} == {("FP16", True)}


def test_all_can_be_asked_for_one_length(run, database, no_gpu, monkeypatch):
    monkeypatch.setattr(tuning_candidates, "compile_all", fake_compiler())
    code, out, _ = run(*DRY_RUN, "--all", "--seqlen", "2048", "--dtype", "FP16", "--causal", "--limit", "1", "--json")
    assert code == 0
    assert {search["problem"]["q_length"] for search in json.loads(out)["searches"]} == {2048}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--d-head", "100"), "d_head: 100 has no kernel of its own to tune; allowed: 64, 96"),
        (("--d-head", "0"), "d_head: 0"),
        (("--dtype", "fp8"), "'fp8' is not a known element type; allowed: FP16, BF16"),
        (("--seqlen", "0"), "q_length: 0 is not allowed"),
        (("--kv-seqlen", "-5"), "kv_length: -5 is not allowed"),
        (("--batch", "0"), "batch: 0 is not allowed"),
        (("--heads", str(2**31)), f"heads: {2**31} is not allowed; allowed: 1 to {2**31 - 1}"),
        (("--family", "nope"), "family: 'nope' is not known; allowed: ampere"),
        (("--all", "--family", "nope"), "family: 'nope' is not known; allowed: ampere, hopper"),
        (("--limit", "0"), "limit: 0 is not allowed"),
        (("--scores", "sinks"), "scores: 'sinks' is not known; did you mean 'sink'?"),
        (("--arch", "sm_70"), "arch: 'sm_70' is not known; known: sm_80"),
        (("--all", "--batch", "2"), "--batch: not with --all"),
        (("--all", "--d-head", "72"), "d_head: 72"),
    ],
)
def test_bad_arguments_are_one_message_and_exit_code_1(run, database, no_gpu, arguments, message):
    code, out, err = run("tune", "--dry-run", *arguments)
    assert (code, out) == (1, "")
    assert message in err


def test_interrupting_the_real_process_ends_it_with_one_line(database):
    command = [sys.executable, "-m", "flashwright", *DRY_RUN, "--d-head", "64"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell ignores interrupts, and would hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not database.path.parent.exists():  # made when compiling begins
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "interrupted")


# --- With one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "arguments", "family"),
    [
        ("sm_80", (), "ampere"),
        ("sm_90", (), "hopper"),
        ("sm_90", ("--seqlen", "16"), "ampere"),
        ("sm_90", ("--family", "ampere"), "ampere"),
        ("sm_100", (), "ampere"),
    ],
)
def test_what_is_tuned_is_the_family_that_attention_uses_there_unless_told(run, gpu, arch, arguments, family):
    gpu(GPUModel.of_architecture("NVIDIA Imaginary 9001", arch))
    code, out, err = run("tune", "--d-head", "128", "--limit", "2", *arguments, "--json")
    assert (code, err) == (0, "")
    (report,) = json.loads(out)["searches"]
    assert report["problem"]["family"] == family
    assert report["result"]["config"].startswith("hopper (") == (family == "hopper")


@pytest.mark.parametrize(("arch", "family"), [("sm_80", "ampere backward"), ("sm_90", "hopper backward")])
def test_the_backward_is_tuned_stored_and_used_apart_from_the_forward(run, database, gpu, arch, family):
    model = GPUModel.of_architecture("NVIDIA Imaginary 9001", arch)
    gpu(model)
    code, out, err = run("tune", "--operation", "backward", "--d-head", "128", "--limit", "3", "--json")
    assert (code, err) == (0, "")
    (report,) = json.loads(out)["searches"]
    assert report["problem"]["family"] == family
    found = report["result"]
    assert found["config"].startswith(family)
    forward_flops = 4 * 4 * 16 * 4096 * 4096 * 128
    assert found["tflops"] == pytest.approx(2.5 * forward_flops / found["time_ms"] / 1e9, abs=0.01)
    bucket = length_bucket(4096)
    occasion = Occasion(DType.BF16, 128, False, bucket, bucket, model)
    assert str(backward_config(occasion)) == found["config"]
    assert database.results()[0].problem.operation == "backward"
    shown = run("tune", "show")[1]
    assert "backward" in shown


def test_decodes_are_tuned_by_packed_rows_and_stored_apart(run, database, gpu):
    model = GPUModel.of_architecture("NVIDIA Imaginary 9001", "sm_90")
    gpu(model)
    code, out, err = run("tune", "--operation", "decode", "--limit", "3", "--json")
    assert (code, err) == (0, "")
    (report,) = json.loads(out)["searches"]
    assert report["problem"]["kv_heads"] == 8
    assert "decode (BF16, 128, " in report["result"]["config"]
    (stored,) = database.results()
    assert (stored.problem.kind.q_bucket, stored.problem.packed_rows) == ("p1-16", 4)
    assert stored == from_document(to_document([stored]))[0]
    family = family_named(report["problem"]["family"].split()[0], "decode")
    other = replace(stored.problem, q_length=2, kv_length=300, batch=1)  # as many rows fill the tile, on any cache
    assert tuned_or_default(family, other.occasion(model)) == stored.config
    more = replace(stored.problem, q_length=8)
    assert more.kind != stored.problem.kind
    code, out, _ = run("tune", "--operation", "decode", "--rows", "8", "--limit", "2")
    assert code == 0
    assert "32 heads on 8, 8 on 8192 rows" in " ".join(out.split())
    assert "TB/s" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--operation", "decode", "--kv-heads", "5"), "kv_heads: 5 does not divide the 32 heads"),
        (("--kv-heads", "4"), "kv_heads: 4 is not allowed; forward is tuned without grouped heads"),
        (("--operation", "decode", "--all", "--kv-heads", "4"), "--kv-heads: not with --all"),
    ],
)
def test_heads_of_keys_are_checked(run, database, no_gpu, options, message):
    code, _, err = run("tune", "--dry-run", *options)
    assert code == 1
    assert message in err


def test_an_operation_without_kernels_is_refused(run, database, no_gpu):
    code, _, err = run("tune", "--operation", "train")
    assert code == 1
    assert "operation: 'train' has no kernels of its own; allowed: forward, backward, decode" in err


def test_the_winner_is_stored_and_used(run, database, gpu):
    gpu()
    code, out, err = run(*SEARCH, "--json")
    assert (code, err) == (0, "")
    (report,) = json.loads(out)["searches"]
    assert report.keys() == REPORT_KEYS
    assert report["gpu"] == GPU
    assert report["result"] == report["stored"] == database.results()[0].to_dict()
    assert report["result"]["config"] == str(CONFIGS[0])
    assert report["result"]["versions"].keys() == {
        "flashwright", "kernels", "nvrtc", "compiler", "torch", "driver",
    }  # fmt: skip
    assert report["stages"][0] == {"candidates": 25, "sweeps": 1}  # the incumbent is one more
    assert report["speedup"] > 1
    code, out, _ = run(*SEARCH)
    assert code == 0
    assert f"fastest on {GPU}: {CONFIGS[0]}" in out
    assert "(in use so far)" in out


@pytest.mark.parametrize(
    ("arguments", "scores"),
    [((), list(TUNING_SCORES)), (("--scores", "sink,normal", "--scores", "equal"), ["sink", "normal", "equal"])],
)
def test_results_say_on_which_kinds_of_scores_they_were_measured(run, database, gpu, arguments, scores):
    gpu()
    code, out, _ = run(*SEARCH, *arguments, "--json")
    assert code == 0
    (report,) = json.loads(out)["searches"]
    assert report["scores"] == report["result"]["scores"] == scores
    assert database.results()[0].scores == tuple(scores)
    assert scores[1] in run("tune", "show")[1]


def test_wrong_kernels_are_named(run, gpu):
    gpu(errors={CONFIGS[0]: WRONG})
    code, out, _ = run(*SEARCH)
    assert code == 0
    assert f"wrong (error 5.0e-01), never timed: {CONFIGS[0]}" in out
    assert f"fastest on {GPU}: {CONFIGS[1]}" in out


def test_an_interrupted_search_says_how_to_go_on_and_does(run, database, gpu):
    def interrupt(number):
        if number == 2:
            raise KeyboardInterrupt

    before = gpu(before_sweep=interrupt)
    code, out, err = run(*SEARCH)
    assert (code, out) == (130, "")
    assert "the same command with --resume goes on" in " ".join(err.split())
    assert database.status().unfinished_searches == 1
    after = gpu()
    code, out, _ = run(*SEARCH, "--resume", "--json")
    assert code == 0
    assert json.loads(out)["searches"][0]["resumed"]
    assert (after.checked, len(before.swept)) == ([], 2)
    assert database.results()[0].config == CONFIGS[0]


def test_all_goes_on_after_the_searches_that_were_finished(run, gpu):
    def interrupt(number):
        if number == 20:
            raise KeyboardInterrupt

    arguments = ("tune", "--all", "--d-head", "64", "--dtype", "BF16", "--limit", "4")
    gpu(before_sweep=interrupt)
    code, out, _ = run(*arguments)
    assert code == 130
    finished = out.count("fastest on")
    assert 0 < finished < 6
    gpu()
    code, out, _ = run(*arguments, "--resume")
    assert code == 0
    assert out.count("fastest on") == 6
    assert out.count("finished before") == finished


def test_a_database_that_cannot_be_written_is_one_message_before_anything_is_measured(run, gpu, tmp_path, monkeypatch):
    measurer = gpu()
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "file"))
    code, out, err = run(*SEARCH)
    assert (code, out) == (1, "")
    assert CACHE_DIRECTORY_VARIABLE in err
    assert (measurer.checked, measurer.swept) == ([], [])


def test_a_damaged_database_does_not_keep_from_tuning(run, database, gpu):
    gpu()
    database.path.parent.mkdir()
    database.path.write_bytes(b"no database" * 100)
    with pytest.warns(RuntimeWarning, match="set aside"):
        code, _, _ = run(*SEARCH)
    assert code == 0
    assert database.results()[0].config == CONFIGS[0]


# --- Results ---------------------------------------------------------------------------------------------------


def test_an_empty_database_is_shown_as_empty(run, database):
    code, out, _ = run("tune", "show")
    assert code == 0
    assert f"no results in {database.path}" in out
    code, out, _ = run("tune", "show", "--json")
    assert json.loads(out) == {"schema": "tune-show/1"} | to_document([])


def test_results_are_shown(run, database):
    database.store([a_result()])
    code, out, _ = run("tune", "show")
    assert code == 0
    assert GPU in out
    assert "65-1024" in out
    code, out, _ = run("tune", "show", "--json", "--gpu", "another")
    assert json.loads(out)["results"] == []


@pytest.mark.parametrize(
    ("digest", "currency"), [(kernel_digest(CONFIGS[0]), "current"), ("0123456789abcdef", "other"), (None, "unknown")]
)
def test_results_are_shown_with_whether_their_kernels_are_current(run, database, digest, currency):
    database.store([a_result(kernels=digest)])
    heading, _, row, _ = run("tune", "show")[1].splitlines()
    assert GPU in heading and row.split()[-1] == currency
    document = json.loads(run("tune", "show", "--json")[1])
    assert [each["kernels"] for each in document["results"]] == [currency]
    assert from_document(document) == [a_result(kernels=digest)]


def test_results_and_their_whole_configs_fit_a_narrow_terminal(run, database, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("tune", "show", "--shipped")[1].splitlines()
    configs = [line.strip() for line in lines if line.startswith("  ")]
    assert sorted(configs) == sorted(str(result.config) for result in shipped_results())
    assert max(len(line) for line in lines if not line.startswith("  ")) <= 80


def test_results_of_the_package_are_shown(run, database):
    code, out, _ = run("tune", "show", "--shipped", "--json")
    assert code == 0
    assert from_document(json.loads(out)) == list(shipped_results())


def test_exported_results_can_be_imported_elsewhere(run, database, tmp_path, monkeypatch):
    mine = [a_result(), a_result(CONFIGS[3], 2.0, gpu="another")]
    database.store(mine)
    file = tmp_path / "results.json"
    assert run("tune", "export", file)[:2] == (0, f"2 results written to {file}\n")
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "elsewhere"))
    assert run("tune", "import", file)[:2] == (0, "2 results imported\n")
    elsewhere = TuningDatabase()
    assert elsewhere.path != database.path
    assert elsewhere.results() == database.results()
    assert run("tune", "export", file, "--gpu", "another")[:2] == (0, f"1 result written to {file}\n")
    assert [result["gpu"] for result in json.loads(file.read_text())["results"]] == ["another"]
    assert run("tune", "export", "--output", file)[:2] == (0, f"2 results written to {file}\n")
    assert sorted(path.name for path in tmp_path.glob("*results*") if path.is_file()) == ["results.json"]


@pytest.mark.parametrize("where", ["/proc/results.json", "/nowhere/results.json", "/tmp"])
def test_a_place_that_cannot_be_written_is_named_as_it_was_given(run, database, where):
    database.store([a_result()])
    code, out, err = run("tune", "export", where)
    assert (code, out) == (1, "")
    assert f"error: {where} " in err and "partial" not in err and f".{where.rpartition('/')[2]}." not in err


def test_an_import_keeps_results_that_are_faster(run, database, tmp_path):
    file = tmp_path / "results.json"
    file.write_text(json.dumps(to_document([a_result(CONFIGS[1], 2.0), a_result(gpu="another")])))
    database.store([a_result(CONFIGS[0], 1.0)])
    assert (
        "1 result imported; kept, being faster or of the installed kernels: 1 of yours"
        in run("tune", "import", file)[1]
    )
    assert [result.config for result in database.results(GPU)] == [CONFIGS[0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "not a file of tuning results"),
        (json.dumps(to_document([a_result(gpu="new")])).replace("async", "magic").encode(), "unknown option 'magic'"),
    ],
)
def test_an_unsound_file_changes_nothing(run, database, tmp_path, content, message):
    database.store([a_result()])
    before = database.path.read_bytes()
    file = tmp_path / "results.json"
    file.write_bytes(content)
    code, out, err = run("tune", "import", file)
    assert (code, out) == (1, "")
    assert message in err
    assert str(file) in err
    assert database.path.read_bytes() == before
    assert run("tune", "import", tmp_path / "missing.json")[0] == 1


def test_results_are_forgotten_only_when_that_is_meant(run, database, monkeypatch):
    database.store([a_result(), a_result(gpu="another")])
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert run("tune", "clear")[0] == 1
    assert len(database.results()) == 2
    assert run("tune", "clear", "--yes", "--gpu", GPU)[:2] == (0, "1 result forgotten\n")
    assert [result.gpu for result in database.results()] == ["another"]
