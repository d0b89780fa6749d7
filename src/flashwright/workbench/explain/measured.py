"""What the committed results of the knobs' effects say of a config. They lie beside the package in a checkout."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from flashwright.kernels.family import KernelConfig
from flashwright.workbench.bench.knob_effects import LENGTHS, Effect, KnobEffects, effect, read_knob_effects
from flashwright.workbench.explain.facts import MeasuredEffect

ROOT = Path(__file__).parents[4]
FILE = "benchmarks/results/knob_effects_h200.json"


def measured_effects(config: KernelConfig) -> tuple[MeasuredEffect, ...]:
    """The speed of a config beside each base kernel that it is one turn away from; nothing where it was not timed."""
    effects = _committed()
    if effects is None:
        return ()
    where = effects.environment
    return tuple(
        MeasuredEffect(
            base=base.name,
            base_config=base.config.short_form(),
            change=turn.change,
            rows=length,
            times_base=found.times_base,
            gpu=str(where.get("gpu")),
            date=str(where.get("date"))[:10],
            file=FILE,
        )
        for base in effects.bases
        for turn in base.turns
        if turn.config == config
        for length in LENGTHS
        if isinstance(found := effect(effects, base, turn.config, length), Effect) and found.times_base is not None
    )


@cache
def _committed() -> KnobEffects | None:
    path = ROOT / FILE
    return read_knob_effects(path) if path.is_file() else None
