"""What a search has measured so far, kept in the database so that an interrupted search can go on."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone

from flashwright.choice.database import TuningDatabase, store_result
from flashwright.choice.problem import TuningProblem
from flashwright.choice.results import TunedResult
from flashwright.compiler.nvrtc import compiler_build
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of
from flashwright.kernels.source import device_headers
from flashwright.problem.variant import PLAIN


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class SearchJournal:
    """The record of one search. Each entry is on disk when the method that makes it returns."""

    def __init__(self, database: TuningDatabase, search: int, *, resumed: bool, result: TunedResult | None) -> None:
        self._database = database
        self._search = search
        self.resumed = resumed
        """Whether this continues a search that was begun before."""
        self.result = result
        """What came out, if the search is over."""
        self._errors: dict[str, float] = {}
        self._sweeps: dict[tuple[int, int], dict[str, float]] = {}
        if resumed:
            self._recall()

    @classmethod
    def open(
        cls, database: TuningDatabase, gpu: str, problem: TuningProblem, space: str, *, resume: bool
    ) -> SearchJournal:
        """A new journal, or the last one of the same search if it is to be resumed and there is one."""
        what = (gpu, json.dumps(problem.to_dict(), sort_keys=True), space)

        def find_or_begin(connection: sqlite3.Connection) -> tuple[int, str | None, bool]:
            if resume:
                query = "SELECT id, result FROM searches WHERE gpu = ? AND problem = ? AND space = ? ORDER BY id DESC"
                if (row := connection.execute(query, what).fetchone()) is not None:
                    return row["id"], row["result"], True
            insert = "INSERT INTO searches (gpu, problem, space, started) VALUES (?, ?, ?, ?)"
            cursor = connection.execute(insert, (*what, now()))
            assert cursor.lastrowid is not None
            return cursor.lastrowid, None, False

        search, result, resumed = database.write(find_or_begin)
        finished = None if result is None else TunedResult.from_dict(json.loads(result))
        return cls(database, search, resumed=resumed, result=finished)

    def _recall(self) -> None:
        checks = self._database.select("SELECT * FROM checks WHERE search = ?", (self._search,))
        sweeps = self._database.select("SELECT * FROM sweeps WHERE search = ?", (self._search,))
        self._errors = {row["config"]: row["error"] for row in checks}
        self._sweeps = {(row["stage"], row["sweep"]): json.loads(row["times"]) for row in sweeps}

    # --- Checks --------------------------------------------------------------------------------------------

    def error(self, config: KernelConfig) -> float | None:
        """The recorded error of a config; None: it was not checked."""
        return self._errors.get(config.short_form())

    def record_error(self, config: KernelConfig, error: float) -> None:
        error = math.inf if math.isnan(error) else error  # which SQLite would store as NULL
        self._errors[config.short_form()] = error
        self._insert("checks", config.short_form(), error)

    # --- Sweeps --------------------------------------------------------------------------------------------

    def sweep(self, stage: int, number: int, configs: Iterable[KernelConfig]) -> dict[KernelConfig, float] | None:
        """The recorded times of these configs; None if the sweep is missing, or was over others."""
        times = self._sweeps.get((stage, number), {})
        found = {config: times.get(config.short_form()) for config in configs}
        return None if None in found.values() else found  # type: ignore[return-value]

    def record_sweep(self, stage: int, number: int, times: Mapping[KernelConfig, float]) -> None:
        by_name = {config.short_form(): time for config, time in times.items()}
        self._sweeps[stage, number] = by_name
        self._insert("sweeps", stage, number, json.dumps(by_name))

    def _insert(self, table: str, *values: object) -> None:
        marks = ", ".join("?" * (len(values) + 1))
        self._database.write(
            lambda connection: connection.execute(
                f"INSERT OR REPLACE INTO {table} VALUES ({marks})", (self._search, *values)
            )
        )

    # --- The end -------------------------------------------------------------------------------------------

    def finish(self, result: TunedResult) -> TunedResult:
        """Stores the result in place of all that led to it; returns what is then stored for such problems."""

        def finish(connection: sqlite3.Connection) -> TunedResult:
            # Earlier searches of the same are superseded, whether they were finished or given up.
            same = (
                "SELECT old.id FROM searches old JOIN searches this USING (gpu, problem, space) "
                "WHERE this.id = :search AND old.id <= :search"
            )
            this = {"search": self._search}
            for table in ("checks", "sweeps"):
                connection.execute(f"DELETE FROM {table} WHERE search IN ({same})", this)
            connection.execute(f"DELETE FROM searches WHERE id < :search AND id IN ({same})", this)
            document = json.dumps(result.to_dict())
            connection.execute("UPDATE searches SET result = ? WHERE id = ?", (document, self._search))
            return store_result(connection, result)

        return self._database.write(finish)


def space_name(configs: Iterable[KernelConfig], scores: Sequence[str]) -> str:
    """A name for kernels and what they are timed on: other configs, generated sources, device headers, compilers or
    kinds of scores have another."""
    digest = hashlib.sha256(json.dumps([compiler_build(), device_headers(), list(scores)]).encode())
    shared = set(device_headers())
    for config in sorted(configs, key=str):
        source = family_of(config).source(config, PLAIN)
        generated = [header for header in source.headers if header not in shared]
        digest.update(json.dumps([str(config), source.text, generated, source.options]).encode())
    return digest.hexdigest()
