"""The tuning database: what is stored is found, files are checked, and no trouble with the disk is attention()'s."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tuning_fakes
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning_fakes import CONFIGS, GPU, MODEL, PROBLEM, a_result, occasion_of, untuned

from flashwright import DType, FlashForwardKernelConfig
from flashwright.choice import database as database_module
from flashwright.choice import lookup
from flashwright.choice.choose import backward_config, best_family, default_config
from flashwright.choice.database import SCHEMA_VERSION, DatabaseUnusable, NewerDatabase, TuningDatabase
from flashwright.choice.lookup import shipped_results
from flashwright.choice.problem import problem_of, standard_problems
from flashwright.choice.results import Timing, TunedResult, TuningFileError, from_document, to_document
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.registry import family_named, parse_config, tile_shapes
from flashwright.operators import forward
from flashwright.problem.options import AttentionOptions
from flashwright.workbench.tuning.reload import reload
from flashwright.workbench.tuning.space import enumerate_space

H200 = GPUModel.of_architecture("NVIDIA H200", "sm_90")
ANOTHER = GPUModel.of_architecture("another", "sm_80")
HEURISTIC = untuned()


@pytest.fixture
def database(tmp_path, monkeypatch):
    """The user's database, which `attention()` consults; nothing ships with the package."""
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(lookup, "shipped_results", lambda: iter(()))
    reload()
    yield TuningDatabase()
    reload()


def default(problem=PROBLEM, gpu=MODEL, **changes):
    problem = replace(problem, **changes)
    reload()
    return default_config(
        problem.dtype,
        problem.d_head,
        causal=problem.causal,
        q_length=problem.q_length,
        kv_length=problem.kv_length,
        gpu=gpu,
    )


# --- Results ---------------------------------------------------------------------------------------------------


PRINTABLE = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1)


@cache
def some_configs(dtype: DType, d_head: int) -> tuple[FlashForwardKernelConfig, ...]:
    return enumerate_space(problem_of(dtype=dtype, d_head=d_head), limit=20).configs


@st.composite
def results(draw: st.DrawFn) -> TunedResult:
    problem = problem_of(
        dtype=draw(st.sampled_from(DType)),
        d_head=draw(st.sampled_from(family_named("ampere").d_heads)),
        causal=draw(st.booleans()),
        q_length=draw(st.integers(1, 2**20)),
        kv_length=draw(st.integers(1, 2**20)),
        batch=draw(st.integers(1, 100)),
        heads=draw(st.integers(1, 100)),
    )
    times = st.floats(1e-6, 1e6)
    config = st.sampled_from(some_configs(problem.dtype, problem.d_head))
    return TunedResult(
        gpu=draw(PRINTABLE),
        problem=problem,
        best=Timing(draw(config), draw(times)),
        runners_up=tuple(draw(st.lists(st.builds(Timing, config, times), max_size=4))),
        date=draw(PRINTABLE),
        versions=draw(st.dictionaries(st.text(), st.none() | st.text())),
        scores=tuple(draw(st.lists(PRINTABLE, min_size=1, max_size=3))),
    )


@settings(deadline=None, max_examples=40)
@given(st.lists(results(), max_size=3, unique_by=lambda result: result.key))
def test_results_survive_the_way_through_a_file_and_the_database(some):
    text = json.dumps(to_document(some))
    assert from_document(json.loads(text)) == some
    with tempfile.TemporaryDirectory() as directory:
        database = TuningDatabase(Path(directory) / "tuning.sqlite3")
        assert database.store(some) == some
        assert database.results() == sorted(some, key=lambda result: result.key)


def test_an_absent_database_is_empty_and_is_not_made_by_looking(database):
    assert database.results() == []
    assert database.clear() == 0
    assert database.status().state == "absent"
    assert default() == HEURISTIC
    assert not database.path.parent.exists()


def test_the_database_is_in_a_directory_of_the_users_alone(database):
    database.store([a_result()])
    assert database.path.parent.stat().st_mode & 0o777 == 0o700
    assert (database.status().state, database.status().results) == ("usable", 1)


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_directory_that_was_there_keeps_its_mode(database, mode):
    database.path.parent.mkdir()
    database.path.parent.chmod(mode)
    database.store([a_result()])
    assert database.path.parent.stat().st_mode & 0o7777 == mode
    assert database.results() == [a_result()]


def test_a_result_replaces_what_it_was_measured_to_beat_even_if_it_is_slower(database):
    """A GPU may run slower than when the old result was made; the new search timed both."""
    database.store([a_result(CONFIGS[0], 1.0)])
    newer = a_result(CONFIGS[1], 1.5, runners_up=[Timing(CONFIGS[0], 1.6)])
    assert database.store([newer]) == [newer]
    assert database.results() == [newer]


def test_of_results_that_were_not_measured_beside_each_other_the_faster_stays(database):
    fast, slow = a_result(CONFIGS[0], 1.0), a_result(CONFIGS[1], 1.5)
    database.store([fast])
    assert database.store([slow]) == [fast]
    assert database.results() == [fast]
    faster = a_result(CONFIGS[2], 0.5)
    assert database.store([faster]) == [faster]


def test_times_on_other_kinds_of_scores_prove_nothing(database):
    database.store([a_result(CONFIGS[0], 1.0)])
    later = a_result(CONFIGS[1], 1.5, scores=("normal", "sink"))
    assert database.store([later]) == [later]


def test_a_result_that_names_no_kinds_of_scores_was_measured_on_normal_ones():
    document = to_document([a_result(scores=("sink",))])
    del document["results"][0]["scores"]
    assert from_document(document) == [a_result(scores=("normal",))]


def make_older_schema(path: Path, version: int, lacking: tuple[str, ...]) -> None:
    """As an earlier version made it: without columns of kinds of scores, or of heads of keys."""
    with sqlite3.connect(path) as connection:
        for column in lacking:
            connection.execute(f"ALTER TABLE results DROP COLUMN {column}")
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


@pytest.mark.parametrize(("version", "lacking"), [(1, ("scores", "kv_heads")), (2, ("kv_heads",))])
def test_a_database_of_an_older_schema_is_read_as_it_is_and_extended_when_written(database, version, lacking):
    old, new = a_result(), a_result(gpu="another", scores=("sink", "equal"))
    database.store([old])
    make_older_schema(database.path, version, lacking)
    before = database.path.read_bytes()
    assert database.results() == [old]
    assert database.status().state == "usable"
    assert default() == old.config
    assert database.path.read_bytes() == before
    database.store([new])
    assert database.results() == [old, new]


def test_results_of_one_gpu_can_be_listed_and_forgotten(database):
    mine, other = a_result(), a_result(gpu="another")
    database.store([mine, other])
    assert database.results(GPU) == [mine]
    assert database.clear(GPU) == 1
    assert database.results() == [other]
    assert database.clear() == 1
    assert database.results() == []


def test_processes_may_store_at_the_same_time(database, tmp_path):
    go = tmp_path / "go"
    program = f"""
import sys, time, pathlib
sys.path.insert(0, {str(Path(tuning_fakes.__file__).parent)!r})
from tuning_fakes import *
from flashwright.choice.database import TuningDatabase
number = int(sys.argv[1])
print("ready", flush=True)
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.001)
for step in range(20):
    result = a_result(CONFIGS[number], 2.0 - 0.01 * step - 0.1 * number)
    TuningDatabase().store([result, a_result(gpu=f"GPU {{number}}.{{step}}")])
"""
    processes = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", program, str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    go.touch()
    for process in processes:
        process.communicate(timeout=120)
    assert [process.returncode for process in processes] == [0, 0, 0]
    stored = database.results()
    assert len(stored) == 1 + 3 * 20
    (contested,) = [result for result in stored if result.gpu == GPU]
    assert contested == a_result(CONFIGS[2], 2.0 - 0.01 * 19 - 0.1 * 2)


# --- What attention() uses -------------------------------------------------------------------------------------


def test_measured_results_come_before_experience(database, monkeypatch):
    assert default() == HEURISTIC
    monkeypatch.setattr(lookup, "shipped_results", lambda: iter([a_result(CONFIGS[1], 1.0)]))
    assert default() == CONFIGS[1]
    database.store([a_result(CONFIGS[2], 9.0)])
    assert default() == CONFIGS[2]
    database.clear()
    assert default() == CONFIGS[1]


def test_a_result_serves_its_gpu_dtype_head_dimension_mask_and_lengths_only(database):
    database.store([a_result(CONFIGS[0])])
    assert default() == CONFIGS[0] != HEURISTIC
    assert default(q_length=1000, kv_length=70, batch=3, heads=5) == CONFIGS[0]
    assert default(gpu=ANOTHER) == HEURISTIC
    assert default(gpu=None) == HEURISTIC
    for change in ({"dtype": DType.FP16}, {"d_head": 128}, {"causal": True}, {"q_length": 4096}, {"q_length": 64}):
        changed = replace(PROBLEM, **change)
        assert default(changed) == untuned(changed)


def test_a_padded_head_dimension_uses_the_results_of_the_kernel_that_computes_it(database):
    database.store([a_result(CONFIGS[0])])
    reload()
    options = {"causal": False, "q_length": 512, "kv_length": 512, "gpu": MODEL}
    assert default_config(DType.BF16, 40, **options) == CONFIGS[0]
    assert default_config(DType.BF16, 32, **options) != CONFIGS[0]


def test_results_of_one_operation_are_not_found_by_another(database):
    backward = problem_of(family="ampere backward", d_head=64, q_length=512)
    tuned = parse_config("ampere backward (BF16, 64, 32, 32, 2): stages_1_1+swizzled")
    database.store([a_result(CONFIGS[-1]), a_result(tuned, problem=backward)])
    reload()
    assert {result.config for result in database.results()} == {CONFIGS[-1], tuned}
    assert default() == CONFIGS[-1]
    assert backward_config(occasion_of(PROBLEM)) == tuned
    assert from_document(to_document(database.results())) == database.results()
    with pytest.raises(ValueError, match="is of the ampere backward family, not ampere"):
        from_document(to_document([a_result(tuned)]))


def test_where_no_result_has_as_many_keys_the_nearest_with_as_many_queries_serves(database, monkeypatch):
    long_keys = replace(PROBLEM, kv_length=8192)
    assert default(long_keys) == HEURISTIC
    database.store([a_result(CONFIGS[0])])
    assert default(long_keys) == CONFIGS[0]
    monkeypatch.setattr(lookup, "shipped_results", lambda: iter([a_result(CONFIGS[1], problem=long_keys)]))
    assert default(long_keys) == CONFIGS[1]  # measured for as many keys, if not by the user
    assert default() == CONFIGS[0]


def test_results_are_read_once_until_they_are_reloaded(database):
    assert default() == HEURISTIC
    database.store([a_result(CONFIGS[0])])
    options = {"causal": False, "q_length": 512, "kv_length": 512, "gpu": MODEL}
    assert default_config(PROBLEM.dtype, 64, **options) == HEURISTIC
    reload()
    assert default_config(PROBLEM.dtype, 64, **options) == CONFIGS[0]


def test_attention_asks_for_the_gpu_of_its_tensors(database, monkeypatch):
    torch = pytest.importorskip("torch")
    database.store([a_result(CONFIGS[0])])
    reload()

    class OnAGpu:
        dtype, shape, is_cuda, device = torch.bfloat16, (1, 1, 512, 64), True, torch.device("cuda", 3)

    monkeypatch.setattr(forward, "gpu_model", {3: MODEL}.__getitem__)
    assert forward.config_chosen_for(OnAGpu(), OnAGpu(), AttentionOptions(), None) == CONFIGS[0]


def test_a_stored_config_that_this_version_does_not_know_is_ignored(database):
    database.store([a_result(CONFIGS[0]), a_result(gpu="another")])
    with sqlite3.connect(database.path) as connection:
        connection.execute("UPDATE results SET config = config || '+from_the_future' WHERE gpu = ?", (GPU,))
    connection.close()
    assert [result.gpu for result in database.results()] == ["another"]
    assert default() == HEURISTIC


# --- Trouble ---------------------------------------------------------------------------------------------------


def scribble(path: Path) -> None:
    path.write_bytes(b"this is no database, whatever it was " * 300)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def corrupt_pages(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))


def other_schema(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name, minutes)")
    connection.close()


def missing_column(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE results RENAME COLUMN config TO kernel")
    connection.close()


DAMAGES = [scribble, truncate, corrupt_pages, other_schema, missing_column]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_database_is_set_aside_with_a_warning(database, damage):
    database.store([a_result(), *(a_result(gpu=f"GPU {number}") for number in range(100))])
    damage(database.path)
    damaged = database.path.read_bytes()
    assert database.status().state == "damaged"
    assert database.path.read_bytes() == damaged
    with pytest.warns(RuntimeWarning, match=r"is damaged .* set aside as tuning.sqlite3.damaged-1"):
        assert default() == HEURISTIC
    assert database.path.with_name("tuning.sqlite3.damaged-1").read_bytes() == damaged
    assert not database.path.exists()

    database.store([a_result()])
    damage(database.path)
    with pytest.warns(RuntimeWarning, match="damaged-2"):
        database.store([a_result(CONFIGS[1])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert default() == CONFIGS[1]


def test_an_empty_file_is_an_empty_database(database):
    database.path.parent.mkdir()
    database.path.touch()
    assert database.results() == []
    assert default() == HEURISTIC
    database.store([a_result()])
    assert database.results() == [a_result()]


def test_a_database_of_a_newer_version_is_left_alone_and_attention_works(database):
    database.store([a_result()])
    with sqlite3.connect(database.path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    before = database.path.read_bytes()
    with pytest.raises(NewerDatabase, match=f"newer flashwright .schema {SCHEMA_VERSION + 1}.*update flashwright"):
        database.store([a_result(CONFIGS[1])])
    assert database.status().state == "newer"
    with pytest.warns(RuntimeWarning, match="newer flashwright"):
        assert default() == HEURISTIC
    assert database.path.read_bytes() == before


def test_a_database_in_use_by_another_process_for_too_long_is_not_fatal(database, monkeypatch):
    database.store([a_result()])
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.05)
    connection = sqlite3.connect(database.path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(DatabaseUnusable, match="locked"):
            database.store([a_result(CONFIGS[1])])
        with pytest.warns(RuntimeWarning, match="locked"):
            assert default() == HEURISTIC
    finally:
        connection.close()
    assert default() == CONFIGS[0]


def test_a_directory_that_cannot_be_made_is_not_fatal(tmp_path, monkeypatch, database):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "file" / "cache"))
    assert default() == HEURISTIC
    with pytest.raises(DatabaseUnusable, match=CACHE_DIRECTORY_VARIABLE):
        TuningDatabase().store([a_result()])


def test_a_read_only_disk_is_still_read(database, monkeypatch):
    database.store([a_result(CONFIGS[0])])
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda name, **options: connect(re.sub("mode=rwc?", "mode=ro", name), **options)
    )
    assert default() == CONFIGS[0]
    with pytest.raises(DatabaseUnusable, match="readonly"):
        database.store([a_result(CONFIGS[1], 0.5)])
    assert default() == CONFIGS[0]


def test_a_full_disk_loses_no_stored_result(database, monkeypatch):
    database.store([a_result()])
    connect = sqlite3.connect

    def connect_to_full_disk(*arguments, **options):
        connection = connect(*arguments, **options)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_full_disk)
    with pytest.raises(DatabaseUnusable, match="full"):
        database.store([a_result(gpu=f"GPU {number}") for number in range(1000)])
    assert database.results() == [a_result()]
    assert default() == CONFIGS[0]


# --- Files -----------------------------------------------------------------------------------------------------


def changed(**changes):
    document = to_document([a_result(), a_result(gpu="another")])
    document["results"][1] |= changes
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a file of tuning results"),
        ({"format": "other"}, "not a file of tuning results"),
        ({"format": "flashwright-tuning", "version": 2, "results": []}, "version: 2 is not known; allowed: 1"),
        ({"format": "flashwright-tuning", "version": 1}, "results: expected a list"),
        ({"format": "flashwright-tuning", "version": 1, "results": [7]}, "results[0]: expected an object, got int"),
        (changed(config="(BF16, 64, 64, 64, 4): async+nonsense+load_2_2_2_tiles"), "results[1]: unknown option"),
        (changed(config="hopper (BF16, 64, 64, 64): stages_1"), "is of the hopper family, not ampere"),
        (changed(config="(FP16, 64, 64, 64, 4): async+load_2_2_2_tiles"), "does not compute BF16 with d_head = 64"),
        (changed(config="(BF16, 64, 64, 64, 8): async+load_2_2_2_tiles"), "an mma needs a multiple of 16"),
        (changed(config="(BF16, 64, 64, 64, 4): load_2_2_2_tiles+stride_2048"), "tensors of one row stride only"),
        (changed(d_head=100), "results[1]: d_head: 100"),
        (changed(dtype="fp8"), "FP16, BF16"),
        (changed(family="nope"), "family: 'nope' is not known"),
        (changed(causal=1), "causal: 1"),
        (changed(q_length=0), "q_length: 0"),
        (changed(time_ms=float("nan")), "time_ms: nan"),
        (changed(time_ms=-1), "time_ms: -1"),
        (changed(time_ms=10**400), "allowed: 1e-06 to 1e+09"),
        (changed(gpu=""), "gpu: '' is not a line of text"),
        (changed(gpu="\ud800"), "is not a line of text"),
        (changed(d_head=64.0), "d_head: 64.0"),
        (changed(runners_up={}), "runners_up: expected a list"),
        (changed(runners_up=[{"config": "x", "time_ms": 1}]), "results[1]: runners_up[0]: 'x' names no kernel"),
        (changed(versions=[]), "versions: []"),
        (changed(scores=[]), "scores: [] is not a list of kinds"),
        (changed(scores="normal"), "scores: 'normal' is not a list of kinds"),
        (changed(scores=["normal", 3]), "scores: kind: 3 is not a line of text"),
    ],
)
def test_a_file_with_anything_wrong_is_refused_with_what_and_where(document, message):
    with pytest.raises(TuningFileError) as refusal:
        from_document(document)
    assert message in str(refusal.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.sampled_from(sorted(a_result().to_dict())), JSON)
def test_no_content_makes_reading_fail_otherwise_than_by_value_error(name, value):
    with suppress(TuningFileError):
        from_document(changed(**{name: value}))


# --- Shipped with the package ----------------------------------------------------------------------------------


def test_what_ships_can_be_built_and_was_measured_better_than_its_runners_up():
    for result in shipped_results():
        assert tile_shapes(result.config).shared_bytes <= 227 * 1024
        assert all(result.best.time_ms <= runner_up.time_ms for runner_up in result.runners_up)
        assert result.versions["flashwright"]


def test_what_ships_covers_every_standard_problem_of_an_h200():
    shipped: dict[str, set] = {}
    for result in shipped_results():
        assert result.problem.kind not in shipped.setdefault(result.gpu, set()), "shipped twice"
        shipped[result.gpu].add(result.problem.kind)
    assert set(shipped) == {H200.name}
    used = best_family(occasion_of(PROBLEM, H200))
    assert shipped[H200.name] >= {problem.kind for problem in standard_problems(family=used.name)}


def test_what_ships_for_an_h200_has_searches_of_the_ampere_family_of_whole_head_dimensions():
    """At d_head 256 in bf16 the rule has a ring, which no search has timed."""
    searched = {DType.BF16: (32, 64, 96, 128, 192), DType.FP16: (64, 128)}
    shipped = {result.problem.kind for result in shipped_results() if result.problem.family == "ampere"}
    standard = {problem.kind for problem in standard_problems(family="ampere")}
    assert shipped >= {kind for kind in standard if kind.d_head in searched[kind.dtype]}


def test_shipped_files_are_read_from_the_package(tmp_path, monkeypatch):
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "imaginary.json").write_text(json.dumps(to_document([a_result()])))
    (tmp_path / "shipped" / "notes.txt").write_text("not JSON")
    monkeypatch.setattr(lookup.resources, "files", lambda package: tmp_path)
    assert list(shipped_results()) == [a_result()]
    (tmp_path / "shipped" / "imaginary.json").write_text("{")
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    with pytest.warns(RuntimeWarning, match="tuning results of this installation cannot be read"):
        assert default() == HEURISTIC
    monkeypatch.setattr(lookup.resources, "files", lambda package: tmp_path / "absent")
    assert list(shipped_results()) == []
    reload()
