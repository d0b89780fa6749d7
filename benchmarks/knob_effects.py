"""What each knob of the Ampere family is worth on this machine's GPU: the measurements of the pages in docs/knobs.

    PYTHONPATH=src python benchmarks/knob_effects.py RESULT.json [--rounds N]

Two base configs, and every config one turn of one knob away from them, beside PyTorch's FlashAttention-2, in one
process (GPU time, CUDA graphs, medians over shuffled rounds): hidden size 2048, 16,384 tokens in all, no mask, 512 and
4,096 rows. A config that fails is recorded with its reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from flashwright.compiler.nvrtc import CompileError
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.runtime.compiling import compile_many
from flashwright.runtime.progress import progress_bar
from flashwright.workbench.bench.gpu_machine import GPUMachine
from flashwright.workbench.bench.knob_effects import (
    LENGTHS,
    ROUNDS,
    Base,
    Effect,
    KnobEffects,
    Turn,
    bases,
    configs_of,
    effect,
    measure_knobs,
    problems_of,
    shuffled_times_ms,
    spread,
    write_knob_effects,
)
from flashwright.workbench.bench.measure import Timed, reason
from flashwright.workbench.bench.peers import Inputs, Prepared
from flashwright.workbench.bench.result_files import check_destination
from flashwright.workbench.bench.timing import capture, host_us, replay_times_ms
from flashwright.workbench.environment import environment_record


class Machine(GPUMachine):
    def gpu_times_ms(self, prepared: Mapping[Timed, Prepared]) -> tuple[dict[Timed, float], dict[Timed, str]]:
        import torch

        stream = torch.cuda.Stream()
        captured, failures = {}, {}
        for name, implementation in prepared.items():
            try:
                captured[name] = capture(implementation.run, stream, launches=None)
            except Exception as error:  # it is recorded, and the others are timed
                failures[name] = reason(error)
        replay_ms = partial(replay_times_ms, stream=stream, rounds=1)
        return shuffled_times_ms(captured, replay_ms, rounds=self._rounds), failures

    def host_us(self, prepared: Prepared, gpu_ms: float) -> float:
        """Of one call: the knobs are about the GPU's time."""
        with prepared.context():
            return host_us(prepared.call, 1, 1, warm_up=0)


def prepare(config: FlashForwardKernelConfig, inputs: Inputs) -> Prepared:
    import torch

    from flashwright import run_forward

    q, k, v = inputs.q, inputs.k, inputs.v
    out = torch.full_like(q, torch.nan)  # what a kernel leaves unwritten is no number
    call = partial(run_forward, config, q, k, v, out=out)
    return Prepared(call, kernel=config.short_form())


def compile_all(configs: list[FlashForwardKernelConfig]) -> None:
    """On all cores, into the cache. Where a kernel does not compile, its measurement says so."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    try:
        compile_many(configs, f"sm_{major}{minor}")
    except CompileError as error:
        print(f"compiled one by one from here: {str(error).splitlines()[0]}")


def measured(rounds: int) -> KnobEffects:
    machine, starts = Machine(rounds=rounds), bases()
    compile_all(configs_of(starts))
    with progress_bar("timing", problems_of(starts) * len(LENGTHS)) as advance:
        cells = measure_knobs(machine, starts, prepare, advance=advance)
    return KnobEffects(environment_record() | {"rounds": rounds}, starts, cells)


def print_table(effects: KnobEffects) -> None:
    """A line per turn: times the base and, in brackets, times FlashAttention-2, at every length."""
    for base in effects.bases:
        print(f"\n{base.name}: {base.config}")
        for turn in (Turn("", "the base", base.config), *base.turns):
            print(f"  {turn.change:38} {_figures(effects, base, turn)}")
    largest = spread(effects)
    if largest is not None:
        print(f"\nthe same kernel timed twice differs by up to {largest:.1%}")


def _figures(effects: KnobEffects, base: Base, turn: Turn) -> str:
    if turn.config is None:
        return turn.problem or ""
    found = [effect(effects, base, turn.config, length) for length in LENGTHS]
    return "  ".join(_figure(each) for each in found)


def _figure(found: Effect | str | None) -> str:
    if isinstance(found, Effect):
        return f"{_times(found.times_base)} ({_times(found.times_peer)} FA-2)"
    return found or "not measured"


def _times(ratio: float | None) -> str:
    return "    -" if ratio is None else f"{ratio:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each kernel (default: %(default)s)")
    options = parser.parse_args()
    check_destination(options.result)
    effects = measured(options.rounds)
    write_knob_effects(options.result, effects)
    print_table(effects)


if __name__ == "__main__":
    main()
