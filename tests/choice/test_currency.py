"""Results of the kernels that are installed come before results of others, and later ones before earlier ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tuning_fakes import CONFIGS, GPU, MODEL, PROBLEM, a_result

from flashwright import parse_hopper_config
from flashwright.choice import currency as currency_module
from flashwright.choice import lookup
from flashwright.choice.choose import default_config
from flashwright.choice.currency import Currency, currency, kernel_digest, measured_at
from flashwright.choice.database import TuningDatabase
from flashwright.choice.lookup import shipped_results
from flashwright.choice.results import Timing, from_document, to_document
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE
from flashwright.kernels.forward.ampere.source import forward_kernel_source
from flashwright.kernels.forward.hopper.source import hopper_kernel_source
from flashwright.kernels.source import KernelSource
from flashwright.workbench.tuning.reload import reload

OLD, NEW = "2029-12-31T23:59:59+00:00", "2030-01-01T00:00:00+00:00"
MINE, THEIRS = CONFIGS[0], CONFIGS[1]


def digest_of(source: str, config) -> str | None:
    """The digest that a result of a source has: `current`, `other`, or `unknown`, which has none."""
    return {"current": kernel_digest(config), "other": "0123456789abcdef", "unknown": None}[source]


def result(config, source: str, date: str = NEW, time_ms: float = 1.0, **options):
    return a_result(config, time_ms, date=date, kernels=digest_of(source, config), **options)


@pytest.fixture
def database(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    yield TuningDatabase()
    monkeypatch.undo()
    reload()


# --- The digest --------------------------------------------------------------------------------------------------

AMPERE_SOURCE = forward_kernel_source(MINE)
HOPPER_SOURCE = hopper_kernel_source(parse_hopper_config("hopper (BF16, 64, 128, 128): stages_2"))


def with_header(source: KernelSource, name: str, more: str = "// changed\n") -> KernelSource:
    headers = dict(source.headers)
    return replace(source, headers=tuple((headers | {name: headers[name] + more}).items()))


def test_a_digest_is_short_and_the_same_every_time():
    assert kernel_digest(MINE) == AMPERE_SOURCE.digest() == forward_kernel_source(MINE).digest()
    assert len(kernel_digest(MINE)) == 16


@pytest.mark.parametrize(
    "changed",
    [
        with_header(AMPERE_SOURCE, "attention/softmax.cuh"),
        with_header(AMPERE_SOURCE, "ptx/mma.cuh"),
        with_header(AMPERE_SOURCE, "specialisation.cuh"),
        replace(AMPERE_SOURCE, text=AMPERE_SOURCE.text + "\n"),
        replace(AMPERE_SOURCE, options=("--ptxas-options=-O2",)),
    ],
    ids=["a device header", "an instruction's wrapper", "the constants", "the translation unit", "an option"],
)
def test_whatever_a_kernel_is_made_of_changes_its_digest(changed):
    assert changed.digest() != AMPERE_SOURCE.digest()


def test_device_code_that_a_kernel_does_not_include_is_no_part_of_its_digest():
    assert with_header(AMPERE_SOURCE, "ptx/wgmma.cuh").digest() == AMPERE_SOURCE.digest()
    assert with_header(HOPPER_SOURCE, "ptx/wgmma.cuh").digest() != HOPPER_SOURCE.digest()


def test_configs_have_digests_of_their_own():
    assert len({kernel_digest(config) for config in CONFIGS}) == len(CONFIGS)


@pytest.mark.parametrize("source", ["current", "other", "unknown"])
def test_a_result_is_current_if_the_installed_package_makes_the_same_kernel(source):
    assert currency(result(MINE, source)) is Currency(source)


def test_results_without_a_digest_stay_readable_and_are_of_unknown_source():
    old = a_result()
    assert "kernels" not in old.versions
    assert from_document(to_document([old])) == [old]
    assert {currency(shipped) for shipped in shipped_results()} <= set(Currency)


# --- The choice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "chosen"),
    [
        (("current", OLD), ("unknown", NEW), MINE),
        (("current", OLD), ("other", NEW), MINE),
        (("unknown", NEW), ("current", OLD), THEIRS),
        (("other", NEW), ("current", OLD), THEIRS),
        (("current", NEW), ("current", OLD), MINE),
        (("current", OLD), ("current", NEW), THEIRS),
        (("current", NEW), ("current", NEW), MINE),
        (("unknown", OLD), ("unknown", NEW), THEIRS),
        (("unknown", NEW), ("unknown", OLD), MINE),
        (("unknown", NEW), ("unknown", NEW), MINE),
        (("other", OLD), ("unknown", NEW), THEIRS),
        (("unknown", NEW), ("other", OLD), MINE),
        (("unknown", "some day"), ("unknown", OLD), THEIRS),
        (("unknown", OLD), ("unknown", "some day"), MINE),
    ],
)
def test_of_a_users_result_and_a_shipped_one_the_current_is_used_or_else_the_later(
    database, monkeypatch, mine, theirs, chosen
):
    monkeypatch.setattr(lookup, "shipped_results", lambda: iter([result(THEIRS, *theirs)]))
    database.store([result(MINE, *mine)])
    reload()
    options = {"causal": False, "q_length": 512, "kv_length": 512, "gpu": MODEL}
    assert default_config(PROBLEM.dtype, PROBLEM.d_head, **options) == chosen


def test_a_result_whose_kernels_are_others_is_still_used_where_there_is_no_better(database, monkeypatch):
    monkeypatch.setattr(lookup, "shipped_results", lambda: iter(()))
    database.store([result(MINE, "other", OLD)])
    reload()
    options = {"causal": False, "q_length": 512, "kv_length": 512, "gpu": MODEL}
    assert default_config(PROBLEM.dtype, PROBLEM.d_head, **options) == MINE


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("2030-01-01T00:00:00+00:00", "2030-01-01T00:00:01+00:00"),
        ("2030-01-01T12:00:00+02:00", "2030-01-01T11:00:00+00:00"),
        ("2029-12-31", "2030-01-01T00:00:00+00:00"),
        ("no date", "2029-12-31"),
    ],
)
def test_dates_are_compared_as_points_in_time(earlier, later):
    assert measured_at(a_result(date=earlier)) < measured_at(a_result(date=later))


# --- The database ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["other", "unknown"])
def test_a_result_of_the_installed_kernels_replaces_one_of_others_even_if_it_is_slower(database, stored):
    database.store([result(MINE, stored, time_ms=1.0)])
    slower = result(THEIRS, "current", time_ms=2.0)
    assert database.store([slower]) == [slower]
    assert database.results(GPU) == [slower]


@pytest.mark.parametrize("newcomer", ["other", "unknown"])
def test_a_result_of_other_kernels_does_not_replace_one_of_the_installed(database, newcomer):
    current = result(MINE, "current", time_ms=2.0)
    database.store([current])
    assert database.store([result(THEIRS, newcomer, time_ms=1.0, runners_up=[Timing(MINE, 1.5)])]) == [current]
    assert database.results(GPU) == [current]


@pytest.mark.parametrize("source", ["current", "other", "unknown"])
def test_of_results_alike_in_source_the_faster_stays(database, source):
    fast = result(MINE, source, time_ms=1.0)
    assert database.store([fast, result(THEIRS, source, time_ms=2.0)]) == [fast, fast]


def test_an_update_of_the_package_makes_current_results_those_of_others(monkeypatch):
    mine = result(MINE, "current")
    monkeypatch.setattr(currency_module, "kernel_digest", lambda config: "of the next version")
    assert currency(mine) is Currency.OTHER
