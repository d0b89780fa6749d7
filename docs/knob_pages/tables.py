"""The content of generated blocks, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from flashwright.kernels.forward.ampere import explain as ampere
from flashwright.kernels.forward.ampere.combinations import AUTOTUNED_D_HEADS
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.names import parse_kernel_name_into_config
from flashwright.kernels.forward.ampere.registers import estimate
from flashwright.kernels.forward.ampere.space import get_autotuning_kernel_configs
from flashwright.kernels.registry import families, rejection_reason
from flashwright.problem.dtypes import DType
from flashwright.workbench.bench.best_peers import Problem
from flashwright.workbench.bench.claims import ClaimResults
from flashwright.workbench.bench.knob_effects import LENGTHS, PEER, Base, Effect, KnobEffects, bases, effect, spread
from flashwright.workbench.bench.results import BenchResult
from flashwright.workbench.explain.instruction_kinds import Kind
from flashwright.workbench.ladder import Ladder

from .accuracy import SimulatedErrors, accuracy_renderers
from .blocks import Renderer
from .claims import claim_table, claim_verdicts, claims_summary
from .distributed import distributed_renderers
from .instruction_coverage import coverage_table
from .kernel_facts import ARCH, FactsFile, KernelFacts
from .knobs import AMPERE, HOPPER, KNOBS, KnobSet, KnobValue, values_of
from .markdown import table
from .measured import AmpereGrid, ampere_table, bench_table, kinds_table, ladder_table, scores_table
from .tuned import tuned_pairs

MEASURED_BY = "PYTHONPATH=src python benchmarks/knob_effects.py benchmarks/results/knob_effects_h200.json"
DEVICE_CODE = "src/flashwright/cuda"
_MARKERS = re.compile(r" *// @.*$")
_FLOAT_KINDS = (Kind.FLOAT.value, Kind.EXPONENTIAL.value)
_OTHER_KINDS = (Kind.INTEGER.value, Kind.MOVE.value, Kind.CONTROL.value)

COUNTS: dict[str, Callable[[KernelFacts], int]] = {
    "instructions": lambda facts: facts.instructions,
    "instructions per 1,000 scores": lambda facts: facts.instructions_per_thousand_scores,
    "instructions of the launch": lambda facts: facts.launch_instructions,
    "barriers": lambda facts: facts.barriers,
    "ldmatrix": lambda facts: facts.count_of(Kind.LOAD.value),
    "mma": lambda facts: facts.count_of(Kind.MMA.value),
    "copies": lambda facts: facts.count_of(Kind.COPY.value, Kind.GLOBAL.value, Kind.SHARED.value),
    "fp32 and exponential": lambda facts: facts.count_of(*_FLOAT_KINDS),
    "integers, moves, branches": lambda facts: facts.count_of(*_OTHER_KINDS),
    "wavefronts per 1,000 scores": lambda facts: facts.wavefronts_per_thousand_scores,
    "shared wavefronts": lambda facts: facts.shared_wavefronts,
    "bank conflicts": lambda facts: facts.bank_conflicts,
    "bytes read": lambda facts: facts.bytes_read,
    "bytes written": lambda facts: facts.bytes_written,
}
"""The columns that a block of simulated counts may name."""


@dataclass(frozen=True)
class Inputs:
    """What the pages are made of."""

    root: Path
    facts: FactsFile
    ladder: Ladder
    effects: KnobEffects | None
    """None until they have been measured."""
    bench: BenchResult
    scores: Mapping[str, BenchResult]
    """By kind of scores, of each family."""
    best_peers: Mapping[Problem, float]
    """What the fastest peers have over cuDNN."""
    hopper_ladder: Ladder
    backward_ladders: Mapping[str, Ladder]
    """By family."""
    ampere_grids: Mapping[str, AmpereGrid]
    """By element type, and of gradients."""
    claims: ClaimResults | None
    """None until they have been measured."""
    hopper_facts: FactsFile
    errors: SimulatedErrors
    distributed: dict[str, Any] | None
    """What `benchmarks/distributed.py` wrote; None until it has been measured."""


def renderers(inputs: Inputs, knob: str | None, of: KnobSet = AMPERE) -> dict[str, Renderer]:
    """By name, the blocks that a page may have; those about a knob only on the page of one."""
    of_any: dict[str, Renderer] = {
        "bases": lambda _: _bases(),
        "conditions": lambda _: _conditions(inputs),
        "index": lambda _: _index(inputs),
        "code": partial(_code, inputs.root),
        "buffering": _buffering,
        "same-code": lambda _: _same_code(inputs.facts),
        "spills": lambda _: _spills(inputs),
        "compiled-of": lambda knob: _compiled(inputs.facts, knob),
        "measured-of": lambda knob: _measured(inputs.effects, knob),
        "spaces": lambda _: _spaces(),
        "operation-spaces": _operation_spaces,
        "register-rules": lambda _: _register_rules(inputs),
        "broken": lambda _: _broken(inputs.facts),
        "bench-table": lambda _: bench_table(inputs.bench),
        "kinds-table": lambda _: kinds_table(),
        "scores-table": lambda family: scores_table(inputs.scores[family], inputs.best_peers),
        "ladder-table": lambda _: ladder_table(inputs.ladder),
        "hopper-ladder-table": lambda _: ladder_table(inputs.hopper_ladder),
        "backward-ladder-table": lambda family: ladder_table(inputs.backward_ladders[family]),
        "ampere-table": lambda which: ampere_table(inputs.ampere_grids[which]),
        "claims": lambda _: claims_summary(inputs.claims),
        "claim": partial(claim_table, inputs.claims),
        "claim-verdicts": partial(claim_verdicts, inputs.claims),
        "instruction-coverage": lambda _: coverage_table(),
        "hopper-index": lambda _: _hopper_index(inputs),
        "hopper-bases": lambda _: _bases(HOPPER),
        **accuracy_renderers(inputs.errors, inputs.bench, inputs.effects),
        **distributed_renderers(inputs.distributed),
    }
    if knob is None:
        return of_any
    if of is HOPPER:
        return of_any | {
            "navigation": lambda _: _navigation(knob, of),
            "compiled": lambda _: _compiled(inputs.hopper_facts, knob, of),
            "simulated": lambda columns: _simulated(inputs.hopper_facts, knob, columns, of),
            "ladder": lambda _: _rung(inputs.hopper_ladder, knob, "its-ladder"),
            "tuned": lambda _: tuned_pairs(knob, inputs.root),
            "command": lambda base: _command(knob, base, of),
        }
    return of_any | {
        "navigation": lambda _: _navigation(knob),
        "ladder": lambda _: _rung(inputs.ladder, knob),
        "compiled": lambda _: _compiled(inputs.facts, knob),
        "simulated": lambda columns: _simulated(inputs.facts, knob, columns),
        "order": lambda _: _order(inputs.facts, knob),
        "measured": lambda _: _measured(inputs.effects, knob),
        "command": lambda base: _command(knob, base),
    }


# --- Tables ----------------------------------------------------------------------------------------------------


def _value_cells(value: KnobValue) -> list[str]:
    return [value.base.name, f"**{value.value}**" if value.is_own else value.value]


def _compiled(facts: FactsFile, knob: str, of_set: KnobSet = AMPERE) -> str:
    rows, problems = [], []
    for value in values_of(knob, of=of_set):
        if value.config is None:
            reason = (value.problem or "").rstrip(".")
            problems.append(f"`{value.base.name}` with {value.value}: no kernel, for {reason}.")
            continue
        of = facts.of(value.config)
        shared = f"{of.shared_bytes / 1024:.4g} KiB"
        resident = f"{of.blocks_per_sm} ({of.limited_by})"
        same = not value.is_own and of.code_digest == facts.of(value.base.config).code_digest
        code = "the same" if same else f"{of.code_bytes:,} bytes"
        rows.append([*_value_cells(value), str(of.registers), f"{of.spill_bytes:,}", shared, resident, code])
    header = ["kernel", f"`{knob}`", "registers", "spilled bytes", "shared memory", "blocks per SM", "machine code"]
    note = f"NVRTC {facts.nvrtc}, `{facts.arch}`; in brackets, what limits the blocks. Bold: the base's own value."
    return "\n\n".join([table(header, rows, 2), " ".join([note, *problems])])


def _simulated(facts: FactsFile, knob: str, columns: str, of_set: KnobSet = AMPERE) -> str:
    names = [name.strip() for name in columns.split(";")]
    for name in names:
        if name not in COUNTS:
            raise ValueError(f"no count is called {name!r}; allowed: {'; '.join(COUNTS)}")
    rows = [
        [*_value_cells(value), *(f"{COUNTS[name](facts.of(value.config)):,}" for name in names)]
        for value in values_of(knob, of=of_set)
        if value.config is not None
    ]
    whole = [name for name in names if name in ("instructions of the launch", "bytes read", "bytes written")]
    note = "Counted on the simulated GPU: one warp, one KV step in the middle of the loop."
    if whole:
        note += f" The launch is one thread block against {facts.keys} keys; bytes are the whole block's."
    return f"{table(['kernel', f'`{knob}`', *names], rows, 2)}\n\n{note}"


def _order(facts: FactsFile, knob: str) -> str:
    """Of each value: PTX, and machine code for two architectures, assembled at the config's level and at the other."""
    rows = []
    for value in values_of(knob):
        if value.config is None:
            continue
        for found in facts.orders_of(value.config):
            if knob in found.code:
                continue  # the knob's other value has rows of its own
            kept = " (that of PTX)" if found.is_that_of_ptx and found.code != "PTX" else ""
            rows.append([*_value_cells(value), found.code, str(found.runs), f"{found.text}{kept}", found.distances])
    header = ["kernel", f"`{knob}`", "code", "runs", "loads and products of one KV step", "load to first use"]
    note = (
        f"NVRTC {facts.nvrtc}. The loop's body as it stands in the code; LDSM and HMMA are the machine's `ldmatrix` "
        "and `mma`. Distances are medians, in brackets the least and the most. With `assembler_reorders` on, the code "
        "is assembled at `-O3`, with it off at `-O1`."
    )
    return f"{table(header, rows, len(header))}\n\n{note}"


def _measured(effects: KnobEffects | None, knob: str) -> str:
    if effects is None:
        return f"Not measured yet. On a GPU: `{MEASURED_BY}`, then `make docs`."
    rows = []
    for value in values_of(knob):
        if value.config is not None:
            found = [effect(effects, value.base, value.config, length) for length in LENGTHS]
            rows.append([*_value_cells(value), *(cell for each in found for cell in _effect_cells(each))])
    columns = [f"{name}, {length:,} rows" for length in LENGTHS for name in ("TFLOP/s", "× base", "× FA-2")]
    return f"{table(['kernel', f'`{knob}`', *columns], rows, 2)}\n\n{_conditions_line(effects)}"


def _effect_cells(found: Effect | str | None) -> list[str]:
    if isinstance(found, Effect):
        return [f"{found.tflops:.0f}", _ratio(found.times_base), _ratio(found.times_peer)]
    return [f"failed: {found}" if found else "not measured yet", "–", "–"]


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3f}"


def _conditions_line(effects: KnobEffects) -> str:
    largest = spread(effects)
    noise = "" if largest is None else f" The same kernel timed twice differed by up to {largest:.1%}."
    return (
        f"{effects.environment.get('gpu')}, medians, in turns with FlashAttention-2 (FA-2) in one process, 16,384 "
        f"tokens of hidden size 2,048, no mask.{noise}"
    )


def _conditions(inputs: Inputs) -> str:
    compiler = f"Compiled and simulated with NVRTC {inputs.facts.nvrtc} for `sm_90` ([`knob_facts.json`]"
    compiler += "(../benchmarks/results/knob_facts.json))."
    if inputs.effects is None:
        return f"{compiler} Times: not measured yet. On a GPU: `{MEASURED_BY}`, then `make docs`."
    where = inputs.effects.environment
    versions = ", ".join(f"{name} {where.get(name)}" for name in ("driver", "torch", "nvrtc") if where.get(name))
    return (
        f"{compiler} Timed on {str(where.get('date'))[:10]} ({versions}) by `{MEASURED_BY}` ([`knob_effects_h200.json`]"
        f"(../benchmarks/results/knob_effects_h200.json)): {_conditions_line(inputs.effects)}"
    )


def _bases(of: KnobSet = AMPERE) -> str:
    rows = [[base.name, f"`{base.config}`"] for base in of.bases()]
    return table(["kernel", "config"], rows, 2)


# --- Sentences -------------------------------------------------------------------------------------------------


def _rung(ladder: Ladder, knob: str, section: str = "the-ladder") -> str:
    """The first rung that turns a knob, beside the one before."""
    pairs = pairwise(ladder.rungs)
    before, after = next(
        (pair for pair in pairs if len({getattr(each.rung.config, knob, None) for each in pair}) == 2), (None, None)
    )
    if before is None or after is None:
        raise ValueError(f"no rung of the ladder turns {knob}")
    described = f"On the [ladder](../performance.md#{section}), rung {after.rung.number} ({after.rung.change})"
    if before.gpu is None or after.gpu is None:
        return f"{described} has not been timed beside the one before."
    tflops, ratios = zip(*((each.tflops, each.ratios[PEER]) for each in (before.gpu, after.gpu)), strict=True)
    return (
        f"{described}: {tflops[0]:.0f} → {tflops[1]:.0f} TFLOP/s, {ratios[0]:.3f} → {ratios[1]:.3f} × FlashAttention-2 "
        "(bf16, d_head 128, 4,096 rows)."
    )


def _command(knob: str, base: str, of: KnobSet = AMPERE) -> str:
    found = [value.config for value in values_of(knob, only=base or "early", of=of) if value.config is not None]
    own, other = found[:2]
    return f"```bash\nflashwright compare --differing --arch sm_90 \\\n  '{own}' \\\n  '{other}'\n```"


def _code(root: Path, arguments: str) -> str:
    """`FILE ;; TEXT ;; COUNT`: lines of the device code, from the one that contains a text, without markers."""
    name, start, count = (part.strip() for part in arguments.split(";;"))
    text = (root / DEVICE_CODE / name).read_text("utf-8")
    lines = [_MARKERS.sub("", line) for line in text.splitlines()]
    first = next((index for index, line in enumerate(lines) if start in line), None)
    if first is None:
        raise ValueError(f"{name} has no line with {start!r}")
    shown = "\n".join(_dedented(lines[first : first + int(count)]))
    return f"[`{name}`](../../{DEVICE_CODE}/{name}):\n\n```cpp\n{shown}\n```"


def _dedented(lines: Sequence[str]) -> list[str]:
    """Preprocessor lines stand at the margin whatever is around them."""
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip() and not line.startswith("#"))
    return [line if line.startswith("#") else line[margin:] for line in lines]


def _navigation(knob: str, of: KnobSet = AMPERE) -> str:
    names = list(of.meanings)
    index = names.index(knob)
    links = [f"[All knobs](../README.md#{of.index})"]
    if index:
        links.insert(0, f"← [`{names[index - 1]}`]({names[index - 1]}.md)")
    if index + 1 < len(names):
        links.append(f"[`{names[index + 1]}`]({names[index + 1]}.md) →")
    return " · ".join(links)


# --- The index -------------------------------------------------------------------------------------------------


def _index(inputs: Inputs) -> str:
    rows = []
    for knob, meaning in KNOBS.items():
        cells = [_turned(inputs.effects, base, knob) for base in bases()]
        rows.append([f"[`{knob}`](knobs/{knob}.md)", meaning, *cells])
    titles = [f"turned from {base.name}" for base in bases()]
    return table(["knob", "what it is", *titles], rows, 4)


def _hopper_index(inputs: Inputs) -> str:
    rows = []
    for knob, meaning in HOPPER.meanings.items():
        rows.append([f"[`{knob}`](hopper_knobs/{knob}.md)", meaning, _gain_on_ladder(inputs.hopper_ladder, knob)])
    return table(["knob", "what it is", "on the ladder, TFLOP/s"], rows, 3)


def _gain_on_ladder(ladder: Ladder, knob: str) -> str:
    for before, after in pairwise(ladder.rungs):
        turned = getattr(before.rung.config, knob) != getattr(after.rung.config, knob)
        if turned and before.gpu is not None and after.gpu is not None:
            return f"{before.gpu.tflops:.0f} → {after.gpu.tflops:.0f} (rung {after.rung.number})"
    return "–"


def _turned(effects: KnobEffects | None, base: Base, knob: str) -> str:
    """Each other value and how many times as fast the kernel is with it; of another problem, how many times FA-2."""
    if effects is None:
        return "not measured yet"
    described = []
    for value in values_of(knob, only=base.name):
        if value.is_own:
            continue
        if value.config is None:
            described.append(f"{value.value}: no kernel")
            continue
        described.append(f"{value.value}: {_summary(effect(effects, base, value.config, LENGTHS[-1]))}")
    return "; ".join(described)


def _summary(found: Effect | str | None) -> str:
    if not isinstance(found, Effect):
        return "failed" if found else "not measured yet"
    if found.times_base is None:
        return f"({_ratio(found.times_peer)} × FA-2)"
    return f"{found.times_base:.2f}"


# --- The search spaces -----------------------------------------------------------------------------------------


@cache
def _spaces() -> str:
    rows = []
    for d_head in AUTOTUNED_D_HEADS:
        sizes = [len(get_autotuning_kernel_configs(DType.BF16, d_head, full=full)) for full in (False, True)]
        rows.append([str(d_head), *(f"{size:,}" for size in sizes)])
    return table(["d_head", "default space", "full space"], rows, 0)


@cache
def _operation_spaces(operation: str) -> str:
    """How many configs of one dtype the rules of each family of an operation keep, by head dimension."""
    kept = {
        family.title: {
            d_head: sum(reason is None for _, reason in family.space.configs(DType.BF16, d_head))
            for d_head in family.d_heads
        }
        for family in families(operation)
        if family.space is not None
    }
    d_heads = sorted({d_head for of_family in kept.values() for d_head in of_family})
    rows = [
        [title, *(f"{of_family[d_head]:,}" if d_head in of_family else "" for d_head in d_heads)]
        for title, of_family in kept.items()
    ]
    return table(["d_head", *map(str, d_heads)], rows, 1)


# --- Diagnosing ------------------------------------------------------------------------------------------------


def _buffering(config: str) -> str:
    """Which operands of a config, or of a base kernel, are double-buffered, and why."""
    named = {base.name: base.config for base in bases()}
    parsed = named[config] if config in named else parse_kernel_name_into_config(config)
    rows = [[each.operand, each.product, "yes" if each.is_double_buffered else "no", each.reason] for each in
            ampere.buffering(parsed)]  # fmt: skip
    return f"`{parsed}`:\n\n" + table(["operand", "product", "double-buffered", "why"], rows, 4)


def _same_code(facts: FactsFile) -> str:
    """The turns that the assembler makes nothing of."""
    rows = []
    for base in bases():
        own = facts.of(base.config).code_digest
        turned = [turn for turn in base.turns if turn.config and facts.of(turn.config).code_digest == own]
        rows.append([base.name, "; ".join(f"`{turn.change}`" for turn in turned) or "none"])
    return table(["kernel", "turns that leave its machine code as it is, byte for byte"], rows, 2)


def _spills(inputs: Inputs) -> str:
    rows = []
    for base in bases():
        for turn in base.turns:
            if turn.config is not None and inputs.facts.of(turn.config).spill_bytes:
                rows.append([base.name, f"`{turn.change}`", *_spill_cells(inputs, base, turn.config)])
    header = ["kernel", "turned", "operands at the peak", "spilled bytes", "× base, 4,096 rows"]
    return table(header, rows, 2)


def _register_rules(inputs: Inputs) -> str:
    """What rules 4, 5 and 6 of the documents exclude, among the turns: estimated, compiled and measured."""
    rows = []
    for base in bases():
        for turn in base.turns:
            rule = "" if turn.config is None else (rejection_reason(turn.config) or "").partition(":")[0]
            if turn.config is not None and rule in ("rule 4", "rule 5", "rule 6"):
                rows.append([rule, base.name, f"`{turn.change}`", *_register_rule_cells(inputs, base, turn.config)])
    columns = ["registers, estimated", "compiled", "blocks per SM", "spilled bytes"]
    times = [f"× base, {length:,} rows" for length in LENGTHS]
    return table(["excluded by", "kernel", "turned", *columns, *times], sorted(rows), 3)


def _register_rule_cells(inputs: Inputs, base: Base, config: FlashForwardKernelConfig) -> list[str]:
    guess, of = estimate(config, ARCH), inputs.facts.of(config)
    base_of = inputs.facts.of(base.config)
    estimated = f"{guess.registers}{f', {guess.excess} missing' if guess.excess else ''}"
    found = [None if inputs.effects is None else effect(inputs.effects, base, config, length) for length in LENGTHS]
    return [
        estimated,
        f"{of.registers} (base {base_of.registers})",
        f"{of.blocks_per_sm} (base {base_of.blocks_per_sm})",
        f"{of.spill_bytes:,}",
        *("not measured yet" if inputs.effects is None else _summary(each) for each in found),
    ]


def _spill_cells(inputs: Inputs, base: Base, config: FlashForwardKernelConfig) -> list[str]:
    planned = max(phase.total for phase in ampere.register_phases(config))
    found = None if inputs.effects is None else effect(inputs.effects, base, config, LENGTHS[-1])
    times = "not measured yet" if inputs.effects is None else _summary(found)
    return [str(planned), f"{inputs.facts.of(config).spill_bytes:,}", times]


def _broken(facts: FactsFile) -> str:
    return "\n\n".join(f"Without {each.missing}:\n\n```text\n{each.message}\n```" for each in facts.broken)


def failures(inputs: Inputs) -> Mapping[str, str]:
    """Kernels that could not be measured, for whoever runs the generator."""
    if inputs.effects is None:
        return {}
    return {name: reason for result in inputs.effects.cells for name, reason in result.failures.items()}
