"""Measured results, found by what is about to be computed: the user's own first, then those of the package."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources

from flashwright.defaults import LENGTH_BUCKETS
from flashwright.families import ForwardKernelConfig
from flashwright.kernel_configs import DType
from flashwright.tuning.database import DatabaseUnusable, TuningDatabase
from flashwright.tuning.problem import ProblemKind
from flashwright.tuning.results import TunedResult, TuningFileError, from_document

Configs = Mapping[tuple[str, ProblemKind], ForwardKernelConfig]


def tuned_config(
    gpu: str, family: str, dtype: DType, d_head: int, causal: bool, q_bucket: str, kv_bucket: str
) -> ForwardKernelConfig | None:
    """The config measured fastest for such problems, or for those with as many queries and nearly as many keys."""
    for bucket in _nearest_first(kv_bucket):
        kind = ProblemKind(family, dtype, d_head, causal, q_bucket, bucket)
        for configs in (_user_configs(), _shipped_configs()):
            if (gpu, kind) in configs:
                return configs[gpu, kind]
    return None


def _nearest_first(bucket: str) -> list[str]:
    position = LENGTH_BUCKETS.index(bucket)
    return sorted(LENGTH_BUCKETS, key=lambda other: abs(LENGTH_BUCKETS.index(other) - position))


def shipped_results() -> Iterator[TunedResult]:
    """The results in the package's own files."""
    folder = resources.files("flashwright.tuning") / "shipped"
    if not folder.is_dir():
        return
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            yield from from_document(json.loads(file.read_text("utf-8")))


@cache
def _shipped_configs() -> Configs:
    try:
        return _by_key(shipped_results())
    except (OSError, TuningFileError, json.JSONDecodeError) as error:
        return _none_after_warning(f"the tuning results of this installation cannot be read ({error})")


@cache
def _user_configs() -> Configs:
    try:
        return _by_key(TuningDatabase().results())
    except DatabaseUnusable as error:
        return _none_after_warning(str(error))


def _by_key(results: Iterable[TunedResult]) -> Configs:
    return {result.key: result.config for result in results}


def _none_after_warning(message: str) -> Configs:
    warnings.warn(f"{message}; default configs are used instead", RuntimeWarning, stacklevel=2)
    return {}


def forget_results() -> None:
    """The next lookup reads everything anew."""
    _shipped_configs.cache_clear()
    _user_configs.cache_clear()
