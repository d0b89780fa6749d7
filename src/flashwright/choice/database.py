"""The user's tuning results: one SQLite file beside the compiled programs.

Whatever reads or writes does so in one transaction, so that processes may tune at the same time and may be killed at
any time. A file that SQLite or the schema does not recognise is set aside, never deleted and never an obstacle.
"""

from __future__ import annotations

import json
import sqlite3
import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from flashwright.choice.currency import is_current
from flashwright.choice.problem import ProblemKind
from flashwright.choice.results import NORMAL_SCORES, TunedResult
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE, cache_directory, make_private

FILE_NAME = "tuning.sqlite3"
SCHEMA_VERSION = 3
BUSY_TIMEOUT_S = 30.0

_KEY = ("gpu", "family", "dtype", "d_head", "causal", "q_bucket", "kv_bucket")
_TABLES = {
    # The fastest config of each kind of problem on each GPU model; what it was measured on and with.
    "results": (
        *_KEY, "batch", "heads", "q_length", "kv_length", "config", "time_ms", "tflops", "runners_up", "date",
        "versions", "scores", "kv_heads", f"PRIMARY KEY ({', '.join(_KEY)})",
    ),
    # The journal of searches; one that is finished keeps its result, one that is not what it has measured.
    "searches": ("id INTEGER PRIMARY KEY", "gpu", "problem", "space", "started", "result"),
    "checks": ("search", "config", "error REAL", "PRIMARY KEY (search, config)"),
    "sweeps": ("search", "stage", "sweep", "times", "PRIMARY KEY (search, stage, sweep)"),
}  # fmt: skip
_OLDER_SCHEMAS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"results": ("scores", "kv_heads")},
    2: {"results": ("kv_heads",)},
}
"""By version, the columns that tables of an older schema lack. They are added when the database is written to."""
_ADDED_COLUMNS = {"scores": f"'{json.dumps(NORMAL_SCORES)}'", "kv_heads": "0"}
"""With what older results have in them."""

Value = TypeVar("Value")


class DatabaseUnusable(OSError):
    """The tuning database cannot be read or written. The message gives the reason and a remedy."""


class NewerDatabase(DatabaseUnusable):
    """The tuning database was written by a later version, and is left as it is."""


class _UnknownSchema(sqlite3.DatabaseError):
    """A sound SQLite file that is not, or no longer, a tuning database."""


@dataclass(frozen=True)
class DatabaseStatus:
    """What the file holds, found without changing it."""

    path: Path
    state: str
    """`absent`, `usable`, `damaged`, `newer` or `unusable`."""
    detail: str
    results: int = 0
    unfinished_searches: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


class TuningDatabase:
    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_directory() / FILE_NAME

    # --- Results -------------------------------------------------------------------------------------------

    def results(self, gpu: str | None = None) -> list[TunedResult]:
        """All results, or those of one GPU model. Those whose config this version does not know are left out."""
        rows = self.select("SELECT * FROM results")
        results = [result for row in rows if (result := _result(row)) and gpu in (None, result.gpu)]
        return sorted(results, key=lambda result: result.key)

    def result(self, gpu: str, kind: ProblemKind) -> TunedResult | None:
        return next((result for result in self.results(gpu) if result.key == (gpu, kind)), None)

    def store(self, results: Iterable[TunedResult]) -> list[TunedResult]:
        """Keeps those that are better than what is stored, all or none; returns what is then stored for each."""
        results = list(results)
        return self.write(lambda connection: [store_result(connection, result) for result in results])

    def clear(self, gpu: str | None = None) -> int:
        """Forgets all results, or those of one GPU model, and the searches for them; returns how many results."""

        def delete(connection: sqlite3.Connection) -> int:
            where, values = ("", ()) if gpu is None else (" WHERE gpu = ?", (gpu,))
            searches = f"search IN (SELECT id FROM searches{where})"
            for table in ("checks", "sweeps"):
                connection.execute(f"DELETE FROM {table} WHERE {searches}", values)
            connection.execute(f"DELETE FROM searches{where}", values)
            return connection.execute(f"DELETE FROM results{where}", values).rowcount

        return self.write(delete) if self.path.exists() else 0

    def status(self) -> DatabaseStatus:
        def count(connection: sqlite3.Connection) -> tuple[int, int]:
            (results,) = connection.execute("SELECT count(*) FROM results").fetchone()
            (unfinished,) = connection.execute("SELECT count(*) FROM searches WHERE result IS NULL").fetchone()
            return results, unfinished

        try:
            if not self.path.exists():
                return DatabaseStatus(self.path, "absent", "nothing was tuned here yet")
            results, unfinished = self._attempt(count, write=False, empty=(0, 0))
        except NewerDatabase as error:
            return DatabaseStatus(self.path, "newer", str(error))
        except (sqlite3.Error, OSError) as error:
            state = "damaged" if _means_damage(error) else "unusable"
            return DatabaseStatus(self.path, state, str(error))
        return DatabaseStatus(self.path, "usable", f"schema {SCHEMA_VERSION}", results, unfinished)

    # --- Transactions --------------------------------------------------------------------------------------

    def select(self, query: str, values: tuple[object, ...] = ()) -> list[sqlite3.Row]:
        """The rows that a query finds; none if there is no database."""
        nothing: list[sqlite3.Row] = []
        return self.read(lambda connection: connection.execute(query, values).fetchall(), empty=nothing)

    def read(self, work: Callable[[sqlite3.Connection], Value], *, empty: Value) -> Value:
        """What `work` finds; `empty` if there is no database."""
        return self._run(work, write=False, empty=empty) if self._exists() else empty

    def write(self, work: Callable[[sqlite3.Connection], Value]) -> Value:
        """What `work` does, all or nothing, in a database that is made if need be."""
        try:
            make_private(self.path.parent)
        except OSError as error:
            raise self._unusable(error) from error
        return self._run(work, write=True)

    def _exists(self) -> bool:
        try:
            return self.path.exists()
        except OSError as error:  # a directory that may not be searched
            raise self._unusable(error) from error

    def _run(self, work: Callable[[sqlite3.Connection], Value], *, write: bool, empty: Any = None) -> Value:
        identity = _identity(self.path)
        try:
            try:
                return self._attempt(work, write=write, empty=empty)
            except sqlite3.Error as error:
                if not _means_damage(error):
                    raise
                self._set_aside(error, identity)
                return self._attempt(work, write=write, empty=empty) if write or self._exists() else empty
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _attempt(self, work: Callable[[sqlite3.Connection], Value], *, write: bool, empty: Any = None) -> Value:
        mode = "rwc" if write else "rw"  # not "ro": the journal of a process that was killed has to be rolled back
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                version = self._schema(connection)
                if version is None and not write:
                    return empty
                if write:
                    _bring_up_to_date(connection, version)
                value = work(connection)
                connection.execute("COMMIT")
                return value
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _schema(self, connection: sqlite3.Connection) -> int | None:
        """The schema's version, this or an older one; None for a file without content. Raises for any other."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise NewerDatabase(
                f"the tuning database {self.path} was written by a newer flashwright (schema {version}; this one knows "
                f"{SCHEMA_VERSION}); update flashwright, or set {CACHE_DIRECTORY_VARIABLE} to another directory"
            )
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if version == 0 and not tables:
            return None
        if version != SCHEMA_VERSION and version not in _OLDER_SCHEMAS:
            raise _UnknownSchema(f"its schema is {version}, not {SCHEMA_VERSION}")
        lacking = _OLDER_SCHEMAS.get(version, {})
        for table, columns in _TABLES.items():
            names = [column.split()[0] for column in columns if not column.startswith("PRIMARY KEY")]
            expected = [name for name in names if name not in lacking.get(table, ())]
            found = [row["name"] for row in connection.execute(f"PRAGMA table_info({table})")]
            if found != expected:
                raise _UnknownSchema(f"its table {table!r} has the columns {found}, not {expected}")
        return int(version)

    # --- Trouble -------------------------------------------------------------------------------------------

    def _set_aside(self, error: sqlite3.Error, identity: tuple[int, int] | None) -> None:
        """Renames a damaged file, unless another process has done so meanwhile and a new one stands in its place."""
        if _identity(self.path) != identity:
            return
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        journal = self.path.with_name(f"{self.path.name}-journal")
        try:
            if journal.exists():  # a new database must not be repaired with the old one's journal
                journal.rename(aside.with_name(f"{aside.name}-journal"))
            self.path.rename(aside)
        except FileNotFoundError:
            return
        except OSError as problem:
            raise self._unusable(problem) from error
        warnings.warn(
            f"the tuning database {self.path} is damaged ({error}); it was set aside as {aside.name}. "
            "Tune again, or import exported results.",
            RuntimeWarning,
            stacklevel=5,
        )

    def _unusable(self, error: Exception) -> DatabaseUnusable:
        return DatabaseUnusable(
            f"the tuning database {self.path} cannot be used ({error}); "
            f"set {CACHE_DIRECTORY_VARIABLE} to a directory of your own to use another"
        )


def _means_damage(error: Exception) -> bool:
    """SQLite reports damage by the base class, and what is wrong around a sound file by subclasses of it."""
    return type(error) in (sqlite3.DatabaseError, _UnknownSchema)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _bring_up_to_date(connection: sqlite3.Connection, version: int | None) -> None:
    """Makes the tables, or adds the columns that an older version's lack."""
    if version == SCHEMA_VERSION:
        return
    if version is None:
        for table, columns in _TABLES.items():
            connection.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
    else:
        for table, columns in _OLDER_SCHEMAS[version].items():
            for column in columns:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} DEFAULT {_ADDED_COLUMNS[column]}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


# --- Rows --------------------------------------------------------------------------------------------------------


def store_result(connection: sqlite3.Connection, result: TunedResult) -> TunedResult:
    """Stores a result unless the stored one is better by measurement; returns what is stored then.

    Times of kernels that are no longer installed prove nothing: a result of the installed kernels replaces one of
    others, and is not replaced by one. A search times what was stored when it began beside its own candidates, and so
    may replace it. It has not timed what another process has stored since; of two such results for the same problem and
    kinds of scores the faster stays.
    """
    gpu, kind = result.key
    key = (gpu, kind.family, kind.dtype.name, kind.d_head, kind.causal, kind.q_bucket, kind.kv_bucket)
    where = " AND ".join(f"{name} = ?" for name in _KEY)
    row = connection.execute(f"SELECT * FROM results WHERE {where}", key).fetchone()
    stored = None if row is None else _result(row)
    if stored is not None and _stays(stored, result):
        return stored
    document = result.to_dict()
    values = dict(zip(_KEY, key, strict=True)) | {
        name: document[name]
        for name in ("batch", "heads", "q_length", "kv_length", "config", "time_ms", "tflops", "date")
    }
    values |= {name: json.dumps(document[name]) for name in ("runners_up", "versions", "scores")}
    values["kv_heads"] = result.problem.kv_heads
    placeholders = ", ".join("?" * len(values))
    connection.execute(
        f"INSERT OR REPLACE INTO results ({', '.join(values)}) VALUES ({placeholders})", tuple(values.values())
    )
    return result


def _stays(stored: TunedResult, newcomer: TunedResult) -> bool:
    if is_current(stored) != is_current(newcomer):
        return is_current(stored)
    return (
        not newcomer.was_compared_with(stored.config)
        and (stored.problem, stored.scores) == (newcomer.problem, newcomer.scores)
        and stored.best.time_ms <= newcomer.best.time_ms
    )


def _result(row: sqlite3.Row) -> TunedResult | None:
    """None for a row that another version wrote, with a config or a family that this one does not know."""
    document: dict[str, Any] = dict(row)
    try:
        document |= {"causal": bool(document["causal"])}
        in_json = [name for name in ("runners_up", "versions", "scores") if name in document]
        document |= {name: json.loads(document[name]) for name in in_json}
        return TunedResult.from_dict(document)
    except (ValueError, TypeError):
        return None
