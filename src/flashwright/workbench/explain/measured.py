"""What the committed results say of a config: of the knobs' effects, and of the documents' claims. They lie beside the
package in a checkout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from flashwright.kernels.family import KernelConfig
from flashwright.workbench.bench.claims import ClaimResults, Found, claims, findings, read_claims
from flashwright.workbench.bench.knob_effects import LENGTHS, Effect, KnobEffects, effect, read_knob_effects
from flashwright.workbench.explain.facts import MeasuredEffect

ROOT = Path(__file__).parents[4]
EFFECTS, CLAIMS = "benchmarks/results/knob_effects_h200.json", "benchmarks/results/claims_h200.json"
BASE_OF_CLAIMS = "before"
"""What the kernel is called that a claim's knob is turned from."""


def measured_effects(config: KernelConfig) -> tuple[MeasuredEffect, ...]:
    """The speed of a config beside each kernel that it is one turn away from; nothing where it was not timed."""
    return (*_of_knobs(config), *_of_claims(config))


def _of_knobs(config: KernelConfig) -> Iterator[MeasuredEffect]:
    effects = _committed_effects()
    if effects is None:
        return
    for base in effects.bases:
        for turn in base.turns:
            if turn.config != config:
                continue
            for length in LENGTHS:
                found = effect(effects, base, turn.config, length)
                if isinstance(found, Effect) and found.times_base is not None:
                    yield MeasuredEffect(
                        base=base.name,
                        base_config=base.config.short_form(),
                        change=turn.change,
                        rows=length,
                        times_base=found.times_base,
                        gpu=str(effects.environment.get("gpu")),
                        date=str(effects.environment.get("date"))[:10],
                        file=EFFECTS,
                    )


def _of_claims(config: KernelConfig) -> Iterator[MeasuredEffect]:
    results = _committed_claims()
    if results is None:
        return
    for claim in claims():
        for found in findings(results, claim):
            if isinstance(found, Found) and found.pair.second == config:
                yield MeasuredEffect(
                    base=BASE_OF_CLAIMS,
                    base_config=found.pair.first.short_form(),
                    change=found.pair.change,
                    rows=found.pair.cell.length,
                    times_base=found.ratio,
                    gpu=str(results.environment.get("gpu")),
                    date=str(results.environment.get("date"))[:10],
                    file=CLAIMS,
                )


@cache
def _committed_effects() -> KnobEffects | None:
    path = ROOT / EFFECTS
    return read_knob_effects(path) if path.is_file() else None


@cache
def _committed_claims() -> ClaimResults | None:
    path = ROOT / CLAIMS
    return read_claims(path) if path.is_file() else None
