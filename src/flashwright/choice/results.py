"""The outcome of a search, and its form in files that are shared: checked in every part when read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from flashwright.choice.problem import ProblemKind, TuningProblem
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of, parse_config

FORMAT = "flashwright-tuning"
FORMAT_VERSION = 1
NORMAL_SCORES = ("normal",)
"""What a result that names no kinds of scores was measured on."""
TIMES_MS = (1e-6, 1e9)
"""What a launch may take: more than nothing, and less than forever."""

Read = TypeVar("Read")


class TuningFileError(ValueError):
    """A text is not a file of tuning results."""


@dataclass(frozen=True)
class Timing:
    """How long one launch of a config's kernel took."""

    config: KernelConfig
    time_ms: float


@dataclass(frozen=True)
class TunedResult:
    """The fastest config for a problem on a GPU model, beside those that it was compared with to the end."""

    gpu: str
    problem: TuningProblem
    best: Timing
    runners_up: tuple[Timing, ...]
    date: str
    versions: Mapping[str, str | None] = field(hash=False)
    """What it was measured with; information, no part of what it is found by."""
    scores: tuple[str, ...] = NORMAL_SCORES
    """The kinds of scores that it was measured on; a time is the geometric mean over them."""

    @property
    def key(self) -> tuple[str, ProblemKind]:
        return self.gpu, self.problem.kind

    @property
    def config(self) -> KernelConfig:
        return self.best.config

    @property
    def tflops(self) -> float:
        return self.problem.tflops(self.best.time_ms)

    def was_compared_with(self, config: KernelConfig) -> bool:
        return config in {timing.config for timing in (self.best, *self.runners_up)}

    def to_dict(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu,
            **self.problem.to_dict(),
            "config": self.config.short_form(),
            "time_ms": self.best.time_ms,
            "tflops": round(self.tflops, 2),
            "runners_up": [{"config": t.config.short_form(), "time_ms": t.time_ms} for t in self.runners_up],
            "date": self.date,
            "versions": dict(self.versions),
            "scores": list(self.scores),
        }

    @classmethod
    def from_dict(cls, document: Any) -> TunedResult:
        """The result that `to_dict` wrote; raises `ValueError` naming the field that is wrong."""
        _get(document, "family")  # refuses what is no object
        problem_fields = {
            each.name: _get(document, each.name)
            for each in fields(TuningProblem)
            if each.default is MISSING or each.name in document
        }
        problem = TuningProblem.from_dict(problem_fields)
        runners_up = _get(document, "runners_up")
        if not isinstance(runners_up, list):
            raise ValueError(f"runners_up: expected a list, got {type(runners_up).__name__}")
        return cls(
            gpu=_text("gpu", _get(document, "gpu")),
            problem=problem,
            best=_timing(document, problem),
            runners_up=tuple(_at(f"runners_up[{i}]", _timing, each, problem) for i, each in enumerate(runners_up)),
            date=_text("date", _get(document, "date")),
            versions=_versions(_get(document, "versions")),
            scores=_scores(document.get("scores", list(NORMAL_SCORES))),
        )


# --- Files -------------------------------------------------------------------------------------------------------


def to_document(results: Iterable[TunedResult]) -> dict[str, Any]:
    """What an exported file holds."""
    return {"format": FORMAT, "version": FORMAT_VERSION, "results": [result.to_dict() for result in results]}


def from_document(document: Any) -> list[TunedResult]:
    """The results in an exported file; raises `TuningFileError` if any part of it is not as `to_document` writes it."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TuningFileError(f'not a file of tuning results: expected an object with "format": "{FORMAT}"')
    if document.get("version") != FORMAT_VERSION:
        raise TuningFileError(f"version: {document.get('version')!r} is not known; allowed: {FORMAT_VERSION}")
    results = document.get("results")
    if not isinstance(results, list):
        raise TuningFileError(f"results: expected a list, got {type(results).__name__}")
    try:
        return [_at(f"results[{i}]", TunedResult.from_dict, each) for i, each in enumerate(results)]
    except ValueError as error:
        raise TuningFileError(str(error)) from error


# --- Parts -------------------------------------------------------------------------------------------------------


def _at(where: str, read: Callable[..., Read], *arguments: Any) -> Read:
    try:
        return read(*arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _get(document: Any, name: str) -> Any:
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, got {type(document).__name__}")
    if name not in document:
        raise ValueError(f"{name}: missing")
    return document[name]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{name}: {value!r} is not a line of text")
    return value


def _timing(document: Any, problem: TuningProblem) -> Timing:
    time_ms = _get(document, "time_ms")
    shortest, longest = TIMES_MS
    if isinstance(time_ms, bool) or not isinstance(time_ms, (int, float)) or not shortest <= time_ms <= longest:
        raise ValueError(f"time_ms: {time_ms!r} is not allowed; allowed: {shortest:g} to {longest:g}")
    return Timing(_config(_get(document, "config"), problem), float(time_ms))


def _config(text: Any, problem: TuningProblem) -> KernelConfig:
    """A config that computes every problem of this kind."""
    config = parse_config(_text("config", text))
    family = family_of(config)
    if family.prefix != problem.family:
        raise ValueError(f"config: {config} is of the {family.prefix} family, not {problem.family}")
    if (config.dtype, config.d_head) != (problem.dtype, problem.d_head):
        raise ValueError(f"config: {config} does not compute {problem.dtype.name} with d_head = {problem.d_head}")
    if family.launch_rules.row_stride(config):
        raise ValueError(f"config: {config} computes tensors of one row stride only; allowed: those that compute any")
    family.shapes(config)  # raises if no kernel can be built
    return config


def _versions(document: Any) -> dict[str, str | None]:
    if not isinstance(document, dict) or not all(isinstance(v, str | None) for v in document.values()):
        raise ValueError(f"versions: {document!r} is not an object of texts")
    return document


def _scores(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not names:
        raise ValueError(f"scores: {names!r} is not a list of kinds")
    return tuple(_at("scores", _text, "kind", name) for name in names)
